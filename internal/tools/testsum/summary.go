package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
)

// event is one line of `go test -json`; see `go doc cmd/test2json`.
type event struct {
	Action      string
	Package     string
	ImportPath  string // of build-output and build-fail
	Test        string
	Output      string
	Elapsed     float64 // seconds
	FailedBuild string
}

// summary counts tests (subtests included) and keeps the output of those still
// running, so that only the output of a failed one is printed.
type summary struct {
	out        io.Writer
	skipsFail  bool
	output     map[testID]*strings.Builder
	perPackage map[string]*counts
	results    io.Writer // a line of JSON for each test that ended; nil for none
	resultsErr error

	packages, passed int
	failedTests      []testID
	failedPackages   []string // failed with no failed test: build, TestMain, timeout, panic
	skippedTests     []testID
}

type testID struct{ pkg, test string }

func (id testID) String() string { return id.pkg + "." + id.test }

type counts struct{ passed, failed, skipped int }

func newSummary(out io.Writer, skipsFail bool) *summary {
	return &summary{
		out:        out,
		skipsFail:  skipsFail,
		output:     map[testID]*strings.Builder{},
		perPackage: map[string]*counts{},
	}
}

// read takes events until the end of r. Lines that are no event (go prints some
// build errors plainly) are passed on.
func (s *summary) read(r io.Reader) error {
	br := bufio.NewReader(r)
	for {
		line, err := br.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			if json.Unmarshal(line, &e) != nil || e.Action == "" {
				fmt.Fprint(s.out, string(line))
			} else {
				s.add(e)
			}
		}
		if errors.Is(err, io.EOF) {
			return s.resultsErr
		}
		if err != nil {
			return fmt.Errorf("reading test events: %w", err)
		}
	}
}

func (s *summary) add(e event) {
	id := testID{e.Package, e.Test}
	switch e.Action {
	case "build-output":
		fmt.Fprint(s.out, e.Output)
	case "output":
		b := s.output[id]
		if b == nil {
			b = &strings.Builder{}
			s.output[id] = b
		}
		b.WriteString(e.Output)
	case "pass", "fail", "skip":
		if e.Test == "" {
			s.endPackage(e)
		} else {
			s.record(e)
			s.endTest(id, e.Action)
		}
	}
}

func (s *summary) counts(pkg string) *counts {
	c := s.perPackage[pkg]
	if c == nil {
		c = &counts{}
		s.perPackage[pkg] = c
	}
	return c
}

// result is a line of the file given with -results.
type result struct {
	Package string
	Test    string // "" for what failed without a test
	Result  string // pass, fail or skip
	Seconds float64
}

func (s *summary) record(e event) {
	if s.results == nil || s.resultsErr != nil {
		return
	}
	s.resultsErr = json.NewEncoder(s.results).Encode(result{e.Package, e.Test, e.Action, e.Elapsed})
}

func (s *summary) endTest(id testID, action string) {
	c := s.counts(id.pkg)
	switch action {
	case "pass":
		c.passed++
		s.passed++
	case "skip":
		c.skipped++
		s.skippedTests = append(s.skippedTests, id)
		fmt.Fprintf(s.out, "--- SKIP %s\n%s", id, s.text(id))
	case "fail":
		c.failed++
		s.failedTests = append(s.failedTests, id)
		fmt.Fprintf(s.out, "--- FAIL %s\n%s", id, s.text(id))
	}
	delete(s.output, id)
}

func (s *summary) endPackage(e event) {
	s.packages++
	c, id := s.counts(e.Package), testID{pkg: e.Package}
	elapsed := time.Duration(e.Elapsed * float64(time.Second)).Round(10 * time.Millisecond)
	switch {
	case e.Action == "fail":
		// What a test that was cut off by a panic or the timeout printed belongs to
		// nobody else.
		for open := range s.output {
			if open.pkg == e.Package && open.test != "" {
				fmt.Fprintf(s.out, "--- UNFINISHED %s\n%s", open, s.text(open))
				delete(s.output, open)
			}
		}
		if c.failed == 0 {
			s.record(e)
			s.failedPackages = append(s.failedPackages, e.Package)
			fmt.Fprintf(s.out, "%s", s.text(id))
		}
		fmt.Fprintf(s.out, "FAIL  %s  %s\n", e.Package, elapsed)
	case e.Action == "skip":
		// No test files.
	default:
		note := ""
		if c.skipped > 0 {
			note = fmt.Sprintf(", %d skipped", c.skipped)
		}
		fmt.Fprintf(s.out, "ok    %s  %s  %d passed%s\n", e.Package, elapsed, c.passed, note)
	}
	delete(s.output, id)
}

func (s *summary) text(id testID) string {
	if b := s.output[id]; b != nil {
		return b.String()
	}
	return ""
}

// failed is what counts against the run.
func (s *summary) failed() int {
	n := len(s.failedTests) + len(s.failedPackages)
	if s.skipsFail {
		n += len(s.skippedTests)
	}
	return n
}

func (s *summary) ok() bool { return s.failed() == 0 }

func (s *summary) line() string {
	line := fmt.Sprintf("%d passed, %d failed", s.passed, s.failed())
	if n := len(s.skippedTests); n > 0 && s.skipsFail {
		line += fmt.Sprintf(" (%d of them skipped, which counts as failed here)", n)
	} else if n > 0 {
		line += fmt.Sprintf(", %d skipped", n)
	}
	return line
}
