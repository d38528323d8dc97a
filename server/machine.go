package server

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/internal/chaos"
	"github.com/kvd-io/kvd/raft"
	"github.com/kvd-io/kvd/storage/arena"
	"github.com/kvd-io/kvd/storage/engine"
)

// machine is what the state machines of all groups share: where the group's durable
// state lies, up to which index it is applied, and the snapshot that was received
// last. What a group's entries mean is the content's business.
type machine struct {
	group   uint64
	eng     *engine.Group
	content content
	// record is the group's control record; nil for group 0, which nobody reads
	// one-sidedly.
	record *arena.Record
	// onTopology is told that who leads, or the configuration, is about to change; nil:
	// nobody wants to know. It must not block.
	onTopology func()

	// applyMu serializes everything that changes the state: applying, installing a
	// snapshot, taking a value back into memory.
	applyMu sync.Mutex
	meta    engine.Meta // guarded by applyMu

	applied atomic.Uint64 // what readers of the engine see at least
	// revealed is what they may see at most: it is raised before the engine shows more.
	// Invariant: applied <= revealed.
	revealed atomic.Uint64

	mu struct {
		sync.Mutex
		waiters map[chan struct{}]uint64 // closed when applied reaches the index
		token   uint64
		staged  []stagedSnapshot // received, not yet installed; oldest first

		receiving *receiving // nil: no snapshot comes in
		incoming  *incoming  // what came of one whose stream broke; nil: nothing is kept
		left      bool       // nothing is received any more
	}
}

// content is what the entries of a group mean.
type content interface {
	// load builds what is kept outside of the engine, from the engine.
	load(meta engine.Meta) error
	// check refuses, by ErrCorrupt, an item of a received snapshot that load could not
	// take.
	check(it engine.Item) error
	// apply shows the command to one-sided readers at once and adds it to the batch.
	apply(b *engine.Batch, index uint64, cmd *kvdv1.Command) (result any, err error)
}

func newMachine(group uint64, eng *engine.Group) *machine {
	m := &machine{group: group, eng: eng}
	m.mu.waiters = map[chan struct{}]uint64{}
	return m
}

var _ raft.StateMachine = (*machine)(nil)

// Open implements raft.StateMachine.
func (m *machine) Open() (raft.AppliedState, error) {
	m.applyMu.Lock()
	defer m.applyMu.Unlock()
	return m.reloadLocked()
}

// reloadLocked takes the state from the engine and shows it.
func (m *machine) reloadLocked() (raft.AppliedState, error) {
	meta, err := m.eng.Meta()
	if err != nil {
		return raft.AppliedState{}, fmt.Errorf("server: group %d: %w", m.group, err)
	}
	if meta.Conf == nil {
		return raft.AppliedState{}, fmt.Errorf("%w: group %d has no configuration: the state store is not that of this cluster, or was emptied", ErrDataDir, m.group)
	}
	if err := m.content.load(meta); err != nil {
		return raft.AppliedState{}, fmt.Errorf("server: load group %d: %w", m.group, err)
	}
	m.meta = meta
	if m.record != nil {
		m.record.SetConfigID(meta.ConfigID)
		m.record.SetApplied(meta.Applied)
	}
	m.revealed.Store(meta.Applied)
	m.publishApplied(meta.Applied)
	return raft.AppliedState{Index: meta.Applied, Term: meta.AppliedTerm, ConfigID: meta.ConfigID, Conf: meta.Conf}, nil
}

// SetTerm implements raft.StateMachine.
func (m *machine) SetTerm(term uint64) {
	if m.record != nil {
		m.record.SetTerm(term)
	}
}

// SetServing implements raft.StateMachine.
func (m *machine) SetServing(term uint64) {
	if m.record != nil {
		m.record.SetServedTerm(term)
	}
	m.stir()
}

// BeginConfig implements raft.StateMachine.
func (m *machine) BeginConfig(index uint64) {
	if m.record != nil {
		m.record.SetConfigID(index)
	}
	m.stir()
}

func (m *machine) stir() {
	if m.onTopology != nil {
		m.onTopology()
	}
}

