package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/objstorage/objstorageprovider"
	"github.com/cockroachdb/pebble/v2/sstable"
)

// Staging collects a received snapshot in tables beside the store, so that memory
// stays bounded (a block and an index per table) however large the group is. It is
// used by one goroutine.
//
// Install ingests the tables and excises the group's old range in one edit of the
// MANIFEST, which Pebble syncs. A batch would not do: without a WAL it is not durable,
// and memtables written before it could be flushed alone. The excision also covers
// what was in memtables: Install flushes them first, so nothing old comes back.
type Staging struct {
	e     *Engine
	group uint64
	dir   string

	w       *sstable.Writer
	wBytes  int
	unsaved int // bytes added since the last checkpoint
	tables  []string
	last    []byte // raw key, for the order

	meta        *Meta
	keys, bytes uint64

	finished, done bool

	note []byte // of the last checkpoint
}

// NewStaging starts a staging: Install or Abort it, or Leave it behind. A crash before
// Install leaves the old state; of stagings left behind Open keeps those that were
// checkpointed, if it is asked to, and removes the others.
func (e *Engine) NewStaging(group uint64) (*Staging, error) {
	if err := e.writable(); err != nil {
		return nil, err
	}
	e.mu.Lock()
	e.mu.nextStaging++
	n := e.mu.nextStaging
	e.mu.Unlock()
	dir := e.fs.PathJoin(e.cfg.Dir, stagingDir, fmt.Sprintf("%d-%d", group, n))
	// Durably: what a checkpoint says is there must not lose its directory.
	if err := makeDir(e.fs, dir); err != nil {
		return nil, err
	}
	return &Staging{e: e, group: group, dir: dir}, nil
}

// Add takes pairs in the order in which Items gave them; they are copied. ErrCorrupt
// where a pair's check sum does not match.
func (s *Staging) Add(key, value []byte) error {
	if s.finished || s.done {
		return errors.New("engine: staging: Add after Finish")
	}
	if len(key) == 0 {
		return corrupt("received snapshot", errors.New("empty key"))
	}
	raw := append(appendGroup(make([]byte, 0, groupLen+len(key)), s.group, key[0]), key[1:]...)
	if s.last != nil && bytes.Compare(raw, s.last) <= 0 {
		return corrupt("received snapshot", fmt.Errorf("%s comes after %s", describeKey(raw), describeKey(s.last)))
	}
	if err := verifyPair(raw, value); err != nil {
		return err
	}
	s.last = raw
	switch raw[groupLen] {
	case stateMeta:
		m, err := decodeMeta(raw, value)
		if err != nil {
			return corrupt(describeKey(raw), err)
		}
		s.meta = &m
	case stateKV:
		s.keys++
		s.bytes += uint64(len(raw) - kvPrefixLen + len(value) - valueHeaderLen)
	}
	return s.write(raw, value)
}

func (s *Staging) write(raw, value []byte) error {
	if s.w == nil {
		path := s.tablePath(len(s.tables))
		f, err := s.e.fs.Create(path, "kvd-staging")
		if err != nil {
			return openError(path, err)
		}
		s.tables = append(s.tables, path)
		// The level only picks the compression and the filter.
		o := s.e.stateOptions(s.e.fs).MakeWriterOptions(6, s.e.state.TableFormat())
		s.w, s.wBytes = sstable.NewWriter(objstorageprovider.NewFileWritable(f), o), 0
	}
	if err := s.w.Set(raw, value); err != nil {
		return openError(s.dir, err)
	}
	s.unsaved += len(raw) + len(value)
	if s.wBytes += len(raw) + len(value); s.wBytes >= stagingTableBytes {
		return s.closeTable()
	}
	return nil
}

// closeTable also syncs the table.
func (s *Staging) closeTable() error {
	if s.w == nil {
		return nil
	}
	err := s.w.Close()
	s.w = nil
	if err != nil {
		return openError(s.dir, err)
	}
	return nil
}

// Finish completes the collecting; no Add may follow. ErrCorrupt where the meta is
// missing or does not fit the data.
func (s *Staging) Finish() error {
	if s.finished || s.done {
		return errors.New("engine: staging: already finished")
	}
	if err := s.closeTable(); err != nil {
		return err
	}
	what := fmt.Sprintf("received snapshot of group %d", s.group)
	if s.meta == nil {
		return corrupt(what, errors.New("it has no meta record"))
	}
	if s.meta.Keys != s.keys || s.meta.Bytes != s.bytes {
		return corrupt(what, fmt.Errorf("%d keys of %d bytes arrived, its meta says %d of %d", s.keys, s.bytes, s.meta.Keys, s.meta.Bytes))
	}
	s.finished = true
	return nil
}

// Meta of what was received; the zero Meta before Finish.
func (s *Staging) Meta() Meta {
	if !s.finished {
		return Meta{}
	}
	return s.meta.clone()
}

// Install replaces the group's state by the staged one, atomically and durably, and
// returns its Meta. No batch of the group may be open. Only afterwards reset the
// group's log to (Meta.Applied, Meta.AppliedTerm); a crash in between is seen at
// OpenLog.
func (s *Staging) Install() (Meta, error) {
	if !s.finished || s.done {
		return Meta{}, errors.New("engine: staging: Install without Finish")
	}
	if err := s.e.writable(); err != nil {
		return Meta{}, err
	}
	// Memtables that overlap would be flushed by the ingestion, with all commits
	// waiting for it.
	if err := s.e.flushStore(s.e.state, "state"); err != nil {
		return Meta{}, err
	}
	lower, upper := groupBounds(s.group)
	if err := s.e.ingest(s.tables, pebble.KeyRange{Start: lower, End: upper}); err != nil {
		return Meta{}, err
	}
	s.e.groupState(s.group).set(s.meta.clone())
	return *s.meta, s.Abort()
}

func (e *Engine) ingest(tables []string, span pebble.KeyRange) (err error) {
	defer func() {
		if r := recover(); r != nil {
			e.fail(fmt.Errorf("engine: ingestion: %v", r))
			err = e.failure()
		}
	}()
	if _, err := e.state.IngestAndExcise(context.Background(), tables, nil, nil, span); err != nil {
		return errors.Join(e.failure(), storeError("state: ingesting a snapshot", err))
	}
	return e.failure()
}

// Destroy deletes the group's state, durably: Meta is zero then, as if the group had
// never been written. No batch, snapshot or staging of the group may be open.
func (g *Group) Destroy() error {
	if err := g.e.writable(); err != nil {
		return err
	}
	lower, upper := groupBounds(g.id)
	b := g.e.state.NewBatch()
	if err := b.DeleteRange(lower, upper, nil); err != nil {
		return errors.Join(storeError("state", err), b.Close())
	}
	if err := g.e.commit(b, pebble.NoSync); err != nil {
		return err
	}
	// The store has no log of its own.
	if err := g.e.flushStore(g.e.state, "state"); err != nil {
		return err
	}
	g.state.set(Meta{})
	return nil
}

// Abort removes what was staged. It may be called again, and after Install.
func (s *Staging) Abort() error {
	if s.done {
		return nil
	}
	s.done = true
	err := s.closeTable()
	// Its checkpoint goes first: a crash in the midst of this leaves nothing to go on from.
	if rerr := s.e.fs.Remove(s.e.fs.PathJoin(s.dir, checkpointFile)); rerr != nil && !errors.Is(rerr, fs.ErrNotExist) {
		err = errors.Join(err, openError(s.dir, rerr))
	}
	if rerr := s.e.fs.RemoveAll(s.dir); rerr != nil {
		err = errors.Join(err, openError(s.dir, rerr))
	}
	return err
}
