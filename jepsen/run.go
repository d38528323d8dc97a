package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kvd-io/kvd/jepsen/env"
	"github.com/kvd-io/kvd/jepsen/history"
	"github.com/kvd-io/kvd/jepsen/nemesis"
	"github.com/kvd-io/kvd/jepsen/worker"
	"github.com/kvd-io/kvd/jepsen/workload"
)

const (
	startTimeout = 90 * time.Second
	healTimeout  = 90 * time.Second

	verbsConnectTimeout = 20 * time.Second
	verbsHedgeMin       = 200 * time.Millisecond
)

func newLogger(w io.Writer) *slog.Logger { return slog.New(slog.NewTextHandler(w, nil)) }

// run is one run, from the first namespace to the last process that is gone.
type run struct {
	f     *flags
	say   func(format string, args ...any)
	dir   string // artifacts
	data  string
	kinds []string // of faults; those that this place can not have are in leftOut
	lanes nemesis.Lanes

	leftOut []string

	load *workload.Workload

	env     *env.Env
	workers []*worker.Worker // of clients
	ctl     *worker.Worker
	clients []clientAt
	rec     *history.Recorder
	ids     counter
}

// clientAt is one SDK client.
type clientAt struct {
	w         *worker.Worker
	index     int
	name, via string
}

type counter struct {
	sync.Mutex
	n uint64
}

func (c *counter) next() uint64 {
	c.Lock()
	defer c.Unlock()
	c.n++
	return c.n
}

func (f *flags) newRun(say func(string, ...any)) (*run, error) {
	r := &run{f: f, say: say}
	var err error
	if r.kinds, err = nemesis.ParseKinds(f.nemesis); err != nil {
		return nil, err
	}
	if r.load, err = workload.New(f.workload, f.settings()); err != nil {
		return nil, err
	}
	return r, nil
}

// run runs everything and returns the history. What was made is gone when it returns.
func (r *run) run(ctx context.Context) (*history.History, error) {
	if err := r.prepare(ctx); err != nil {
		return nil, errors.Join(err, r.close())
	}
	end := r.play(ctx)
	// Cleaned up before the history is closed: what a node logs while it dies counts. What
	// goes wrong from here on spoils the run, but not what was recorded.
	for _, n := range r.env.Nodes {
		end.Crashes = append(end.Crashes, n.Crashes()...)
	}
	if err := r.close(); err != nil {
		end.Crashes = append(end.Crashes, "cleaning up: "+err.Error())
	}
	return r.rec.Close(end)
}

// prepare makes the artifacts folder, the place, the cluster and the clients.
func (r *run) prepare(ctx context.Context) error {
	f := r.f
	if err := r.makeDirs(); err != nil {
		return err
	}
	namespaces := f.network == "namespaces"
	if len(f.addresses) > 0 {
		r.say("nodes on %v of this host: faults of processes only", f.addresses)
	} else if cannot := env.CanNamespaces(); cannot != nil {
		if namespaces {
			return fmt.Errorf("--net namespaces: %w", cannot)
		}
		r.say("no network namespaces (%v): all on loopback, faults of processes only", cannot)
	} else if f.network == "auto" {
		namespaces = true
	}
	if f.programs == nil {
		p, err := f.build(ctx, r.data, f.broken != "")
		if err != nil {
			return err
		}
		f.programs = &p
	}
	if err := f.checkEarlier(ctx, *f.programs); err != nil {
		return err
	}
	if len(f.addresses) > 0 && slices.ContainsFunc(r.kinds, nemesis.NeedsSpare) {
		r.say("faults of membership left out: no address for a node that joins")
		r.leaveOut(nemesis.NeedsSpare)
	}
	cfg := env.Config{
		Spare:   slices.ContainsFunc(r.kinds, nemesis.NeedsSpare),
		Earlier: f.earlier, Binary: f.programs.kvd, Self: f.programs.worker, Chaos: f.programs.chaos, Broken: f.broken, DataDir: r.data, LogDir: r.dir, Nodes: f.nodes, Shards: f.shards,
		Namespaces: namespaces, Addrs: f.addresses, Clients: []string{"beside", "apart"},
		Args: []string{
			"--tick", "50ms", "--arena", f.arena, "--max-chunk", "2MiB", "--cache", "16MiB", "--min-free-disk", nemesis.MinFreeDisk,
			"--replication", strconv.Itoa(f.replicas()),
		},
	}
	if f.transport == verbs {
		cfg.Args = append(cfg.Args, "--transports", "verbs,tcp", "--require-rdma")
	}
	cfg.Args = append(cfg.Args, f.nodeFlags...)
	if f.transport == "mixed" && f.nodes > 1 {
		// One read may then take its object from one transport and its quorum from another.
		cfg.NodeArgs = map[uint64][]string{uint64(f.nodes): {"--transports", "tcp"}}
	}
	var err error
	if r.env, err = env.New(cfg); err != nil {
		return err
	}
	if err := r.dropImpossible(); err != nil {
		return err
	}
	if r.rec, err = history.Create(filepath.Join(r.dir, "history.jsonl"), r.header(namespaces)); err != nil {
		return err
	}
	return r.startCluster(ctx)
}

