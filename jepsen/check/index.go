package check

import (
	"cmp"
	"math"
	"slices"
	"strings"

	"github.com/kvd-io/kvd/jepsen/history"
)

// write is what is known of one write.
type write struct {
	op      *history.Op
	version uint64 // 0: not known
}

// key is all that was done to one key.
type key struct {
	name  string
	shard uint32
	first int64 // when the first write was called; 0: none
	// strong are the linearizable operations, lists and manys taken apart; weak are
	// reads of other levels.
	strong, weak []*history.Op
	// writes that have a known version, in the order of their versions.
	versions []write
	// openDels are deletes of unknown fate: their versions cannot be known.
	openDels []*history.Op
	valueOf  map[uint64]uint64 // value by version
}

// index is a history by keys, with what the reads tell about the writes.
type index struct {
	keys    map[string]*key
	names   []string               // sorted
	written map[uint64]*history.Op // by value
	bad     []Finding
}

func newIndex(h *history.History) *index {
	x := &index{keys: map[string]*key{}, written: map[uint64]*history.Op{}}
	for _, op := range h.Ops {
		if op.Kind.Writes() {
			if k := x.key(op.Key, op.Shard); k.first == 0 || op.Call < k.first {
				k.first = op.Call
			}
			if op.Kind.Stores() {
				x.written[op.Value] = op
			}
		}
	}
	for _, op := range h.Ops {
		x.add(op)
	}
	x.names = make([]string, 0, len(x.keys))
	for name := range x.keys {
		x.names = append(x.names, name)
	}
	slices.Sort(x.names)
	x.sanity()
	x.resolve()
	return x
}

func (x *index) key(name string, shard uint32) *key {
	k := x.keys[name]
	if k == nil {
		k = &key{name: name, valueOf: map[uint64]uint64{}}
		x.keys[name] = k
	}
	if shard != 0 {
		k.shard = shard
	}
	return k
}

func (x *index) add(op *history.Op) {
	switch op.Kind {
	case history.List:
		x.addList(op)
	case history.Many:
		if op.Outcome == history.OK && len(op.Items) < len(op.Keys) {
			x.report(KindSanity, op, op.Keys[len(op.Items)], "a GetMany of %d keys has %d answers: want one for each key, in their order", len(op.Keys), len(op.Items))
		}
		for i, it := range op.Items {
			if op.Outcome != history.OK || it.Failed {
				continue
			}
			one := *op
			one.Kind, one.Key, one.Keys, one.Items = history.Get, it.Key, nil, nil
			one.Got, one.Version, one.Bad, one.Shard = it.Got, it.Version, it.Bad, it.Shard
			if it.Got == 0 && it.Bad == "" {
				one.Outcome = history.Absent
			}
			if i >= len(op.Keys) || op.Keys[i] != it.Key {
				x.report(KindSanity, op, it.Key, "the answer at %d of a GetMany belongs to another key", i)
			}
			x.place(&one)
		}
	default:
		x.place(op)
	}
}

func (x *index) place(op *history.Op) {
	k := x.key(op.Key, op.Shard)
	if op.Level == "" {
		k.strong = append(k.strong, op)
	} else {
		k.weak = append(k.weak, op)
	}
}

// addList takes a list apart: each page is linearizable, so for every key in the range
// that the list covers it is a get that ran as long as the list. A key that was not in
// the list was absent at one moment.
func (x *index) addList(op *history.Op) {
	if op.Outcome != history.OK {
		return // what an unfinished list showed is dropped, like a failed read
	}
	last := op.After
	seen := map[string]bool{}
	for _, it := range op.Items {
		if !strings.HasPrefix(it.Key, op.Key) || (op.After != "" && it.Key <= op.After) {
			x.report(KindList, op, it.Key, "list of %q behind %q shows %q, which is not in that range", op.Key, op.After, it.Key)
		}
		if it.Key <= last {
			x.report(KindList, op, it.Key, "list of %q shows %q behind %q: not in order, or twice", op.Key, it.Key, last)
		}
		last = it.Key
		seen[it.Key] = true
		one := *op
		one.Kind, one.Key, one.Items, one.After = history.Get, it.Key, nil, ""
		one.Got, one.Version, one.Bad, one.Shard = it.Got, it.Version, it.Bad, it.Shard
		x.place(&one)
	}
	if op.Limit > 0 && len(op.Items) > op.Limit {
		x.report(KindList, op, op.Key, "list of %q shows %d keys: want at most %d", op.Key, len(op.Items), op.Limit)
	}
	whole := op.Limit == 0 || len(op.Items) < op.Limit
	for name, k := range x.keys {
		inRange := strings.HasPrefix(name, op.Key) && (op.After == "" || name > op.After) && (whole || name <= last)
		if !inRange || seen[name] || k.first > op.Return {
			continue
		}
		one := *op
		one.Kind, one.Key, one.Items, one.After, one.Outcome, one.Shard = history.Get, name, nil, "", history.Absent, k.shard
		x.place(&one)
	}
}

// resolve learns the versions of writes of unknown fate from those who saw their
// values, and sorts what is known by version.
func (x *index) resolve() {
	for _, name := range x.names {
		k := x.keys[name]
		seenAt := map[uint64]uint64{} // version by value
		seenBy := map[uint64]int64{}  // by value: when the first strong read of it returned
		for _, op := range slices.Concat(k.strong, k.weak) {
			if op.Kind == history.Get && op.Outcome == history.OK && op.Bad == "" {
				seenAt[op.Got] = op.Version
				k.valueOf[op.Version] = op.Got
				// A follower may show an entry before its leader does, so only strong reads
				// prove that the write has had its moment.
				if first, ok := seenBy[op.Got]; op.Level == "" && (!ok || op.Return < first) {
					seenBy[op.Got] = op.Return
				}
			}
		}
		for i, op := range k.strong {
			if !op.Kind.Writes() {
				continue
			}
			v := uint64(0)
			switch op.Outcome {
			case history.OK:
				v = op.Version
			case history.Unknown:
				if op.Kind.Stores() {
					v = seenAt[op.Value]
				} else {
					k.openDels = append(k.openDels, op)
				}
				if v != 0 {
					known := *op // the history itself stays as it was recorded
					known.Version, known.Return = v, math.MaxInt64
					if first, ok := seenBy[op.Value]; ok {
						known.Return = first
					}
					k.strong[i] = &known
				}
			}
			if v != 0 {
				k.versions = append(k.versions, write{op, v})
				if op.Kind.Stores() {
					k.valueOf[v] = op.Value
				}
			}
		}
		slices.SortFunc(k.versions, func(a, b write) int { return cmp.Compare(a.version, b.version) })
	}
}

// at is the newest known write whose version is at most idx; nil: none.
func (k *key) at(idx uint64) *write {
	i, found := slices.BinarySearchFunc(k.versions, idx, func(w write, v uint64) int { return cmp.Compare(w.version, v) })
	if !found {
		i--
	}
	if i < 0 {
		return nil
	}
	return &k.versions[i]
}
