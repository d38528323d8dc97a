package server

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma"
)

// fakeTarget registers in a list, when it is let.
type fakeTarget struct {
	rdma.Target
	mu      sync.Mutex
	domains map[string]*fakeDomain
	// hold, where set for a domain's name, is waited for by its registrations.
	hold map[string]chan struct{}
	// refuse, where set for a region, is what its registration fails with.
	refuse map[rdma.RegionID]error
	broken error
	closed bool
}

type fakeDomain struct {
	rdma.Domain
	t       *fakeTarget
	name    string
	regions map[rdma.RegionID]*rdma.Memory
	closed  bool
	closing chan struct{} // where set, Close waits for it
}

func (t *fakeTarget) NewDomain(name string) (rdma.Domain, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.broken != nil {
		return nil, t.broken
	}
	d := &fakeDomain{t: t, name: name, regions: map[rdma.RegionID]*rdma.Memory{}}
	t.domains[name] = d
	return d, nil
}

func (d *fakeDomain) Register(id rdma.RegionID, m *rdma.Memory) ([]byte, error) {
	d.t.mu.Lock()
	hold := d.t.hold[d.name]
	d.t.mu.Unlock()
	if hold != nil {
		<-hold
	}
	d.t.mu.Lock()
	defer d.t.mu.Unlock()
	if err := d.t.refuse[id]; err != nil {
		return nil, err
	}
	if d.regions[id] != nil {
		return nil, errors.New("registered twice")
	}
	d.regions[id] = m
	return []byte{byte(id)}, nil
}

func (d *fakeDomain) Deregister(id rdma.RegionID) error {
	d.t.mu.Lock()
	defer d.t.mu.Unlock()
	if d.regions[id] == nil {
		return errors.New("not registered")
	}
	delete(d.regions, id)
	return nil
}

func (d *fakeDomain) Close() error {
	d.t.mu.Lock()
	if d.closing != nil {
		d.t.mu.Unlock()
		<-d.closing
		d.t.mu.Lock()
	}
	defer d.t.mu.Unlock()
	d.closed = true
	return nil
}

func (t *fakeTarget) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	return nil
}

func (t *fakeTarget) registered(name string) []rdma.RegionID {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Sorted(maps.Keys(t.domains[name].regions))
}

func newFakeExporter(t *testing.T) (*exporter, *fakeTarget, func(bytes uint64) *rdma.Memory) {
	memory := func(bytes uint64) *rdma.Memory {
		m, err := rdma.AllocMemory("test", bytes, rdma.MemoryOptions{})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, m.Free()) })
		return m
	}
	f := &fakeTarget{domains: map[string]*fakeDomain{}, hold: map[string]chan struct{}{}, refuse: map[rdma.RegionID]error{}}
	e := newExporter(&Node{log: testLogger(t), metrics: newMetrics()})
	e.targets, e.control = []*target{newTarget("fake", f)}, memory(4096)
	return e, f, memory
}

// Each domain has the control table and the chunks of its namespace, those from before
// and those from after; what goes is gone everywhere.
func TestExporter(t *testing.T) {
	e, f, memory := newFakeExporter(t)
	require.NoError(t, e.onChunk(1, 1, memory(4096)))
	require.NoError(t, e.onChunk(2, 1, memory(8192)))
	d, err := e.domain(1, "fake")
	require.NoError(t, err)
	again, err := e.domain(1, "fake")
	require.NoError(t, err)
	require.Same(t, d, again)
	require.NoError(t, e.onChunk(1, 2, memory(4096)))
	require.Equal(t, []rdma.RegionID{0, 1, 2}, f.registered("namespace-1"))
	require.Len(t, d.regions(nil), 3)
	require.Equal(t, uint64(4096), d.regions([]uint32{1, 7})[0].GetLength())
	e.onChunkGone(1, 1)
	require.Equal(t, []rdma.RegionID{0, 2}, f.registered("namespace-1"))
	other, err := e.domain(2, "fake")
	require.NoError(t, err)
	require.Equal(t, uint64(8192), other.regions([]uint32{1})[0].GetLength())
	_, err = e.domain(1, "pigeon")
	require.ErrorIs(t, err, rdma.ErrUnsupported)

	// A chunk that is refused leaves nothing behind.
	f.refuse[3] = rdma.ErrExhausted
	require.ErrorIs(t, e.onChunk(1, 3, memory(4096)), rdma.ErrExhausted)
	e.onChunkGone(1, 3)
	require.Equal(t, []rdma.RegionID{0, 2}, f.registered("namespace-1"))
	require.NotContains(t, e.mu.chunks[1], rdma.RegionID(3))

	// A domain that can not be made is tried again by the next who asks.
	f.refuse[1] = rdma.ErrExhausted
	require.NoError(t, e.onChunk(4, 1, memory(4096)))
	_, err = e.domain(4, "fake")
	require.ErrorIs(t, err, rdma.ErrExhausted)
	require.True(t, f.domains["namespace-4"].closed)
	f.broken = rdma.ErrUnsupported
	_, err = e.domain(4, "fake")
	require.ErrorIs(t, err, rdma.ErrUnsupported)
	f.broken = nil
	delete(f.refuse, 1)
	_, err = e.domain(4, "fake")
	require.NoError(t, err)
	require.Equal(t, []rdma.RegionID{0, 1}, f.registered("namespace-4"))
}

