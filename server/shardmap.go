package server

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"

	"google.golang.org/protobuf/proto"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/storage/engine"
)

// shardMap is the part of group 0 that says of each shard where its replicas should be
// and where they were last known to be. What is true is in the shard's own group: its
// configuration. The wish outlives who had it, and the report lets a node find out that
// it has been left, and whom to ask.
type shardMap struct {
	manifest *kvdv1.Manifest
	onChange func() // must not block
	// known is replaced, never changed.
	known atomic.Pointer[map[uint32]*kvdv1.ShardRecord]
}

func newShardMap(m *kvdv1.Manifest, onChange func()) *shardMap {
	s := &shardMap{manifest: m, onChange: onChange}
	s.known.Store(&map[uint32]*kvdv1.ShardRecord{})
	return s
}

// wish returns where the shard's replicas should be; nil: where they are.
func (s *shardMap) wish(number uint32) []uint64 {
	return (*s.known.Load())[number].GetWish().GetNodes()
}

// whereabouts returns where they were last known to be.
func (s *shardMap) whereabouts(number uint32) *kvdv1.ShardReport {
	if r := (*s.known.Load())[number].GetReport(); r != nil {
		return r
	}
	voters, learners := manifestPlacement(s.manifest, uint64(number))
	return &kvdv1.ShardReport{Shard: number, ConfigId: 1, Voters: voters, Learners: learners}
}

// holds tells whether the node has a part in a configuration.
func holds(r *kvdv1.ShardReport, node uint64) bool {
	return slices.Contains(r.GetVoters(), node) || slices.Contains(r.GetVotersOutgoing(), node) || slices.Contains(r.GetLearners(), node)
}

func shardKey(number uint32) []byte { return binary.BigEndian.AppendUint32(nil, number) }

func (s *shardMap) load(eng *engine.Group) error {
	all := map[uint32]*kvdv1.ShardRecord{}
	err := eng.ScanAux(auxShard, nil, nil, func(key, value []byte) (bool, error) {
		r, err := decodeShardRecord(key, value)
		if err == nil {
			all[binary.BigEndian.Uint32(key)] = r
		}
		return err == nil, err
	})
	if err != nil {
		return err
	}
	s.known.Store(&all)
	s.onChange()
	return nil
}

// decodeShardRecord refuses, by ErrCorrupt, what apply can not have stored.
func decodeShardRecord(key, value []byte) (*kvdv1.ShardRecord, error) {
	r := &kvdv1.ShardRecord{}
	if err := proto.Unmarshal(value, r); err != nil {
		return nil, fmt.Errorf("%w: shard record: %w", engine.ErrCorrupt, err)
	}
	if len(key) != 4 || binary.BigEndian.Uint32(key) == 0 {
		return nil, fmt.Errorf("%w: a shard record has the key %x", engine.ErrCorrupt, key)
	}
	for _, of := range []uint32{r.GetWish().GetShard(), r.GetReport().GetShard()} {
		if of != 0 && of != binary.BigEndian.Uint32(key) {
			return nil, fmt.Errorf("%w: the record of shard %x is about shard %d", engine.ErrCorrupt, key, of)
		}
	}
	return r, nil
}

// apply is a function of the log alone.
func (s *shardMap) apply(b *engine.Batch, op *kvdv1.ShardOp) error {
	next := maps.Clone(*s.known.Load())
	changed := map[uint32]bool{}
	record := func(number uint32) *kvdv1.ShardRecord {
		changed[number] = true
		r := &kvdv1.ShardRecord{}
		if have := next[number]; have != nil {
			r = proto.Clone(have).(*kvdv1.ShardRecord)
		}
		next[number] = r
		return r
	}
	for _, w := range op.GetWishes() {
		if w.GetShard() != 0 && w.GetShard() <= s.manifest.GetShards() && len(w.GetNodes()) > 0 {
			record(w.GetShard()).Wish = w
		}
	}
	for _, r := range op.GetReports() {
		have := next[r.GetShard()].GetReport()
		if r.GetShard() != 0 && r.GetShard() <= s.manifest.GetShards() && len(r.GetVoters()) > 0 && r.GetConfigId() > have.GetConfigId() {
			record(r.GetShard()).Report = r
		}
	}
	for number := range changed {
		v, err := proto.Marshal(next[number])
		if err != nil {
			return fmt.Errorf("server: encode shard record: %w", err)
		}
		if err := b.PutAux(auxShard, shardKey(number), v); err != nil {
			return err
		}
	}
	s.known.Store(&next)
	s.onChange()
	return nil
}
