package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"sync"
)

func main() {
	full := flag.Bool("full", false, "larger bounds as well, minutes each")
	only := flag.String("only", "", "run the check of this name alone")
	story := flag.Bool("story", false, "print counterexamples step by step")
	parallel := flag.Int("parallel", runtime.NumCPU(), "searches at a time; each may take gigabytes")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	var chosen []check
	for _, c := range checks {
		if *only == c.name || (*only == "" && (*full || !c.full)) {
			chosen = append(chosen, c)
		}
	}
	if len(chosen) == 0 {
		fmt.Fprintf(os.Stderr, "model: no check is called %q: see model/checks.go\n", *only)
		os.Exit(2)
	}
	err := tools()
	if err == nil {
		err = runAll(ctx, *parallel, chosen, func(c check, r result) {
			fmt.Println(r.line(c))
			if *story && r.story != "" {
				fmt.Println(r.story)
			}
		})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// runAll runs the checks, parallel at a time, tells of each outcome as it comes, one at a
// time, and returns the first error or bad outcome.
func runAll(ctx context.Context, parallel int, chosen []check, tell func(check, result)) error {
	var first error
	var mu sync.Mutex
	var wg sync.WaitGroup
	if parallel < 1 {
		return fmt.Errorf("model: -parallel %d: want at least 1", parallel)
	}
	slots := make(chan struct{}, parallel)
	for _, c := range chosen {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			r, err := run(ctx, "", c)
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				tell(c, r)
				err = r.judge(c)
			}
			if err != nil && first == nil {
				first = err
			}
		})
	}
	wg.Wait()
	return first
}

// sourceDir is this folder: it is the working directory of its tests, and below that of
// go run ./model.
func sourceDir() string {
	if _, err := os.Stat(modelFile); err == nil {
		return "."
	}
	return filepath.FromSlash("model")
}
