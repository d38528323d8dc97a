package client

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/shm"
	"github.com/kvd-io/kvd/rdma/tcp"
)

func startTwoTransports(t *testing.T, edit func(*Config)) *fixture {
	dir := t.TempDir()
	f := &fixture{fakeCluster: newFakeCluster(t, fakeOptions{nodes: 3, shards: 2, targets: func(n *fakeNode) []rdma.Provider {
		return []rdma.Provider{&shm.Provider{SocketPath: filepath.Join(dir, fmt.Sprint(n.id))}, tcp.Provider{}}
	}})}
	f.c = f.dial(t, nil, func(cfg *Config) {
		cfg.Providers = []rdma.Provider{&shm.Provider{}, tcp.Provider{}}
		if edit != nil {
			edit(cfg)
		}
	})
	f.ready(t)
	return f
}

// Every transport is timed by READs of its own, whatever gets use, and gets go on as
// before.
func TestExamine(t *testing.T) {
	f := startTwoTransports(t, nil)
	f.put("key", "value")
	served := func() (n uint64) {
		for _, node := range f.nodes {
			for _, target := range node.real.targets {
				n += target.Stats().Reads
			}
		}
		return n
	}
	before := served()
	list := f.c.Examine(ctxFor(t, time.Minute), 100)
	require.Len(t, list, 3)
	for i, e := range list {
		require.NoError(t, e.Err)
		require.Equal(t, uint64(i+1), e.NodeID)
		require.Equal(t, f.nodes[i].addr, e.Address)
		require.True(t, e.SameHost)
		require.Equal(t, "shm", e.Transport)
		require.Len(t, e.Trials, 3)
		for j, want := range []struct {
			transport    string
			confidential bool
			reads        int
		}{{"shm", true, 100}, {"tcp", false, 100}, {"grpc", false, 10}} {
			trial := e.Trials[j]
			require.Equal(t, want.transport, trial.Transport)
			require.True(t, trial.Usable, trial.Detail)
			require.Equal(t, "none", trial.Reason)
			require.Equal(t, want.confidential, trial.Confidential)
			require.Equal(t, want.reads, trial.Reads)
			require.Positive(t, trial.P50)
			require.GreaterOrEqual(t, trial.P99, trial.P50)
		}
	}
	require.Equal(t, uint64(3*110), served()-before, "the nodes' own count of READs over tcp")
	require.Zero(t, f.c.Stats().TotalReads(), "what Examine reads is no get's")
	f.want(t, "key", "value")
	for _, p := range f.c.Stats().Peers {
		require.Equal(t, "shm", p.Transport)
		require.EqualValues(t, 1, p.Connections)
	}
}

// What cannot or must not be tried says why.
func TestExamineReasons(t *testing.T) {
	trial := func(e Examination, transport string) Trial {
		for _, tr := range e.Trials {
			if tr.Transport == transport {
				return tr
			}
		}
		t.Fatalf("no trial of %s", transport)
		return Trial{}
	}
	t.Run("another host", func(t *testing.T) {
		f := startTwoTransports(t, func(cfg *Config) { cfg.HostID = "elsewhere" })
		e := f.c.Examine(ctxFor(t, time.Minute), 1)[0]
		require.False(t, e.SameHost)
		require.Equal(t, "tcp", e.Transport)
		require.Equal(t, "another_host", trial(e, "shm").Reason)
		require.True(t, trial(e, "tcp").Usable)
	})
	t.Run("not served, refused, dead", func(t *testing.T) {
		f := start(t, fakeOptions{}, netOptions{}, func(cfg *Config) {
			cfg.Providers = append(cfg.Providers, tcp.Provider{})
		})
		f.locked(func() { f.nodes[1].refuse = 1 << 20 })
		f.nodes[2].kill()
		eventually(t, "the dead node's session ends", func() bool { return len(f.c.liveSessions()) == 2 && f.c.sessionOf(3) == nil })
		list := f.c.Examine(ctxFor(t, time.Minute), 1)
		require.Equal(t, "not_served", trial(list[0], "tcp").Reason)
		require.True(t, trial(list[0], "fake").Usable)
		refused := trial(list[1], "fake")
		require.False(t, refused.Usable)
		require.NotEmpty(t, refused.Detail)
		require.True(t, trial(list[1], "grpc").Usable)
		require.Error(t, list[2].Err)
		require.Empty(t, list[2].Trials)
	})
	t.Run("TLS required", func(t *testing.T) {
		f := startTwoTransports(t, nil)
		// The cluster of the tests speaks no TLS, so that is required once sessions stand.
		c := &Client{cfg: f.c.cfg, transports: f.c.transports}
		c.cfg.RequireTLS = true
		tried := c.try(ctxFor(t, time.Minute), f.c.liveSessions()[0], 1, c.transports[1], 1)
		require.Equal(t, "tcp", tried.Transport)
		require.Equal(t, "plaintext", tried.Reason)
	})
	t.Run("two-sided namespace", func(t *testing.T) {
		f := start(t, fakeOptions{twoSided: true}, netOptions{}, nil)
		e := f.c.Examine(ctxFor(t, time.Minute), 1)[0]
		require.Equal(t, "two_sided", trial(e, "fake").Reason)
		require.True(t, trial(e, "grpc").Usable)
	})
}
