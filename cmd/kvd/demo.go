package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/internal/devcluster"
)

// demo is what `kvd dev --once` does on a running cluster.
type demo struct {
	settings *devSettings
	cluster  *devcluster.Cluster
	tree     string
	out      io.Writer
	errOut   io.Writer

	client *client.Client
	files  []file
	left   []file // above the value limit
	report report
}

// file of the tree. The sum is that of what was put.
type file struct {
	key  string
	size int64
	sum  [sha256.Size]byte
}

const (
	demoValueLimit = 1 << 20 // bytes: the nodes' default
	victimID       = 1       // node that is killed
)

func (d *demo) run(ctx context.Context) error {
	c, err := client.Dial(ctx, client.Config{Endpoints: d.cluster.Endpoints(), Transport: d.settings.transport, CallTimeout: 30 * time.Second})
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	d.client = c
	for _, step := range []func(context.Context) error{d.scan, d.load, d.readBack, d.warm} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	d.report.print(d.out)
	if d.report.differing > 0 {
		return fmt.Errorf("%d of %d files came back with other bytes than were put", d.report.differing, len(d.files))
	}
	return nil
}

// scan lists the regular files of the tree.
func (d *demo) scan(context.Context) error {
	err := filepath.WalkDir(d.tree, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(d.tree, path)
		if err != nil {
			return err
		}
		f := file{key: filepath.ToSlash(rel), size: info.Size()}
		if f.size > demoValueLimit {
			d.left = append(d.left, f)
		} else {
			d.files = append(d.files, f)
		}
		return nil
	})
	if err != nil {
		return usageError{fmt.Errorf("tree %s: %w", d.tree, err)}
	}
	if len(d.files) == 0 {
		return usageError{fmt.Errorf("tree %s has no file of at most %d bytes", d.tree, demoValueLimit)}
	}
	d.report.tree, d.report.files, d.report.left = d.tree, len(d.files), d.left
	return nil
}

// each calls f for every file, from several callers at once, and shows the progress.
func (d *demo) each(ctx context.Context, title string, f func(ctx context.Context, i int) error) error {
	p := newProgress(d.errOut, title, len(d.files))
	defer p.finish()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var next atomic.Int64
	var wg sync.WaitGroup
	for range d.settings.callers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for ctx.Err() == nil {
				i := int(next.Add(1)) - 1
				if i >= len(d.files) {
					return
				}
				if err := f(ctx, i); err != nil {
					cancel(fmt.Errorf("%s: %s: %w", title, d.files[i].key, err))
					return
				}
				p.add(1)
			}
		}()
	}
	wg.Wait()
	return context.Cause(ctx)
}

func (d *demo) load(ctx context.Context) error {
	var bytes atomic.Int64
	began := time.Now()
	err := d.each(ctx, "load", func(ctx context.Context, i int) error {
		content, err := os.ReadFile(filepath.Join(d.tree, filepath.FromSlash(d.files[i].key)))
		if err != nil {
			return err
		}
		d.files[i].sum = sha256.Sum256(content)
		bytes.Add(int64(len(content)))
		_, err = d.client.Put(ctx, []byte(d.files[i].key), content)
		return err
	})
	d.report.bytes, d.report.loadTook = bytes.Load(), time.Since(began)
	return err
}

