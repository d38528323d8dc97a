package client

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/storage/layout"
)

// tell has the node tell its sessions.
func (n *fakeNode) tell(t *kvdv1.Topology) {
	n.c.mu.Lock()
	defer n.c.mu.Unlock()
	for _, l := range n.c.listeners[n] {
		l <- t
	}
}

// routeLocked is what the node says of a shard.
func (n *fakeNode) routeLocked(s uint32) *kvdv1.Route {
	rec := n.readRecord(s)
	r := &kvdv1.Route{
		Shard: s, LeaderNode: n.c.leader[s], ConfigId: rec.ConfigID, Voters: n.c.voters, VotersOutgoing: n.c.outgoing,
		Local: &kvdv1.LocalReplica{Slot: s, Record: layout.AppendRecord(nil, rec)},
	}
	if n.real != nil {
		n.real.describe(s, r.Local)
	}
	if t := n.tables[s]; t != nil {
		r.Local.Table = &kvdv1.IndexTable{
			LayoutGen: rec.LayoutGen, TableId: t.t.ID, Chunk: t.t.Place.Chunk, Offset: t.t.Place.Offset,
			Buckets: t.t.Buckets, Overflow: t.t.Overflow,
		}
	}
	return r
}

func (n *fakeNode) members() []*kvdv1.Member {
	n.c.mu.Lock()
	defer n.c.mu.Unlock()
	return n.membersLocked()
}

func (n *fakeNode) membersLocked() (list []*kvdv1.Member) {
	for _, m := range n.c.nodes {
		if n.c.left[m.id] {
			continue
		}
		list = append(list, &kvdv1.Member{NodeId: m.id, Address: m.addr})
	}
	return list
}

// tellRoute has a node tell what it says of shard 1 now.
func (f *fixture) tellRoute(node uint64) {
	n := f.nodes[node-1]
	var r *kvdv1.Route
	f.locked(func() { r = n.routeLocked(1) })
	n.tell(&kvdv1.Topology{Routes: []*kvdv1.Route{r}})
}

// heard waits until the client took in so many things that it was told.
func (f *fixture) heard(t testing.TB, before Stats, times uint64) {
	t.Helper()
	eventually(t, "it is told", func() bool { return f.c.Stats().Sub(before).Topologies == times })
}

func (f *fixture) leads() uint64 {
	if r := f.c.cluster().shard[1].route.Load(); r != nil {
		return r.leader.nodeID
	}
	return 0
}

func (f *fixture) routeCalls() (n int) {
	f.locked(func() { n = f.routes })
	return n
}

// TestTold: the leader's place changes and who leads now says so. Not one read or write
// fails to find out, and nobody is asked.
func TestTold(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{}, nil)
	f.put(theKey, "1")
	f.want(t, theKey, "1")
	_, err := f.c.Put(ctxFor(t, time.Minute), []byte(theKey), []byte("2"))
	require.NoError(t, err)
	asked := f.routeCalls()
	stats := f.during(func() {
		before := f.c.Stats()
		f.locked(func() { f.elect(1, 2, 6) })
		f.tellRoute(1) // it leads no more, and knows who does
		f.tellRoute(2)
		f.heard(t, before, 2)
		f.want(t, theKey, "2")
		_, err := f.c.Put(ctxFor(t, time.Minute), []byte(theKey), []byte("3"))
		require.NoError(t, err)
		f.want(t, theKey, "3")
		// Other replicas: the configuration has a later id, and another node leads.
		before = f.c.Stats()
		f.locked(func() {
			f.voters = []uint64{2, 3}
			for _, n := range f.nodes {
				rec := n.readRecord(1)
				rec.ConfigID = 9
				n.writeRecord(1, rec)
			}
		})
		f.tellRoute(2)
		f.heard(t, before, 1)
		f.want(t, theKey, "3")
	})
	require.EqualValues(t, 2, f.leads())
	require.Equal(t, []uint64{2, 3}, f.c.cluster().shard[1].route.Load().voters)
	require.Empty(t, stats.Retries)
	require.Empty(t, stats.Fallbacks)
	require.Zero(t, stats.WriteRetries)
	require.Equal(t, asked, f.routeCalls(), "calls of Routes")
}