// ApplyConfig implements raft.StateMachine.
func (m *machine) ApplyConfig(index, term uint64, conf *raftpb.ConfState) error {
	m.applyMu.Lock()
	defer m.applyMu.Unlock()
	if index <= m.meta.Applied {
		return nil
	}
	b := m.eng.NewBatch()
	meta := m.meta
	meta.Applied, meta.AppliedTerm, meta.ConfigID, meta.Conf = index, term, index, conf
	return m.commitLocked(b, meta)
}

// Apply implements raft.StateMachine.
func (m *machine) Apply(entries []raft.Entry, through, throughTerm uint64) ([]any, error) {
	m.applyMu.Lock()
	defer m.applyMu.Unlock()
	chaos.RunLater(m)
	results := make([]any, len(entries))
	if through <= m.meta.Applied {
		return results, nil
	}
	b := m.eng.NewBatch()
	for i, e := range entries {
		if e.Index <= m.meta.Applied {
			continue
		}
		cmd := &kvdv1.Command{}
		if err := proto.Unmarshal(e.Data, cmd); err != nil {
			b.Discard()
			return nil, fmt.Errorf("%w: entry %d of group %d can not be decoded: %w", engine.ErrCorrupt, e.Index, m.group, err)
		}
		if f := cmd.GetFormat(); f > entryFormat {
			b.Discard()
			return nil, fmt.Errorf("%w: entry %d of group %d has format %d, this kvd knows %d: start the newer kvd that its writer runs", ErrDataDir, e.Index, m.group, f, entryFormat)
		}
		r, err := m.content.apply(b, e.Index, cmd)
		if err != nil {
			b.Discard()
			return nil, fmt.Errorf("server: apply entry %d of group %d: %w", e.Index, m.group, err)
		}
		results[i] = r
	}
	meta := m.meta
	meta.Applied, meta.AppliedTerm = through, throughTerm
	if err := m.commitLocked(b, meta); err != nil {
		return nil, err
	}
	return results, nil
}

// commitLocked ends an apply: the arena already shows the entries, so the applied
// word is stored, and then the engine shows them too.
func (m *machine) commitLocked(b *engine.Batch, meta engine.Meta) error {
	if err := b.SetMeta(meta); err != nil {
		b.Discard()
		return fmt.Errorf("server: group %d: %w", m.group, err)
	}
	if m.record != nil {
		m.record.SetApplied(meta.Applied)
	}
	m.revealed.Store(meta.Applied)
	if err := b.Commit(); err != nil {
		return fmt.Errorf("server: commit group %d at index %d: %w", m.group, meta.Applied, err)
	}
	m.meta = meta // its counts are the engine's business
	m.publishApplied(meta.Applied)
	return nil
}

func (m *machine) publishApplied(index uint64) {
	m.applied.Store(index)
	m.mu.Lock()
	for c, want := range m.mu.waiters {
		if want <= index {
			close(c)
			delete(m.mu.waiters, c)
		}
	}
	m.mu.Unlock()
}

func (m *machine) appliedIndex() uint64 { return m.applied.Load() }

// revealedIndex, asked after a read of the engine, is not below anything that the
// read saw. appliedIndex may be: the engine shows a batch before it is counted.
func (m *machine) revealedIndex() uint64 { return m.revealed.Load() }

// servedTerm is the term that this replica leads and serves, or 0.
func (m *machine) servedTerm() uint64 { return m.record.Load().ServedTerm }

// waitApplied returns once the engine shows the index.
func (m *machine) waitApplied(ctx context.Context, index uint64) error {
	if m.applied.Load() >= index {
		return nil
	}
	c := make(chan struct{})
	m.mu.Lock()
	if m.applied.Load() >= index {
		m.mu.Unlock()
		return nil
	}
	m.mu.waiters[c] = index
	m.mu.Unlock()
	select {
	case <-c:
		return nil
	case <-ctx.Done():
		m.mu.Lock()
		delete(m.mu.waiters, c)
		m.mu.Unlock()
		return ctx.Err()
	}
}

// DurableApplied implements raft.StateMachine.
func (m *machine) DurableApplied() (uint64, error) { return m.eng.DurableApplied() }

// pairBytes is about what a pair takes beside key and value in a snapshot and in tables.
const pairBytes = 48

// StateBytes implements raft.StateMachine. Writers and group 0's content are not counted:
// they are small.
func (m *machine) StateBytes() (uint64, error) {
	meta, err := m.eng.Meta()
	return meta.Bytes + pairBytes*meta.Keys, err
}

