package engine

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"
)

// Check verifies the engine's invariants, for tests: every value's check sum, meta
// counts against the data, log continuity, the cached tails against the disk. Nothing
// may be written meanwhile.
func (e *Engine) Check() error {
	if err := e.usable(); err != nil {
		return err
	}
	return errors.Join(e.checkState(), e.checkLog())
}

func (e *Engine) checkState() error {
	type counts struct {
		meta        *Meta
		keys, bytes uint64
	}
	groups := make(map[uint64]*counts)
	err := e.iterateAll(e.state, func(raw, value []byte) error {
		if err := verifyPair(raw, value); err != nil {
			return err
		}
		group := binary.BigEndian.Uint64(raw)
		c := groups[group]
		if c == nil {
			c = &counts{}
			groups[group] = c
		}
		switch raw[groupLen] {
		case stateMeta:
			m, err := decodeMeta(raw, value)
			c.meta = &m
			return err
		case stateKV:
			c.keys++
			c.bytes += uint64(len(raw) - kvPrefixLen + len(value) - valueHeaderLen)
		}
		return nil
	})
	if err != nil {
		return err
	}
	for group, c := range groups {
		what := fmt.Sprintf("state of group %d", group)
		if c.meta == nil {
			return corrupt(what, errors.New("data without a meta record"))
		}
		if c.meta.Keys != c.keys || c.meta.Bytes != c.bytes {
			return corrupt(what, fmt.Errorf("%d keys of %d bytes, its meta says %d of %d", c.keys, c.bytes, c.meta.Keys, c.meta.Bytes))
		}
	}
	return nil
}

func (e *Engine) checkLog() error {
	next := make(map[uint64]uint64) // index after the last one seen
	err := e.iterateAll(e.log, func(raw, value []byte) error {
		group := binary.BigEndian.Uint64(raw)
		what := fmt.Sprintf("log of group %d, key %x", group, raw)
		if raw[groupLen] != logEntry {
			if _, err := unseal(raw, value); err != nil {
				return corrupt(what, err)
			}
			return nil
		}
		entry, err := decodeEntry(raw, value)
		if err != nil {
			return corrupt(what, err)
		}
		if want, ok := next[group]; ok && entry.GetIndex() != want {
			return corrupt(what, fmt.Errorf("entry %d where %d was expected", entry.GetIndex(), want))
		}
		next[group] = entry.GetIndex() + 1
		return nil
	})
	if err != nil {
		return err
	}
	e.mu.Lock()
	groups := make([]*logGroup, 0, len(e.mu.logs))
	for _, g := range e.mu.logs {
		groups = append(groups, g)
	}
	e.mu.Unlock()
	for _, g := range groups {
		if err := e.checkLogGroup(g); err != nil {
			return err
		}
	}
	return nil
}

// checkLogGroup compares what is in memory with what is on disk.
func (e *Engine) checkLogGroup(g *logGroup) error {
	st, err := e.readLogState(g.id)
	if err != nil {
		return err
	}
	g.mu.RLock()
	defer g.mu.RUnlock()
	if !g.mu.loaded {
		return nil
	}
	what := fmt.Sprintf("log of group %d", g.id)
	if m := g.mu.LogState; m.Truncated != st.Truncated || m.TruncatedTerm != st.TruncatedTerm || m.Last != st.Last {
		return corrupt(what, fmt.Errorf("memory has %+v, disk %+v", m, st))
	}
	bytes := int64(0)
	for _, c := range g.mu.tail.entries {
		bytes += entrySize(c)
		disk, err := e.readEntries(g.id, c.GetIndex(), c.GetIndex()+1, 0)
		if err != nil {
			return err
		}
		if len(disk) != 1 || disk[0].GetTerm() != c.GetTerm() || string(disk[0].GetData()) != string(c.GetData()) {
			return corrupt(what, fmt.Errorf("cached entry %d differs from the disk", c.GetIndex()))
		}
	}
	if n := len(g.mu.tail.entries); n > 0 && g.mu.tail.entries[n-1].GetIndex() != st.Last {
		return corrupt(what, fmt.Errorf("cache ends at %d, log at %d", g.mu.tail.entries[n-1].GetIndex(), st.Last))
	}
	if bytes != g.mu.tail.bytes {
		return corrupt(what, fmt.Errorf("cache counts %d bytes, has %d", g.mu.tail.bytes, bytes))
	}
	return nil
}

func (e *Engine) iterateAll(db *pebble.DB, f func(raw, value []byte) error) error {
	it, err := db.NewIter(nil)
	if err != nil {
		return storeError("check", err)
	}
	err = eachPair(it, func(raw, value []byte) (bool, error) {
		if len(raw) < groupLen+1 {
			return false, corrupt(describeKey(raw), errors.New("too short"))
		}
		return true, f(raw, value)
	})
	return cmp.Or(err, storeError("check", it.Close()))
}
