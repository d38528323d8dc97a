// Command fuzzsmoke runs every fuzz function of the module for a short time each
// (go test -fuzz takes one function at a time, so somebody has to list them). It
// finds them by reading the test files; none has to be registered.
//
//	go run ./internal/tools/fuzzsmoke -time 5s
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"time"
)

func main() {
	each := flag.Duration("time", 5*time.Second, "how long each fuzz function runs")
	unguided := flag.String("unguided", "", "packages (./dir,...) to fuzz without guidance by coverage: their dependencies take minutes to instrument")
	totals := flag.String("totals", "", "append \"fuzz PASSED FAILED\" to this file")
	flag.Parse()
	targets, err := find(".")
	if err == nil && len(targets) == 0 {
		err = errors.New("no fuzz function found: run it from the module's root")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "fuzzsmoke:", err)
		os.Exit(1)
	}
	bin, err := os.MkdirTemp("", "fuzzsmoke-")
	if err != nil {
		fmt.Fprintln(os.Stderr, "fuzzsmoke:", err)
		os.Exit(1)
	}
	defer os.RemoveAll(bin)
	passed, failed := runAll(targets, bin, *each, strings.Split(*unguided, ","))
	fmt.Printf("fuzz: %d passed, %d failed\n", passed, failed)
	if *totals != "" {
		if err := appendTotals(*totals, passed, failed); err != nil {
			fmt.Fprintln(os.Stderr, "fuzzsmoke:", err)
			os.Exit(1)
		}
	}
	if failed > 0 {
		os.RemoveAll(bin)
		os.Exit(1)
	}
}

// runAll builds each package once, into the folder bin, and runs its functions one
// after the other.
func runAll(targets []target, bin string, each time.Duration, unguided []string) (passed, failed int) {
	var b binary
	for _, t := range targets {
		start := time.Now()
		var out []byte
		var err error
		if b.dir != t.dir {
			b, out, err = build(t.dir, filepath.Join(bin, "fuzz.test"), !slices.Contains(unguided, t.dir))
		}
		if err == nil {
			out, err = b.run(t.fn, each)
		}
		took := time.Since(start).Round(100 * time.Millisecond)
		if err != nil {
			failed++
			fmt.Printf("FAIL  %s  %s: %v\n%s", t, took, err, out)
			continue
		}
		passed++
		fmt.Printf("ok    %s  %s  %s\n", t, took, lastProgress(out))
	}
	return passed, failed
}

// target is one fuzz function. dir is relative to the module's root and starts
// with "./", as the go command wants it.
type target struct{ dir, fn string }

func (t target) String() string { return t.dir + " " + t.fn }

// attempts for a function whose run ended by the race described at raceAtTheEnd.
const attempts = 3

// binary is the test binary of one package, built to be fuzzed: with one
// "go test -fuzz" for each function the linker would take most of the time.
type binary struct{ dir, path, cache string }

// build compiles the tests of the package in dir into the file path, with or without
// what guides the fuzzer by coverage. What the go command printed comes with the error.
func build(dir, path string, guided bool) (binary, []byte, error) {
	out, err := exec.Command("go", "list", "-f", "{{.ImportPath}}", dir).Output()
	if err != nil {
		return binary{}, nil, fmt.Errorf("name of the package in %s: %w", dir, err)
	}
	cache, err := exec.Command("go", "env", "GOCACHE").Output()
	if err != nil {
		return binary{}, nil, fmt.Errorf("place of Go's cache: %w", err)
	}
	// Where "go test -fuzz" keeps what it found interesting, so both share it.
	corpus := filepath.Join(strings.TrimSpace(string(cache)), "fuzz", strings.TrimSpace(string(out)))
	args := []string{"test", "-c", "-vet=off", "-o", path}
	if guided {
		args = append(args, "-fuzz=.")
	}
	out, err = exec.Command("go", append(args, dir)...).CombinedOutput()
	if err != nil {
		return binary{}, out, fmt.Errorf("build of %s: %w", dir, err)
	}
	return binary{dir: dir, path: path, cache: corpus}, nil, nil
}

func (b binary) run(fn string, d time.Duration) (out []byte, err error) {
	for range attempts {
		cmd := exec.Command(b.path, "-test.paniconexit0", "-test.run=^$", "-test.fuzz=^"+fn+"$", "-test.fuzztime="+d.String(), "-test.fuzzcachedir="+b.cache)
		cmd.Dir = b.dir
		out, err = cmd.CombinedOutput()
		if err == nil || !raceAtTheEnd(out) {
			break
		}
	}
	return out, err
}

// raceAtTheEnd recognizes a run that failed because its time was up: before Go 1.27
// the fuzzing engine sometimes takes its own deadline for a failure
// (go.dev/issue/75804). A real failure leaves an input behind.
func raceAtTheEnd(out []byte) bool {
	return bytes.Contains(out, []byte("context deadline exceeded")) && !bytes.Contains(out, []byte("Failing input written"))
}

// find lists the fuzz functions below root, sorted.
func find(root string) ([]target, error) {
	var targets []target
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() {
			if path != root && (strings.HasPrefix(name, ".") || strings.HasPrefix(name, "_") || name == "testdata") {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(name, "_test.go") {
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, filepath.Dir(path))
		if err != nil {
			return err
		}
		for _, decl := range file.Decls {
			if fn, ok := decl.(*ast.FuncDecl); ok && isFuzz(fn) {
				targets = append(targets, target{"./" + filepath.ToSlash(rel), fn.Name.Name})
			}
		}
		return nil
	})
	sort.Slice(targets, func(i, j int) bool { return targets[i].String() < targets[j].String() })
	return targets, err
}

// isFuzz: func FuzzXxx(f *testing.F).
func isFuzz(fn *ast.FuncDecl) bool {
	if fn.Recv != nil || !strings.HasPrefix(fn.Name.Name, "Fuzz") || len(fn.Type.Params.List) != 1 {
		return false
	}
	ptr, ok := fn.Type.Params.List[0].Type.(*ast.StarExpr)
	if !ok {
		return false
	}
	sel, ok := ptr.X.(*ast.SelectorExpr)
	return ok && sel.Sel.Name == "F"
}

// lastProgress is the last "execs: N (M/sec)" of the fuzzer's output.
func lastProgress(out []byte) string {
	var last string
	for _, line := range bytes.Split(out, []byte("\n")) {
		if _, rest, ok := bytes.Cut(line, []byte("execs: ")); ok {
			last, _, _ = strings.Cut(string(rest), ",")
		}
	}
	if last == "" {
		return "no execs reported"
	}
	return "execs: " + last
}

func appendTotals(path string, passed, failed int) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(f, "fuzz %d %d\n", passed, failed)
	return errors.Join(err, f.Close())
}
