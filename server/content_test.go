package server

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
	"github.com/kvd-io/kvd/storage/engine"
	"github.com/kvd-io/kvd/storage/layout"
)

const (
	applied  = kvdv1.WriteOutcome_WRITE_OUTCOME_APPLIED
	conflict = kvdv1.WriteOutcome_WRITE_OUTCOME_CONFLICT
	notFound = kvdv1.WriteOutcome_WRITE_OUTCOME_NOT_FOUND
	gone     = kvdv1.WriteOutcome_WRITE_OUTCOME_WRITER_EXPIRED
)

// twin says, as plainly as possible, what a log means.
type twin struct {
	values  map[string]twinValue // by namespace/key
	writers map[uint64]*twinWriter
	limits  writerLimits
}

type twinValue struct {
	data      string
	version   uint64
	expiry    int64
	immutable bool
}

type twinWriter struct {
	lastUse int64
	acked   uint64
	results map[uint64]twinResult
}

type twinResult struct {
	outcome kvdv1.WriteOutcome
	version uint64
}

func newTwin(l writerLimits) *twin {
	return &twin{values: map[string]twinValue{}, writers: map[uint64]*twinWriter{}, limits: l}
}

func name(namespace uint32, key []byte) string { return fmt.Sprintf("%d/%s", namespace, key) }

func (t *twin) apply(index uint64, c *kvdv1.Command) any {
	now := c.GetLeaderUnixMs()
	switch {
	case c.GetPut() != nil:
		op := c.GetPut()
		return t.stamped(now, op.GetWriter(), func() twinResult { return t.put(index, now, op) })
	case c.GetDelete() != nil:
		op := c.GetDelete()
		return t.stamped(now, op.GetWriter(), func() twinResult { return t.delete(index, now, op) })
	case c.GetOpenWriter() != nil:
		if len(t.writers) >= t.limits.writers {
			ids := make([]uint64, 0, len(t.writers))
			for id := range t.writers {
				ids = append(ids, id)
			}
			slices.SortFunc(ids, func(a, b uint64) int {
				if x, y := t.writers[a].lastUse, t.writers[b].lastUse; x != y {
					return int(x - y)
				}
				return int(a) - int(b)
			})
			delete(t.writers, ids[0])
		}
		t.writers[index] = &twinWriter{lastUse: now, results: map[uint64]twinResult{}}
		return index
	default:
		op := c.GetExpire()
		for _, k := range op.GetKeys() {
			n := name(k.GetNamespaceId(), k.GetKey())
			if v, ok := t.values[n]; ok && v.version == k.GetVersion() && v.expiry != 0 {
				delete(t.values, n)
			}
		}
		for _, id := range op.GetWriters() {
			if w := t.writers[id]; w != nil && w.lastUse <= op.GetWritersIdleSinceUnixMs() {
				delete(t.writers, id)
			}
		}
		return nil
	}
}

func (t *twin) stamped(now int64, s *kvdv1.WriterStamp, write func() twinResult) twinResult {
	if s.GetWriterId() == 0 {
		return write()
	}
	w := t.writers[s.GetWriterId()]
	if w == nil || s.GetSequence() < w.acked {
		return twinResult{outcome: gone}
	}
	if r, ok := w.results[s.GetSequence()]; ok {
		return r
	}
	r := write()
	w.results[s.GetSequence()] = r
	w.acked = max(w.acked, min(s.GetAckedBelow(), s.GetSequence()))
	w.lastUse = max(w.lastUse, now)
	for {
		seqs := make([]uint64, 0, len(w.results))
		for q := range w.results {
			if q < w.acked {
				delete(w.results, q)
				continue
			}
			seqs = append(seqs, q)
		}
		if len(seqs) <= t.limits.results {
			return r
		}
		w.acked = slices.Min(seqs) + 1
	}
}

func (t *twin) live(n string, now int64) (twinValue, bool) {
	v, ok := t.values[n]
	return v, ok && (v.expiry == 0 || v.expiry > now)
}

func (t *twin) put(index uint64, now int64, op *kvdv1.PutOp) twinResult {
	n := name(op.GetNamespaceId(), op.GetKey())
	v, live := t.live(n, now)
	p := op.GetPrecondition()
	switch {
	case p.GetIfAbsent() && live, p.GetIfVersion() != 0 && live && v.version != p.GetIfVersion(),
		op.GetImmutable() && live && v.data != string(op.GetValue()):
		return twinResult{conflict, v.version}
	case p.GetIfVersion() != 0 && !live:
		return twinResult{conflict, 0}
	case op.GetImmutable() && live:
		return twinResult{applied, v.version}
	}
	t.values[n] = twinValue{string(op.GetValue()), index, op.GetExpiresUnixMs(), op.GetImmutable()}
	return twinResult{applied, index}
}

