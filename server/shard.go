package server

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/internal/chaos"
	"github.com/kvd-io/kvd/raft"
	"github.com/kvd-io/kvd/storage/arena"
	"github.com/kvd-io/kvd/storage/engine"
	"github.com/kvd-io/kvd/storage/layout"
)

// Kinds of the engine's auxiliary keys.
const (
	auxExpiry    = 'x' // expiry | namespace | key -> version
	auxWriter    = 'w' // writer -> last use
	auxResult    = 'r' // writer | sequence -> result
	auxNamespace = 'n' // id -> NamespaceInfo (group 0)
	auxToken     = 't' // id -> TokenRecord (group 0)
	auxNode      = 'm' // id -> NodeRecord (group 0)
	auxShard     = 's' // number -> ShardRecord (group 0)
)

// writeResult is what a write did; it is replicated state while its writer may retry.
type writeResult struct {
	outcome kvdv1.WriteOutcome
	version uint64
	// location of the new object on this node; not replicated.
	location arena.Location
	resident bool
}

// shard is the content of a data group: key-values, shown in the arena and kept in the
// engine, and the writers that may retry.
type shard struct {
	*machine
	number  uint32
	arena   *arena.Arena
	place   keyPlace
	writers *writers
	// spaces are the namespaces that have anything here. Replaced, never changed, so
	// that readers need no lock.
	spaces atomic.Pointer[map[uint32]*arena.Shard]
	// g is this replica's group; set before the shard is published.
	g *raft.Group
	// gone: the replica has left this node. Set before any of its state is deleted, so
	// whoever reads and then finds it unset has read what was there.
	gone atomic.Bool
	made time.Time // when it was opened
	// unheard are learners that its leader does not hear, and since when.
	unheard sync.Map // raft.NodeID -> time.Time
}

// keyPlace is what tells a key's shard, in the whole cluster alike.
type keyPlace struct {
	seed   uint64
	shards uint32
}

var _ content = (*shard)(nil)

func newShard(number uint32, place keyPlace, eng *engine.Group, a *arena.Arena, rec *arena.Record, limits writerLimits) *shard {
	s := &shard{machine: newMachine(uint64(number), eng), number: number, place: place, arena: a, writers: newWriters(limits)}
	s.machine.content, s.machine.record = s, rec
	s.spaces.Store(&map[uint32]*arena.Shard{})
	return s
}

// space returns the namespace's part of this shard; nil where it has none.
func (s *shard) space(namespace uint32) *arena.Shard { return (*s.spaces.Load())[namespace] }

// openSpace makes it where it has none. Under applyMu.
func (s *shard) openSpace(namespace uint32) *arena.Shard {
	if sp := s.space(namespace); sp != nil {
		return sp
	}
	sp := s.arena.OpenNamespace(namespace, 0).OpenShard(s.number, s.record)
	next := map[uint32]*arena.Shard{namespace: sp}
	for id, other := range *s.spaces.Load() {
		next[id] = other
	}
	s.spaces.Store(&next)
	return sp
}

// load implements content: everything in the engine is shown at once, in place of
// whatever was shown.
func (s *shard) load(engine.Meta) (err error) {
	loads := map[uint32]*arena.Load{}
	defer func() {
		for _, l := range loads {
			if err != nil {
				l.Abort()
			}
		}
	}()
	// What was shown and is not in the new state must go too.
	for id, sp := range *s.spaces.Load() {
		loads[id] = sp.StartLoad()
	}
	err = s.eng.Scan(func(namespace uint32, key []byte, v engine.Value) error {
		l := loads[namespace]
		if l == nil {
			l = s.openSpace(namespace).StartLoad()
			loads[namespace] = l
		}
		l.Put(arena.Item{Key: key, Value: v.Data, Version: v.Version, Expiry: v.Expiry, Flags: v.Flags})
		return nil
	})
	if err != nil {
		return err
	}
	if err = s.writers.load(s.eng); err != nil {
		return err
	}
	for id, l := range loads {
		l.Commit()
		delete(loads, id)
	}
	return nil
}

// check implements content: a peer may send anything.
func (s *shard) check(it engine.Item) error {
	switch it.Aux {
	case 0:
		return s.checkKey(it.Key)
	case auxWriter, auxResult:
		return checkWriterRecord(it)
	}
	return nil
}

