package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// fakeSystem is a fakeStore as a system that leaves a trace of what happened to it.
type fakeSystem struct {
	*fakeStore
	title    string
	trace    *[]string
	startErr error
	started  bool
}

func (s *fakeSystem) name() string { return s.title }

func (s *fakeSystem) start(context.Context, string, workload) error {
	*s.trace = append(*s.trace, "start "+s.title)
	s.started = s.startErr == nil
	return s.startErr
}

func (s *fakeSystem) conn() (conn, error) { return s.fakeStore, nil }
func (s *fakeSystem) pids() []int         { return nil }
func (s *fakeSystem) notes() []string     { return []string{s.title + " has a note"} }
func (s *fakeSystem) describe() description {
	return description{Version: s.title + " 1.0", Settings: map[string]string{"durable": "no"}}
}

func (s *fakeSystem) stop() error {
	*s.trace = append(*s.trace, "stop "+s.title)
	return nil
}

func TestCompareMeasuresByTurnsAndStopsAll(t *testing.T) {
	var trace, said []string
	fast := &fakeSystem{fakeStore: newFakeStore(), title: "kvd", trace: &trace}
	slow := &fakeSystem{fakeStore: newFakeStore(), title: "tortoise", trace: &trace}
	fast.delay, slow.delay = time.Millisecond, 4*time.Millisecond
	w := smallLoad(opGet)
	w.keys = makeKeys(8, 1)
	subjects, err := compare(t.Context(), []system{fast, slow}, w, 3, t.TempDir(), func(s string) { said = append(said, s) })
	require.NoError(t, err)
	require.Equal(t, []string{"start kvd", "start tortoise", "stop kvd", "stop tortoise"}, trace)

	var rounds []string
	for _, line := range said {
		if strings.HasPrefix(line, "round") {
			rounds = append(rounds, strings.Fields(line)[4])
		}
	}
	require.Equal(t, []string{"kvd", "tortoise", "tortoise", "kvd", "kvd", "tortoise"}, rounds)

	r := makeReport(subjects, w, 3)
	require.Equal(t, "kvd", r.Baseline)
	require.Nil(t, r.Systems[0].OpsRatio)
	require.Less(t, r.Systems[1].OpsRatio.Median, 0.6, "four times as slow")
	require.Greater(t, r.Systems[1].P50Ratio.Median, 1.5)
	require.Nil(t, r.Systems[0].ServerCPUMicros, "no process, no CPU time")
	require.Empty(t, r.failedSystems())
	require.Equal(t, []string{"kvd has a note", "tortoise has a note"}, r.Notes)
}

func TestCompareStopsWhatItStartedWhenOneFails(t *testing.T) {
	var trace []string
	good := &fakeSystem{fakeStore: newFakeStore(), title: "good", trace: &trace}
	bad := &fakeSystem{fakeStore: newFakeStore(), title: "bad", trace: &trace, startErr: errors.New("no such binary")}
	_, err := compare(t.Context(), []system{good, bad}, smallLoad(opGet), 1, t.TempDir(), func(string) {})
	require.ErrorContains(t, err, "bad: no such binary")
	require.Equal(t, []string{"start good", "start bad", "stop good", "stop bad"}, trace)

	trace = nil
	flaky := &fakeSystem{fakeStore: newFakeStore(), title: "flaky", trace: &trace}
	w := smallLoad(opGet)
	w.keys = makeKeys(3, 1)
	flaky.failEvery, flaky.delay = 4, time.Millisecond // the preload passes, then every fourth fails
	subjects, err := compare(t.Context(), []system{flaky}, w, 1, t.TempDir(), func(string) {})
	require.NoError(t, err)
	require.Len(t, makeReport(subjects, w, 1).failedSystems(), 1, "figures with errors are called so")
}