func (t *twin) delete(index uint64, now int64, op *kvdv1.DeleteOp) twinResult {
	n := name(op.GetNamespaceId(), op.GetKey())
	v, live := t.live(n, now)
	want := op.GetPrecondition().GetIfVersion()
	switch {
	case want != 0 && !live:
		return twinResult{conflict, 0}
	case want != 0 && v.version != want:
		return twinResult{conflict, v.version}
	case !live:
		return twinResult{outcome: notFound}
	case op.GetImmutable():
		return twinResult{conflict, v.version}
	}
	delete(t.values, n)
	return twinResult{applied, index}
}

// comparable takes from a result what all replicas have alike.
func comparable(r any) any {
	if w, ok := r.(writeResult); ok {
		return twinResult{w.outcome, w.version}
	}
	return r
}

// storyteller makes up a log.
type storyteller struct {
	*rand.Rand
	now     int64
	index   uint64
	keys    [][]byte
	twin    *twin
	writers []uint64
	stamped []*kvdv1.Command
}

const keyCount = 12

func newStoryteller(seed uint64, l writerLimits) *storyteller {
	s := &storyteller{Rand: rand.New(rand.NewPCG(seed, 1)), now: 1_000_000, index: 1, twin: newTwin(l)}
	for i := range keyCount {
		s.keys = append(s.keys, []byte(strings.Repeat("k", 1+i*7)+fmt.Sprint(i)))
	}
	return s
}

// Namespace 2 is immutable.
func (s *storyteller) place() (namespace uint32, key []byte) {
	return uint32(1 + s.IntN(2)), s.keys[s.IntN(keyCount)]
}

func (s *storyteller) version(namespace uint32, key []byte) uint64 {
	if v, ok := s.twin.values[name(namespace, key)]; ok && s.IntN(3) > 0 {
		return v.version
	}
	return 1 + s.Uint64N(s.index)
}

func (s *storyteller) stamp() *kvdv1.WriterStamp {
	if len(s.writers) == 0 || s.IntN(2) == 0 {
		return nil
	}
	id := s.writers[s.IntN(len(s.writers))]
	seq := 1 + s.Uint64N(12)
	if w := s.twin.writers[id]; w != nil && s.IntN(4) > 0 {
		for q := range w.results {
			seq = max(seq, q+1)
		}
	}
	return &kvdv1.WriterStamp{WriterId: id, Sequence: seq, AckedBelow: s.Uint64N(seq + 2)}
}

// next makes a command and tells the twin.
func (s *storyteller) next() (*kvdv1.Command, any) {
	s.index++
	s.now += s.Int64N(120) - 20 // leaders' clocks go back at times
	c := s.make()
	return c, s.twin.apply(s.index, c)
}

func (s *storyteller) make() *kvdv1.Command {
	namespace, key := s.place()
	switch x := s.IntN(100); {
	case x < 50:
		op := &kvdv1.PutOp{NamespaceId: namespace, Key: key, Immutable: namespace == 2, Writer: s.stamp()}
		op.Value = []byte(strings.Repeat(string('a'+rune(s.IntN(3))), s.IntN(4)*s.IntN(300)))
		if v, ok := s.twin.values[name(namespace, key)]; ok && s.IntN(2) == 0 {
			op.Value = []byte(v.data)
		}
		switch s.IntN(6) {
		case 0:
			op.Precondition = &kvdv1.Precondition{IfAbsent: true}
		case 1, 2:
			op.Precondition = &kvdv1.Precondition{IfVersion: s.version(namespace, key)}
		}
		if s.IntN(3) == 0 {
			op.ExpiresUnixMs = s.now + s.Int64N(1000)
		}
		c := putCommand(s.now, op)
		if op.Writer != nil {
			s.stamped = append(s.stamped, c)
		}
		return c
	case x < 68:
		op := &kvdv1.DeleteOp{NamespaceId: namespace, Key: key, Immutable: namespace == 2, Writer: s.stamp()}
		if s.IntN(3) == 0 {
			op.Precondition = &kvdv1.Precondition{IfVersion: s.version(namespace, key)}
		}
		c := deleteCommand(s.now, op)
		if op.Writer != nil {
			s.stamped = append(s.stamped, c)
		}
		return c
	case x < 80 && len(s.stamped) > 0:
		return s.stamped[max(0, len(s.stamped)-1-s.IntN(8))] // a retry, word for word
	case x < 88:
		s.writers = append(s.writers, s.index)
		if s.IntN(5) == 0 {
			s.writers = append(s.writers, s.index+1000) // never opened
		}
		return openWriterCommand(s.now)
	}
	op := &kvdv1.ExpireOp{WritersIdleSinceUnixMs: s.now - 300}
	for range s.IntN(6) {
		namespace, key := s.place()
		op.Keys = append(op.Keys, &kvdv1.ExpireOp_Key{NamespaceId: namespace, Key: key, Version: s.version(namespace, key)})
	}
	for _, id := range s.writers {
		if s.IntN(6) == 0 {
			op.Writers = append(op.Writers, id)
		}
	}
	return expireCommand(s.now, op)
}

