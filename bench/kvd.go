package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strconv"
	"strings"

	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/internal/devcluster"
)

// kvdSystem is a cluster of three kvd processes, read and written through the SDK.
type kvdSystem struct {
	opt     options
	binary  string
	cluster *devcluster.Cluster
	client  *client.Client
	before  client.Stats // when the measurements began
	size    int
	op      operation
}

const (
	kvdNodes  = 3
	kvdShards = 8
)

func (s *kvdSystem) name() string { return "kvd" }

func (s *kvdSystem) start(ctx context.Context, dir string, w workload) (err error) {
	s.size, s.op = w.size, w.op
	level, err := client.ParseLevel(s.opt.level)
	if err != nil {
		return err
	}
	dir = filepath.Join(dir, "kvd")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if s.binary, err = kvdBinary(ctx, s.opt.kvdBinary, dir); err != nil {
		return err
	}
	startCtx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	s.cluster, err = devcluster.Start(startCtx, devcluster.Config{
		Binary: s.binary, Dir: dir, Nodes: kvdNodes, Shards: kvdShards, Args: []string{"--log-level", "warn"},
	})
	if err != nil {
		return err
	}
	s.client, err = client.Dial(startCtx, client.Config{Endpoints: s.cluster.Endpoints(), Transport: s.opt.transport, Level: level})
	if err != nil {
		return err
	}
	return waitReady(ctx, s.name(), nil, func(ctx context.Context) error { return kvdReady(ctx, s.client) })
}

// kvdReady: every node answers, and so does a write.
func kvdReady(ctx context.Context, c *client.Client) error {
	nodes, err := c.Status(ctx)
	if err != nil {
		return err
	}
	for _, n := range nodes {
		if n.Err != nil {
			return n.Err
		}
	}
	_, err = c.Put(ctx, []byte("bench-ready"), []byte("1"))
	return err
}

// kvdBinary is the given one, or one built now, so that the figures belong to the
// commit that the report names.
func kvdBinary(ctx context.Context, given, dir string) (string, error) {
	if given != "" {
		return filepath.Abs(given)
	}
	out := filepath.Join(dir, "bin", "kvd")
	cmd := exec.CommandContext(ctx, "go", "build", "-buildvcs=false", "-ldflags=-X main.version="+sourceCommit(),
		"-o", out, "github.com/kvd-io/kvd/cmd/kvd")
	if text, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building kvd: %w\n%s(give a finished one with --kvd-bin)", err, text)
	}
	return out, nil
}

func (s *kvdSystem) conn() (conn, error) {
	s.before = s.client.Stats()
	return kvdConn{s.client, make([]byte, s.size)}, nil
}

func (s *kvdSystem) describe() description {
	d := description{
		Version: versionOf(s.binary, "version"),
		Settings: map[string]string{
			"shards":    strconv.Itoa(kvdShards),
			"processes": "3, replicated by Raft",
			"durable":   "yes: log synced on a quorum",
			"client":    "the SDK, one Client for all workers",
		},
	}
	if s.op == opGet {
		level, _ := client.ParseLevel(s.opt.level) // parsed at start already
		if level == client.LevelDefault {
			level = client.Linearizable
		}
		d.Settings["reads"] = level.String()
		d.Settings["transport"] = s.opt.transport
	}
	return d
}

func (s *kvdSystem) pids() []int {
	var out []int
	for _, n := range s.cluster.Nodes() {
		out = append(out, n.PID())
	}
	return out
}

// notes say how the gets were answered: a figure that came over gRPC in truth
// would be a lie.
func (s *kvdSystem) notes() []string {
	if s.client == nil || s.op != opGet {
		return nil
	}
	st := s.client.Stats().Sub(s.before)
	gets := st.TotalGets()
	if gets == 0 {
		return nil
	}
	per := func(n uint64) float64 { return float64(n) / float64(gets) }
	lines := []string{fmt.Sprintf("kvd: per get %.2f object READs, %.2f bucket READs, %.2f record READs, %.2f queries, %.2f confirmations",
		per(st.ObjectReads), per(st.BucketReads), per(st.RecordReads), per(st.Queries), per(st.Confirmations))}
	var via []string
	for _, g := range st.Gets {
		via = append(via, fmt.Sprintf("%d %s over %s", g.Count, g.Level, g.Via))
	}
	for reason, n := range st.Fallbacks {
		via = append(via, fmt.Sprintf("%d fell back to gRPC: %s", n, reason))
	}
	sort.Strings(via)
	return append(lines, "kvd: gets answered: "+strings.Join(via, ", "))
}

func (s *kvdSystem) stop() error {
	if s.client != nil {
		_ = s.client.Close()
	}
	if s.cluster == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*stopTimeout)
	defer cancel()
	return s.cluster.Stop(ctx)
}

type kvdConn struct {
	client *client.Client
	buf    []byte
}

func (c kvdConn) get(ctx context.Context, k key) ([]byte, error) {
	v, err := c.client.GetInto(ctx, k.bytes, c.buf)
	return v.Data, err
}

func (c kvdConn) put(ctx context.Context, k key, value []byte) error {
	_, err := c.client.Put(ctx, k.bytes, value)
	return err
}
