package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

const modelFile = "confirmedread.pml"

// sampleMinutes is how long a search goes on that can not be complete.
const sampleMinutes = 5

// result is what one search came to.
type result struct {
	violation string // the assertion, empty if none failed
	complete  bool   // every state was visited (up to hash collisions of sampled searches)
	states    float64
	depth     int
	memoryMB  float64
	took      time.Duration // of the search alone
	story     string        // the counterexample, step by step
}

// line is one row of the table.
func (r result) line(c check) string {
	outcome := "nothing found"
	switch {
	case r.violation != "":
		outcome = "counterexample"
	case c.sample:
		outcome = "nothing found (sampled)"
	}
	return fmt.Sprintf("%-24s %-24s %11.0f states  depth %3d  %6.0f MB  %6.1f s   %s",
		c.name, outcome, r.states, r.depth, r.memoryMB, r.took.Seconds(), c.what)
}

// judge returns an error if the search did not come out as it must.
func (r result) judge(c check) error {
	switch {
	case c.broken && r.violation == "":
		return fmt.Errorf("%s: no counterexample among %.0f states: the model can not see what it breaks (%s)", c.name, r.states, c.what)
	case !c.broken && r.violation != "":
		return fmt.Errorf("%s: violated: %s; go run ./model -only %s -story shows how", c.name, r.violation, c.name)
	case !c.broken && !c.sample && !r.complete:
		return fmt.Errorf("%s: the search was not completed after %.0f states, so it proves nothing", c.name, r.states)
	}
	return nil
}

// tools says in a sentence what is missing on this machine.
func tools() error {
	for _, tool := range []string{"spin", "cc"} {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("model: no %s on PATH: install Debian's packages spin and gcc", tool)
		}
	}
	return nil
}

// run makes, compiles and runs the verifier of c in a folder of its own below dir. It
// returns an error if there is no outcome, not if the outcome is bad.
func run(ctx context.Context, dir string, c check) (result, error) {
	work, err := os.MkdirTemp(dir, "kvd-model-")
	if err != nil {
		return result{}, err
	}
	defer os.RemoveAll(work)
	text, err := os.ReadFile(filepath.Join(sourceDir(), modelFile))
	if err != nil {
		return result{}, fmt.Errorf("model: %w (run it in the module's root)", err)
	}
	if err := os.WriteFile(filepath.Join(work, modelFile), text, 0o644); err != nil {
		return result{}, err
	}
	var defs []string
	for _, d := range c.defs {
		defs = append(defs, "-D"+d)
	}
	if _, err := command(ctx, work, "spin", append(defs, "-a", modelFile)...); err != nil {
		return result{}, err
	}
	// Deadlocks and cycles mean nothing here: replicas may always do nothing. There is nothing
	// to reduce either, because all processes share all variables.
	cc := []string{"-O1", "-w", "-DSAFETY", "-DNOREDUCE", "-DVECTORSZ=2048", "-DMEMLIM=8000", "-o", "pan", "pan.c"}
	pan := []string{"-m1000000", "-n"}
	if c.sample {
		cc = append(cc, "-DBITSTATE", "-DT_RAND", "-DP_RAND")
		pan = append(pan, "-w33", "-RS1", "-Q"+strconv.Itoa(sampleMinutes)) // 2^33 bits: 1 GiB
	}
	if _, err := command(ctx, work, "cc", cc...); err != nil {
		return result{}, err
	}
	out, err := command(ctx, work, filepath.Join(work, "pan"), pan...)
	if err != nil {
		return result{}, err
	}
	r, err := parse(out)
	if err != nil {
		return result{}, fmt.Errorf("model: %s: %w; pan said:\n%s", c.name, err, out)
	}
	if r.violation != "" {
		// It ends with the failed assertion, and with another exit code for that.
		r.story, _ = command(ctx, work, "spin", append(defs, "-t", "-T", "-B", "-k", modelFile+".trail", modelFile)...)
	}
	return r, nil
}

func command(ctx context.Context, dir, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("model: %s %s: %w: %s", filepath.Base(name), strings.Join(args, " "), err, out.String())
	}
	return out.String(), nil
}

var (
	reViolation = regexp.MustCompile(`(?m)^pan:\d+: (.*) \(at depth \d+\)`)
	reDepth     = regexp.MustCompile(`depth reached (\d+), errors: (\d+)`)
	reStates    = regexp.MustCompile(`(?m)^\s*([0-9.e+]+) states, stored`)
	reMemory    = regexp.MustCompile(`(?m)^\s*([0-9.]+)\s+total actual memory usage`)
	reTook      = regexp.MustCompile(`elapsed time ([0-9.e+-]+) seconds`)
)

// parse reads what pan printed.
func parse(out string) (result, error) {
	var r result
	var err error
	number := func(re *regexp.Regexp, group int) float64 {
		m := re.FindStringSubmatch(out)
		if m == nil {
			err = fmt.Errorf("no %q in what pan printed", re)
			return 0
		}
		f, perr := strconv.ParseFloat(m[group], 64)
		if perr != nil {
			err = perr
		}
		return f
	}
	r.states = number(reStates, 1)
	r.depth = int(number(reDepth, 1))
	errors := number(reDepth, 2)
	r.memoryMB = number(reMemory, 1)
	r.took = time.Duration(number(reTook, 1) * float64(time.Second))
	if err != nil {
		return result{}, err
	}
	if m := reViolation.FindStringSubmatch(out); m != nil {
		r.violation = m[1]
	}
	if (errors > 0) != (r.violation != "") {
		return result{}, fmt.Errorf("%v errors, and the violation is %q", errors, r.violation)
	}
	// Anything but a failed assertion is a fault of the model: an index out of its bounds, for one.
	if r.violation != "" && (!strings.HasPrefix(r.violation, "assertion violated (") && !strings.HasPrefix(r.violation, "assertion violated !")) {
		return result{}, fmt.Errorf("the model itself is wrong: %s", r.violation)
	}
	r.complete = !strings.Contains(out, "Search not completed") && !strings.Contains(out, "max search depth too small")
	return r, nil
}