// agree compares engine and registered memory with the twin.
func (r *rig) agree(s *storyteller) {
	r.t.Helper()
	require.Equal(r.t, s.index, r.shard.appliedIndex())
	require.Equal(r.t, s.index, r.record.Load().Applied)
	expiries := 0
	for namespace := uint32(1); namespace <= 2; namespace++ {
		for _, key := range s.keys {
			want, ok := s.twin.values[name(namespace, key)]
			v, stored, err := r.shard.eng.Get(namespace, key)
			require.NoError(r.t, err)
			require.Equal(r.t, ok, stored)
			o, found := r.lookup(namespace, key)
			if !ok {
				require.Equal(r.t, layout.AnswerAbsent, found)
				continue
			}
			require.Equal(r.t, layout.AnswerFound, found)
			flags := uint8(0)
			if want.immutable {
				flags = layout.FlagImmutable
			}
			if want.expiry != 0 {
				expiries++
			}
			require.Equal(r.t, engine.Value{Data: v.Data, Version: want.version, Expiry: want.expiry, Flags: flags}, v)
			require.Equal(r.t, want.data, string(v.Data))
			require.Equal(r.t, layout.Object{State: layout.StateLive, Flags: flags, Version: want.version, Expiry: want.expiry, Key: o.Key, Value: o.Value}, o)
			require.Equal(r.t, want.data, string(o.Value))
		}
	}
	r.agreeAux(s, expiries)
}

// agreeAux: the expiry index names exactly what expires, and writers are remembered as
// the twin has them, in memory and on disk.
func (r *rig) agreeAux(s *storyteller, expiries int) {
	r.t.Helper()
	require.NoError(r.t, r.shard.eng.ScanAux(auxExpiry, nil, nil, func(k, v []byte) (bool, error) {
		expiry, namespace, key, err := parseExpiryKey(k)
		require.NoError(r.t, err)
		require.Equal(r.t, expiry, s.twin.values[name(namespace, key)].expiry)
		expiries--
		return true, nil
	}))
	require.Zero(r.t, expiries)
	fresh := newWriters(r.limits)
	require.NoError(r.t, fresh.load(r.shard.eng))
	for _, ws := range []*writers{r.shard.writers, fresh} {
		require.Len(r.t, ws.mu.byID, len(s.twin.writers))
		for id, want := range s.twin.writers {
			w := ws.mu.byID[id]
			require.NotNil(r.t, w)
			require.Equal(r.t, want.lastUse, w.lastUse)
			require.Equal(r.t, want.acked, w.ackedBelow)
			require.Len(r.t, w.results, len(want.results))
			for q, res := range want.results {
				require.Equal(r.t, res, comparable(w.results[q]))
			}
		}
	}
}

var smallLimits = writerLimits{writers: 4, results: 3}

// A random log means the same to the shard and to the twin: results, engine, memory.
// Entries come in batches of any size, and again after crashes that lose what was
// not flushed. Another replica with other batches ends with the same bytes.
func TestContentAgreesWithTwin(t *testing.T) {
	seeds, entries := 4, 500
	if raceEnabled { // ten times as slow
		seeds, entries = 1, 120
	}
	for range seeds {
		seed := rand.Uint64()
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) { agreesWithTwin(t, seed, entries) })
	}
}

