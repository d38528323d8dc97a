//go:build rdmaguest

package e2e

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/internal/devcluster"
	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/verbs"
)

// These tests run in a guest of internal/tools/rdmaguest: nodes with addresses, and so
// GIDs, of their own on one Soft-RoCE device.

func guestEnv(t testing.TB, name string) string {
	t.Helper()
	v := os.Getenv(name)
	require.NotEmpty(t, v, "%s is not set: this test runs in a guest, by make test-rdma", name)
	return v
}

// rdmaConfig of a cluster that clients of this host read by verbs, or by tcp.
func rdmaConfig(t testing.TB) devcluster.Config {
	t.Helper()
	return devcluster.Config{
		Hosts: rxeAddrs(t)[:3],
		// Emulated processors are slow, and an election for that reason is not what is tested.
		Args: []string{"--transports", "verbs,tcp", "--tick", "200ms", "--require-rdma",
			// The guest has an iWARP device too, which would take over from this one.
			"--rdma-devices", guestEnv(t, "KVD_GUEST_RXE")},
	}
}

// byVerbs dials with bounds for emulated processors.
func byVerbs(cfg *client.Config) {
	cfg.Transport, cfg.ConnectTimeout, cfg.HedgeMin = "verbs", 20*time.Second, 200*time.Millisecond
}

func byAny(cfg *client.Config) {
	byVerbs(cfg)
	cfg.Transport = client.TransportAuto
}

// rdmaNodes is a cluster that the caller must leave as it is: it may add keys below a
// prefix of its own.
func rdmaNodes(t testing.TB) *cluster {
	t.Helper()
	shared.once.Do(func() {
		if shared.dir, shared.err = os.MkdirTemp("", "kvd-e2e-"); shared.err == nil {
			shared.c, shared.err = startCluster(shared.dir, rdmaConfig(t))
		}
	})
	require.NoError(t, shared.err)
	t.Cleanup(func() {
		if t.Failed() {
			shared.c.printLogs(t)
		}
	})
	return shared.c
}

func runTool(t testing.TB, name string, args ...string) string {
	t.Helper()
	ctx, cancel := within(patience)
	defer cancel()
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	require.NoError(t, err, "%s %v: %s (%v)", name, args, out, ctx.Err())
	return string(out)
}

// TestRDMATree: a real directory is loaded, got by verbs and compared.
func TestRDMATree(t *testing.T) {
	c := rdmaNodes(t)
	want := map[string][sha256.Size]byte{}
	var files []string
	require.NoError(t, filepath.WalkDir("/tree", func(p string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(p)
		want[p] = sha256.Sum256(b)
		files = append(files, p)
		return err
	}))
	require.Greater(t, len(files), 100, "make test-rdma copies a directory to /tree")
	writer, reader := c.dial(t, byAny), c.dial(t, byVerbs)
	each := func(f func(file string) error) {
		var wg sync.WaitGroup
		for w := range 4 {
			wg.Add(1)
			go func() {
				defer wg.Done()
				for i := w; i < len(files); i += 4 {
					if err := f(files[i]); err != nil {
						t.Errorf("%s: %v", files[i], err)
						return
					}
				}
			}()
		}
		wg.Wait()
	}
	each(func(file string) error {
		b, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		ctx, cancel := within(patience)
		defer cancel()
		_, err = writer.Put(ctx, []byte(file), b)
		return err
	})
	verify := func() {
		each(func(file string) error {
			ctx, cancel := within(patience)
			defer cancel()
			v, err := reader.Get(ctx, []byte(file))
			if err == nil && sha256.Sum256(v.Data) != want[file] {
				err = fmt.Errorf("%d bytes with another SHA-256", len(v.Data))
			}
			return err
		})
	}
	verify() // learns where things are
	require.False(t, t.Failed())
	await(t, "the whole tree is read by verbs", func() error {
		d := counted(reader, verify)
		require.False(t, t.Failed())
		if n := via(d, "verbs"); n != uint64(len(files)) {
			return fmt.Errorf("%d of %d gets by verbs: fallbacks %v, retries %v", n, len(files), d.Fallbacks, d.Retries)
		}
		return nil
	})
	t.Logf("%d files", len(files))

	// The same by a program: kvctl.
	r := command{bin: kvctlBin, limit: patience, args: []string{
		"--endpoints", strings.Join(c.Endpoints(), ","), "--transport", "verbs", "--require-rdma", "--timeout", "60s", "-v", "get", files[0],
	}}.run(t)
	require.Zero(t, r.code, r.stderr)
	require.Equal(t, want[files[0]], sha256.Sum256([]byte(r.stdout)))
	require.Contains(t, r.stderr, "verbs")
}