// makeDirs: the data's path is short, as unix sockets lie below it.
func (r *run) makeDirs() error {
	stamp := time.Now().Format("0102-150405")
	r.dir = filepath.Join(r.f.artifacts, fmt.Sprintf("%s-%s-%d-%s", r.f.workload, r.f.transport, r.f.seed, stamp))
	if err := os.MkdirAll(r.dir, 0o755); err != nil {
		return err
	}
	parent := cmp.Or(r.f.dataDir, os.TempDir())
	env.RemoveLeftovers(parent)
	name := fmt.Sprintf("kvdj%d-", os.Getpid())
	if r.f.keepData {
		name = "kvdj-kept-" // which no later run takes for a left-over
	}
	var err error
	r.data, err = os.MkdirTemp(parent, name)
	return err
}

// leaveOut takes kinds of faults out of the run, which the header and the verdict tell.
func (r *run) leaveOut(which func(kind string) bool) {
	r.kinds = slices.DeleteFunc(r.kinds, func(k string) bool {
		if which(k) {
			r.leftOut = append(r.leftOut, k)
			return true
		}
		return false
	})
}

// dropImpossible takes the faults out that this place can not have, says so, and plans the
// others. That none is left, or none has room in the run, is an error: such a run would
// show nothing of what was asked for.
func (r *run) dropImpossible() error {
	r.leaveOutBySize()
	r.leaveOut(func(k string) bool {
		switch {
		case nemesis.NeedsNetwork(k) && !r.env.CanCut():
			r.say("fault %s left out: no network of our own", k)
		case nemesis.NeedsChaos(k) && !r.f.programs.chaos:
			r.say("fault %s left out: kvd was not built with the tag chaos", k)
		case k == nemesis.Upgrade && r.f.earlier == "":
			r.say("fault %s left out: no --upgrade-from", k)
		case k == nemesis.OOM && r.env.NoCgroups != nil:
			r.say("fault %s left out: %v", k, r.env.NoCgroups)
		default:
			return false
		}
		return true
	})
	if len(r.kinds) == 0 && len(r.leftOut) > 0 {
		return fmt.Errorf("--nemesis %s: this place can have none of these faults (see above): want others, or none", r.f.nemesis)
	}
	var err error
	r.lanes, err = r.f.planned(r.kinds)
	return err
}

// leaveOutBySize leaves out what the number of nodes or of replicas does not allow.
func (r *run) leaveOutBySize() {
	r.leaveOut(func(k string) bool {
		switch {
		case nemesis.NeedsOthers(k) && r.f.nodes == 1:
			r.say("fault %s left out: there is one node", k)
		case nemesis.NeedsReplicas(k) && r.f.replicas() == 1:
			r.say("fault %s left out: each shard has one replica", k)
		default:
			return false
		}
		return true
	})
}

// planned are the faults that the seed means. That there are none, though kinds of them were
// chosen, is an error.
func (f *flags) planned(kinds []string) (nemesis.Lanes, error) {
	lanes := nemesis.Plan(f.seed, kinds, f.length, f.nodes, f.tempo)
	if len(kinds) > 0 && len(slices.Concat(lanes[:]...)) == 0 {
		return lanes, fmt.Errorf("--time %v: too short for any fault of --nemesis %s: want at least %v, or --nemesis none", f.length, f.nemesis, nemesis.RoomForOne(f.tempo))
	}
	return lanes, nil
}

