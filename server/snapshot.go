package server

import (
	"context"
	"encoding/binary"
	"time"

	"github.com/zeebo/xxh3"
	"golang.org/x/time/rate"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

const (
	snapshotFormat = 1
	// snapshotChunkBytes is about how much one message of a snapshot stream carries.
	snapshotChunkBytes = 1 << 20
	// snapshotSaveBytes is what a receiver takes in between two checkpoints: what comes
	// again when it dies. A stream that breaks costs nothing, for then it saves.
	snapshotSaveBytes = 32 << 20
	// snapshotMarkBytes is what a sender sends between two positions that it remembers.
	snapshotMarkBytes = 16 << 20
	// snapshotStall is how long a receiver may take nothing until its stream is ended: it
	// holds up the snapshots of all other groups.
	snapshotStall = time.Minute
	// A sender keeps a snapshot whose stream broke for outgoingKept, in which Raft asks for
	// it again some times if the follower lives, and none beyond outgoingAge; a receiver
	// keeps what came a little longer. Both keep so many at most, the youngest.
	outgoingKept = time.Minute
	outgoingAge  = time.Hour
	maxOutgoing  = 4
	incomingKept = 2 * time.Minute
	maxIncoming  = 4
)

// snapshotHash is the check sum of a stream: all items in order, with their lengths.
type snapshotHash struct{ h *xxh3.Hasher }

func newSnapshotHash() snapshotHash { return snapshotHash{xxh3.New()} }

func (s snapshotHash) add(key, value []byte) {
	var n [8]byte
	binary.LittleEndian.PutUint32(n[:], uint32(len(key)))
	binary.LittleEndian.PutUint32(n[4:], uint32(len(value)))
	_, _ = s.h.Write(n[:])
	_, _ = s.h.Write(key)
	_, _ = s.h.Write(value)
}

// snapshotPosition is how far a snapshot came: so many items, up to that key, with that
// sum over all of them. Other than a hash in progress it can be written down.
type snapshotPosition struct {
	Items uint64
	Key   []byte
	Sum   uint64
}

// add goes on by an item. The key is borrowed.
func (p *snapshotPosition) add(key, value []byte) {
	p.Items++
	p.Key = append(p.Key[:0], key...)
	p.Sum = xxh3.HashSeed(value, xxh3.HashSeed(key, p.Sum))
}

func (p snapshotPosition) clone() snapshotPosition {
	p.Key = append([]byte(nil), p.Key...)
	return p
}

// same tells whether two nodes came equally far with equal items.
func (p snapshotPosition) same(q snapshotPosition) bool {
	return p.Items == q.Items && p.Sum == q.Sum && string(p.Key) == string(q.Key)
}

// snapshotName tells snapshots apart, of all nodes and boots. Number 0 has none: its sender
// is of an older version and does not go on with it.
type snapshotName struct {
	Node, Incarnation, Boot, Number uint64
}

func nameOf(from *kvdv1.Identity, number uint64) snapshotName {
	return snapshotName{from.GetNodeId(), from.GetIncarnation(), from.GetBootId(), number}
}

// pace bounds what a node sends of snapshots, to all others together.
type pace struct {
	limiter *rate.Limiter // nil: no bound
	waited  func(time.Duration)
}

func newPace(bytes int64, waited func(time.Duration)) *pace {
	p := &pace{waited: waited}
	if bytes > 0 {
		// An eighth of a second at once: foreground traffic has its turn in between.
		p.limiter = rate.NewLimiter(rate.Limit(bytes), int(min(bytes/8, 4<<20)))
	}
	return p
}

// wait returns when so many bytes may leave.
func (p *pace) wait(ctx context.Context, bytes int) error {
	if p.limiter == nil {
		return ctx.Err()
	}
	began := time.Now()
	defer func() { p.waited(time.Since(began)) }()
	for bytes > 0 {
		n := min(bytes, p.limiter.Burst())
		if err := p.limiter.WaitN(ctx, n); err != nil {
			return err
		}
		bytes -= n
	}
	return nil
}