// checkKey refuses a key that no client can have written to this shard.
func (s *shard) checkKey(key []byte) error {
	if len(key) == 0 || len(key) > layout.MaxKeySize {
		return fmt.Errorf("%w: shard %d has a key of %d bytes, want 1 to %d", engine.ErrCorrupt, s.number, len(key), layout.MaxKeySize)
	}
	if of := layout.HashKey(s.place.seed, key).Shard(s.place.shards); of != s.number {
		return fmt.Errorf("%w: shard %d has key %q, which belongs to shard %d", engine.ErrCorrupt, s.number, key, of)
	}
	return nil
}

// apply implements content.
func (s *shard) apply(b *engine.Batch, index uint64, cmd *kvdv1.Command) (any, error) {
	now := cmd.GetLeaderUnixMs()
	switch op := cmd.GetOp().(type) {
	case *kvdv1.Command_Put:
		if err := s.checkKey(op.Put.GetKey()); err != nil {
			return nil, err
		}
		return s.once(b, now, op.Put, func() (writeResult, error) { return s.put(b, index, now, op.Put) })
	case *kvdv1.Command_Delete:
		if err := s.checkKey(op.Delete.GetKey()); err != nil {
			return nil, err
		}
		return s.once(b, now, op.Delete, func() (writeResult, error) { return s.delete(b, index, now, op.Delete) })
	case *kvdv1.Command_OpenWriter:
		return index, s.writers.open(b, index, now, op.OpenWriter.GetOwner())
	case *kvdv1.Command_Expire:
		return nil, s.expire(b, op.Expire)
	default:
		return nil, fmt.Errorf("%w: a command that this version does not know (%T): all nodes of a shard need a version that knows it", engine.ErrCorrupt, op)
	}
}

// stamped is a write that may be repeated.
type stamped interface {
	GetWriter() *kvdv1.WriterStamp
	GetOwner() string
}

// once applies a stamped write if it was not applied before, and else repeats its
// result.
func (s *shard) once(b *engine.Batch, now int64, op stamped, write func() (writeResult, error)) (any, error) {
	w := op.GetWriter()
	if w.GetWriterId() == 0 {
		return write()
	}
	if r, done := s.writers.lookup(w, op.GetOwner()); done {
		return r, nil
	}
	r, err := write()
	if err != nil {
		return nil, err
	}
	return r, s.writers.record(b, w, now, r)
}

// present is the key's value unless it is past its expiry. What is expired by the
// entry's own time is absent, on every replica alike, whether or not the expiry was
// carried out yet.
func present(b *engine.Batch, namespace uint32, key []byte, now int64) (old engine.Value, stored, live bool, err error) {
	old, stored, err = b.Get(namespace, key)
	return old, stored, stored && (old.Expiry == 0 || old.Expiry > now), err
}

// conflicts tells whether the precondition fails for what is there.
func conflicts(p *kvdv1.Precondition, old engine.Value, live bool) bool {
	switch {
	case p.GetIfAbsent():
		return live
	case p.GetIfVersion() != 0:
		return !live || old.Version != p.GetIfVersion()
	}
	return false
}

func (s *shard) put(b *engine.Batch, index uint64, now int64, op *kvdv1.PutOp) (writeResult, error) {
	old, stored, live, err := present(b, op.GetNamespaceId(), op.GetKey(), now)
	if err != nil {
		return writeResult{}, err
	}
	conflict := writeResult{outcome: kvdv1.WriteOutcome_WRITE_OUTCOME_CONFLICT}
	if live {
		conflict.version = old.Version
	}
	if conflicts(op.GetPrecondition(), old, live) {
		return conflict, nil
	}
	if op.GetImmutable() && live {
		if string(old.Data) != string(op.GetValue()) {
			return conflict, nil
		}
		// The same content again is a success that changes nothing.
		return writeResult{outcome: kvdv1.WriteOutcome_WRITE_OUTCOME_APPLIED, version: old.Version}, nil
	}
	if stored {
		if err := dropExpiry(b, op.GetNamespaceId(), op.GetKey(), old.Expiry); err != nil {
			return writeResult{}, err
		}
	}
	v := engine.Value{Data: op.GetValue(), Version: index, Expiry: op.GetExpiresUnixMs()}
	if op.GetImmutable() {
		v.Flags |= layout.FlagImmutable
	}
	r := writeResult{outcome: kvdv1.WriteOutcome_WRITE_OUTCOME_APPLIED, version: index}
	sp, it := s.openSpace(op.GetNamespaceId()), arena.Item{Key: op.GetKey(), Value: v.Data, Version: v.Version, Expiry: v.Expiry, Flags: v.Flags}
	if chaos.Enabled && chaos.Broken(chaos.EngineAhead) {
		chaos.Later(s.machine, func() { sp.Put(it) })
	} else {
		r.location, r.resident = sp.Put(it)
	}
	if v.Expiry != 0 {
		if err := b.PutAux(auxExpiry, expiryKey(v.Expiry, op.GetNamespaceId(), op.GetKey()), binary.BigEndian.AppendUint64(nil, index)); err != nil {
			return writeResult{}, err
		}
	}
	return r, b.Put(op.GetNamespaceId(), op.GetKey(), v)
}

