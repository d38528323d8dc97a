//go:build linux

package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/spf13/cobra"
)

// testResult is a line of testsum's -results.
type testResult struct {
	Package, Test, Result string
	Seconds               float64
}

// figure is what internal/testutil's Record writes.
type figure struct {
	Test, What, Unit, Than       string
	Value, Base, AtMost, AtLeast float64
}

const (
	resultsFile = "results.jsonl"
	figuresFile = "figures.jsonl"
)

func tableCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "table DIR",
		Short: "Print the tests (" + resultsFile + " of testsum) and what they measured (" + figuresFile + ") of one run",
		Args:  cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			results, err := readLines[testResult](filepath.Join(args[0], resultsFile))
			if err != nil {
				return err
			}
			figures, err := readLines[figure](filepath.Join(args[0], figuresFile))
			if err != nil {
				return err
			}
			printTable(os.Stdout, results, figures)
			return nil
		},
	}
}

// readLines of JSON; a file that is not there has none.
func readLines[T any](file string) ([]T, error) {
	f, err := os.Open(file)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	var all []T
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		var one T
		if err := json.Unmarshal(lines.Bytes(), &one); err != nil {
			return nil, fmt.Errorf("%s: %q: %w", file, lines.Text(), err)
		}
		all = append(all, one)
	}
	return all, lines.Err()
}

// printTable has a row for each top-level test, whose subtests are counted, and below it
// one for each figure that it or its subtests took.
func printTable(w io.Writer, results []testResult, figures []figure) {
	type row struct {
		testResult
		passed, failed, skipped int
	}
	var rows []*row
	byName := map[string]*row{}
	for _, r := range results {
		top, _, sub := strings.Cut(r.Test, "/")
		key := r.Package + "." + top
		if byName[key] == nil {
			byName[key] = &row{testResult: testResult{Package: r.Package, Test: top}}
			rows = append(rows, byName[key])
		}
		at := byName[key]
		if !sub {
			at.Result, at.Seconds = r.Result, r.Seconds
			continue
		}
		switch r.Result {
		case "pass":
			at.passed++
		case "fail":
			at.failed++
		default:
			at.skipped++
		}
	}
	t := table.NewWriter()
	t.SetOutputMirror(w)
	style := table.StyleLight
	style.Options = table.OptionsNoBordersAndSeparators
	style.Format.Header = text.FormatDefault
	t.SetStyle(style)
	t.AppendHeader(table.Row{"test", "result", "seconds", "figure", "compared with", "ratio", "wanted"})
	shown := map[int]bool{}
	for _, r := range rows {
		name := strings.TrimPrefix(r.Package, "github.com/kvd-io/kvd/") + " " + r.Test
		result := r.Result
		if n := r.passed + r.failed + r.skipped; n > 0 {
			result += fmt.Sprintf(" (%d of %d)", r.passed, n)
		}
		t.AppendRow(table.Row{name, result, fmt.Sprintf("%.1f", r.Seconds)})
		for i, f := range figures {
			if top, _, _ := strings.Cut(f.Test, "/"); top == r.Test && !shown[i] {
				shown[i] = true
				t.AppendRow(f.row())
			}
		}
	}
	for i, f := range figures {
		if !shown[i] {
			t.AppendRow(f.row())
		}
	}
	t.Render()
}

func (f figure) row() table.Row {
	value := f.Value
	compared, ratio := "", ""
	if f.Base != 0 {
		value = f.Value / f.Base
		compared = fmt.Sprintf("%s %.4g", f.Than, f.Base)
		ratio = fmt.Sprintf("%.2f", value)
	}
	wanted := ""
	if f.AtMost != 0 {
		wanted = fmt.Sprintf("at most %.4g", f.AtMost)
	}
	if f.AtLeast != 0 {
		wanted = strings.TrimPrefix(fmt.Sprintf("%s, at least %.4g", wanted, f.AtLeast), ", ")
	}
	if f.AtMost != 0 && value > f.AtMost || f.AtLeast != 0 && value < f.AtLeast {
		wanted += ": MISSED"
	}
	return table.Row{"  " + f.What, "", "", strings.TrimSpace(fmt.Sprintf("%.4g %s", f.Value, f.Unit)), compared, ratio, wanted}
}