// TestNotTold: nodes that are too old to tell are asked when a read fails, and no call does.
func TestNotTold(t *testing.T) {
	f := &fixture{fakeCluster: newFakeCluster(t, fakeOptions{nodes: 3, shards: 1})}
	for _, n := range f.nodes {
		n.mum = true
	}
	f.net = &fakeNet{c: f.fakeCluster, name: "fake"}
	f.c = f.dial(t, f.net, nil)
	f.ready(t)
	f.put(theKey, "1")
	f.want(t, theKey, "1")
	asked := f.routeCalls()
	stats := f.during(func() {
		f.locked(func() { f.elect(1, 2, 6) })
		f.want(t, theKey, "1")
	})
	require.Zero(t, stats.Topologies)
	require.NotEmpty(t, stats.Retries)
	require.Greater(t, f.routeCalls(), asked)
	require.EqualValues(t, 2, f.leads())
}

// TestToldOfThePast: of two nodes that tell of leaders the one with the later term is right,
// whoever speaks last; and what a node said before it said something newer is past, too.
func TestToldOfThePast(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{}, nil)
	f.put(theKey, "1")
	f.want(t, theKey, "1")
	var past, older *kvdv1.Route
	f.locked(func() { past = f.nodes[0].routeLocked(1) }) // node 1 serves term 5
	before := f.c.Stats()
	f.locked(func() { f.elect(1, 2, 6) })
	f.locked(func() { older = f.nodes[1].routeLocked(1) })
	f.put(theKey, "2")
	f.tellRoute(2)
	f.heard(t, before, 1)
	require.EqualValues(t, 2, f.leads())
	route := f.c.cluster().shard[1].route.Load()
	f.nodes[0].tell(&kvdv1.Topology{Routes: []*kvdv1.Route{past}})
	f.heard(t, before, 2)
	require.Same(t, route, f.c.cluster().shard[1].route.Load())
	applied := f.c.sessionOf(2).replicas[1].info.Load().record.Applied
	require.Greater(t, applied, layoutApplied(t, older))
	f.nodes[1].tell(&kvdv1.Topology{Routes: []*kvdv1.Route{older}})
	f.heard(t, before, 3)
	require.Equal(t, applied, f.c.sessionOf(2).replicas[1].info.Load().record.Applied)
	// Of another boot, and of a shard that there is not.
	f.locked(func() { f.elect(1, 3, 7) })
	var foreign *kvdv1.Route
	f.locked(func() { foreign = f.nodes[2].routeLocked(1) })
	f.nodes[1].tell(&kvdv1.Topology{Routes: []*kvdv1.Route{foreign, {Shard: 99}, {}}})
	f.heard(t, before, 4)
	require.Same(t, route, f.c.cluster().shard[1].route.Load())
}

func layoutApplied(t testing.TB, r *kvdv1.Route) uint64 {
	rec, ok := layout.DecodeRecord(r.GetLocal().GetRecord())
	require.True(t, ok)
	return rec.Applied
}

// known lists the ids of the nodes that the client knows.
func (c *Client) known() (ids []uint64) {
	for _, n := range c.sortedNodes() {
		ids = append(ids, n.id)
	}
	return ids
}

