package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/kvd-io/kvd/internal/chaos"
)

// binaries of a run.
type binaries struct {
	kvd    string
	worker string // this program
	chaos  bool   // kvd takes orders for its disk and clock, and can be broken
}

const module = "github.com/kvd-io/kvd/"

// build finds or makes what a run needs, in dir. What is built here has the tag chaos;
// broken variants need it in the workers too, as some rules are the client's.
func (f *flags) build(ctx context.Context, dir string, broken bool) (p binaries, err error) {
	if p.worker, err = os.Executable(); err != nil {
		return p, err
	}
	var want []string
	switch {
	case f.kvdBin == "":
		p.kvd, p.chaos = filepath.Join(dir, "kvd"), true
		want = append(want, module+"cmd/kvd")
	default:
		if p.kvd, err = filepath.Abs(f.kvdBin); err != nil {
			return p, err
		}
		if p.chaos, err = takesOrders(ctx, p.kvd); err != nil {
			return p, err
		}
	}
	if broken && !p.chaos {
		return p, fmt.Errorf("%s was not built with the tag chaos: it can not be broken", p.kvd)
	}
	if broken && !chaos.Enabled {
		p.worker = filepath.Join(dir, "jepsen")
		want = append(want, module+"jepsen")
	}
	if len(want) == 0 {
		return p, nil
	}
	args := append([]string{"build", "-buildvcs=false", "-tags", "chaos", "-o", dir + string(filepath.Separator)}, want...)
	if text, err := exec.CommandContext(ctx, "go", args...).CombinedOutput(); err != nil {
		return p, fmt.Errorf("building %v: %w\n%s(give a finished kvd with --kvd-bin)", want, err, text)
	}
	return p, nil
}

// checkEarlier makes the path of the earlier kvd one that the kernel knows too. It gets the
// command line that kvd gets.
func (f *flags) checkEarlier(ctx context.Context, p binaries) (err error) {
	if f.earlier == "" {
		return nil
	}
	if f.earlier, err = filepath.EvalSymlinks(f.earlier); err == nil {
		f.earlier, err = filepath.Abs(f.earlier)
	}
	if err != nil {
		return fmt.Errorf("--upgrade-from: %w", err)
	}
	orders, err := takesOrders(ctx, f.earlier)
	if err == nil && orders != p.chaos {
		err = fmt.Errorf("--upgrade-from %s: built with the tag chaos %v, %s: %v: want both or neither", f.earlier, orders, p.kvd, p.chaos)
	}
	return err
}

// takesOrders tells whether a kvd was built with the tag chaos.
func takesOrders(ctx context.Context, kvd string) (bool, error) {
	help, err := exec.CommandContext(ctx, kvd, "start", "--help").CombinedOutput()
	if err != nil {
		return false, fmt.Errorf("%s start --help: %w\n%s", kvd, err, help)
	}
	return bytes.Contains(help, []byte("--chaos-socket")), nil
}