func TestPairedRatio(t *testing.T) {
	perSecond := func(n uint64) sample { return sample{ops: n, elapsed: time.Second} }
	// The machine slows down threefold from round to round; the ratio stays.
	a := []sample{perSecond(900), perSecond(300), perSecond(100)}
	b := []sample{perSecond(450), perSecond(150), perSecond(50)}
	got := pairedRatio(a, b, sample.perSecond)
	require.Equal(t, &ratio{Median: 2, Min: 2, Max: 2}, got)

	b[2] = perSecond(100)
	got = pairedRatio(a, b, sample.perSecond)
	require.Equal(t, &ratio{Median: 2, Min: 1, Max: 2}, got)
	require.Nil(t, pairedRatio(a, nil, sample.perSecond))
	require.Nil(t, pairedRatio(a, []sample{{}}, sample.perSecond), "no division by zero")

	require.Equal(t, "1", (*ratio)(nil).String())
	require.Equal(t, "0.0021 (0.0020 to 0.0022)", (&ratio{0.0021, 0.0020, 0.0022}).String())
	require.Equal(t, "1.50 (1.25 to 2.00)", (&ratio{1.5, 1.25, 2}).String())
	require.Equal(t, "102.3 (99.0 to 104.0)", (&ratio{102.26, 99, 104}).String())

	require.Zero(t, median(nil))
	require.Equal(t, 2.5, median([]float64{4, 1, 3, 2}))
}

// The JSON is kept by people: a field that changes its name breaks them.
func TestReportJSON(t *testing.T) {
	var trace []string
	sys := &fakeSystem{fakeStore: newFakeStore(), title: "kvd", trace: &trace}
	other := &fakeSystem{fakeStore: newFakeStore(), title: "other", trace: &trace}
	w := smallLoad(opPut)
	subjects, err := compare(t.Context(), []system{sys, other}, w, 2, t.TempDir(), func(string) {})
	require.NoError(t, err)
	r := makeReport(subjects, w, 2)
	r.Machine = describeMachine(t.TempDir())

	var out bytes.Buffer
	require.NoError(t, r.writeJSON(&out))
	var got map[string]any
	require.NoError(t, json.Unmarshal(out.Bytes(), &got))
	require.ElementsMatch(t, []string{"time", "commit", "machine", "workload", "baseline", "systems", "notes"}, names(got))
	require.ElementsMatch(t, []string{"cpu", "cores", "kernel", "os", "filesystem", "go"}, names(got["machine"]))
	require.ElementsMatch(t, []string{"op", "clients", "value_bytes", "key_bytes", "keys", "seed", "rounds",
		"seconds_a_round", "warmup_seconds", "loop", "key_distribution"}, names(got["workload"]))
	systems := got["systems"].([]any)
	require.Len(t, systems, 2)
	require.ElementsMatch(t, []string{"name", "version", "settings", "ops_per_second", "p50_us", "p99_us", "p999_us", "max_us",
		"errors", "server_cpu_us_per_op", "ops_ratio", "p50_ratio", "rounds"}, names(systems[1]))
	require.ElementsMatch(t, []string{"median", "min", "max"}, names(systems[1].(map[string]any)["ops_ratio"]))
	require.Len(t, systems[0].(map[string]any)["rounds"], 2)

	out.Reset()
	require.NoError(t, r.writeTable(&out))
	for _, want := range []string{"put, 4 clients", "ops/s to kvd", "other 1.0; durable: no", "machine: ", "commit: "} {
		require.Contains(t, out.String(), want)
	}
}

func names(m any) []string {
	var out []string
	for k := range m.(map[string]any) {
		out = append(out, k)
	}
	return out
}

func TestFlagsAreChecked(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--op", "scan"}, "want get or put"},
		{[]string{"--clients", "0"}, "--clients 0"},
		{[]string{"--size", "4"}, "--size 4"},
		{[]string{"--seconds", "0"}, "--seconds 0"},
		{[]string{"-o", "xml"}, "want table or json"},
		{[]string{"--systems", "kvd,sqlite"}, `"sqlite" is not known: want some of etcd, kvd, memcached, redis`},
		{[]string{"--systems", "etcd,etcd"}, "named twice"},
	} {
		cmd := newCommand()
		cmd.SetArgs(c.args)
		require.ErrorContains(t, cmd.ExecuteContext(t.Context()), c.want)
	}
}