// TestRDMACounts: how many READs a get costs, and that no node's processor answers them.
func TestRDMACounts(t *testing.T) {
	c := rdmaNodes(t)
	held := fill(t, c.dial(t, byAny), "counts", 48, 1024)
	n := uint64(len(held))
	cl := c.dial(t, byVerbs)
	warmUp(t, cl, held)
	served := c.readsServed(t)
	d := calm(t, cl, func() { check(t, cl, held) })
	require.Equal(t, n, via(d, "verbs"))
	require.Equal(t, n, d.ObjectReads, "one READ of the object")
	require.Equal(t, 2*n, d.RecordReads, "the leader's record and one more voter's")
	require.Zero(t, d.BucketReads+d.Queries)

	// How well callers meet depends on the scheduler: the best of some rounds counts.
	best := 9.0
	for round := 0; round < 12 && best > 1.3; round++ {
		d := counted(cl, func() { c.getConcurrently(t, cl, held, 16, 50) })
		require.Equal(t, d.TotalGets(), via(d, "verbs"))
		best = min(best, float64(d.TotalReads())/float64(d.TotalGets()))
	}
	figureOf("READs a get, 16 callers", best, "").atMost(1.3).Record(t)
	require.LessOrEqual(t, best, 1.3)

	// Absent keys and cold ones, too.
	cold := c.dial(t, func(cfg *client.Config) { byVerbs(cfg); cfg.CacheEntries = -1 })
	check(t, cold, held)
	d = calm(t, cold, func() { check(t, cold, held) })
	require.Equal(t, n, via(d, "verbs"))
	for i := range 8 {
		_, err := cl.Get(context.Background(), fmt.Appendf(nil, "counts/none/%d", i))
		require.ErrorIs(t, err, client.ErrNotFound)
	}
	require.Equal(t, served, c.readsServed(t), "READs and look-ups that the nodes' processors answered")
}

// TestRDMACountsOfImmutable: a hit in an immutable namespace is one READ and no more.
func TestRDMACountsOfImmutable(t *testing.T) {
	c := rdmaNodes(t)
	ctx, cancel := within(patience)
	defer cancel()
	_, err := c.admin(t).CreateNamespace(ctx, client.NamespaceSpec{Name: "rdma-immutable", Immutable: true})
	require.NoError(t, err)
	in := func(cfg *client.Config) { byVerbs(cfg); cfg.Namespace = "rdma-immutable" }
	cl := c.dial(t, in)
	held := fill(t, cl, "imm", 24, 1024)
	c.caughtUp(t)
	check(t, cl, held)
	await(t, "each hit is exactly one READ", func() error {
		d := calm(t, cl, func() { check(t, cl, held) })
		if n := uint64(len(held)); via(d, "verbs") != n || d.TotalReads() != n || d.Confirmations+d.Queries > 0 {
			return fmt.Errorf("%d hits: %d by verbs, %d READs, %d confirmations, %d look-ups", n, via(d, "verbs"), d.TotalReads(), d.Confirmations, d.Queries)
		}
		return nil
	})
}

// TestRDMABuffer: the device puts values into the caller's registered memory.
func TestRDMABuffer(t *testing.T) {
	c := rdmaNodes(t)
	const size = 20_000
	held := fill(t, c.dial(t, byAny), "buffer", 12, size)
	cl := c.dial(t, byVerbs)
	warmUp(t, cl, held)
	b, err := cl.AllocBuffer(size)
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Free()) }()
	require.Equal(t, "verbs", b.Registered())
	var at *byte
	d := calm(t, cl, func() {
		for k, want := range held {
			v, err := b.GetInto(context.Background(), []byte(k))
			require.NoError(t, err)
			require.True(t, want == string(v.Data))
			if at == nil {
				at = &v.Data[0]
			}
			require.Same(t, at, &v.Data[0], "each value lies at the same place of the buffer")
		}
	})
	n := uint64(len(held))
	require.Equal(t, n, d.BufferDirect)
	require.Zero(t, d.BufferCopied)
	require.Equal(t, n, via(d, "verbs"))
	require.Equal(t, n, d.ObjectReads)
}

