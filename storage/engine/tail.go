package engine

import (
	"sync/atomic"

	"go.etcd.io/raft/v3/raftpb"
)

const (
	// A group keeps at most this much, so that one busy group does not push out the
	// others.
	tailGroupBytes = 8 << 20
	// When all groups together are over the budget, each still keeps this much.
	tailKeepBytes = 64 << 10
	// What an entry takes besides its data.
	tailEntryBytes = 128
)

// tail caches the newest entries of one group, so that replication and applying do
// not read Pebble. It is guarded by its logGroup's lock.
//
// Invariant: entries are contiguous; if there are any, the last one is the log's
// last entry.
type tail struct {
	entries []*raftpb.Entry
	bytes   int64
	total   *atomic.Int64 // of all groups
	budget  int64
}

func entrySize(e *raftpb.Entry) int64 { return int64(len(e.GetData())) + tailEntryBytes }

// add appends entries after cutting what they overwrite.
func (t *tail) add(entries []*raftpb.Entry) {
	if len(entries) == 0 {
		return
	}
	t.cutFrom(entries[0].GetIndex())
	if n := len(t.entries); n > 0 && t.entries[n-1].GetIndex()+1 != entries[0].GetIndex() {
		t.clear()
	}
	grown := int64(0)
	for _, e := range entries {
		grown += entrySize(e)
	}
	t.entries = append(t.entries, entries...)
	t.account(grown)
	drop := 0
	left, total := t.bytes, t.total.Load()
	for drop < len(t.entries) && (left > tailGroupBytes || total > t.budget && left > tailKeepBytes) {
		size := entrySize(t.entries[drop])
		left, total, drop = left-size, total-size, drop+1
	}
	t.dropFront(drop)
}

func (t *tail) account(bytes int64) {
	t.bytes += bytes
	t.total.Add(bytes)
}

// cutFrom removes the entries at and above index.
func (t *tail) cutFrom(index uint64) {
	n := len(t.entries)
	for n > 0 && t.entries[n-1].GetIndex() >= index {
		n--
		t.account(-entrySize(t.entries[n]))
		t.entries[n] = nil
	}
	t.entries = t.entries[:n]
}

// cutTo removes the entries up to index.
func (t *tail) cutTo(index uint64) {
	if len(t.entries) == 0 {
		return
	}
	if first := t.entries[0].GetIndex(); index >= first {
		t.dropFront(int(min(index-first+1, uint64(len(t.entries)))))
	}
}

func (t *tail) dropFront(n int) {
	for i := range n {
		t.account(-entrySize(t.entries[i]))
		t.entries[i] = nil
	}
	t.entries = t.entries[n:]
}

func (t *tail) clear() {
	t.account(-t.bytes)
	t.entries = nil
}

// slice returns a copy of [lo, hi) up to maxBytes of data but at least one, or nil
// where lo is not cached.
func (t *tail) slice(lo, hi, maxBytes uint64) []*raftpb.Entry {
	i, ok := t.position(lo)
	if !ok {
		return nil
	}
	end, size := i, uint64(0)
	for end < len(t.entries) && lo+uint64(end-i) < hi {
		size += uint64(entrySize(t.entries[end]))
		if end > i && size > maxBytes {
			break
		}
		end++
	}
	return append([]*raftpb.Entry(nil), t.entries[i:end]...)
}

func (t *tail) term(index uint64) (uint64, bool) {
	i, ok := t.position(index)
	if !ok {
		return 0, false
	}
	return t.entries[i].GetTerm(), true
}

func (t *tail) position(index uint64) (int, bool) {
	if len(t.entries) == 0 {
		return 0, false
	}
	first := t.entries[0].GetIndex()
	if index < first || index-first >= uint64(len(t.entries)) {
		return 0, false
	}
	return int(index - first), true
}
