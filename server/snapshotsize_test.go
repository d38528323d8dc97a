package server

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	runtimemetrics "runtime/metrics"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
	"github.com/kvd-io/kvd/storage/engine"
)

// snapshotBytes is how large a shard TestSnapshotSize moves.
var snapshotBytes = flag.Int64("snapshot.bytes", 96<<20, "size of the shard that is moved")

// sizeOldBytes is what the receiver has of the shard before.
const sizeOldBytes = 4 << 20

// peaks of a process while a snapshot moves.
type peaks struct {
	HeapBytes uint64 // what the collector found in use in Go's heap
	RSSBytes  uint64 // all of the process, the memory that clients read included
	RSSBefore uint64
	DiskBytes uint64 // below its data directory
}

// watchPeaks samples until it is told to end.
func watchPeaks(dir string) (end func() peaks) {
	var p peaks
	stop, done := make(chan struct{}), make(chan struct{})
	debug.FreeOSMemory()
	// What VmHWM remembers begins here.
	_ = os.WriteFile("/proc/self/clear_refs", []byte("5"), 0)
	p.RSSBefore = residentBytes("VmRSS:")
	go func() {
		defer close(done)
		tick := time.NewTicker(2 * time.Millisecond)
		defer tick.Stop()
		sample := []runtimemetrics.Sample{{Name: "/gc/heap/live:bytes"}} // without garbage, of which a slow collector leaves more
		for n := 0; ; n++ {
			runtimemetrics.Read(sample)
			p.HeapBytes = max(p.HeapBytes, sample[0].Value.Uint64())
			if n%25 == 0 {
				p.DiskBytes = max(p.DiskBytes, diskBytes(dir))
			}
			select {
			case <-tick.C:
			case <-stop:
				return
			}
		}
	}()
	return func() peaks {
		close(stop)
		<-done
		p.RSSBytes = residentBytes("VmHWM:")
		return p
	}
}

func diskBytes(dir string) (sum uint64) {
	seen := map[uint64]bool{} // a table that is ingested has two names for a moment
	_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil // files come and go
		}
		if info, err := d.Info(); err == nil {
			st := info.Sys().(*syscall.Stat_t)
			if !seen[st.Ino] {
				seen[st.Ino] = true
				sum += uint64(st.Blocks) * 512
			}
		}
		return nil
	})
	return sum
}

// residentBytes is 0 where the system does not tell.
func residentBytes(which string) uint64 {
	b, _ := os.ReadFile("/proc/self/status")
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, which); ok {
			n, _ := strconv.ParseUint(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 10, 64)
			return n << 10
		}
	}
	return 0
}

const (
	sizeIndex = 1 << 20 // of the snapshot
	// sizeRate gives the collector time, also under the race detector and beside other work:
	// what is made while it looks counts as found.
	sizeRate = 16 << 20
)

// sizeCore opens a node of three whose one shard has so many bytes, at the index.
func sizeCore(t *testing.T, id uint64, dir string, index uint64, bytes int64, change func(*CoreConfig)) *Core {
	m := &kvdv1.Manifest{Format: 1, ClusterId: "0123456789abcdef", HashSeed: rigSeed, Shards: 1, Replication: 3}
	for i := range uint64(3) {
		m.Nodes = append(m.Nodes, &kvdv1.ManifestNode{NodeId: i + 1, Incarnation: 100 + i, Address: fmt.Sprint("node-", i+1, ":1")})
	}
	e, err := engine.Open(engine.Config{Dir: dir})
	require.NoError(t, err)
	conf := &raftpb.ConfState{Voters: []uint64{1, 2, 3}}
	g := e.Group(1)
	rnd := rand.NewChaCha8([32]byte{byte(id)})
	value := make([]byte, 16<<10)
	for n := int64(0); n < bytes; {
		b := g.NewBatch()
		for range 256 {
			_, _ = rnd.Read(value) // nothing compresses it
			require.NoError(t, b.Put(1, fmt.Appendf(nil, "key-%08d", n/int64(len(value))), engine.Value{Data: value, Version: 1}))
			n += int64(len(value))
		}
		require.NoError(t, b.SetMeta(engine.Meta{Applied: index, AppliedTerm: 1, ConfigID: 1, Conf: conf}))
		require.NoError(t, b.Commit())
	}
	b := e.Group(0).NewBatch()
	require.NoError(t, b.SetMeta(engine.Meta{Applied: 1, AppliedTerm: 1, ConfigID: 1, Conf: conf}))
	require.NoError(t, b.Commit())
	lb := e.NewLogBatch()
	for group, at := range map[uint64]uint64{0: 1, 1: index} {
		require.NoError(t, lb.SetHardState(group, &raftpb.HardState{Term: proto.Uint64(1), Vote: proto.Uint64(0), Commit: &at}))
		require.NoError(t, lb.Reset(group, at, 1))
	}
	require.NoError(t, lb.Commit(true))
	require.NoError(t, e.Close())
	cfg := CoreConfig{
		Config: Config{
			NodeID: id, DataDir: dir, FS: vfs.Default, ListenAddr: "127.0.0.1:1", ArenaBytes: 32 << 20, MaxChunkBytes: 4 << 20, CacheBytes: 8 << 20, MinFreeDisk: 1,
			SnapshotRate: sizeRate, Logger: slog.New(slog.DiscardHandler),
		},
		Manifest: m, Reopened: true, BootID: id + 1, Seed: id + 1,
		Send: func(raft.NodeID, []raft.GroupMessage) {}, SendHeartbeat: func(raft.NodeID, raft.NodeHeartbeat) {},
	}
	change(&cfg)
	c, err := OpenCore(cfg)
	require.NoError(t, err)
	return c
}

