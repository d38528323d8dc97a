//go:build e2e

package e2e

import (
	"context"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/internal/devcluster"
)

// TestStoppedLeader: a leader is stopped by SIGSTOP, so its memory can still be read, by
// clients that had mapped it before. Once a newer write was acknowledged nobody reads an
// older value.
func TestStoppedLeader(t *testing.T) {
	// Elections take one to two seconds: time for reads before one. Node 3 serves no
	// shared memory, so that a client with mixed transports is among the readers.
	c := newCluster(t, devcluster.Config{
		Args:     []string{"--tick", "100ms"},
		NodeArgs: map[uint64][]string{3: {"--transports", "tcp"}},
	})
	const stopped = 1
	tr := newTruth(40)
	writer := c.dial(t, func(cfg *client.Config) { cfg.Endpoints = c.Endpoints()[1:] })
	tr.putAll(t, writer, 1)
	c.lead(t, stopped)

	shm := &watcher{name: "shm", tr: tr, c: c.dial(t, overTransport("shm"))}
	tcp := &watcher{name: "tcp", tr: tr, c: c.dial(t, func(cfg *client.Config) { cfg.Transport, cfg.CallTimeout = "tcp", time.Second })}
	mixed := &watcher{name: "auto", tr: tr, c: c.dial(t, nil)}
	watchers := []*watcher{shm, tcp, mixed}
	for _, w := range watchers {
		w.warm(t)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	stop := func() { cancel(); wg.Wait() }
	defer stop()

	require.NoError(t, c.Node(stopped).Signal(syscall.SIGSTOP))
	defer func() { _ = c.Node(stopped).Signal(syscall.SIGCONT) }()
	shm.readsStoppedMemory(t)
	for _, w := range watchers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			w.run(ctx)
		}()
	}
	tr.putAll(t, writer, 2) // acknowledged by a new leader
	for i := range tr.keys {
		for _, w := range watchers {
			round, violation, err := tr.get(context.Background(), w.c, i)
			require.NoError(t, violation, w.name)
			if w == tcp && err != nil {
				require.ErrorIs(t, err, client.ErrUnavailable) // its time for one call is short
				continue
			}
			require.NoError(t, err, w.name)
			require.GreaterOrEqual(t, round, 2, "%s: %s", w.name, tr.keys[i])
		}
	}
	awaitPasses(t, watchers)

	require.NoError(t, c.Node(stopped).Signal(syscall.SIGCONT))
	admin := c.admin(t)
	await(t, "the old leader steps down", func() error { return steppedDown(admin, stopped) })
	tr.putAll(t, writer, 3)
	awaitPasses(t, watchers)
	stop()
	c.lead(t, 2) // which all watchers can read one-sidedly
	for _, w := range watchers {
		require.NoError(t, w.violation, w.name)
		for _, err := range w.failures {
			require.Same(t, tcp, w, "a get failed: %v", err)
			require.ErrorIs(t, err, client.ErrUnavailable)
		}
		w.warm(t) // one-sided again, from the new leader
		t.Logf("%s: %d passes, %d gets unanswered, retries %v, fallbacks %v", w.name, w.rounds.Load(), len(w.failures), w.c.Stats().Retries, w.c.Stats().Fallbacks)
	}
}
