package gossip

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

// State is how a node seems to be.
type State uint8

// The states of a node.
const (
	// Alive: nobody doubts it.
	Alive State = iota + 1
	// Suspect: this node's own probes of it fail, or it said that it moved and was not
	// reached there yet.
	Suspect
	// Dead: it did not answer anyone for long enough.
	Dead
	// Left: it said that it stops, and did.
	Left
)

func (s State) String() string {
	switch s {
	case Alive:
		return "alive"
	case Suspect:
		return "suspect"
	case Dead:
		return "dead"
	case Left:
		return "left"
	}
	return fmt.Sprintf("State(%d)", uint8(s))
}

// Member is a node as this one hears it.
type Member struct {
	Meta
	GossipAddr netip.AddrPort
	State      State
	Since      time.Time // in this state
	Heard      time.Time // the last answer to this node's own probe; zero: none
}

// Event is a change of one node. What happened in between two events of a node may be
// left out; the last state never is.
type Event struct {
	Before Member // zero: the node was not known
	Member Member
}

// Moved tells whether the node can be reached at another address than before.
func (e Event) Moved() bool {
	return e.Before.NodeID != 0 && (e.Before.Address != e.Member.Address || e.Before.GossipAddr != e.Member.GossipAddr)
}

// maxMembers bounds the table. Nodes beyond it are not let in.
const maxMembers = 1024

// table is what is known of the other nodes. Its methods are memberlist's delegates too:
// memberlist calls them with its own lock held, so they block on nothing and do not call
// it back.
type table struct {
	cfg  Config
	self string
	wake chan struct{} // capacity 1: there is something to deliver

	mu struct {
		sync.Mutex
		members map[string]*Member
		dirty   []string // names with changes to deliver, each once
		closed  bool
		meta    Meta // this node's
		// stale: others still have this node at an address or generation that it had before.
		stale bool

		refusedLabel, refusedKey, refusedMember, conflicts uint64
	}
}

var (
	_ memberlist.Delegate         = (*table)(nil)
	_ memberlist.EventDelegate    = (*table)(nil)
	_ memberlist.AliveDelegate    = (*table)(nil)
	_ memberlist.ConflictDelegate = (*table)(nil)
	_ memberlist.PingDelegate     = (*table)(nil)
)

func newTable(cfg Config) *table {
	t := &table{cfg: cfg, self: cfg.Meta.name(), wake: make(chan struct{}, 1)}
	t.mu.members = map[string]*Member{}
	t.mu.meta = cfg.Meta
	return t
}