// getConcurrently gets from several callers at once; every value must be right.
func (c *cluster) getConcurrently(t testing.TB, cl *client.Client, held map[string]string, callers, each int) {
	t.Helper()
	var keys [][]byte
	for k := range held {
		keys = append(keys, []byte(k))
	}
	var wg sync.WaitGroup
	for w := range callers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range each {
				k := keys[(w*37+i)%len(keys)]
				v, err := cl.Get(context.Background(), k)
				if err != nil || string(v.Data) != held[string(k)] {
					t.Errorf("%s: %v", k, err)
					return
				}
			}
		}()
	}
	wg.Wait()
}

var servedMetric = regexp.MustCompile(`^(kvd_transport_(?:reads|queries)_total\{transport="(?:verbs|tcp)"\}) (\S+)`)

// readsServed is what the nodes' processors answered, by node and transport.
func (c *cluster) readsServed(t testing.TB) map[string]float64 {
	t.Helper()
	counts := map[string]float64{}
	for _, n := range c.Nodes() {
		for m, v := range metrics(t, n.Metrics, servedMetric) {
			counts[fmt.Sprintf("node %d %s", n.ID, m)] = v
		}
	}
	require.NotEmpty(t, counts)
	return counts
}

func metrics(t testing.TB, url string, which *regexp.Regexp) map[string]float64 {
	t.Helper()
	resp, err := http.Get(url)
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	defer http.DefaultClient.CloseIdleConnections()
	all, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	got := map[string]float64{}
	lines := bufio.NewScanner(bytes.NewReader(all))
	for lines.Scan() {
		if m := which.FindStringSubmatch(lines.Text()); m != nil {
			got[m[1]], err = strconv.ParseFloat(m[2], 64)
			require.NoError(t, err)
		}
	}
	return got
}

// TestRDMAStoppedLeader: a leader is stopped by SIGSTOP. The device answers READs of its
// memory for it; once a newer write was acknowledged nobody reads an older value.
func TestRDMAStoppedLeader(t *testing.T) {
	cfg := rdmaConfig(t)
	cfg.Args = append(cfg.Args, "--tick", "400ms") // time for reads before an election
	c := newCluster(t, cfg)
	const stopped = 1
	tr := newTruth(20)
	writer := c.dial(t, func(cfg *client.Config) { byAny(cfg); cfg.Endpoints = c.Endpoints()[1:] })
	tr.putAll(t, writer, 1)
	c.lead(t, stopped)
	w := &watcher{name: "verbs", tr: tr, c: c.dial(t, func(cfg *client.Config) { byVerbs(cfg); cfg.CallTimeout = patience })}
	w.warm(t)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	stop := func() { cancel(); wg.Wait() }
	defer stop()

	require.NoError(t, c.Node(stopped).Signal(syscall.SIGSTOP))
	defer func() { _ = c.Node(stopped).Signal(syscall.SIGCONT) }()
	w.readsStoppedMemory(t)
	wg.Add(1)
	go func() {
		defer wg.Done()
		w.run(ctx)
	}()
	tr.putAll(t, writer, 2) // acknowledged by a new leader
	for i := range tr.keys {
		round, violation, err := tr.get(context.Background(), w.c, i)
		require.NoError(t, violation)
		require.NoError(t, err)
		require.GreaterOrEqual(t, round, 2, tr.keys[i])
	}
	awaitPasses(t, []*watcher{w})
	require.NoError(t, c.Node(stopped).Signal(syscall.SIGCONT))
	tr.putAll(t, writer, 3)
	awaitPasses(t, []*watcher{w})
	stop()
	require.NoError(t, w.violation)
	require.Empty(t, w.failures)
	w.warm(t) // by verbs again, all of it
	t.Logf("%d passes, retries %v, fallbacks %v", w.rounds.Load(), w.c.Stats().Retries, w.c.Stats().Fallbacks)
}

// TestRDMAFaults: nodes are killed, and the device goes, in one cluster.
func TestRDMAFaults(t *testing.T) {
	c := newCluster(t, rdmaConfig(t))
	t.Run("kill", func(t *testing.T) { rdmaKill(t, c) })
	t.Run("device lost", func(t *testing.T) { rdmaDeviceLost(t, c) })
}

