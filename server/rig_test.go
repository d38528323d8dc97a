package server

import (
	"fmt"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/storage/arena"
	"github.com/kvd-io/kvd/storage/engine"
	"github.com/kvd-io/kvd/storage/layout"
)

const rigSeed = 0x5eed

// rig is the content of one data shard with a real engine and a real arena, and
// nothing else: what Raft would call is called by the test.
type rig struct {
	t      testing.TB
	fs     *vfs.MemFS
	limits writerLimits
	bytes  uint64 // of the arena
	shards uint32

	eng    *engine.Engine
	arena  *arena.Arena
	record *arena.Record
	shard  *shard
}

func newRig(t testing.TB, limits writerLimits, arenaBytes uint64) *rig {
	r := &rig{t: t, fs: vfs.NewCrashableMem(), limits: limits, bytes: arenaBytes, shards: 1}
	r.open()
	t.Cleanup(r.close)
	return r
}

func (r *rig) open() {
	var err error
	r.eng, err = engine.Open(engine.Config{Dir: "data", FS: r.fs, CacheBytes: 1 << 20})
	require.NoError(r.t, err)
	r.arena, err = arena.New(arena.Config{HashSeed: rigSeed, BootID: 7, Shards: r.shards, Slots: 8, LimitBytes: r.bytes, Quarantine: time.Nanosecond})
	require.NoError(r.t, err)
	r.record, err = r.arena.NewRecord(1, 1, 1)
	require.NoError(r.t, err)
	g := r.eng.Group(1)
	meta, err := g.Meta()
	require.NoError(r.t, err)
	if meta.Conf == nil {
		b := g.NewBatch()
		require.NoError(r.t, b.SetMeta(engine.Meta{Applied: 1, AppliedTerm: 1, ConfigID: 1, Conf: &raftpb.ConfState{Voters: []uint64{1}}}))
		require.NoError(r.t, b.Commit())
		require.NoError(r.t, r.eng.Flush())
	}
	r.shard = newShard(1, keyPlace{rigSeed, r.shards}, g, r.arena, r.record, r.limits)
	st, err := r.shard.Open()
	require.NoError(r.t, err)
	require.Equal(r.t, st.Index, r.shard.appliedIndex())
}

func (r *rig) close() {
	require.NoError(r.t, r.shard.dropStaged())
	require.NoError(r.t, r.eng.Close())
	require.NoError(r.t, r.arena.Close())
}

// crash loses what was not synced and starts again.
func (r *rig) crash() {
	left := r.fs.CrashClone(vfs.CrashCloneCfg{})
	r.close()
	r.fs = left
	r.open()
}

// command encodes cmd as the entry at index.
func command(t testing.TB, index uint64, cmd *kvdv1.Command) raft.Entry {
	data, err := proto.Marshal(cmd)
	require.NoError(t, err)
	return raft.Entry{Index: index, Term: 1, Data: data}
}

func (r *rig) apply(entries ...raft.Entry) []any {
	results, err := r.shard.Apply(entries, entries[len(entries)-1].Index, 1)
	require.NoError(r.t, err)
	require.Len(r.t, results, len(entries))
	return results
}

// one applies a single command at the next index.
func (r *rig) one(cmd *kvdv1.Command) any {
	return r.apply(command(r.t, r.shard.appliedIndex()+1, cmd))[0]
}

func (r *rig) memory(namespace uint32) layout.Memory {
	chunks := map[rdma.RegionID]*rdma.Memory{}
	if n := r.arena.Namespace(namespace); n != nil {
		chunks = n.Chunks()
	}
	return func(chunk uint32, offset, length uint64) []byte {
		m := chunks[rdma.RegionID(chunk)]
		if m == nil || offset+length > m.Size() {
			return nil
		}
		return m.Bytes()[offset:][:length]
	}
}

// lookup finds a key the way a client does: from the address of the table, through
// registered memory alone.
func (r *rig) lookup(namespace uint32, key []byte) (layout.Object, layout.AnswerKind) {
	sp := r.shard.space(namespace)
	if sp == nil {
		return layout.Object{}, layout.AnswerAbsent
	}
	table, _, ok := sp.Table()
	if !ok {
		return layout.Object{}, layout.AnswerAbsent
	}
	answer := layout.DecodeAnswer(layout.AnswerQuery(r.memory(namespace), layout.AppendQuery(nil, table, rigSeed, key), nil))
	if answer.Kind != layout.AnswerFound {
		return layout.Object{}, answer.Kind
	}
	o, verdict := layout.DecodeObject(answer.Object, rigSeed, answer.Place)
	require.Equal(r.t, layout.Valid, verdict)
	require.Equal(r.t, layout.StateLive, o.State)
	require.Equal(r.t, string(key), string(o.Key))
	return o, answer.Kind
}

// items is everything that a snapshot of the shard would carry.
func (r *rig) items() []string {
	s, err := r.eng.Group(1).OpenSnapshot()
	require.NoError(r.t, err)
	defer func() { require.NoError(r.t, s.Close()) }()
	var all []string
	require.NoError(r.t, s.Items(func(k, v []byte) error {
		all = append(all, fmt.Sprintf("%x=%x", k, v))
		return nil
	}))
	return all
}

// send installs this rig's state on another, as a snapshot stream would.
func (r *rig) send(to *rig) {
	said, name := r.stage(to)
	st, err := to.shard.InstallSnapshot(said, name)
	require.NoError(r.t, err)
	require.Equal(r.t, said.GetIndex(), st.Index)
}

// stage sends this rig's state to another, which does not install it yet.
func (r *rig) stage(to *rig) (said *raftpb.SnapshotMetadata, name []byte) {
	s, err := r.eng.Group(1).OpenSnapshot()
	require.NoError(r.t, err)
	staging, err := to.eng.NewStaging(1)
	require.NoError(r.t, err)
	require.NoError(r.t, s.Items(func(k, v []byte) error {
		if it, ok := engine.DecodeItem(k, v); ok {
			if err := to.shard.check(it); err != nil {
				return err
			}
		}
		return staging.Add(k, v)
	}))
	require.NoError(r.t, staging.Finish())
	meta := s.Meta()
	require.NoError(r.t, s.Close())
	said = &raftpb.SnapshotMetadata{Index: &meta.Applied, Term: &meta.AppliedTerm, ConfState: meta.Conf}
	require.NoError(r.t, sameState(said, staging.Meta()))
	return said, to.shard.stage(staging, meta.Applied)
}

func put(namespace uint32, key, value string) *kvdv1.PutOp {
	return &kvdv1.PutOp{NamespaceId: namespace, Key: []byte(key), Value: []byte(value)}
}

func putCommand(now int64, op *kvdv1.PutOp) *kvdv1.Command {
	return &kvdv1.Command{LeaderUnixMs: now, Op: &kvdv1.Command_Put{Put: op}}
}

func deleteCommand(now int64, op *kvdv1.DeleteOp) *kvdv1.Command {
	return &kvdv1.Command{LeaderUnixMs: now, Op: &kvdv1.Command_Delete{Delete: op}}
}

func openWriterCommand(now int64) *kvdv1.Command {
	return &kvdv1.Command{LeaderUnixMs: now, Op: &kvdv1.Command_OpenWriter{OpenWriter: &kvdv1.OpenWriterOp{}}}
}

func expireCommand(now int64, op *kvdv1.ExpireOp) *kvdv1.Command {
	return &kvdv1.Command{LeaderUnixMs: now, Op: &kvdv1.Command_Expire{Expire: op}}
}