// A registration that takes long holds up its own domain and nobody else; what comes
// and goes meanwhile is found at the end.
func TestSlowRegistration(t *testing.T) {
	e, f, memory := newFakeExporter(t)
	one := memory(4096)
	require.NoError(t, e.onChunk(1, 1, one))
	hold := make(chan struct{})
	f.hold["namespace-1"] = hold
	var slow sync.WaitGroup
	slow.Go(func() {
		_, err := e.domain(1, "fake")
		require.NoError(t, err)
	})
	eventually(t, "it is being made", func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		return len(e.mu.domains) == 1
	})
	two := memory(4096)
	slow.Go(func() { require.NoError(t, e.onChunk(1, 2, two)) })
	slow.Go(func() { e.onChunkGone(1, 1) })
	_, err := e.domain(2, "fake")
	require.NoError(t, err, "another namespace")
	require.NoError(t, e.onChunk(2, 1, memory(4096)))
	require.Equal(t, []rdma.RegionID{0, 1}, f.registered("namespace-2"))
	close(hold)
	slow.Wait()
	require.Equal(t, []rdma.RegionID{0, 2}, f.registered("namespace-1"))
	_, err = e.domain(1, "fake")
	require.NoError(t, err)
}

// pinningTarget registers slowly, as a NIC's target does.
type pinningTarget struct {
	*fakeTarget
	room  error // what TryPin says
	asked uint64
}

func (t *pinningTarget) TryPin(bytes uint64) error {
	t.asked = bytes
	return t.room
}

// A chunk can be used as soon as the transports that pin nothing have it; those that do
// follow, and what they refuse is offered to them again.
func TestPinningTargetFollows(t *testing.T) {
	e, f, memory := newFakeExporter(t)
	nic := &pinningTarget{fakeTarget: &fakeTarget{domains: map[string]*fakeDomain{}, hold: map[string]chan struct{}{}, refuse: map[rdma.RegionID]error{}}}
	e.targets = append(e.targets, newTarget("nic", nic))
	require.NoError(t, e.onChunk(1, 1, memory(4096)))
	_, err := e.domain(1, "fake")
	require.NoError(t, err)
	slow, err := e.domain(1, "nic")
	require.NoError(t, err)
	eventually(t, "chunk 1 is registered", func() bool { return len(slow.regions(nil)) == 2 })

	hold := make(chan struct{})
	nic.mu.Lock()
	nic.hold["namespace-1"] = hold
	nic.refuse[5] = rdma.ErrExhausted
	nic.mu.Unlock()
	for id := range rdma.RegionID(2*registrationsAtOnce) + 2 {
		require.NoError(t, e.onChunk(1, id+2, memory(4096)))
	}
	require.Len(t, f.registered("namespace-1"), 2*registrationsAtOnce+4, "the other transport has all of them")
	require.Len(t, slow.regions(nil), 2)
	require.Equal(t, regionCounts{registered: 2, pending: 2*registrationsAtOnce + 2}, e.regionCounts()["nic"])
	eventually(t, "as many are at it as may be", func() bool { return len(e.targets[1].slots) == registrationsAtOnce })
	// One that goes meanwhile waits for its registration, or is never registered.
	var gone sync.WaitGroup
	gone.Go(func() { e.onChunkGone(1, 2) })
	gone.Go(func() { e.onChunkGone(1, 3) })
	close(hold)
	gone.Wait()
	want := regionCounts{registered: 2*registrationsAtOnce + 1, refused: 1}
	eventually(t, "all are registered or refused", func() bool { return e.regionCounts()["nic"] == want })
	require.NotContains(t, nic.registered("namespace-1"), rdma.RegionID(2))
	require.NotContains(t, nic.registered("namespace-1"), rdma.RegionID(3))
	require.Empty(t, slow.regions([]uint32{5}))

	// Still no room; then there is.
	e.retry()
	eventually(t, "it was tried in vain", func() bool {
		slow.mu.Lock()
		defer slow.mu.Unlock()
		return !slow.mu.retrying
	})
	require.Equal(t, want, e.regionCounts()["nic"])
	nic.mu.Lock()
	delete(nic.refuse, 5)
	nic.mu.Unlock()
	e.retry()
	eventually(t, "it is registered", func() bool { return len(slow.regions([]uint32{5})) == 1 })
	e.onChunkGone(1, 5)
	require.NotContains(t, nic.registered("namespace-1"), rdma.RegionID(5))
}