func agreesWithTwin(t *testing.T, seed uint64, entries int) {
	s := newStoryteller(seed, smallLimits)
	r, other := newRig(t, smallLimits, 64<<20), newRig(t, smallLimits, 64<<20)
	var log []raft.Entry
	var results []any
	replay := func(r *rig, from int) {
		got := r.apply(log[from:]...)
		for i := range got {
			if log[from+i].Index > 1 && got[i] != nil {
				require.Equal(t, results[from+i], comparable(got[i]), "entry %d", log[from+i].Index)
			}
		}
	}
	for len(log) < entries {
		from := len(log)
		for range 1 + s.IntN(5) {
			c, want := s.next()
			log, results = append(log, command(t, s.index, c)), append(results, want)
		}
		got := r.apply(log[from:]...)
		for i := range got {
			require.Equal(t, results[from+i], comparable(got[i]), "entry %d", log[from+i].Index)
		}
		r.agree(s)
		switch s.IntN(25) {
		case 0:
			require.NoError(t, r.eng.Flush())
		case 1:
			r.crash()
			// The log starts at or below what survived.
			replay(r, s.IntN(int(r.shard.appliedIndex())))
			r.agree(s)
		}
	}
	for from := 0; from < len(log); {
		to := min(len(log), from+1+s.IntN(40))
		got := other.apply(log[from:to]...)
		for i := range got {
			require.Equal(t, results[from+i], comparable(got[i]), "entry %d", log[from+i].Index)
		}
		from = to
	}
	other.agree(s)
	require.Equal(t, r.items(), other.items())

	third := newRig(t, smallLimits, 64<<20)
	third.one(putCommand(1, put(1, "only here", "old")))
	third.one(putCommand(1, put(3, "only here", "old")))
	third.one(putCommand(1, put(1, string(s.keys[0]), "old")))
	gen := third.record.Load().LayoutGen
	r.send(third)
	require.Greater(t, third.record.Load().LayoutGen, gen)
	require.Equal(t, r.items(), third.items())
	third.agree(s)
	for namespace := range uint32(4) {
		_, found := third.lookup(namespace, []byte("only here"))
		require.NotEqual(t, layout.AnswerFound, found, "what was there before is gone")
	}
	c, want := s.next()
	require.Equal(t, want, comparable(third.one(c)), "writers came with the snapshot")
	third.agree(s)
}

// Entries at or below the applied index are left out, whatever they say.
func TestAppliedEntriesAreSkipped(t *testing.T) {
	r := newRig(t, smallLimits, 16<<20)
	r.apply(command(t, 2, putCommand(1, put(1, "a", "first"))), command(t, 3, putCommand(1, put(1, "b", "x"))))
	got := r.apply(command(t, 2, putCommand(1, put(1, "a", "second"))), command(t, 3, putCommand(1, put(1, "b", "y"))),
		command(t, 4, putCommand(1, put(1, "c", "z"))))
	require.Equal(t, []any{nil, nil, twinResult{applied, 4}}, []any{got[0], got[1], comparable(got[2])})
	for key, want := range map[string]string{"a": "first", "b": "x", "c": "z"} {
		o, found := r.lookup(1, []byte(key))
		require.Equal(t, layout.AnswerFound, found)
		require.Equal(t, want, string(o.Value))
	}
	got = r.apply(command(t, 3, putCommand(1, put(1, "b", "y"))))
	require.Equal(t, []any{nil}, got)
	require.EqualValues(t, 4, r.shard.appliedIndex())
}

// What no client can have written is an error, not a panic, and changes nothing.
func TestForeignEntriesAndItems(t *testing.T) {
	r := newRig(t, smallLimits, 16<<20)
	r.shards = 4 // this is shard 1 of 4
	r.close()
	r.open()
	var mine, foreign []byte
	for i := 0; mine == nil || foreign == nil; i++ {
		key := fmt.Appendf(nil, "key-%d", i)
		if layout.HashKey(rigSeed, key).Shard(4) == 1 {
			mine = key
		} else {
			foreign = key
		}
	}
	r.one(putCommand(1, put(1, string(mine), "v")))
	before := r.items()
	for what, c := range map[string]*kvdv1.Command{
		"put of another shard":    putCommand(1, put(1, string(foreign), "v")),
		"delete of another shard": deleteCommand(1, &kvdv1.DeleteOp{NamespaceId: 1, Key: foreign}),
		"put without a key":       putCommand(1, put(1, "", "v")),
		"long key":                putCommand(1, put(1, strings.Repeat("k", layout.MaxKeySize+1), "v")),
		"no operation":            {LeaderUnixMs: 1},
		"namespace":               {Op: &kvdv1.Command_Namespace{Namespace: &kvdv1.NamespaceOp{}}},
	} {
		_, err := r.shard.Apply([]raft.Entry{command(t, 3, c)}, 3, 1)
		require.ErrorIs(t, err, engine.ErrCorrupt, what)
	}
	_, err := r.shard.Apply([]raft.Entry{{Index: 3, Term: 1, Data: []byte{0xff}}}, 3, 1)
	require.ErrorIs(t, err, engine.ErrCorrupt)
	// Naming a foreign key in an expiry is without effect.
	require.Nil(t, r.one(expireCommand(1, &kvdv1.ExpireOp{Keys: []*kvdv1.ExpireOp_Key{{NamespaceId: 1, Key: foreign, Version: 1}, {}}})))
	require.Equal(t, before[1:], r.items()[1:])

	for what, it := range map[string]engine.Item{
		"key of another shard": {Namespace: 1, Key: foreign},
		"no key":               {Namespace: 1},
		"short writer":         {Aux: auxWriter, Key: make([]byte, 8), Value: make([]byte, 3)},
		"short result":         {Aux: auxResult, Key: make([]byte, 8), Value: make([]byte, 12)},
	} {
		require.ErrorIs(t, r.shard.check(it), engine.ErrCorrupt, what)
	}
	require.NoError(t, r.shard.check(engine.Item{Namespace: 1, Key: mine}))
	require.NoError(t, r.shard.check(engine.Item{Aux: auxWriter, Key: make([]byte, 8), Value: make([]byte, 16)}))
	meta := metaContent{}
	require.ErrorIs(t, meta.check(engine.Item{Aux: auxNamespace, Value: []byte{0xff}}), engine.ErrCorrupt)
}