// changed notes that a member is to be delivered.
func (t *table) changedLocked(name string) {
	if !slices.Contains(t.mu.dirty, name) {
		t.mu.dirty = append(t.mu.dirty, name)
	}
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

// to sets a member's state.
func (t *table) toLocked(name string, m *Member, s State) {
	if m.State != s {
		m.State, m.Since = s, t.cfg.Clock.Now()
		t.changedLocked(name)
	}
}

func addrOf(n *memberlist.Node) netip.AddrPort {
	a, _ := netip.AddrFromSlice(n.Addr)
	return netip.AddrPortFrom(a.Unmap(), n.Port)
}

// NotifyAlive implements memberlist.AliveDelegate: it decides who is let in. Of this node
// itself everything is: memberlist answers what is wrong.
func (t *table) NotifyAlive(n *memberlist.Node) error {
	if n.Name == t.self {
		return nil
	}
	m, err := t.admit(n)
	t.mu.Lock()
	defer t.mu.Unlock()
	have := t.mu.members[n.Name]
	switch {
	case err != nil:
	case have == nil && len(t.mu.members) >= maxMembers:
		err = fmt.Errorf("%d nodes are known, and that is the limit", maxMembers)
	case have != nil && m.Generation < have.Generation:
		return fmt.Errorf("an old message: start %d, and %d is known", m.Generation, have.Generation) // nothing wrong with it
	case have != nil && m.Leaving && m.Generation == have.Generation && have.State == Dead:
		t.toLocked(n.Name, have, Left) // its farewell came after its end
	}
	if err != nil {
		t.mu.refusedMember++
		t.cfg.Logger.Warn("gossip tells of a node that is not let in", "name", n.Name, "gossip_address", addrOf(n).String(), "why", err)
	}
	return err
}

func (t *table) admit(n *memberlist.Node) (Meta, error) {
	m, err := decodeMeta(n.Meta)
	if err != nil {
		return Meta{}, err
	}
	if m.name() != n.Name {
		return Meta{}, fmt.Errorf("it is called %s and says that it is node %d with incarnation %016x", n.Name, m.NodeID, m.Incarnation)
	}
	return m, t.cfg.Admit(m)
}

// NotifyJoin implements memberlist.EventDelegate.
func (t *table) NotifyJoin(n *memberlist.Node) { t.told(n, true) }

// NotifyUpdate implements memberlist.EventDelegate.
func (t *table) NotifyUpdate(n *memberlist.Node) { t.told(n, false) }

// told takes in what memberlist has accepted of a node.
func (t *table) told(n *memberlist.Node, joined bool) {
	meta, err := decodeMeta(n.Meta)
	if n.Name == t.self || err != nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed {
		return
	}
	m := t.mu.members[n.Name]
	if m == nil {
		m = &Member{}
		t.mu.members[n.Name] = m
	} else if meta.Generation < m.Generation {
		return
	}
	if addr := addrOf(n); !m.Meta.equal(meta) || m.GossipAddr != addr {
		m.Meta, m.GossipAddr = meta, addr
		t.changedLocked(n.Name)
	}
	if joined {
		t.toLocked(n.Name, m, Alive)
	}
}

// NotifyLeave implements memberlist.EventDelegate: the node is dead, or left; memberlist
// does not tell which, so the node says that it leaves before it does.
func (t *table) NotifyLeave(n *memberlist.Node) {
	t.mu.Lock()
	defer t.mu.Unlock()
	m := t.mu.members[n.Name]
	if t.mu.closed || m == nil || addrOf(n) != m.GossipAddr {
		return // it moved: where it was nobody answers
	}
	if m.Leaving {
		t.toLocked(n.Name, m, Left)
	} else {
		t.toLocked(n.Name, m, Dead)
	}
}

// NotifyConflict implements memberlist.ConflictDelegate: a name that memberlist has at one
// address was told at another. A later start of the node is believed at once, though
// memberlist goes on with the old address until that is dead.
func (t *table) NotifyConflict(existing, other *memberlist.Node) {
	meta, err := t.admit(other)
	if err != nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed {
		return
	}
	if other.Name == t.self {
		if meta.Generation < t.mu.meta.Generation {
			t.mu.stale = true
			return
		}
		t.conflictLocked(existing, other)
		return
	}
	m := t.mu.members[other.Name]
	if m == nil {
		return
	}
	switch {
	case meta.Generation > m.Generation:
		m.Meta, m.GossipAddr = meta, addrOf(other)
		t.changedLocked(other.Name)
		t.toLocked(other.Name, m, Suspect)
	case meta.Generation == m.Generation && m.GossipAddr != addrOf(other):
		t.conflictLocked(existing, other)
	}
}

func (t *table) conflictLocked(existing, other *memberlist.Node) {
	t.mu.conflicts++
	t.cfg.Logger.Warn("two processes gossip as the same node: is one of them a copy?", "name", other.Name, "one", addrOf(existing).String(), "other", addrOf(other).String())
}

// NotifyPingComplete implements memberlist.PingDelegate.
func (t *table) NotifyPingComplete(n *memberlist.Node, _ time.Duration, _ []byte) {
	t.answered(n.Name, func(m *Member) bool { return m.GossipAddr == addrOf(n) })
}

func (t *table) answered(name string, there func(*Member) bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	m := t.mu.members[name]
	if t.mu.closed || m == nil || !there(m) {
		return
	}
	m.Heard = t.cfg.Clock.Now()
	if m.State == Suspect {
		t.toLocked(name, m, Alive)
	}
}

// AckPayload implements memberlist.PingDelegate.
func (t *table) AckPayload() []byte { return nil }

// hear takes in what memberlist says in its log only.
func (t *table) hear(what heard, of string) {
	switch what {
	case heardTCP:
		t.answered(of, func(*Member) bool { return true })
		return
	case heardWrongLabel:
		t.cfg.Logger.Warn("refused the gossip of another cluster, or of something else", "from", of, "cluster", t.cfg.ClusterID)
	case heardWrongKey:
		t.cfg.Logger.Warn("refused gossip that was encrypted by another key", "from", of, "cluster", t.cfg.ClusterID)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	switch what {
	case heardWrongLabel:
		t.mu.refusedLabel++
	case heardWrongKey:
		t.mu.refusedKey++
	case heardSuspect:
		if m := t.mu.members[of]; m != nil && m.State == Alive && !t.mu.closed {
			t.toLocked(of, m, Suspect)
		}
	}
}

// NodeMeta implements memberlist.Delegate.
func (t *table) NodeMeta(int) []byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	b, err := t.mu.meta.encode()
	if err != nil {
		panic(fmt.Sprintf("gossip: metadata that was checked: %v", err)) // bug: it is checked before it is set
	}
	return b
}

// NotifyMsg implements memberlist.Delegate; there are no messages of ours.
func (t *table) NotifyMsg([]byte) {}

// GetBroadcasts implements memberlist.Delegate.
func (t *table) GetBroadcasts(int, int) [][]byte { return nil }

// LocalState implements memberlist.Delegate.
func (t *table) LocalState(bool) []byte { return nil }

// MergeRemoteState implements memberlist.Delegate.
func (t *table) MergeRemoteState([]byte, bool) {}

// list of all members by id, then incarnation.
func (t *table) list() []Member {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]Member, 0, len(t.mu.members))
	for _, m := range t.mu.members {
		out = append(out, *m)
	}
	slices.SortFunc(out, func(a, b Member) int {
		return cmp.Or(cmp.Compare(a.NodeID, b.NodeID), cmp.Compare(a.Incarnation, b.Incarnation))
	})
	return out
}