// What is queued for registration when the node stops is not waited for.
func TestPinningTargetStops(t *testing.T) {
	e, _, memory := newFakeExporter(t)
	nic := &pinningTarget{fakeTarget: &fakeTarget{domains: map[string]*fakeDomain{}, hold: map[string]chan struct{}{}, refuse: map[rdma.RegionID]error{}}}
	e.targets = []*target{newTarget("nic", nic)}
	d, err := e.domain(1, "nic")
	require.NoError(t, err)
	hold := make(chan struct{})
	nic.mu.Lock()
	nic.hold["namespace-1"] = hold
	nic.mu.Unlock()
	for id := range rdma.RegionID(3 * registrationsAtOnce) {
		require.NoError(t, e.onChunk(1, id+1, memory(4096)))
	}
	eventually(t, "as many are at it as may be", func() bool { return len(e.targets[0].slots) == registrationsAtOnce })
	stopped := make(chan error)
	go func() { stopped <- e.close() }()
	eventually(t, "the others left", func() bool {
		for id := range rdma.RegionID(3 * registrationsAtOnce) {
			d.mu.Lock()
			r := d.mu.regions[id+1]
			d.mu.Unlock()
			select {
			case <-r.done:
				return true
			default:
			}
		}
		return false
	})
	close(hold)
	require.NoError(t, <-stopped)
	require.True(t, nic.closed)
	require.LessOrEqual(t, len(nic.registered("namespace-1")), 1+registrationsAtOnce)
	require.NoError(t, e.onChunk(1, 100, memory(4096)), "late, and harmless")
	_, err = e.domain(2, "nic")
	require.ErrorIs(t, err, rdma.ErrClosed)
}

// Rotated keys: what was given out is closed, what comes next is another domain with the
// same chunks; a chunk that goes meanwhile is gone when its memory is freed.
func TestRotateKeys(t *testing.T) {
	e, f, memory := newFakeExporter(t)
	require.NoError(t, e.onChunk(1, 1, memory(4096)))
	before, err := e.domain(1, "fake")
	require.NoError(t, err)
	other, err := e.domain(2, "fake")
	require.NoError(t, err)
	old := f.domains["namespace-1"]
	require.NoError(t, e.rotateKeys(1))
	require.True(t, old.closed)
	require.True(t, before.isClosed())
	require.Empty(t, before.regions(nil))
	require.False(t, other.isClosed())
	require.NoError(t, before.add(2, memory(4096)), "late, and harmless")
	require.NoError(t, e.onChunk(1, 2, memory(4096)))
	after, err := e.domain(1, "fake")
	require.NoError(t, err)
	require.NotSame(t, before, after)
	require.Equal(t, []rdma.RegionID{0, 1, 2}, f.registered("namespace-1"))
	require.NoError(t, e.rotateKeys(7), "nothing was ever given out of it")

	release := make(chan struct{})
	f.mu.Lock()
	f.domains["namespace-1"].closing = release
	f.mu.Unlock()
	var rotated, gone sync.WaitGroup
	rotated.Go(func() { require.NoError(t, e.rotateKeys(1)) })
	eventually(t, "it is being rotated", after.isClosed)
	freed := false
	gone.Go(func() {
		e.onChunkGone(1, 1)
		f.mu.Lock()
		defer f.mu.Unlock()
		freed = true
	})
	_, err = e.domain(1, "fake")
	require.NoError(t, err, "who asks meanwhile has new keys already")
	f.mu.Lock()
	require.False(t, freed, "the memory is registered still")
	f.mu.Unlock()
	close(release)
	gone.Wait()
	rotated.Wait()
	e.mu.Lock()
	defer e.mu.Unlock()
	require.Empty(t, e.mu.retired)
}

