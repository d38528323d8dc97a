// Command testsum runs `go test -json` with the arguments given after `--` and
// prints what a person wants to know: one line a package, the output of what
// failed, and the counts. Its exit status is 0 only if everything passed.
//
//	go run ./internal/tools/testsum -- -race ./raft/...
//
// With -skips=fail a skipped test counts as failed: a machine that is meant to
// run everything must not leave anything out silently.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"
)

func main() {
	label := flag.String("label", "test", "name of this run in the summary line")
	skips := flag.String("skips", "show", "show: name skipped tests; fail: count them as failed")
	totals := flag.String("totals", "", "append \"LABEL PASSED FAILED\" to this file")
	results := flag.String("results", "", "append a line of JSON for each test that ended to this file")
	flag.Parse()
	if *skips != "show" && *skips != "fail" {
		fmt.Fprintf(os.Stderr, "testsum: -skips=%s: want show or fail\n", *skips)
		os.Exit(2)
	}
	sum := newSummary(os.Stdout, *skips == "fail")
	if *results != "" {
		f, err := os.OpenFile(*results, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
		if err != nil {
			fmt.Fprintln(os.Stderr, "testsum:", err)
			os.Exit(1)
		}
		sum.results = f // open until this process ends
	}
	start := time.Now()
	err := runGoTest(flag.Args(), sum)
	if err != nil {
		fmt.Fprintln(os.Stderr, "testsum:", err)
	}
	fmt.Printf("%s: %s in %s\n", *label, sum.line(), time.Since(start).Round(time.Second))
	if *totals != "" {
		if werr := appendTotals(*totals, *label, sum, err); werr != nil {
			fmt.Fprintln(os.Stderr, "testsum:", werr)
			os.Exit(1)
		}
	}
	if err != nil || !sum.ok() {
		os.Exit(1)
	}
}

// runGoTest feeds the events of `go test -json args...` to sum. The error says that
// go test itself could not do its work; failed tests alone are in sum.
func runGoTest(args []string, sum *summary) error {
	cmd := exec.Command("go", append([]string{"test", "-json"}, args...)...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	readErr := sum.read(out)
	if readErr != nil {
		// Let go test finish: a full pipe would block it.
		_, _ = io.Copy(io.Discard, out)
	}
	err = cmd.Wait()
	var exit *exec.ExitError
	switch {
	case readErr != nil:
		return readErr
	case errors.As(err, &exit) && sum.failed() > 0:
		return nil // told by the events already
	case err != nil:
		return fmt.Errorf("go test: %w, and no test event says why", err)
	case sum.packages == 0:
		return errors.New("go test reported no package: nothing was tested")
	}
	return nil
}

func appendTotals(path, label string, sum *summary, runErr error) error {
	failed := sum.failed()
	if runErr != nil {
		failed++
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(f, "%s %d %d\n", label, sum.passed, failed)
	return errors.Join(err, f.Close())
}
