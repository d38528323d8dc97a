package client

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/internal/clock"
	"github.com/kvd-io/kvd/storage/layout"
)

// TestSessionReadsItsWrites: a follower that lags behind the session is not
// believed; one that has caught up serves with a single READ.
func TestSessionReadsItsWrites(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{sync: true}, nil)
	f.put(theKey, "old")
	f.want(t, theKey, "old", WithLevel(Session))
	s := f.during(func() { f.want(t, theKey, "old", WithLevel(Session)) })
	require.EqualValues(t, 2, s.TotalReads(), "the record has to be seen before the object is read")
	s = f.during(func() { f.want(t, theKey, "old", WithLevel(Session)) })
	require.EqualValues(t, 1, s.TotalReads(), "one READ")
	require.EqualValues(t, 1, s.gets(Session, "fake"))

	// The session sees a newer state by a linearizable get; then the replica that it
	// reads falls behind.
	f.cutOff(1)
	f.locked(func() { f.elect(1, 2, 6) })
	f.put(theKey, "new")
	f.want(t, theKey, "new")
	for range 3 {
		f.want(t, theKey, "new", WithLevel(Session))
	}
	f.want(t, theKey, "old", WithLevel(Stale)) // the lagging one may be shown there
}

// TestSessionAbsence: who saw that a key is gone, at whichever level, is not shown
// it again.
func TestSessionAbsence(t *testing.T) {
	for _, seenAt := range []Level{Session, Linearizable} {
		f := start(t, fakeOptions{}, netOptions{sync: true}, nil)
		f.put(theKey, "old")
		f.want(t, theKey, "old", WithLevel(Session))
		f.cutOff(3)
		f.del(theKey)
		f.wantAbsent(t, theKey, WithLevel(seenAt))
		// Only the replica that missed the deletion is left.
		f.c.cluster().shard[1].near.Store(&nearList{made: time.Now().Add(time.Hour), sessions: []*session{f.c.sessionOf(3)}})
		f.wantAbsent(t, theKey, WithLevel(Session))
		f.want(t, theKey, "old", WithLevel(Stale))
	}
}

func TestStaleBound(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{sync: true}, nil)
	f.put(theKey, "0")
	f.cutOff(3)
	f.put(theKey, "1")
	f.put(theKey, "2")
	f.want(t, theKey, "2")
	f.c.cluster().shard[1].near.Store(&nearList{made: time.Now().Add(time.Hour), sessions: []*session{f.c.sessionOf(3)}})
	f.want(t, theKey, "0", WithMaxLag(2))
	f.want(t, theKey, "2", WithMaxLag(1))
	require.NotZero(t, f.c.Stats().Retries["behind"])
}

// TestImmutable: a hit costs exactly one READ, a miss is confirmed, and what was not
// written as immutable is not taken for it.
func TestImmutable(t *testing.T) {
	clk := clock.NewManual(time.Now())
	f := start(t, fakeOptions{immutable: true}, netOptions{sync: true}, func(c *Config) { c.Clock = clk })
	f.put(theKey, "1")
	f.want(t, theKey, "1")
	s := f.during(func() { f.want(t, theKey, "1") })
	require.EqualValues(t, 1, s.TotalReads())
	require.EqualValues(t, 0, s.Confirmed)
	s = f.during(func() { f.wantAbsent(t, "nobody") })
	require.EqualValues(t, 1, s.Confirmed)

	// The address is remembered, but the layout generation was seen too long ago.
	clk.Advance(trustFor)
	s = f.during(func() { f.want(t, theKey, "1") })
	require.EqualValues(t, 2, s.TotalReads(), "object and record")
	s = f.during(func() { f.want(t, theKey, "1") })
	require.EqualValues(t, 1, s.TotalReads())

	// A leader that is stopped for long: the generation moved on behind its back.
	clk.Advance(trustFor)
	f.change(1, 1, func(r *layout.Record) { r.LayoutGen++ })
	s = f.during(func() { f.want(t, theKey, "1") })
	require.EqualValues(t, 0, s.CacheHits)
}

// TestImmutableFlag: the namespace says immutable, the object does not.
func TestImmutableFlag(t *testing.T) {
	f := start(t, fakeOptions{immutable: true}, netOptions{sync: true}, nil)
	f.locked(func() {
		f.immutable = false
		f.putLocked(theKey, []byte("1"), 0)
		f.immutable = true
	})
	s := f.during(func() { f.want(t, theKey, "1") })
	require.EqualValues(t, 1, s.Confirmed)
}

func TestTwoSidedNamespaceAndConfiguredGRPC(t *testing.T) {
	f := start(t, fakeOptions{twoSided: true}, netOptions{}, nil)
	f.put(theKey, "1")
	s := f.during(func() { f.want(t, theKey, "1") })
	require.EqualValues(t, 1, s.Fallbacks["two_sided_namespace"])
	require.Zero(t, s.TotalReads())
	require.Equal(t, "grpc", f.c.Stats().Peers[0].Transport)

	g := start(t, fakeOptions{}, netOptions{}, func(c *Config) { c.Transport = TransportGRPC })
	g.put(theKey, "1")
	s = g.during(func() { g.want(t, theKey, "1") })
	require.EqualValues(t, 1, s.Fallbacks["configured"])
}