func (r *run) header(namespaces bool) history.Header {
	f := r.f
	h := history.Header{Workload: f.workload, Nemesis: f.nemesis, LeftOut: r.leftOut, Seed: f.seed, Settings: map[string]string{
		"transport": f.transport, "time": f.length.String(), "tempo": strconv.FormatFloat(f.tempo, 'g', -1, 64), "nodes": strconv.Itoa(f.nodes), "replication": strconv.Itoa(f.replicas()), "shards": strconv.Itoa(f.shards),
		"concurrency": strconv.Itoa(f.concurrency), "rate": strconv.FormatFloat(f.rate, 'g', -1, 64), "keys": strconv.Itoa(f.keys),
		"min-size": strconv.Itoa(f.minSize), "max-size": strconv.Itoa(f.maxSize), "op-timeout": f.opTimeout.String(), "arena": f.arena,
		"namespaces": strconv.FormatBool(namespaces), "addresses": strings.Join(f.addresses, ","), "node-flags": strings.Join(f.nodeFlags, ","),
	}}
	if f.broken != "" {
		h.Settings["broken"] = f.broken
	}
	for _, lane := range r.lanes {
		for _, e := range lane {
			b, err := json.Marshal(e)
			if err != nil {
				panic("main: an event can not be written down") // bug: it is plain data
			}
			h.Schedule = append(h.Schedule, b)
		}
	}
	return h
}

// readers are the transports of clients, by host: shared memory only beside the nodes.
func (r *run) readers() map[string][]string {
	switch r.f.transport {
	case "shm":
		return map[string][]string{"beside": {"shm"}}
	case "tcp":
		return map[string][]string{"beside": {"tcp"}, "apart": {"tcp"}}
	case verbs:
		return map[string][]string{"beside": {"verbs", "tcp"}}
	}
	return map[string][]string{"beside": {"shm", "auto"}, "apart": {"tcp", "grpc", "tcp"}}
}

// clientSpecs of a host. Several processes share a client, but where the workload wants
// one for each.
func (r *run) clientSpecs(host string, vias []string, hosts int) []worker.ClientConfig {
	const perClient = 3
	n := (r.f.concurrency + hosts - 1) / hosts
	if !r.load.Private {
		n = max(len(vias), (n+perClient-1)/perClient)
	}
	var out []worker.ClientConfig
	for i := range n {
		via := vias[i%len(vias)]
		out = append(out, worker.ClientConfig{Name: fmt.Sprintf("%s%d-%s", host, i+1, via), Transport: via})
	}
	return out
}

// startCluster starts nodes and clients, and waits until they work. A node that ends
// meanwhile is told of at once, with its last words: nothing would come of waiting.
func (r *run) startCluster(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	ctx, ended := context.WithCancelCause(ctx)
	var watchers sync.WaitGroup
	defer watchers.Wait()
	defer ended(nil)
	for _, n := range r.env.InUse() {
		if err := n.Start(); err != nil {
			return err
		}
		watchers.Go(func() {
			select {
			case <-n.Ended():
				ended(errors.New(strings.Join(n.Crashes(), "; ")))
			case <-ctx.Done():
			}
		})
	}
	err := r.startClients(ctx)
	if cause := context.Cause(ctx); err != nil && cause != nil && !errors.Is(cause, context.DeadlineExceeded) && !errors.Is(cause, context.Canceled) {
		return fmt.Errorf("the cluster does not begin to work: %w", cause) // of which the error is but a sequel
	}
	return err
}

func (r *run) startClients(ctx context.Context) error {
	vias := r.readers()
	var err error
	if r.ctl, err = r.startWorker(ctx, env.Control, []worker.ClientConfig{{Name: "ctl", Transport: "grpc"}}); err != nil {
		return err
	}
	for _, host := range r.env.ClientHosts() {
		if len(vias[host]) == 0 {
			continue
		}
		specs := r.clientSpecs(host, vias[host], len(vias))
		w, err := r.startWorker(ctx, host, specs)
		if err != nil {
			return err
		}
		r.workers = append(r.workers, w)
		for i, s := range specs {
			r.clients = append(r.clients, clientAt{w, i, s.Name, s.Transport})
		}
	}
	if err := r.awaitProgress(ctx); err != nil {
		return fmt.Errorf("the cluster does not begin to work: %w", err)
	}
	return r.env.VerifyCuts()
}

