package raft

import (
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// machine is a state machine that keeps all it was ever given, and tells the order
// in which it was called. Its disk forgets what was not flushed.
type machine struct {
	group GroupID
	tell  func(string) // may be nil
	block chan struct{}
	fail  error
	size  atomic.Uint64 // what StateBytes says
	// applied is told of each entry when it is first applied; may be nil.
	applied func(machineEntry)

	mu      sync.Mutex
	live    machineState
	durable machineState
	// published
	term, serving, configID uint64
}

type machineState struct {
	Index, Term, ConfigID uint64
	Conf                  *raftpb.ConfState
	Entries               []machineEntry
}

type machineEntry struct {
	Index, Term uint64
	Data        string
}

func (s machineState) clone() machineState {
	s.Entries = slices.Clone(s.Entries)
	return s
}

// newMachine starts with a configuration drawn at bootstrap, or empty for none.
func newMachine(g GroupID, voters ...uint64) *machine {
	m := &machine{group: g}
	if len(voters) > 0 {
		m.durable = machineState{Index: 1, Term: 1, ConfigID: 1, Conf: &raftpb.ConfState{Voters: voters}}
		m.live, m.configID = m.durable.clone(), 1
	}
	return m
}

func (m *machine) say(format string, args ...any) {
	if m.tell != nil {
		m.tell(fmt.Sprintf("g%d ", m.group) + fmt.Sprintf(format, args...))
	}
}

// crash forgets what was not flushed; a new process publishes from nothing.
func (m *machine) crash() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.live = m.durable.clone()
	m.term, m.serving, m.configID = 0, 0, m.live.ConfigID
}

func (m *machine) flush() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.durable = m.live.clone()
}

func (m *machine) Open() (AppliedState, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.stateLocked(), nil
}

func (m *machine) stateLocked() AppliedState {
	conf := m.live.Conf
	if conf != nil {
		conf = proto.Clone(conf).(*raftpb.ConfState)
	}
	return AppliedState{Index: m.live.Index, Term: m.live.Term, ConfigID: m.live.ConfigID, Conf: conf}
}

func (m *machine) SetTerm(term uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.say("SetTerm(%d)", term)
	if term < m.term {
		panic(fmt.Sprintf("term falls from %d to %d", m.term, term))
	}
	m.term = term
}

func (m *machine) SetServing(term uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.say("SetServing(%d)", term)
	if term != 0 && term != m.term {
		panic(fmt.Sprintf("serves term %d in term %d", term, m.term))
	}
	if term != 0 && m.live.Term != term {
		panic(fmt.Sprintf("serves term %d but the last applied entry is of term %d", term, m.live.Term))
	}
	m.serving = term
}

func (m *machine) BeginConfig(index uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.say("BeginConfig(%d)", index)
	m.configID = index
}

func (m *machine) ApplyConfig(index, term uint64, conf *raftpb.ConfState) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.say("ApplyConfig(%d) %v", index, conf.GetVoters())
	if index != m.live.Index+1 {
		panic(fmt.Sprintf("configuration of entry %d after %d", index, m.live.Index))
	}
	if m.configID != index {
		panic("configuration applied before it was published")
	}
	m.live.Index, m.live.Term, m.live.ConfigID = index, term, index
	m.live.Conf = proto.Clone(conf).(*raftpb.ConfState)
	return nil
}

func (m *machine) Apply(entries []Entry, through, throughTerm uint64) ([]any, error) {
	if m.block != nil {
		<-m.block
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fail != nil {
		return nil, m.fail
	}
	m.say("Apply(%d entries) through %d term %d", len(entries), through, throughTerm)
	results := make([]any, len(entries))
	for i, e := range entries {
		if e.Index <= m.live.Index {
			continue
		}
		me := machineEntry{e.Index, e.Term, string(e.Data)}
		m.live.Entries = append(m.live.Entries, me)
		if m.applied != nil {
			m.applied(me)
		}
		results[i] = fmt.Sprintf("%s@%d", e.Data, e.Index)
	}
	if through > m.live.Index {
		m.live.Index, m.live.Term = through, throughTerm
	}
	return results, nil
}

func (m *machine) encode() (meta *raftpb.SnapshotMetadata, data []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	data, err := json.Marshal(m.live)
	if err != nil {
		panic(err)
	}
	return &raftpb.SnapshotMetadata{Index: new(m.live.Index), Term: new(m.live.Term), ConfState: proto.Clone(m.live.Conf).(*raftpb.ConfState)}, data
}

func (m *machine) InstallSnapshot(meta *raftpb.SnapshotMetadata, data []byte) (AppliedState, error) {
	if m.block != nil {
		<-m.block
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.say("InstallSnapshot(%d)", meta.GetIndex())
	var s machineState
	if err := json.Unmarshal(data, &s); err != nil {
		return AppliedState{}, err
	}
	m.live, m.durable = s, s.clone()
	m.configID = s.ConfigID
	return m.stateLocked(), nil
}

func (m *machine) DurableApplied() (uint64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.durable.Index, nil
}

func (m *machine) StateBytes() (uint64, error) { return m.size.Load(), nil }

func (m *machine) entries() []machineEntry {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.live.Entries)
}