// forget drops what is known of a node with this id, except the incarnation given.
func (t *table) forget(id, except uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	maps.DeleteFunc(t.mu.members, func(_ string, m *Member) bool {
		return m.NodeID == id && m.Incarnation != except
	})
}

// deliver calls OnEvent until stop is closed.
func (t *table) deliver(stop <-chan struct{}) {
	told := map[string]Member{}
	for {
		select {
		case <-t.wake:
		case <-stop:
			return
		}
		for {
			name, now, ok := t.next()
			if !ok {
				break
			}
			before := told[name]
			if now.NodeID == 0 { // forgotten
				delete(told, name)
				continue
			}
			told[name] = now
			t.report(before, now)
			t.cfg.OnEvent(Event{Before: before, Member: now})
		}
	}
}

func (t *table) next() (name string, m Member, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.mu.dirty) == 0 {
		return "", Member{}, false
	}
	name, t.mu.dirty = t.mu.dirty[0], t.mu.dirty[1:]
	if have := t.mu.members[name]; have != nil {
		m = *have
	}
	return name, m, true
}

// report logs a change.
func (t *table) report(before, now Member) {
	log := t.cfg.Logger.With("member", now.NodeID, "gossip_address", now.GossipAddr.String(), "address", now.Address)
	if e := (Event{before, now}); e.Moved() {
		log.Info("a node moved", "from", before.Address)
	}
	if before.State == now.State {
		return
	}
	level, text := slog.LevelInfo, "a node is heard"
	switch now.State {
	case Suspect:
		level, text = slog.LevelDebug, "a node does not answer"
	case Dead:
		level, text = slog.LevelWarn, "a node does not answer anyone any more"
	case Left:
		text = "a node stopped"
	case Alive:
		if before.State == Suspect {
			level, text = slog.LevelDebug, "a node answers again"
		}
	}
	log.Log(context.Background(), level, text)
}