func (r *run) startWorker(ctx context.Context, host string, clients []worker.ClientConfig) (*worker.Worker, error) {
	logFile, err := os.Create(filepath.Join(r.dir, "worker-"+host+".log"))
	if err != nil {
		return nil, err
	}
	defer func() { _ = logFile.Close() }() // the child has its own
	cmd := exec.Command(r.f.programs.worker, "worker")
	if r.f.broken != "" {
		cmd.Env = append(os.Environ(), "KVD_CHAOS_BREAK="+r.f.broken)
	}
	cmd.Stderr = logFile
	cfg := worker.Config{Name: host, Endpoints: r.env.Endpoints(), Clients: clients, CallTimeout: r.f.opTimeout, DialTimeout: startTimeout}
	if r.f.transport == verbs {
		// A device in software, on emulated processors, is slow at both.
		cfg.ConnectTimeout, cfg.HedgeMin = verbsConnectTimeout, verbsHedgeMin
	}
	return worker.Start(ctx, cfg, cmd, r.env.Starter(host))
}

// awaitProgress waits until every client has written and read a key in every shard.
func (r *run) awaitProgress(ctx context.Context) error {
	var wg sync.WaitGroup
	errs := make([]error, len(r.clients))
	for i, c := range r.clients {
		wg.Go(func() { errs[i] = r.clientProgress(ctx, c) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// awaitNodes waits until every node answers and has applied what any had applied at first.
func (r *run) awaitNodes(ctx context.Context) error {
	goal := map[uint32]uint64{}
	for first := true; ; first = false {
		st, err := r.ctl.Status()
		if err == nil && first {
			for _, rep := range st.Replicas {
				goal[rep.Shard] = max(goal[rep.Shard], rep.Applied)
			}
		}
		if err == nil {
			err = behind(st, goal, len(r.env.InUse()))
		}
		if err == nil {
			return nil
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return err
		}
	}
}

func behind(st *worker.Status, goal map[uint32]uint64, nodes int) error {
	if len(st.Answered) < nodes {
		return fmt.Errorf("only nodes %v answer", st.Answered)
	}
	for _, rep := range st.Replicas {
		if rep.Applied < goal[rep.Shard] {
			return fmt.Errorf("node %d has applied shard %d up to %d: want %d", rep.Node, rep.Shard, rep.Applied, goal[rep.Shard])
		}
	}
	return nil
}

func (r *run) clientProgress(ctx context.Context, c clientAt) error {
	done := map[uint32]bool{}
	var last string
	for n := uint64(0); len(done) < r.f.shards; n++ {
		key := fmt.Sprintf("probe/%s/%d", c.name, n%uint64(20*r.f.shards))
		put, err := c.w.Run(c.index, &history.Op{Kind: history.Put, Key: key, Value: n + 1, Size: worker.MinSize})
		if err != nil {
			return err
		}
		if put.Outcome == history.OK && !done[put.Shard] {
			get, err := c.w.Run(c.index, &history.Op{Kind: history.Get, Key: key})
			if err != nil {
				return err
			}
			if get.Outcome == history.OK && get.Got == n+1 || r.f.broken != "" {
				done[put.Shard] = true
				continue
			}
			last = fmt.Sprintf("get of %s: %s %s", key, get.Outcome, get.Err)
		} else if put.Outcome != history.OK {
			last = fmt.Sprintf("put of %s: %s %s", key, put.Outcome, put.Err)
		}
		if ctx.Err() != nil {
			return fmt.Errorf("client %s worked on %d of %d shards (%s)", c.name, len(done), r.f.shards, last)
		}
	}
	return nil
}

// play runs clients and faults, heals, waits for progress, and reads everything once
// more.
func (r *run) play(ctx context.Context) *history.End {
	end := &history.End{Call: worker.Now(), Gets: map[string]uint64{}, Counts: map[string]uint64{}}
	load, stop := context.WithTimeout(ctx, r.f.length)
	defer stop()
	n := &nemesis.Runner{
		Env: r.env, Ctl: r.ctl, Record: r.rec.Fault, Say: r.say, Shards: r.f.shards, Gets: r.gets,
	}
	var wg sync.WaitGroup
	wg.Go(func() { n.Run(load, r.lanes) })
	procs := r.processes()
	for _, p := range procs {
		wg.Go(func() { p.loop(load) })
	}
	wg.Wait()
	began := time.Now()
	herr := r.env.Heal()
	if ctx.Err() != nil {
		end.Stopped = true
		return end
	}
	r.say("healed; waiting for progress")
	limit := healTimeout
	if r.f.broken != "" {
		limit = controlHeal
	}
	heal, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if err := errors.Join(herr, r.env.VerifyCuts(), n.Settle(heal), r.awaitProgress(heal), r.awaitNodes(heal)); err != nil {
		end.Progress = err.Error()
	} else {
		took := time.Since(began)
		r.say("every client worked on every shard, and every node had caught up, %.1f s after healing", took.Seconds())
		end.Counts["milliseconds from healing to progress"] = uint64(took.Milliseconds())
		r.finalReads(procs)
	}
	r.takeStats(end)
	return end
}

// gets is how many gets were answered so far, by what answered them.
func (r *run) gets() map[string]uint64 {
	sum := map[string]uint64{}
	for _, w := range r.workers {
		st, err := w.Stats()
		if err != nil {
			continue // it has crashed, which takeStats will tell
		}
		for via, n := range st.Gets {
			sum[via] += n
		}
	}
	return sum
}

// takeStats adds up what the clients counted. A worker that does not answer has crashed.
func (r *run) takeStats(end *history.End) {
	for _, w := range append([]*worker.Worker{r.ctl}, r.workers...) {
		st, serr := w.Stats()
		if serr != nil {
			end.Crashes = append(end.Crashes, serr.Error())
			continue
		}
		if w == r.ctl {
			continue
		}
		for via, k := range st.Gets {
			end.Gets[via] += k
		}
		for what, k := range st.Counts {
			end.Counts[what] += k
		}
		for why, k := range st.Fallbacks {
			end.Counts["fallback: "+why] += k
		}
		for why, k := range st.Retries {
			end.Counts["retry: "+why] += k
		}
	}
}

// process is one sequential user of a client.
type process struct {
	r      *run
	client clientAt
	state  workload.Process
	pace   time.Duration
}

func (r *run) processes() []*process {
	var out []*process
	for i := range r.f.concurrency {
		p := &process{r: r, client: r.clients[i%len(r.clients)]}
		p.state = workload.Process{ID: i, Rng: rand.New(rand.NewPCG(r.f.seed, uint64(1000+i)))}
		if r.f.rate > 0 {
			p.pace = time.Duration(float64(r.f.concurrency) / r.f.rate * float64(time.Second))
		}
		out = append(out, p)
	}
	return out
}

func (p *process) loop(ctx context.Context) {
	next := time.Now()
	for ctx.Err() == nil {
		p.do(p.r.load.Next(&p.state), true)
		// A late process does not make up for what it missed: that would be a burst.
		next = next.Add(time.Duration((0.5 + p.state.Rng.Float64()) * float64(p.pace)))
		wait := time.Until(next)
		if wait <= 0 {
			next = time.Now()
			continue
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
		}
	}
}

// do runs one operation and records it.
func (p *process) do(op *history.Op, learn bool) {
	op.ID, op.Process, op.Client, op.Via = p.r.ids.next(), p.state.ID, p.client.name, p.client.via
	called := worker.Now()
	done, err := p.client.w.Run(p.client.index, op)
	if err != nil { // the worker is gone: nobody knows
		op.Call, op.Return, op.Outcome, op.Err = called, worker.Now(), history.Fail, err.Error()
		if op.Kind.Writes() {
			op.Outcome = history.Unknown
		}
		done = op
	}
	p.r.rec.Op(done)
	if learn {
		p.r.load.Done(&p.state, done)
	}
	if done.Outcome == history.Unknown {
		p.state.ID += p.r.f.concurrency // the operation is still under way: somebody else goes on
	}
}

// finalReads reads every key on the healed cluster, with each kind of reader.
func (r *run) finalReads(procs []*process) {
	var wg sync.WaitGroup
	for i, ops := range r.load.Final(len(procs)) {
		wg.Go(func() {
			for _, op := range ops {
				procs[i].do(op, false)
			}
		})
	}
	wg.Wait()
}

// close ends workers and nodes and removes what was made.
func (r *run) close() error {
	var errs []error
	for _, w := range append(r.workers, r.ctl) {
		if w != nil {
			errs = append(errs, w.Close())
		}
	}
	if r.env != nil {
		errs = append(errs, r.env.Close())
	}
	if r.data != "" && !r.f.keepData {
		errs = append(errs, os.RemoveAll(r.data))
	}
	return errors.Join(errs...)
}
