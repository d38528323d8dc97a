//go:build chaos

package main

import (
	"fmt"
	"os"

	"github.com/spf13/pflag"

	"github.com/kvd-io/kvd/internal/chaos"
	"github.com/kvd-io/kvd/internal/faults"
	"github.com/kvd-io/kvd/server"
)

// chaosSettings are of programs that were built with the tag chaos: never run one with
// data that anybody needs.
type chaosSettings struct {
	socket string
	broken string
}

func (s *chaosSettings) define(fs *pflag.FlagSet) {
	fs.StringVar(&s.socket, "chaos-socket", "", "path of a unix socket for orders that make disk and clock misbehave (default: none)")
	// Package chaos has read the variable already. As a setting the log shows it.
	fs.StringVar(&s.broken, "chaos-break", "", "in the environment only ("+chaos.EnvBreak+"): rules that this process does not keep")
}

// begin puts disk and clock of the node under orders.
func (s *chaosSettings) begin(cfg *server.Config) (stop func(), err error) {
	// The variants were switched before there were settings: another value here would be
	// logged and not kept.
	if set := os.Getenv(chaos.EnvBreak); s.broken != set {
		return nil, usageError{fmt.Errorf("--chaos-break %q: it is read from the environment only, where %s is %q: set that instead", s.broken, chaos.EnvBreak, set)}
	}
	cfg.Logger.Warn("this program was built to be broken: it is for tests alone", "broken", s.broken, "socket", s.socket)
	if s.socket == "" {
		return func() {}, nil
	}
	l, err := faults.Listen(s.socket)
	if err != nil {
		return nil, err
	}
	cfg.FS, cfg.Clock = l.Disk, l.Clock
	return func() { _ = l.Close() }, nil
}
