package server

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/tcp"
)

func TestCalmLog(t *testing.T) {
	var out bytes.Buffer
	h := newCalmHandler(slog.NewTextHandler(&out, nil))
	now := time.Unix(1000, 0)
	say := func(h slog.Handler, level slog.Level, text string) (lines int) {
		before := strings.Count(out.String(), "\n")
		require.NoError(t, h.Handle(context.Background(), slog.NewRecord(now, level, text, 0)))
		return strings.Count(out.String(), "\n") - before
	}
	with := h.WithAttrs([]slog.Attr{slog.Int("a", 1)}).WithGroup("g")
	for i := range calmBurst {
		require.Equal(t, 1, say([]slog.Handler{h, with}[i%2], slog.LevelWarn, "x"))
	}
	for range 30 {
		require.Zero(t, say(with, slog.LevelWarn, "x"))
		require.Equal(t, 1, say(h, slog.LevelInfo, "x"))
		require.Equal(t, 1, say(h, slog.LevelError, "x"))
	}
	require.Equal(t, 1, say(h, slog.LevelWarn, "another"))
	now = now.Add(calmWindow)
	require.NotContains(t, out.String(), "more_like_it")
	require.Equal(t, 1, say(h, slog.LevelWarn, "x"))
	require.Contains(t, out.String(), "more_like_it=30")
	require.Equal(t, 1, say(h, slog.LevelWarn, "x"))
	require.Equal(t, 1, strings.Count(out.String(), "more_like_it"), "said once")
	for i := range 2 * calmTexts {
		say(h, slog.LevelWarn, fmt.Sprint("text ", i))
	}
	require.LessOrEqual(t, len(h.state.mu.texts), calmTexts)
}

// Whoever reaches the port of READs can not fill the node's log.
func TestBadHandshakesDoNotFillTheLog(t *testing.T) {
	out := &syncBuffer{}
	e := newExporter(&Node{log: slog.New(slog.NewTextHandler(out, nil)), metrics: newMetrics(), cfg: Config{NodeID: 1, Providers: []rdma.Provider{tcp.Provider{ListenAddr: "127.0.0.1:0"}}}})
	require.NoError(t, e.open())
	_, addr, ok := strings.Cut(out.String(), "addr=")
	require.True(t, ok)
	addr, _, _ = strings.Cut(addr, " ")
	for range 5 * calmBurst {
		c, err := net.Dial("tcp", addr)
		require.NoError(t, err)
		_, err = c.Write(bytes.Repeat([]byte("GET / "), 100))
		require.NoError(t, err)
		_, err = c.Read(make([]byte, 1))
		require.Error(t, err, "hung up on")
		require.NoError(t, c.Close())
	}
	require.NoError(t, e.close())
	require.Equal(t, calmBurst, strings.Count(out.String(), `msg="handshake failed"`))
}

// Leaders change by the hundred; the log says it in a few lines.
func TestLeadersInALine(t *testing.T) {
	const shards = 64
	out := &syncBuffer{}
	startCluster(t, 1, shards, func(c *Config) { c.Logger = slog.New(slog.NewTextHandler(out, nil)) })
	eventually(t, "all shards have a leader", func() bool {
		return strings.Contains(out.String(), fmt.Sprintf("leads=%d \"without leader\"=0 shards=%d", shards, shards))
	})
	require.Less(t, strings.Count(out.String(), "leads="), shards/4)
}
