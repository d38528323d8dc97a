package engine

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strconv"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// checkpointFile of a staging says what of it is durable. It is written anew, under
// another name first, at each Checkpoint: there is never half of it.
const checkpointFile = "CHECKPOINT"

// checkpoint is what the file holds, behind a check sum that is seeded with its name.
type checkpoint struct {
	Group       uint64
	Tables      []int64 // their lengths, in order
	Last        []byte  // raw key
	Keys, Bytes uint64
	Meta        []byte `json:",omitempty"`
	Note        []byte `json:",omitempty"`
}

// Checkpoint makes durable what was added so far, with a note of the owner's: after a
// crash the staging goes on from here, if Open keeps stagings. It ends the table that is
// being written, so it should not follow the last one by too little.
func (s *Staging) Checkpoint(note []byte) error {
	if s.finished || s.done {
		return errors.New("engine: staging: Checkpoint after Finish")
	}
	if err := s.closeTable(); err != nil {
		return err
	}
	c := checkpoint{Group: s.group, Last: s.last, Keys: s.keys, Bytes: s.bytes, Note: note}
	f := s.e.fs
	for _, path := range s.tables {
		info, err := f.Stat(path)
		if err != nil {
			return openError(path, err)
		}
		c.Tables = append(c.Tables, info.Size())
	}
	if s.meta != nil {
		var err error
		if c.Meta, err = encodeMeta(s.metaKey(), *s.meta); err != nil {
			return err
		}
	}
	b, err := json.Marshal(c)
	if err != nil {
		return fmt.Errorf("engine: encoding a checkpoint: %w", err)
	}
	b = append(make([]byte, sumLen), b...)
	seal([]byte(checkpointFile), b)
	path := f.PathJoin(s.dir, checkpointFile)
	file, err := f.Create(path+".tmp", "kvd-staging")
	if err != nil {
		return openError(path, err)
	}
	_, err = file.Write(b)
	if err == nil {
		err = file.Sync()
	}
	if err = errors.Join(err, file.Close()); err != nil {
		return openError(path, err)
	}
	// Should a crash keep this and lose a table's entry, nothing is gone on with.
	if err := f.Rename(path+".tmp", path); err != nil {
		return openError(path, err)
	}
	if err := syncDir(f, s.dir); err != nil {
		return err
	}
	s.unsaved, s.note = 0, note
	return nil
}

func (s *Staging) metaKey() []byte { return appendGroup(nil, s.group, stateMeta) }

// Unsaved is how many bytes were added since the last checkpoint.
func (s *Staging) Unsaved() int { return s.unsaved }

// Group whose state is being received.
func (s *Staging) Group() uint64 { return s.group }

// Note of the last checkpoint.
func (s *Staging) Note() []byte { return s.note }

// Last is the key of the last pair, as Add was given it; nil: there is none.
func (s *Staging) Last() []byte {
	if s.last == nil {
		return nil
	}
	return s.last[groupLen:]
}

// Leave gives the staging up and keeps its files, up to the last checkpoint, for the
// next Open.
func (s *Staging) Leave() error {
	if s.done {
		return nil
	}
	s.done = true
	return s.closeTable()
}

// KeptStagings hands over, once, the stagings that Open kept: go on with them, or Abort
// them.
func (e *Engine) KeptStagings() []*Staging {
	e.mu.Lock()
	defer e.mu.Unlock()
	kept := e.mu.kept
	e.mu.kept = nil
	return kept
}

// findStagings looks at what an earlier run left behind. What can not be gone on with is
// removed; that is no failure: it is received again.
func (e *Engine) findStagings() error {
	root := e.fs.PathJoin(e.cfg.Dir, stagingDir)
	removed := func(path string) error {
		if err := e.fs.RemoveAll(path); err != nil {
			return fmt.Errorf("engine: removing old stagings: %w", err)
		}
		return nil
	}
	if !e.cfg.KeepStagings {
		return removed(root)
	}
	names, err := e.fs.List(root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return openError(root, err)
	}
	for _, name := range names {
		dir := e.fs.PathJoin(root, name)
		// No number is used twice in a directory: not that of one which is removed, either.
		_, after, _ := strings.Cut(name, "-")
		if n, err := strconv.ParseUint(after, 10, 64); err == nil {
			e.mu.nextStaging = max(e.mu.nextStaging, n)
		}
		s, err := e.reopenStaging(dir)
		if err != nil {
			e.cfg.Logger.Info("engine: what was received of a snapshot is not gone on with", "dir", dir, "why", err)
			if err := removed(dir); err != nil {
				return err
			}
			continue
		}
		e.mu.kept = append(e.mu.kept, s)
	}
	return nil
}

func (e *Engine) reopenStaging(dir string) (*Staging, error) {
	c, err := readCheckpoint(e.fs, e.fs.PathJoin(dir, checkpointFile))
	if err != nil {
		return nil, err
	}
	s := &Staging{e: e, group: c.Group, dir: dir, last: c.Last, keys: c.Keys, bytes: c.Bytes, note: c.Note}
	if c.Meta != nil {
		m, err := decodeMeta(s.metaKey(), c.Meta)
		if err != nil {
			return nil, err
		}
		s.meta = &m
	}
	for i, size := range c.Tables {
		path := s.tablePath(i)
		info, err := e.fs.Stat(path)
		if err != nil {
			return nil, err
		}
		if info.Size() != size {
			return nil, fmt.Errorf("%s has %d bytes, its checkpoint says %d", path, info.Size(), size)
		}
		s.tables = append(s.tables, path)
	}
	// What came after the checkpoint comes again; a table of the same name is made anew.
	return s, nil
}

func (s *Staging) tablePath(i int) string { return s.e.fs.PathJoin(s.dir, fmt.Sprintf("%06d.sst", i)) }

func readCheckpoint(f vfs.FS, path string) (c checkpoint, err error) {
	file, err := f.Open(path)
	if err != nil {
		return c, err
	}
	b, err := io.ReadAll(file)
	if err = errors.Join(err, file.Close()); err != nil {
		return c, err
	}
	p, err := unseal([]byte(checkpointFile), b)
	if err != nil {
		return c, fmt.Errorf("%s: %w", path, err)
	}
	return c, json.Unmarshal(p, &c)
}
