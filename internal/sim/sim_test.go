package sim

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/jepsen/check"
)

var (
	seedFlag  = flag.Uint64("seed", 0, "replay this one seed")
	seedsFlag = flag.Int("seeds", usualSeeds, "number of seeds")
	fromFlag  = flag.Uint64("from", 1, "the first seed")
	stepsFlag = flag.Int("steps", 0, "steps under faults; 0: as usual")
	traceFlag = flag.String("events", "", "file for the trace of -seed")
	childFlag = flag.Bool("child", false, "run all seeds in this process")
)

// processors before the simulation took all but one away.
var processors int

func TestMain(m *testing.M) {
	// One goroutine at a time: see DESIGN.md.
	processors = runtime.GOMAXPROCS(1)
	flag.Parse()
	if err := checkSeeds(*seedsFlag); err != nil {
		fmt.Fprintln(os.Stderr, "sim:", err)
		os.Exit(2)
	}
	os.Exit(m.Run())
}

// checkSeeds: no seed would be a pass that shows nothing.
func checkSeeds(n int) error {
	if n < 1 {
		return fmt.Errorf("-seeds %d: want at least 1", n)
	}
	return nil
}

func TestNoSeedIsNoPass(t *testing.T) {
	require.NoError(t, checkSeeds(1))
	for _, n := range []string{"0", "-1"} {
		out, err := exec.Command(os.Args[0], "-test.run", "^TestSim$", "-seeds", n).CombinedOutput()
		require.Error(t, err, "%s", out)
		require.Contains(t, string(out), "-seeds "+n+": want at least 1")
	}
}

// found are seeds that showed something once.
var found = []struct {
	seed uint64
	what string
}{
	{5, "a timer of a client was due in the moment the simulation woke: the seed did not always replay (of the simulation itself)"},
	{8, "a power failure that was ordered before everything was healed came after it (of the simulation itself)"},
}

func runSeed(t *testing.T, seed uint64) *Result {
	opt := Options{Steps: *stepsFlag}
	if *traceFlag != "" {
		f, err := os.Create(*traceFlag)
		require.NoError(t, err)
		defer func() { require.NoError(t, f.Close()) }()
		opt.Trace = f
	}
	began := time.Now()
	r := Run(t, seed, opt)
	ran := time.Since(began)
	report := check.Judge(r.History, check.Options{})
	t.Logf("seed %d hash %016x: %s, %d operations, healed in %d ticks, ran %v, judged %v: %v", seed, r.Hash, report.Verdict, len(r.History.Ops), r.Healed,
		ran.Round(time.Millisecond), (time.Since(began) - ran).Round(time.Millisecond), r.Counts)
	if len(r.Breach) > 0 || report.Verdict != check.Pass {
		for _, l := range r.Tail {
			t.Log(l)
		}
		t.Errorf("seed %d: %v %v %v %v\nreplay: go test ./internal/sim -run Sim -seed %d", seed, report.Verdict, report.Findings, report.Problems, r.Breach, seed)
	}
	return r
}

// TestSim runs many seeds, or one. The seeds are shared out to as many processes as there
// are processors, since each of them uses one.
func TestSim(t *testing.T) {
	switch {
	case *seedFlag != 0:
		runSeed(t, *seedFlag)
		return
	case *childFlag || processors == 1:
		for i := range uint64(*seedsFlag) {
			runSeed(t, *fromFlag+i)
		}
		return
	}
	each := (*seedsFlag + processors - 1) / processors
	var wg sync.WaitGroup
	outputs := make([]string, processors)
	for i := range processors {
		wg.Go(func() {
			outputs[i] = child(t, *fromFlag+uint64(i*each), min(each, *seedsFlag-i*each))
		})
	}
	wg.Wait()
	total := map[string]int{}
	seeds := 0
	for _, out := range outputs {
		for _, m := range seedLine.FindAllStringSubmatch(out, -1) {
			seeds++
			for _, c := range countIn.FindAllStringSubmatch(m[3], -1) {
				n, err := strconv.Atoi(c[2])
				require.NoError(t, err)
				total[strings.TrimSpace(c[1])] += n
			}
		}
	}
	t.Logf("%d seeds: %v", seeds, total)
	require.Equal(t, *seedsFlag, seeds)
	if seeds < 50 {
		return // too few for all to happen
	}
	for _, kind := range []string{"get ok", "put ok", "put unknown", "crash", "power failure", "isolate", "stop", "transfer", "restart", "message lost", "READ between stores", "got by READs", "snapshot installed", "evicted", "woken",
		"coup", "usurp", "left behind", "came back", "outpaced", "applies late", "grow", "direct put ok", "led again between two READs",
		"move", "configuration changed", "strand", "stranded", "caught up", "driven out", "replaced unseen"} {
		require.NotZero(t, total[kind], kind)
	}
}

var (
	seedLine = regexp.MustCompile(`seed (\d+) hash ([0-9a-f]{16}): .*map\[(.*)\]`)
	countIn  = regexp.MustCompile(`([A-Za-z ]+):(\d+)`)
)

// child runs seeds in a process of its own and returns what it said.
func child(t *testing.T, from uint64, n int) string {
	if n <= 0 {
		return ""
	}
	cmd := exec.Command(os.Args[0], "-test.run", "^TestSim$", "-test.v", "-child", "-from", fmt.Sprint(from), "-seeds", fmt.Sprint(n), "-steps", fmt.Sprint(*stepsFlag))
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("seeds %d to %d: %v\n%s", from, from+uint64(n)-1, err, out)
	}
	return string(out)
}

// TestFound runs again what was found once.
func TestFound(t *testing.T) {
	for _, f := range found {
		t.Run(fmt.Sprintf("seed=%d", f.seed), func(t *testing.T) { runSeed(t, f.seed) })
	}
}

// TestSeedsDiffer: a hash that does not depend on the run would prove nothing.
func TestSeedsDiffer(t *testing.T) {
	opt := Options{Steps: 500}
	require.NotEqual(t, Run(t, 1, opt).Hash, Run(t, 2, opt).Hash)
}