// rdmaKill: SIGKILL of a node, and of the next one, while writers write and a reader reads
// by verbs. What was acknowledged is there, what comes back is served by verbs, and nothing
// of the dead process is read when the next one serves.
func rdmaKill(t *testing.T, c *cluster) {
	reader := c.dial(t, byVerbs)
	held := fill(t, c.dial(t, byAny), "still", 20, 700)
	l := startLoad(t, "kill", c.dial(t, byVerbs))
	stop := readOn(t, held, reader)
	l.awaitProgress(t)
	for _, id := range []uint64{1, 2} {
		n := c.Node(id)
		dead := doom(t, n)
		require.NoError(t, n.Signal(syscall.SIGKILL))
		if id == 1 {
			l.awaitProgress(t) // two of three go on, every shard
		}
		await(t, "the next process starts as soon as it can", func() error { return n.Start() })
		c.awaitServing(t, id)
		dead.fenced(t, n)
		l.awaitProgress(t)
	}
	gets := stop()
	l.pause()
	l.verify(t, reader)
	l.verify(t, c.dial(t, byAny))
	warmUp(t, reader, held) // by verbs, every node
	for _, p := range reader.Stats().Peers {
		require.Equal(t, "verbs", p.Transport, "%+v", p)
	}
	t.Logf("%d gets; %d puts acknowledged, %d of unknown outcome, %d refused", gets, l.acked.Load(), l.unsure.Load(), l.refused.Load())
}

// rdmaDeviceLost: the device is removed under load, which takes it from all nodes and the
// client at once. Gets go on another way, with right answers, and come back to verbs when
// the device does, with its addresses in another order. The fall is counted with its
// reason. Then a GID of a node goes and comes, and the port.
func rdmaDeviceLost(t *testing.T, c *cluster) {
	held := fill(t, c.dial(t, byAny), "device", 30, 900)
	// Shared memory is not served here, so automatic means verbs, then tcp.
	cl := c.dial(t, byAny)
	l := startLoad(t, "device-load", c.dial(t, byAny))
	warmUp(t, cl, held)
	require.Equal(t, via(cl.Stats(), "verbs"), cl.Stats().TotalGets()-via(cl.Stats(), "tcp", client.TransportGRPC))
	stop := readOn(t, held, cl)

	netdev := guestEnv(t, "KVD_GUEST_RXE_NETDEV")
	device := guestEnv(t, "KVD_GUEST_RXE")
	addrs := rxeAddrs(t)
	index := rxeGID(t, addrs[0])
	took := since(func() { runTool(t, "/usr/sbin/rdma", "link", "delete", device) }) // waits until nobody has it open
	t.Logf("device removed in %v", took.Round(time.Millisecond))
	added := false
	add := func() {
		runTool(t, "/usr/sbin/rdma", "link", "add", device, "type", "rxe", "netdev", netdev)
		added = true
	}
	defer func() {
		if !added {
			add()
		}
	}()
	before := cl.Stats()
	await(t, "gets go on without the device", func() error {
		if n := via(cl.Stats().Sub(before), "tcp"); n < 50 {
			return fmt.Errorf("%d gets over tcp: peers %+v", n, cl.Stats().Peers)
		}
		return nil
	})
	l.awaitProgress(t)
	var reasons []string
	for _, f := range cl.Stats().TransportFallbacks {
		if f.Transport == "verbs" {
			reasons = append(reasons, f.Reason)
		}
	}
	require.NotEmpty(t, reasons, "the fall from verbs is counted")

	readdress(t, addrs[0])
	add()
	require.NotEqual(t, index, rxeGID(t, addrs[0]))
	byVerbsAgain := func() {
		await(t, "gets go by verbs again, to every node", func() error {
			for _, p := range cl.Stats().Peers {
				if p.Transport != "verbs" || !p.Connected {
					return fmt.Errorf("node %d by %s: %s", p.NodeID, p.Transport, p.Reason)
				}
			}
			return nil
		})
	}
	byVerbsAgain()
	connections := cl.Stats().Peers[1].Connections
	readdress(t, addrs[1])
	await(t, "node 2 is connected by its new GID", func() error {
		if cl.Stats().Peers[1].Connections == connections {
			return errors.New("the connection by a GID that is gone stands")
		}
		return nil
	})
	byVerbsAgain()
	gets := stop()
	l.pause()
	l.verify(t, cl)
	warmUp(t, cl, held)
	d := calm(t, cl, func() { check(t, cl, held) })
	require.Equal(t, uint64(len(held)), via(d, "verbs"))
	t.Logf("%d gets, none wrong or failed; %d puts; falls from verbs: %v", gets, l.acked.Load(), reasons)

	// With the port all ways go, for the addresses of the nodes are on its interface. No
	// get hangs, and afterwards everything is as before.
	runTool(t, "/usr/sbin/ip", "link", "set", netdev, "down")
	up := func() { runTool(t, "/usr/sbin/ip", "link", "set", netdev, "up") }
	defer up()
	for k, want := range held {
		ctx, cancel := within(time.Second)
		v, err := cl.Get(ctx, []byte(k))
		cancel()
		if err == nil {
			require.True(t, want == string(v.Data))
			continue
		}
		require.True(t, errors.Is(err, client.ErrUnavailable) || errors.Is(err, context.DeadlineExceeded), "%v", err)
		break
	}
	up()
	warmUp(t, cl, held)
	byVerbsAgain()
	check(t, cl, held)
}