// TestToldMembers: the newest list counts, whoever says it.
func TestToldMembers(t *testing.T) {
	f := start(t, fakeOptions{nodes: 5}, netOptions{}, nil)
	member := func(id uint64) *kvdv1.Member {
		return &kvdv1.Member{NodeId: id, Address: f.nodes[id-1].addr}
	}
	of := func(ids ...uint64) (list []*kvdv1.Member) {
		for _, id := range ids {
			list = append(list, member(id))
		}
		return list
	}
	say := func(node uint64, version uint64, list []*kvdv1.Member) {
		before := f.c.Stats()
		f.nodes[node-1].tell(&kvdv1.Topology{Members: list, MembersVersion: version})
		f.heard(t, before, 1)
	}
	require.Equal(t, []uint64{1, 2, 3, 4, 5}, f.c.known())
	left := f.c.sessionOf(4)
	say(2, 20, of(1, 2, 3))
	require.Equal(t, []uint64{1, 2, 3}, f.c.known())
	eventually(t, "the session with who left ends", left.ended.Load)
	say(1, 10, of(1, 2, 3, 4, 5)) // node 1 is behind
	require.Equal(t, []uint64{1, 2, 3}, f.c.known())
	f.c.takeMembers(of(1, 2, 3, 4, 5), 0) // and one that is too old to say of when it is
	require.Equal(t, []uint64{1, 2, 3}, f.c.known())
	f.c.takeMembers([]*kvdv1.Member{member(1), {NodeId: 6, Address: "127.0.0.1:1"}}, 0)
	require.Equal(t, []uint64{1, 2, 3, 6}, f.c.known(), "ids only rise: it has come since")
	say(1, 21, of(1, 2, 3))
	require.Equal(t, []uint64{1, 2, 3}, f.c.known())
	say(1, 22, nil)
	require.Equal(t, []uint64{1, 2, 3}, f.c.known(), "nobody at all is no list")
	say(3, 23, of(1, 2, 3, 5))
	eventually(t, "a session with who came", func() bool { return f.c.sessionOf(5) != nil })
}

// TestOnlyEndpointLeaves: the client was given one endpoint. Its node leaves the cluster, and
// those that were there with it; the client goes on with who came after.
func TestOnlyEndpointLeaves(t *testing.T) {
	f := &fixture{fakeCluster: newFakeCluster(t, fakeOptions{nodes: 5, shards: 1})}
	f.locked(func() { f.version, f.left[4], f.left[5] = 1, true, true })
	f.net = &fakeNet{c: f.fakeCluster, name: "fake"}
	f.c = f.dial(t, f.net, func(c *Config) { c.Endpoints = []string{f.nodes[0].addr} })
	eventually(t, "sessions with three nodes", func() bool { return len(f.c.liveSessions()) == 3 })
	f.put(theKey, "1")
	f.want(t, theKey, "1")

	step := func(from, leader, term uint64, voters []uint64, leave []uint64, come ...uint64) {
		f.locked(func() {
			f.version++
			for _, id := range leave {
				f.left[id] = true
			}
			for _, id := range come {
				delete(f.left, id)
			}
			f.voters = voters
			f.elect(1, leader, term)
		})
		n := f.nodes[from-1]
		n.tell(&kvdv1.Topology{Members: n.members(), MembersVersion: f.version})
		for _, id := range come {
			eventually(t, "a session with who came", func() bool { return f.c.sessionOf(id) != nil })
		}
		f.tellRoute(leader)
		for _, id := range leave {
			f.nodes[id-1].kill()
		}
		f.want(t, theKey, "1")
	}
	step(1, 4, 6, []uint64{4, 2, 3}, []uint64{1}, 4)
	step(4, 5, 7, []uint64{4, 5}, []uint64{2, 3}, 5)
	require.Equal(t, []uint64{4, 5}, f.c.known())
	_, err := f.c.Put(ctxFor(t, time.Minute), []byte(theKey), []byte("2"))
	require.NoError(t, err)
	f.want(t, theKey, "2")
}

// TestDialBesideSilence: the first endpoint is of a machine that is gone, where nothing ever
// answers. The second is asked meanwhile.
func TestDialBesideSilence(t *testing.T) {
	cluster := newFakeCluster(t, fakeOptions{nodes: 1, shards: 1})
	silent := listen(t, func(net.Conn) {})
	f := &fixture{fakeCluster: cluster}
	c, err := Dial(context.Background(), Config{
		Endpoints: []string{silent, cluster.nodes[0].addr}, ConnectTimeout: time.Hour, DialTimeout: time.Hour, ClusterID: cluster.name(),
	})
	require.NoError(t, err)
	f.c = c
	require.Equal(t, []uint64{1}, c.known())
	require.NoError(t, c.Close())
}