// TestSnapshotSizeReceiver is the other process of TestSnapshotSize.
func TestSnapshotSizeReceiver(t *testing.T) {
	dir := os.Getenv("KVD_SNAPSHOT_SIZE_DIR")
	if dir == "" {
		return
	}
	c := sizeCore(t, 2, dir, 2, sizeOldBytes, func(*CoreConfig) {})
	srv := grpc.NewServer(grpc.MaxRecvMsgSize(maxMessageBytes), grpc.InitialWindowSize(flowWindow), grpc.InitialConnWindowSize(flowWindow))
	c.Register(srv)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	end := watchPeaks(dir)
	c.Host().Start()
	fmt.Println("at", l.Addr())
	require.NoError(t, c.n.shard(1).waitApplied(t.Context(), sizeIndex))
	p, err := json.Marshal(end())
	require.NoError(t, err)
	fmt.Println("peaks", string(p))
	keys, err := c.n.shard(1).eng.Meta()
	require.NoError(t, err)
	fmt.Println("keys", keys.Keys)
	srv.Stop()
	require.NoError(t, <-served)
	require.NoError(t, c.Close())
}

// moveShard sends a shard of that size from this process to another.
func moveShard(t *testing.T, bytes int64) (sender, receiver peaks) {
	src, dst := t.TempDir(), t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0], "-test.run", "^TestSnapshotSizeReceiver$")
	cmd.Env = append(os.Environ(), "KVD_SNAPSHOT_SIZE_DIR="+dst)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	lines := bufio.NewScanner(out)
	said := func(word string) string {
		for lines.Scan() {
			if rest, ok := strings.CutPrefix(lines.Text(), word+" "); ok {
				return rest
			}
			t.Logf("receiver: %s", lines.Text())
		}
		require.Failf(t, "the receiver ended early", "before its %q", word)
		return ""
	}
	var conn atomic.Pointer[grpc.ClientConn]
	c := sizeCore(t, 1, src, sizeIndex, bytes, func(cfg *CoreConfig) {
		cfg.Dial = func(raft.NodeID) (grpc.ClientConnInterface, error) { return conn.Load(), nil }
	})
	cc, err := grpc.NewClient("passthrough:///"+said("at"), c.n.peers.options()...)
	require.NoError(t, err)
	conn.Store(cc)
	end := watchPeaks(src)
	began := time.Now()
	m := &raftpb.Message{Type: raftpb.MessageType_MsgSnap.Enum(), From: proto.Uint64(1), To: proto.Uint64(2), Term: proto.Uint64(5)}
	require.NoError(t, c.n.peers.sendSnapshot(t.Context(), 2, 1, m))
	sent := time.Since(began)
	sender = end()
	require.NoError(t, json.Unmarshal([]byte(said("peaks")), &receiver))
	t.Logf("%d MiB: sent in %v, installed after %v", bytes>>20, sent.Round(time.Millisecond), time.Since(began).Round(time.Millisecond))
	want, err := c.n.shard(1).eng.Meta()
	require.NoError(t, err)
	require.Equal(t, fmt.Sprint(want.Keys), said("keys"))
	for lines.Scan() {
	}
	require.NoError(t, cmd.Wait())
	require.NoError(t, cc.Close())
	require.NoError(t, c.Close())
	for who, p := range map[string]peaks{"sender": sender, "receiver": receiver} {
		t.Logf("%d MiB: %s: peak of heap %d MiB, of resident memory %d MiB (%d MiB before), of disk %d MiB", bytes>>20, who, p.HeapBytes>>20, p.RSSBytes>>20, p.RSSBefore>>20, p.DiskBytes>>20)
	}
	return sender, receiver
}

// Neither end's heap grows with the shard, and the receiver's disk holds the old state and
// the new one once. `go test -run TestSnapshotSize -v ./server -snapshot.bytes 2147483648`
// moves one of 2 GiB, in two minutes.
func TestSnapshotSize(t *testing.T) {
	smallSender, smallReceiver := moveShard(t, *snapshotBytes/4)
	sender, receiver := moveShard(t, *snapshotBytes)
	const slack = 24 << 20 // when the collector looks is chance
	require.Less(t, sender.HeapBytes, smallSender.HeapBytes+slack, "the sender's heap grows with the shard")
	require.Less(t, receiver.HeapBytes, smallReceiver.HeapBytes+slack, "the receiver's heap grows with the shard")
	// The log's prepared segments are in there, too.
	require.Less(t, receiver.DiskBytes, uint64(*snapshotBytes+*snapshotBytes/20+sizeOldBytes+96<<20))
}