var liveObjects = regexp.MustCompile(`\b(pd|cq|qp|mr|cm_id|ctx|srq) (\d+)`)

// deviceObjects is what the kernel holds of the device, for all processes.
func deviceObjects(t testing.TB) map[string]int {
	t.Helper()
	counts := map[string]int{}
	for _, m := range liveObjects.FindAllStringSubmatch(runTool(t, "/usr/sbin/rdma", "resource", "show"), -1) {
		n, err := strconv.Atoi(m[2])
		require.NoError(t, err)
		counts[m[1]] += n
	}
	require.NotEmpty(t, counts)
	return counts
}

// TestRDMAReconnects: clients that come and go leave nothing in the kernel and no goroutine
// in the nodes. Each opens a session and a queue pair with every node, and costs a second of
// an emulated processor, so they are few; the tests of the provider and of the server have a
// thousand, and look at memory, too.
func TestRDMAReconnects(t *testing.T) {
	c := rdmaNodes(t)
	held := fill(t, c.dial(t, byAny), "again", 3, 500)
	device := guestEnv(t, "KVD_GUEST_RXE")
	visit := func() error {
		ctx, cancel := within(patience)
		defer cancel()
		cfg := client.Config{Endpoints: c.Endpoints(), CallTimeout: patience, DialTimeout: patience}
		byVerbs(&cfg)
		cfg.Providers = []rdma.Provider{verbs.Provider{Devices: []string{device}}}
		cl, err := client.Dial(ctx, cfg)
		if err != nil {
			return err
		}
		for k, want := range held {
			v, err := cl.Get(ctx, []byte(k))
			if err == nil && string(v.Data) != want {
				err = errors.New("other bytes")
			}
			if err != nil {
				return errors.Join(fmt.Errorf("%s: %w", k, err), cl.Close())
			}
		}
		return cl.Close()
	}
	come := func(clients int) {
		var visits errgroup.Group
		visits.SetLimit(4)
		for range clients {
			visits.Go(visit)
		}
		require.NoError(t, visits.Wait())
	}
	of := regexp.MustCompile(`^(go_goroutines|go_memstats_alloc_bytes|process_open_fds) (\S+)`)
	// After a collection the heap is what is in use.
	left := func() (now []map[string]float64) {
		for _, n := range c.Nodes() {
			metrics(t, strings.TrimSuffix(n.Metrics, "/metrics")+"/debug/pprof/heap?gc=1", of)
			now = append(now, metrics(t, n.Metrics, of))
		}
		return now
	}
	come(4) // pools and caches have their size then
	objects, before := deviceObjects(t), left()
	const (
		clients = 50
		heap    = 2 << 20 // bytes that pools may have grown: no client leaves 40 KiB
	)
	took := since(func() { come(clients) })
	await(t, "everything of the clients is gone", func() error {
		// Not equal: what was counted before may have had one that was just going.
		for kind, now := range deviceObjects(t) {
			if now > objects[kind] {
				return fmt.Errorf("the device has %d %s, before %v", now, kind, objects)
			}
		}
		for i, now := range left() {
			// A few come and go with Raft's own streams.
			was := before[i]
			if now["go_goroutines"] > was["go_goroutines"]+clients/2 || now["process_open_fds"] > was["process_open_fds"]+clients/10 ||
				now["go_memstats_alloc_bytes"] > was["go_memstats_alloc_bytes"]+heap {
				return fmt.Errorf("node %d has %v, before %v", i+1, now, was)
			}
		}
		return nil
	})
	t.Logf("%d clients in %v; the nodes' before %v, after %v", clients, took.Round(time.Millisecond), before, left())
}