// A writer that uses the largest sequences leaves nothing behind when it is forgotten.
func TestForgottenWriterLeavesNothing(t *testing.T) {
	r := newRig(t, smallLimits, 16<<20)
	id := r.one(openWriterCommand(10)).(uint64)
	for _, seq := range []uint64{1, 2, ^uint64(0) - 1, ^uint64(0)} {
		op := put(1, "a", fmt.Sprint(seq))
		op.Writer = &kvdv1.WriterStamp{WriterId: id, Sequence: seq}
		require.Equal(t, applied, r.one(putCommand(10, op)).(writeResult).outcome)
	}
	r.one(expireCommand(20, &kvdv1.ExpireOp{Writers: []uint64{id, 999}, WritersIdleSinceUnixMs: 10}))
	for _, kind := range []byte{auxWriter, auxResult} {
		require.NoError(t, r.shard.eng.ScanAux(kind, nil, nil, func(k, _ []byte) (bool, error) {
			t.Errorf("%c record %x is left", kind, k)
			return true, nil
		}))
	}
}

// Group 0 gives out ids in order, refuses a name twice, and finds all again.
func TestNamespacesContent(t *testing.T) {
	r := newRig(t, smallLimits, 16<<20)
	g := r.eng.Group(0)
	b := g.NewBatch()
	require.NoError(t, b.SetMeta(engine.Meta{Applied: 1, AppliedTerm: 1, ConfigID: 1, Conf: r.shard.meta.Conf}))
	require.NoError(t, putNamespace(b, &kvdv1.NamespaceInfo{Id: 1, Name: DefaultNamespace, OneSided: true}))
	require.NoError(t, b.Commit())
	open := func() (*namespaces, *machine) {
		n := newNamespaces(r.arena)
		m := newMachine(0, g)
		m.content = metaContent{n, newTokens(nil), newRegistry(&kvdv1.Manifest{}, func(uint64, []*kvdv1.NodeRecord) {}), newShardMap(&kvdv1.Manifest{}, func() {}), g}
		_, err := m.Open()
		require.NoError(t, err)
		return n, m
	}
	create := func(name string) *kvdv1.Command {
		return &kvdv1.Command{Op: &kvdv1.Command_Namespace{Namespace: &kvdv1.NamespaceOp{Create: &kvdv1.NamespaceInfo{Name: name, Immutable: true}}}}
	}
	n, m := open()
	got, err := m.Apply([]raft.Entry{command(t, 2, create("a")), command(t, 3, create("b")), command(t, 4, create("a"))}, 4, 1)
	require.NoError(t, err)
	require.EqualValues(t, 2, got[0].(namespaceResult).info.GetId())
	require.EqualValues(t, 3, got[1].(namespaceResult).info.GetId())
	require.True(t, got[2].(namespaceResult).existed)
	require.EqualValues(t, 2, got[2].(namespaceResult).info.GetId())
	for _, c := range []*kvdv1.Command{putCommand(1, put(1, "a", "b")), {Op: &kvdv1.Command_Namespace{Namespace: &kvdv1.NamespaceOp{}}}} {
		_, err := m.Apply([]raft.Entry{command(t, 5, c)}, 5, 1)
		require.ErrorIs(t, err, engine.ErrCorrupt)
	}
	again, _ := open()
	require.Len(t, again.list(), 3)
	for i, ns := range n.list() {
		require.True(t, proto.Equal(ns, again.list()[i]))
	}
	require.NotNil(t, r.arena.Namespace(3), "the arena knows it")
}