// readBack gets every file, and kills a node in the middle.
func (d *demo) readBack(ctx context.Context) error {
	victim, err := d.makeLeaderOfHalf(ctx)
	if err != nil {
		return err
	}
	before, began := d.client.Stats(), time.Now()
	times := newTimes()
	var done, differing atomic.Int64
	var once sync.Once
	failed := make(chan error, 1)
	err = d.each(ctx, "read back", func(call context.Context, i int) error {
		if int(done.Add(1)) > len(d.files)/2 {
			// The others go on reading while this caller kills.
			once.Do(func() {
				killed, err := time.Now(), victim.Kill()
				go func() { failed <- errors.Join(err, d.failOver(ctx, victim, killed)) }()
			})
		}
		t := time.Now()
		v, err := d.client.Get(call, []byte(d.files[i].key))
		times.record(time.Since(t))
		if err != nil {
			return err
		}
		if sha256.Sum256(v.Data) != d.files[i].sum {
			differing.Add(1)
			fmt.Fprintf(d.errOut, "%s came back with other bytes\n", d.files[i].key)
		}
		return nil
	})
	if err == nil {
		select {
		case err = <-failed:
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	d.report.differing = int(differing.Load())
	d.report.treeGets = getsOf(d.client.Stats().Sub(before), times, time.Since(began))
	return err
}

// makeLeaderOfHalf moves leaders until one node leads half of the shards.
func (d *demo) makeLeaderOfHalf(ctx context.Context) (*devcluster.Node, error) {
	admin, err := client.DialAdmin(client.Config{Endpoints: d.cluster.Endpoints()})
	if err != nil {
		return nil, err
	}
	defer func() { _ = admin.Close() }()
	want := (d.settings.shards + 1) / 2
	deadline := time.Now().Add(20 * time.Second)
	for {
		led, others, err := d.leaders(ctx, admin, victimID)
		if err == nil && len(led) >= want {
			d.report.victimShards = led
			return d.cluster.Node(victimID), nil
		}
		if err == nil {
			for _, shard := range others[:min(len(others), want-len(led))] {
				err = errors.Join(err, admin.TransferLeader(ctx, shard, victimID))
			}
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("node %d could not be made leader of %d shards: %w", victimID, want, err)
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// leaders sorts the shards by whether the node leads them.
func (d *demo) leaders(ctx context.Context, admin *client.Admin, node uint64) (led, others []uint32, err error) {
	nodes, err := admin.Status(ctx)
	if err != nil {
		return nil, nil, err
	}
	for _, n := range nodes {
		for _, s := range n.Status.GetShards() {
			switch {
			case s.GetShard() == 0 || s.GetLeaderNode() != n.Status.GetNodeId():
			case n.Status.GetNodeId() == node:
				led = append(led, s.GetShard())
			default:
				others = append(others, s.GetShard())
			}
		}
	}
	sort.Slice(others, func(i, j int) bool { return others[i] < others[j] })
	return led, others, nil
}

// failOver measures, for each shard that the victim led, how long after it was killed a
// linearizable get succeeds again.
func (d *demo) failOver(ctx context.Context, victim *devcluster.Node, began time.Time) error {
	keys := map[uint32]string{}
	for _, f := range d.files {
		keys[d.client.ShardOf([]byte(f.key))] = f.key
	}
	took := make([]time.Duration, len(d.report.victimShards))
	errs := make([]error, len(took))
	var wg sync.WaitGroup
	for i, shard := range d.report.victimShards {
		key, ok := keys[shard]
		if !ok {
			continue
		}
		wg.Add(1)
		go func() {
			defer wg.Done()
			_, errs[i] = d.client.Get(ctx, []byte(key))
			took[i] = time.Since(began)
		}()
	}
	wg.Wait()
	d.report.victim, d.report.failover = victim.ID, took
	return errors.Join(errs...)
}

// warm puts values of 1 KiB on the whole cluster, into a namespace of each kind, and
// measures warm gets of one caller.
func (d *demo) warm(ctx context.Context) error {
	if victim := d.cluster.Node(victimID); !victim.Running() {
		if err := victim.Start(); err != nil {
			return err
		}
		wait, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		if err := victim.AwaitServing(wait); err != nil {
			return err
		}
	}
	w := newWarmSet(d.settings.values)
	if err := d.putWarm(ctx, "put 1 KiB values", d.client, w); err != nil {
		return err
	}
	if err := d.measureLinearizable(ctx, w); err != nil {
		return err
	}
	var err error
	if d.report.session, err = w.measure(ctx, d.client, sideGets, client.WithLevel(client.Session)); err != nil {
		return err
	}
	if _, err := d.client.CreateNamespace(ctx, client.NamespaceSpec{Name: "demo-immutable", Immutable: true}); err != nil {
		return err
	}
	im, err := client.Dial(ctx, client.Config{Endpoints: d.cluster.Endpoints(), Namespace: "demo-immutable", Transport: d.settings.transport, CallTimeout: 30 * time.Second})
	if err != nil {
		return err
	}
	defer func() { _ = im.Close() }()
	if err := d.putWarm(ctx, "put immutable values", im, w); err != nil {
		return err
	}
	d.report.immutable, err = w.measure(ctx, im, sideGets)
	return err
}

// sideGets is how many gets the levels beside the linearizable one are measured with.
const sideGets = 200_000

// warmSet is keys and values of 1 KiB.
type warmSet struct{ keys, values [][]byte }

func newWarmSet(n int) *warmSet {
	w := &warmSet{}
	for i := range n {
		w.keys = append(w.keys, fmt.Appendf(nil, "warm/%06d", i))
		w.values = append(w.values, warmValue(i))
	}
	return w
}

func (d *demo) putWarm(ctx context.Context, title string, c *client.Client, w *warmSet) error {
	p := newProgress(d.errOut, title, len(w.keys))
	defer p.finish()
	var wg sync.WaitGroup
	errs := make([]error, 64)
	for worker := range errs {
		wg.Go(func() {
			for i := worker; i < len(w.keys) && errs[worker] == nil; i += len(errs) {
				_, errs[worker] = c.Put(ctx, w.keys[i], w.values[i])
				p.add(1)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// measure gets every key once to learn where it is, and then n times in turn.
func (w *warmSet) measure(ctx context.Context, c *client.Client, n int, opts ...client.ReadOption) (gets, error) {
	buf := make([]byte, 4096)
	get := func(i int) error {
		v, err := c.GetInto(ctx, w.keys[i], buf, opts...)
		if err == nil && !bytes.Equal(v.Data, w.values[i]) {
			err = errors.New("other bytes came back than were put")
		}
		if err != nil {
			return fmt.Errorf("get %s: %w", w.keys[i], err)
		}
		return nil
	}
	for i := range w.keys {
		if err := get(i); err != nil {
			return gets{}, err
		}
	}
	before, began, times := c.Stats(), time.Now(), newTimes()
	for i := range n {
		t := time.Now()
		if err := get(i % len(w.keys)); err != nil {
			return gets{}, err
		}
		times.record(time.Since(t))
	}
	return getsOf(c.Stats().Sub(before), times, time.Since(began)), nil
}

// measureLinearizable also compares the servers' CPU during the gets with that during
// as long a rest.
func (d *demo) measureLinearizable(ctx context.Context, w *warmSet) error {
	cpu0, err := d.serverCPU(ctx)
	if err != nil {
		return err
	}
	began := time.Now()
	if d.report.warmGets, err = w.measure(ctx, d.client, d.settings.gets); err != nil {
		return err
	}
	took := time.Since(began)
	cpu1, err := d.serverCPU(ctx)
	if err != nil {
		return err
	}
	select {
	case <-time.After(took):
	case <-ctx.Done():
		return ctx.Err()
	}
	cpu2, err := d.serverCPU(ctx)
	d.report.cpuGets, d.report.cpuIdle, d.report.cpuTook = cpu1-cpu0, cpu2-cpu1, took
	d.report.peers = d.client.Stats().Peers
	return err
}

// serverCPU is the CPU time, in seconds, of all server processes so far. A node that was
// started again a moment ago may not be connected yet.
func (d *demo) serverCPU(ctx context.Context) (sum float64, err error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	for {
		if sum, err = d.serverCPUOnce(ctx); err == nil {
			return sum, nil
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return 0, err
		}
	}
}

func (d *demo) serverCPUOnce(ctx context.Context) (float64, error) {
	nodes, err := d.client.Status(ctx)
	if err != nil {
		return 0, err
	}
	sum := 0.0
	for _, n := range nodes {
		if n.Err != nil {
			return 0, n.Err
		}
		sum += n.Status.GetServerCpuSeconds()
	}
	return sum, nil
}

// warmValue is 1 KiB that differs from key to key.
func warmValue(i int) []byte {
	v := make([]byte, 1024)
	x := uint64(i)*0x9e3779b97f4a7c15 + 1
	for j := range v {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		v[j] = byte(x)
	}
	return v
}

// times is a histogram that several callers may write.
type times struct {
	mu sync.Mutex
	h  *hdrhistogram.Histogram // nanoseconds
}

func newTimes() *times { return &times{h: hdrhistogram.New(1, int64(time.Minute), 3)} }

func (t *times) record(d time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	_ = t.h.RecordValue(min(int64(d), int64(time.Minute))) // within the range by construction
}

func (t *times) quantile(q float64) time.Duration { return time.Duration(t.h.ValueAtQuantile(q)) }