// maxStaged snapshots of a group are kept at once. Raft takes a message or ignores it
// (an older term, an index that is committed) without a word, so what it will install
// is known only when it does; a leader that does not hear of the first in time sends
// another meanwhile.
const maxStaged = 3

type stagedSnapshot struct {
	token uint64
	index uint64
	*engine.Staging
}

// stage keeps a received snapshot at the index until Raft asks to install it, and
// returns what names it.
func (m *machine) stage(s *engine.Staging, index uint64) []byte {
	applied := m.appliedIndex()
	m.mu.Lock()
	m.mu.token++
	token := m.mu.token
	m.mu.staged = append(m.mu.staged, stagedSnapshot{token, index, s})
	drop := m.unstageLocked(func(i int, s stagedSnapshot) bool {
		return m.mu.left || s.token != token && (s.index <= applied || len(m.mu.staged)-i > maxStaged)
	})
	m.mu.Unlock()
	_ = abort(drop)
	return binary.LittleEndian.AppendUint64(nil, token)
}

// unstageLocked takes out what f chooses.
func (m *machine) unstageLocked(f func(i int, s stagedSnapshot) bool) (out []stagedSnapshot) {
	var keep []stagedSnapshot
	for i, s := range m.mu.staged {
		if f(i, s) {
			out = append(out, s)
		} else {
			keep = append(keep, s)
		}
	}
	m.mu.staged = keep
	return out
}

// abort deletes files; those of which it can not go with the next start.
func abort(staged []stagedSnapshot) error {
	var errs []error
	for _, s := range staged {
		errs = append(errs, s.Abort())
	}
	return errors.Join(errs...)
}

// takeStaged returns the snapshot of that name, nil where there is none. Older ones
// will not be asked for any more: Raft installs in order.
func (m *machine) takeStaged(name []byte) *engine.Staging {
	if len(name) != 8 {
		return nil
	}
	token := binary.LittleEndian.Uint64(name)
	m.mu.Lock()
	out := m.unstageLocked(func(_ int, s stagedSnapshot) bool { return s.token <= token })
	m.mu.Unlock()
	var found *engine.Staging
	if n := len(out); n > 0 && out[n-1].token == token {
		found, out = out[n-1].Staging, out[:n-1]
	}
	_ = abort(out)
	return found
}

// dropStaged forgets snapshots that nobody will install, and takes no more.
func (m *machine) dropStaged() error {
	out, in := m.leave()
	err := abort(out)
	if in != nil {
		err = errors.Join(err, in.staging.Abort())
	}
	return err
}

// leaveStaged is dropStaged for a node that stops: what came of a snapshot stays on the
// disk, for the next start to go on with.
func (m *machine) leaveStaged() error {
	out, in := m.leave()
	err := abort(out)
	if in != nil {
		err = errors.Join(err, in.staging.Leave())
	}
	return err
}

func (m *machine) leave() ([]stagedSnapshot, *incoming) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mu.left = true
	in := m.mu.incoming
	m.mu.incoming = nil
	return m.unstageLocked(func(int, stagedSnapshot) bool { return true }), in
}

// InstallSnapshot implements raft.StateMachine. Readers of the arena go on seeing the
// old content until all of the new one is shown at once; this replica does not serve
// meanwhile.
func (m *machine) InstallSnapshot(meta *raftpb.SnapshotMetadata, data []byte) (raft.AppliedState, error) {
	m.applyMu.Lock()
	defer m.applyMu.Unlock()
	chaos.RunLater(m)
	s := m.takeStaged(data)
	if s == nil {
		return raft.AppliedState{}, fmt.Errorf("server: group %d: snapshot at index %d was not received here", m.group, meta.GetIndex())
	}
	m.revealed.Store(max(m.revealed.Load(), meta.GetIndex()))
	got, err := s.Install()
	if err != nil {
		return raft.AppliedState{}, errors.Join(fmt.Errorf("server: install snapshot of group %d: %w", m.group, err), s.Abort())
	}
	if got.Applied != meta.GetIndex() || got.AppliedTerm != meta.GetTerm() {
		return raft.AppliedState{}, fmt.Errorf("%w: snapshot of group %d holds index %d of term %d, its message says %d of term %d", engine.ErrCorrupt, m.group, got.Applied, got.AppliedTerm, meta.GetIndex(), meta.GetTerm())
	}
	return m.reloadLocked()
}