func TestNoCommonTransport(t *testing.T) {
	f := &fixture{fakeCluster: newFakeCluster(t, fakeOptions{nodes: 3, shards: 1})}
	f.net = &fakeNet{c: f.fakeCluster, name: "strange"}
	f.c = f.dial(t, f.net, nil)
	f.ready(t)
	f.put(theKey, "1")
	s := f.during(func() { f.want(t, theKey, "1") })
	require.EqualValues(t, 1, s.Fallbacks["no_transport"])
	require.Contains(t, f.c.Stats().Peers[0].Reason, "not served by the node")
}

// TestReadsRightAfterDial: the session that Dial opened can be used when it returns,
// with all other nodes dead and whatever the client believed of them before.
func TestReadsRightAfterDial(t *testing.T) {
	for _, immutable := range []bool{false, true} {
		f := &fixture{fakeCluster: newFakeCluster(t, fakeOptions{nodes: 3, shards: 1, immutable: immutable})}
		f.net = &fakeNet{c: f.fakeCluster, name: "fake", sync: true}
		f.put(theKey, "1")
		f.nodes[0].kill()
		f.nodes[1].kill()
		for range 10 {
			f.c = f.dial(t, f.net, func(c *Config) { c.Endpoints = []string{f.nodes[2].addr} })
			require.NotNil(t, f.c.sessionOf(3))
			s := f.during(func() {
				if immutable {
					f.want(t, theKey, "1")
				}
				f.want(t, theKey, "1", WithLevel(Stale))
				f.want(t, theKey, "1", WithLevel(Session))
			})
			require.Zero(t, s.Confirmations+s.Confirmed)
			require.Empty(t, s.Fallbacks)
		}
	}
}

// TestRelaxedTriesAgain: that no replica could answer at first does not leave a read of a
// weaker level to a leader who may not exist.
func TestRelaxedTriesAgain(t *testing.T) {
	for _, level := range []Level{Session, Stale} {
		f := start(t, fakeOptions{}, netOptions{sync: true}, nil)
		f.put(theKey, "1")
		f.nodes[0].kill() // the leader
		f.nodes[1].kill()
		f.ready(t)
		sh := &f.c.cluster().shard[1]
		sh.near.Store(&nearList{made: time.Now().Add(time.Hour)})
		f.want(t, theKey, "1", WithLevel(level))
		require.NotEmpty(t, sh.near.Load().sessions, "an empty list is not kept")

		s := f.c.sessionOf(3)
		s.regions.Store(&[]uint64{}) // to be asked for, which fails the first attempt
		d := f.during(func() { f.want(t, theKey, "1", WithLevel(level)) })
		require.EqualValues(t, 1, d.gets(level, "fake"))
		require.EqualValues(t, 1, d.Retries["unknown_region"])
	}
}

// TestWeakLevelsOverGRPC: over gRPC too any replica answers reads of the weaker levels,
// and none that is too far behind.
func TestWeakLevelsOverGRPC(t *testing.T) {
	for name, c := range map[string]struct {
		twoSided bool
		edit     func(*Config)
	}{
		"configured": {false, func(c *Config) { c.Transport, c.CallTimeout = TransportGRPC, 300*time.Millisecond }},
		"two-sided":  {true, func(c *Config) { c.CallTimeout = 300 * time.Millisecond }},
	} {
		t.Run(name, func(t *testing.T) {
			f := start(t, fakeOptions{twoSided: c.twoSided}, netOptions{}, c.edit)
			f.put(theKey, "old")
			f.want(t, theKey, "old", WithLevel(Session))
			f.cutOff(3)
			f.put(theKey, "new")
			f.put("other", "1")
			f.want(t, theKey, "new", WithLevel(Session)) // the leader is asked
			f.want(t, "other", "1", WithLevel(Session))
			f.nodes[0].kill() // it led
			f.want(t, theKey, "new", WithLevel(Session))
			f.want(t, theKey, "new", WithMaxLag(1))
			f.wantAbsent(t, "nobody", WithLevel(Session))
			f.nodes[1].kill()
			f.ready(t)

			// Only a replica that missed two writes is left.
			f.want(t, theKey, "old", WithLevel(Stale))
			f.want(t, theKey, "old", WithMaxLag(2))
			for _, opt := range []ReadOption{WithLevel(Session), WithMaxLag(1), WithLevel(Linearizable)} {
				_, err := f.c.Get(t.Context(), []byte(theKey), opt)
				require.True(t, isTimeout(err), "%v", err)
			}
			s := f.c.Stats()
			require.EqualValues(t, 5, s.gets(Session, "grpc"))
			require.EqualValues(t, 3, s.gets(Stale, "grpc"))
			require.Zero(t, s.TotalReads())
		})
	}
}

// TestSilentReplica: over gRPC a replica that hangs costs one read its time, and not the
// next ones.
func TestSilentReplica(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{}, func(c *Config) { c.Transport, c.ConnectTimeout = TransportGRPC, 200*time.Millisecond })
	f.put(theKey, "1")
	f.locked(func() { f.nodes[0].silent = true })
	f.want(t, theKey, "1", WithLevel(Session)) // asks the leader first
	require.True(t, (*f.c.nodes.Load())[1].mute.Load())
	began := time.Now()
	for range 10 {
		f.want(t, theKey, "1", WithLevel(Session))
		f.want(t, theKey, "1", WithLevel(Stale))
	}
	require.Less(t, time.Since(began), 10*200*time.Millisecond)
}
