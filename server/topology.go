package server

import (
	"context"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// Clients follow leaders, replicas and members by what nodes tell them on the streams of
// their sessions, so that a read or a write need not fail to find out.

// topology is what this node last told of its replicas and of the members, with a number
// for each change, by which a session knows what it has told already.
type topology struct {
	wake chan struct{} // capacity 1
	mu   struct {
		sync.Mutex
		seq     uint64 // of the last change
		changed chan struct{}
		routes  map[uint32]routeMark
		gone    map[uint32]uint64 // shards whose replica left, and when by number
		members []*kvdv1.Member
		said    uint64 // number of the last change of members
	}
}

// routeMark is of a replica what is told when it changes.
type routeMark struct {
	seq      uint64
	leader   uint64 // the last that was known
	served   uint64
	configID uint64
	slot     uint32
}

const (
	// lookAgain is how often a node looks at its replicas while they change: a hook of
	// Raft is called a little before what it tells of can be seen. So it is also how often
	// sessions are told something, at most.
	lookAgain = 20 * time.Millisecond
	// lookFor is how often it looks again after the last change.
	lookFor = 5
	// lookAnyway finds what nothing woke it for, such as an address heard of by gossip.
	lookAnyway = time.Second
)

func newTopology() *topology {
	t := &topology{wake: make(chan struct{}, 1)}
	t.mu.changed, t.mu.routes, t.mu.gone = make(chan struct{}), map[uint32]routeMark{}, map[uint32]uint64{}
	return t
}

// stir has the node look at what it tells; it does not block.
func (t *topology) stir() {
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

// watchTopology notes changes, for the sessions, until the node stops.
func (n *Node) watchTopology(ctx context.Context) {
	t := n.topology
	tick := time.NewTicker(lookAnyway)
	defer tick.Stop()
	for {
		select {
		case <-t.wake:
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		for quiet := 0; quiet < lookFor && ctx.Err() == nil; quiet++ {
			if n.lookAtTopology() {
				quiet = 0
			}
			pause(ctx, lookAgain)
		}
	}
}

// lookAtTopology notes what has changed since it looked last.
func (n *Node) lookAtTopology() (changed bool) {
	members, version := n.members()
	now := map[uint32]routeMark{}
	for _, sh := range n.localShards() {
		st := sh.g.Status()
		now[sh.number] = routeMark{leader: uint64(st.Leader), served: sh.servedTerm(), configID: st.ConfigID, slot: sh.record.Slot()}
	}
	t := n.topology
	t.mu.Lock()
	defer t.mu.Unlock()
	next := t.mu.seq + 1
	for number, m := range now {
		have, known := t.mu.routes[number]
		if m.leader == 0 {
			m.leader = have.leader // that nobody leads is of no use to anybody
		}
		if m.seq = have.seq; !known || m != have {
			m.seq, changed = next, true
			t.mu.routes[number] = m
			delete(t.mu.gone, number)
		}
	}
	for number := range t.mu.routes {
		if _, here := now[number]; !here {
			delete(t.mu.routes, number)
			t.mu.gone[number], changed = next, true
		}
	}
	same := func(a, b *kvdv1.Member) bool { return proto.Equal(a, b) }
	if version != 0 && !slices.EqualFunc(members, t.mu.members, same) {
		t.mu.members, t.mu.said, changed = members, next, true
	}
	if changed {
		t.mu.seq = next
		close(t.mu.changed)
		t.mu.changed = make(chan struct{})
	}
	return changed
}

// since lists what changed behind the change number told; more is closed by the next one.
func (t *topology) since(told uint64) (shards []uint32, members bool, now uint64, more <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if told < t.mu.seq {
		for number, m := range t.mu.routes {
			if m.seq > told {
				shards = append(shards, number)
			}
		}
		for number, seq := range t.mu.gone {
			if seq > told {
				shards = append(shards, number)
			}
		}
		slices.Sort(shards)
	}
	return shards, t.mu.said > told, t.mu.seq, t.mu.changed
}

// topologySince is what to tell a session of the namespace; nil: nothing.
func (n *Node) topologySince(told uint64, namespace uint32) (event *kvdv1.Topology, now uint64, more <-chan struct{}) {
	shards, members, now, more := n.topology.since(told)
	if len(shards) == 0 && !members {
		return nil, now, more
	}
	event = &kvdv1.Topology{}
	if members {
		event.Members, event.MembersVersion = n.members()
	}
	for _, number := range shards {
		if r := n.route(number, namespace); r != nil {
			event.Routes = append(event.Routes, r)
		}
	}
	return event, now, more
}

// serveSession tells the session of changes behind the number told, if it wants to hear of
// them, until it is to end. It returns why the node ends it; "": the client did.
func (n *Node) serveSession(s *session, wanted bool, told uint64, stream kvdv1.Access_OpenSessionServer) string {
	ended := stream.Context().Done()
	if wanted {
		// Who does not read its stream keeps a send waiting, but not its rights.
		over := make(chan struct{})
		defer close(over)
		n.background(func(context.Context) {
			select {
			case <-s.evicted:
				n.sessions.close(s)
			case <-ended:
				n.sessions.close(s)
			case <-over:
			}
		})
	}
	for {
		var more <-chan struct{}
		if wanted {
			var event *kvdv1.Topology
			if event, told, more = n.topologySince(told, s.namespace.GetId()); event != nil {
				if stream.Send(&kvdv1.SessionEvent{Event: &kvdv1.SessionEvent_Topology{Topology: event}}) != nil {
					return ""
				}
			}
		}
		select {
		case <-ended: // the client's end, or that of its token
			return ""
		case <-s.evicted:
			return s.why
		case <-n.stopping:
			return "the node is shutting down"
		case <-more:
		}
	}
}