func TestMissingBinaryNamesItsPackage(t *testing.T) {
	_, err := findBinary("no-such-server", "no-such-package")
	require.ErrorContains(t, err, "apt-get install no-such-package")
}

// A real process: its CPU time is seen, its death is told with its log, and stop
// ends it.
func TestProcess(t *testing.T) {
	sh, err := exec.LookPath("sh")
	require.NoError(t, err)
	dir := t.TempDir()

	p, err := startProcess(dir, "busy", sh, "-c", "while :; do :; done")
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		cpu, ok := cpuTime([]int{p.pid()})
		return ok && cpu > 0
	}, 10*time.Second, 10*time.Millisecond)
	require.NoError(t, p.stop())

	p, err = startProcess(dir, "dying", sh, "-c", "echo the port is taken; exit 3")
	require.NoError(t, err)
	err = waitReady(t.Context(), "dying", []*process{p}, func(context.Context) error { return errors.New("refused") })
	require.ErrorContains(t, err, "dying ended (exit status 3)")
	require.ErrorContains(t, err, "the port is taken")
	require.NoError(t, p.stop(), "a process that is gone can be stopped")
}

func TestFreePortsDiffer(t *testing.T) {
	ports, err := freePorts(20)
	require.NoError(t, err)
	seen := map[int]bool{}
	for _, p := range ports {
		require.False(t, seen[p])
		seen[p] = true
	}
}

func TestParseProcFiles(t *testing.T) {
	ticks, err := parseStat("42 (a ) b) S 1 42 42 0 -1 4194304 100 0 0 0 17 5 0 0 20 0 9 0 1000 1 1")
	require.NoError(t, err)
	require.EqualValues(t, 22, ticks)
	_, err = parseStat("42")
	require.Error(t, err)

	mounts := []byte(`22 1 254:0 / / rw - ext4 /dev/vda rw
30 22 0:25 / /var/tmp rw shared:3 - tmpfs tmpfs rw
31 22 0:26 / /var rw - xfs /dev/vdb rw
`)
	require.Equal(t, "tmpfs", filesystemOf(mounts, "/var/tmp/x"))
	require.Equal(t, "xfs", filesystemOf(mounts, "/var/tmpfoo"))
	require.Equal(t, "ext4", filesystemOf(mounts, "/home"))
	require.Equal(t, "unknown", filesystemOf(nil, "/home"))
	require.Equal(t, "Some CPU @ 3 GHz", cpuModel([]byte("processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\n")))
	require.Equal(t, "unknown", cpuModel(nil))
}

// The drivers against the real servers: what is put is what is got, and nothing is
// left running. (kvd's driver is run by make bench-smoke: it needs a built kvd.)
func TestRealSystems(t *testing.T) {
	for _, c := range []struct{ system, binary, debian string }{
		{"memcached", "memcached", "memcached"}, {"redis", "redis-server", "redis-server"}, {"etcd", "etcd", "etcd-server"},
	} {
		t.Run(c.system, func(t *testing.T) {
			if _, err := findBinary(c.binary, c.debian); err != nil {
				t.Skip(err) // CI, where a skip is a failure, installs them
			}
			w := smallLoad(opGet)
			sys := makers[c.system](options{})
			subjects, err := compare(t.Context(), []system{sys}, w, 1, t.TempDir(), func(string) {})
			require.NoError(t, err)
			require.Zero(t, subjects[0].samples[0].errors)
			require.NotZero(t, subjects[0].samples[0].ops)
			require.NotEqual(t, "unknown", sys.describe().Version)
			for _, pid := range sys.pids() {
				p, err := os.FindProcess(pid)
				require.NoError(t, err)
				require.Error(t, p.Signal(syscall.Signal(0)), "process %d still runs", pid)
			}
		})
	}
}
