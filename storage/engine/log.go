package engine

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	"github.com/cockroachdb/pebble/v2"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// LogState of a group; the fields are those of raft.LogState.
type LogState struct {
	Hard          *raftpb.HardState // nil: nothing was ever written
	Truncated     uint64
	TruncatedTerm uint64
	Last          uint64 // entries (Truncated, Last] are there
}

// logGroup is what is known in memory of one group's log: what was committed, not
// what a batch still collects.
type logGroup struct {
	id uint64
	mu struct {
		sync.RWMutex
		loaded bool
		LogState
		tail tail
		// Pebble shows a commit before it is synced, and this struct only afterwards. In
		// between, entries can be missing on disk which LogState still has.
		removing chan struct{} // closed when the commit is over; nil: none under way
		version  uint64        // of LogState
	}
}

func (e *Engine) logGroup(group uint64) *logGroup {
	e.mu.Lock()
	defer e.mu.Unlock()
	g := e.mu.logs[group]
	if g == nil {
		g = &logGroup{id: group}
		g.mu.tail.total, g.mu.tail.budget = &e.logCached, e.cfg.LogCacheBytes
		e.mu.logs[group] = g
	}
	return g
}

// loadedLogGroup reads the group's state at first use.
func (e *Engine) loadedLogGroup(group uint64) (*logGroup, error) {
	if err := e.usable(); err != nil {
		return nil, err
	}
	g := e.logGroup(group)
	g.mu.RLock()
	loaded := g.mu.loaded
	g.mu.RUnlock()
	if loaded {
		return g, nil
	}
	st, err := e.readLogState(group)
	if err != nil {
		return nil, err
	}
	m, err := e.Group(group).Meta()
	if err != nil {
		return nil, err
	}
	if m.Applied > 0 && m.Applied < st.Truncated {
		return nil, corrupt(fmt.Sprintf("group %d", group),
			fmt.Errorf("the state has applied %d, the log starts only at %d: the state lost what was durable", m.Applied, st.Truncated+1))
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	// A batch may have been faster.
	if !g.mu.loaded {
		g.mu.loaded, g.mu.LogState = true, st
	}
	return g, nil
}

// OpenLog returns what is there for the group; the zero LogState where nothing is.
// ErrCorrupt where the entries do not follow the truncation marker without a gap, or
// where the state has applied something, but less than what was cut off the log.
//
// Damage that takes whole entries away without a trace can not be seen here, but by
// the owner: a state with Applied and a log without a hard state do not go together
// (the hard state is written before anything is applied or installed); nor does an
// empty state with Truncated above 0. Such a replica must not vote: it may have
// forgotten a vote. Remove it and let the peers rebuild it under a new id.
//
// Where Group.Meta's Applied is beyond Last, a snapshot was installed and the crash
// came before the log was reset: Reset it to (Meta.Applied, Meta.AppliedTerm). A
// hard state's commit below Applied is to be raised to it before raft sees it.
func (e *Engine) OpenLog(group uint64) (LogState, error) {
	g, err := e.loadedLogGroup(group)
	if err != nil {
		return LogState{}, err
	}
	g.mu.RLock()
	defer g.mu.RUnlock()
	st := g.mu.LogState
	if st.Hard != nil {
		st.Hard = proto.Clone(st.Hard).(*raftpb.HardState)
	}
	return st, nil
}

func (e *Engine) readLogState(group uint64) (st LogState, err error) {
	key := appendGroup(nil, group, logHard)
	err = readRecord(e.log, key, func(p []byte) error {
		st.Hard = &raftpb.HardState{}
		return proto.Unmarshal(p, st.Hard)
	})
	if err != nil {
		return LogState{}, logError(group, "hard state", err)
	}
	key = appendGroup(key[:0], group, logTrunc)
	err = readRecord(e.log, key, func(p []byte) error {
		if len(p) != 16 {
			return fmt.Errorf("%d bytes, want 16", len(p))
		}
		st.Truncated, st.TruncatedTerm = binary.LittleEndian.Uint64(p), binary.LittleEndian.Uint64(p[8:])
		return nil
	})
	if err != nil {
		return LogState{}, logError(group, "truncation marker", err)
	}
	first, last, err := e.logEnds(group)
	if err != nil {
		return LogState{}, logError(group, "entries", err)
	}
	st.Last = max(st.Truncated, last)
	if last != 0 && (first != st.Truncated+1 || last < first) {
		return LogState{}, corrupt(fmt.Sprintf("log of group %d", group),
			fmt.Errorf("entries %d to %d do not follow the truncated index %d", first, last, st.Truncated))
	}
	return st, nil
}

// logEnds returns the indexes of the first and the last entry on disk, 0 for none.
func (e *Engine) logEnds(group uint64) (first, last uint64, err error) {
	it, err := e.log.NewIter(&pebble.IterOptions{
		LowerBound: appendGroup(nil, group, logEntry),
		UpperBound: appendGroup(nil, group, logEntry+1),
	})
	if err != nil {
		return 0, 0, err
	}
	if it.First() {
		first = binary.BigEndian.Uint64(it.Key()[groupLen+1:])
	}
	// Asked here: positioning anew forgets an error.
	err = it.Error()
	if err == nil && it.Last() {
		last = binary.BigEndian.Uint64(it.Key()[groupLen+1:])
	}
	return first, last, cmp.Or(err, it.Error(), it.Close())
}

// errDecode marks what a decoder said, other than an error of the store.
type errDecode struct{ err error }

func (e errDecode) Error() string { return e.err.Error() }

// readRecord calls f with the verified record at key, if there is one.
func readRecord(r pebble.Reader, key []byte, f func(p []byte) error) error {
	b, closer, err := r.Get(key)
	if errors.Is(err, pebble.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	p, derr := unseal(key, b)
	if derr == nil {
		derr = f(p)
	}
	if err := closer.Close(); err != nil {
		return err
	}
	if derr != nil {
		return errDecode{derr}
	}
	return nil
}

func logError(group uint64, what string, err error) error {
	what = fmt.Sprintf("log of group %d, %s", group, what)
	var d errDecode
	if errors.As(err, &d) {
		return corrupt(what, d.err)
	}
	return storeError(what, err)
}

// LogEntries returns [lo, hi), about maxBytes of them but at least one. ErrCompacted
// or ErrUnavailable where the first is not there; where only later ones are missing,
// what is there. The entries are shared with the cache: read them, never change them.
func (e *Engine) LogEntries(group, lo, hi, maxBytes uint64) ([]*raftpb.Entry, error) {
	g, err := e.loadedLogGroup(group)
	if err != nil {
		return nil, err
	}
	if lo >= hi {
		return nil, nil
	}
	for {
		g.mu.RLock()
		truncated, last, version := g.mu.Truncated, g.mu.Last, g.mu.version
		cached := g.mu.tail.slice(lo, hi, maxBytes)
		g.mu.RUnlock()
		switch {
		case lo <= truncated:
			return nil, fmt.Errorf("%w: group %d index %d, the log starts at %d", ErrCompacted, group, lo, truncated+1)
		case lo > last:
			return nil, fmt.Errorf("%w: group %d index %d, the log ends at %d", ErrUnavailable, group, lo, last)
		case cached != nil:
			return cached, nil
		}
		entries, err := e.readEntries(group, lo, min(hi, last+1), maxBytes)
		if err != nil || len(entries) > 0 {
			return entries, err
		}
		if !g.changedSince(version) {
			return nil, cmp.Or(e.failure(), corrupt(fmt.Sprintf("log of group %d", group),
				fmt.Errorf("entry %d is missing in (%d, %d]", lo, truncated, last)))
		}
	}
}

// changedSince waits for a commit that removes entries, if there is one under way, and
// tells whether the log is another one than it was at the version.
func (g *logGroup) changedSince(version uint64) bool {
	g.mu.RLock()
	removing := g.mu.removing
	g.mu.RUnlock()
	if removing != nil {
		<-removing
	}
	g.mu.RLock()
	defer g.mu.RUnlock()
	return g.mu.version != version
}

// readEntries reads without a gap from lo on; nothing where lo is missing.
func (e *Engine) readEntries(group, lo, hi, maxBytes uint64) (entries []*raftpb.Entry, err error) {
	it, err := e.log.NewIter(&pebble.IterOptions{
		LowerBound: appendEntryKey(nil, group, lo),
		UpperBound: appendEntryKey(nil, group, hi),
	})
	if err != nil {
		return nil, storeError("log", err)
	}
	defer func() {
		if cerr := cmp.Or(it.Error(), it.Close()); cerr != nil && err == nil {
			entries, err = nil, logError(group, "entries", cerr)
		}
	}()
	size := uint64(0)
	for ok := it.First(); ok; ok = it.Next() {
		b, err := it.ValueAndErr()
		if err != nil {
			return nil, logError(group, "entries", err)
		}
		size += uint64(len(b))
		if len(entries) > 0 && size > maxBytes {
			break
		}
		entry, err := decodeEntry(it.Key(), b)
		if err != nil {
			return nil, corrupt(fmt.Sprintf("log of group %d, key %x", group, it.Key()), err)
		}
		if entry.GetIndex() != lo+uint64(len(entries)) {
			break
		}
		entries = append(entries, entry)
	}
	return entries, nil
}

// LogTerm of an entry in (Truncated, Last], and of Truncated itself. ErrCompacted,
// ErrUnavailable.
func (e *Engine) LogTerm(group, index uint64) (uint64, error) {
	g, err := e.loadedLogGroup(group)
	if err != nil {
		return 0, err
	}
	g.mu.RLock()
	st := g.mu.LogState
	term, ok := g.mu.tail.term(index)
	g.mu.RUnlock()
	switch {
	case index == st.Truncated:
		return st.TruncatedTerm, nil
	case ok:
		return term, nil
	}
	entries, err := e.LogEntries(group, index, index+1, 0)
	if err != nil {
		return 0, err
	}
	return entries[0].GetTerm(), nil
}