type changingDomain struct {
	*fakeDomain
	attr func(rdma.RegionID) ([]byte, error)
}

func (d changingDomain) Attr(id rdma.RegionID) ([]byte, error) { return d.attr(id) }

// Attrs that change are asked for each time, and a region that no device can read now is
// left out.
func TestAttrsOfTheMoment(t *testing.T) {
	e, f, _ := newFakeExporter(t)
	d, err := e.domain(1, "fake")
	require.NoError(t, err)
	require.Equal(t, []byte{0}, d.regions(nil)[0].GetAttr())
	attr, problem := []byte("second"), error(nil)
	d.Domain = changingDomain{f.domains["namespace-1"], func(rdma.RegionID) ([]byte, error) { return attr, problem }}
	require.Equal(t, attr, d.regions([]uint32{0})[0].GetAttr())
	problem = rdma.ErrExhausted
	require.Empty(t, d.regions(nil))
	problem = nil
	require.Len(t, d.regions(nil), 1)
}

// fakeProvider gives a target, or the reason why there is none.
type fakeProvider struct {
	rdma.Provider
	name   string
	target rdma.Target
	err    error
}

func (p fakeProvider) Name() string                                     { return p.name }
func (p fakeProvider) NewTarget(rdma.TargetConfig) (rdma.Target, error) { return p.target, p.err }

// What a host can not serve is left out with a warning, or, by default, without; what is
// configured wrongly stops the start, as does a demand for RDMA that can not be met.
func TestPreflight(t *testing.T) {
	plain := fakeProvider{name: "plain", target: &fakeTarget{}}
	missing := fakeProvider{name: "nic", err: fmt.Errorf("%w: no device", rdma.ErrUnsupported)}
	wrong := fakeProvider{name: "nic", err: errors.New("address in use")}
	nic := func(room error) fakeProvider {
		return fakeProvider{name: "nic", target: &pinningTarget{fakeTarget: &fakeTarget{}, room: room}}
	}
	tight := fmt.Errorf("%w: have 8 MiB, need 64 MiB", rdma.ErrExhausted)
	for _, tc := range []struct {
		name      string
		providers []rdma.Provider
		byDefault bool
		require   bool
		err       string // "": none
		log       string // must be said
		names     []string
	}{
		{name: "all work", providers: []rdma.Provider{plain, nic(nil)}, names: []string{"plain", "nic"}},
		{name: "required and there", providers: []rdma.Provider{plain, nic(nil)}, require: true, names: []string{"plain", "nic"}},
		{name: "no device", providers: []rdma.Provider{plain, missing}, log: "level=WARN msg=\"transport is not served on this host\" transport=nic", names: []string{"plain"}},
		{name: "no device, not asked for", providers: []rdma.Provider{plain, missing}, byDefault: true, log: "level=INFO msg=\"transport is not served on this host\" transport=nic", names: []string{"plain"}},
		{name: "no device, required", providers: []rdma.Provider{plain, missing}, byDefault: true, require: true, err: "RDMA is required, and this host can not serve it: nic: rdma: not supported here: no device"},
		{name: "not configured, required", providers: []rdma.Provider{plain}, require: true, err: "RDMA is required, and no transport of the configured ones ([plain]) is one: add verbs"},
		{name: "wrong", providers: []rdma.Provider{plain, wrong}, err: "transport nic: address in use"},
		{name: "no room", providers: []rdma.Provider{plain, nic(tight)}, log: "have 8 MiB, need 64 MiB", names: []string{"plain", "nic"}},
		{name: "no room, required", providers: []rdma.Provider{plain, nic(tight)}, require: true, err: "RDMA is required, and nic can not register the arena of 64 MiB: rdma: exhausted: have 8 MiB, need 64 MiB"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			out := &syncBuffer{}
			e := newExporter(&Node{log: slog.New(slog.NewTextHandler(out, nil)), metrics: newMetrics(), cfg: Config{
				NodeID: 1, ArenaBytes: 64 << 20, Providers: tc.providers, TransportsByDefault: tc.byDefault, RequireRDMA: tc.require,
			}})
			err := e.open()
			if tc.err != "" {
				require.ErrorIs(t, err, ErrConfig)
				require.ErrorContains(t, err, tc.err)
			} else {
				require.NoError(t, err)
				require.Equal(t, tc.names, e.names())
			}
			require.Contains(t, out.String(), tc.log)
			require.NoError(t, e.close())
		})
	}
}