func (s *shard) delete(b *engine.Batch, index uint64, now int64, op *kvdv1.DeleteOp) (writeResult, error) {
	old, stored, live, err := present(b, op.GetNamespaceId(), op.GetKey(), now)
	if err != nil {
		return writeResult{}, err
	}
	switch {
	case conflicts(op.GetPrecondition(), old, live):
		r := writeResult{outcome: kvdv1.WriteOutcome_WRITE_OUTCOME_CONFLICT}
		if live {
			r.version = old.Version
		}
		return r, nil
	case !live:
		// What is stored and past its expiry is left to the expiry.
		return writeResult{outcome: kvdv1.WriteOutcome_WRITE_OUTCOME_NOT_FOUND}, nil
	case op.GetImmutable():
		return writeResult{outcome: kvdv1.WriteOutcome_WRITE_OUTCOME_CONFLICT, version: old.Version}, nil
	}
	r := writeResult{outcome: kvdv1.WriteOutcome_WRITE_OUTCOME_APPLIED, version: index}
	return r, s.remove(b, op.GetNamespaceId(), op.GetKey(), old, stored, layout.StateDeleted)
}

func (s *shard) remove(b *engine.Batch, namespace uint32, key []byte, old engine.Value, stored bool, why layout.State) error {
	if sp := s.openSpace(namespace); chaos.Enabled && chaos.Broken(chaos.EngineAhead) {
		chaos.Later(s.machine, func() { sp.Delete(key, why) })
	} else {
		sp.Delete(key, why)
	}
	if stored {
		if err := dropExpiry(b, namespace, key, old.Expiry); err != nil {
			return err
		}
	}
	return b.Delete(namespace, key)
}

func (s *shard) expire(b *engine.Batch, op *kvdv1.ExpireOp) error {
	for _, k := range op.GetKeys() {
		old, stored, err := b.Get(k.GetNamespaceId(), k.GetKey())
		if err != nil {
			return err
		}
		// Only a key that is stored can match, and what is stored was checked.
		same := old.Version == k.GetVersion() || chaos.Broken(chaos.ExpiryUnfenced)
		if !stored || !same || old.Expiry == 0 {
			continue
		}
		if err := s.remove(b, k.GetNamespaceId(), k.GetKey(), old, true, layout.StateExpired); err != nil {
			return err
		}
	}
	return s.writers.expire(b, op.GetWriters(), op.GetWritersIdleSinceUnixMs())
}

// takeBack shows again, in memory, a key that is in the engine only, and returns where
// it lies now. The apply lock keeps a newer write from being overtaken.
func (s *shard) takeBack(namespace uint32, key []byte) (loc arena.Location, resident bool, err error) {
	if !s.applyMu.TryLock() {
		return arena.Location{}, false, nil // busy with writes: some later read will do it
	}
	defer s.applyMu.Unlock()
	if s.gone.Load() {
		return arena.Location{}, false, nil
	}
	sp := s.openSpace(namespace)
	if loc, resident := sp.Lookup(key); resident {
		return loc, true, nil
	}
	v, ok, err := s.eng.Get(namespace, key)
	if err != nil || !ok {
		return arena.Location{}, false, err
	}
	loc, resident = sp.Put(arena.Item{Key: key, Value: v.Data, Version: v.Version, Expiry: v.Expiry, Flags: v.Flags})
	return loc, resident, nil
}

// expiryKey sorts by time.
func expiryKey(expiry int64, namespace uint32, key []byte) []byte {
	b := binary.BigEndian.AppendUint64(make([]byte, 0, 12+len(key)), uint64(expiry))
	b = binary.BigEndian.AppendUint32(b, namespace)
	return append(b, key...)
}

var errExpiryKey = errors.New("server: malformed expiry key")

func parseExpiryKey(b []byte) (expiry int64, namespace uint32, key []byte, err error) {
	if len(b) < 13 {
		return 0, 0, nil, errExpiryKey
	}
	return int64(binary.BigEndian.Uint64(b)), binary.BigEndian.Uint32(b[8:]), b[12:], nil
}

func dropExpiry(b *engine.Batch, namespace uint32, key []byte, expiry int64) error {
	if expiry == 0 {
		return nil
	}
	return b.DeleteAux(auxExpiry, expiryKey(expiry, namespace, key))
}
