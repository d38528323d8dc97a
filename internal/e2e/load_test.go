//go:build e2e || rdmaguest

package e2e

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/client"
)

// load is a set of concurrent writers, each with keys of its own, that remembers what
// each key may hold. A value says which put wrote it.
type load struct {
	clients []*client.Client // writers take turns over them
	prefix  string
	writers int
	keys    int // of each writer

	history []*keyHistory
	acked   atomic.Int64
	unsure  atomic.Int64
	refused atomic.Int64

	stop context.CancelFunc
	wg   sync.WaitGroup
}

// keyHistory is written by the one writer of the key.
type keyHistory struct {
	key     string
	next    int
	acked   int    // the last put that was acknowledged; 0: none
	version uint64 // of that put
	unsure  map[int]bool
	errs    []error // what puts failed with
	acks    atomic.Int64
}

func startLoad(t testing.TB, prefix string, clients ...*client.Client) *load {
	l := &load{clients: clients, prefix: prefix, writers: 6, keys: 8}
	for w := range l.writers {
		for k := range l.keys {
			l.history = append(l.history, &keyHistory{key: fmt.Sprintf("%s/%d/%d", prefix, w, k), unsure: map[int]bool{}})
		}
	}
	l.resume()
	t.Cleanup(l.pause)
	return l
}

func (l *load) resume() {
	ctx, stop := context.WithCancel(context.Background())
	l.stop = stop
	for w := range l.writers {
		l.wg.Add(1)
		go func() {
			defer l.wg.Done()
			for i := 0; ctx.Err() == nil; i++ {
				l.put(l.clients[w%len(l.clients)], l.history[w*l.keys+i%l.keys])
			}
		}()
	}
}

// pause returns when no put is under way.
func (l *load) pause() {
	l.stop()
	l.wg.Wait()
}

func (l *load) put(c *client.Client, h *keyHistory) {
	h.next++
	// Values of 10 bytes to some kilobytes, so that all kinds of blocks are used.
	value := fmt.Sprintf("%s#%d#%s", h.key, h.next, strings.Repeat("x", h.next*37%3000))
	version, err := c.Put(context.Background(), []byte(h.key), []byte(value))
	switch {
	case err == nil:
		h.acked, h.version = h.next, version
		h.acks.Add(1)
		l.acked.Add(1)
	case errors.Is(err, client.ErrOutcomeUnknown):
		h.unsure[h.next] = true
		h.errs = append(h.errs, err)
		l.unsure.Add(1)
	default:
		h.errs = append(h.errs, err)
		l.refused.Add(1)
	}
}

// awaitProgress returns when each key has been written again since now.
func (l *load) awaitProgress(t testing.TB) {
	t.Helper()
	before := make([]int64, len(l.history))
	for i, h := range l.history {
		before[i] = h.acks.Load()
	}
	await(t, "every key is written again", func() error {
		for i, h := range l.history {
			if h.acks.Load() == before[i] {
				return fmt.Errorf("no put of %s was acknowledged", h.key)
			}
		}
		return nil
	})
}

// verify reads every key while the load is paused: it holds the last acknowledged put,
// or one whose outcome is unknown; never one older, nor one that was said to have failed.
func (l *load) verify(t testing.TB, c *client.Client) {
	t.Helper()
	for _, h := range l.history {
		ctx, cancel := within(patience)
		v, err := c.Get(ctx, []byte(h.key))
		cancel()
		if errors.Is(err, client.ErrNotFound) && h.acked == 0 {
			continue
		}
		require.NoError(t, err, "get %s, last acknowledged %d", h.key, h.acked)
		parts := strings.SplitN(string(v.Data), "#", 3)
		require.Len(t, parts, 3, "%s holds %.80q", h.key, v.Data)
		seq, err := strconv.Atoi(parts[1])
		require.NoError(t, err)
		require.Equal(t, h.key, parts[0])
		require.Equal(t, strings.Repeat("x", seq*37%3000), parts[2])
		require.GreaterOrEqual(t, v.Version, h.version, "%s went back behind an acknowledged version", h.key)
		if v.Version == h.version {
			require.Equal(t, h.acked, seq, "%s: another value under the acknowledged version", h.key)
		} else {
			require.True(t, h.unsure[seq], "%s holds put %d (version %d); the last acknowledged is %d (version %d), and %d is not of unknown outcome",
				h.key, seq, v.Version, h.acked, h.version, seq)
		}
	}
}

// errors are all that puts failed with.
func (l *load) errors() []error {
	var errs []error
	for _, h := range l.history {
		errs = append(errs, h.errs...)
	}
	return errs
}

// fill puts n values of size bytes and returns what each key holds.
func fill(t testing.TB, c *client.Client, prefix string, n, size int) map[string]string {
	t.Helper()
	held := make(map[string]string, n)
	var keys []string
	for i := range n {
		k := fmt.Sprintf("%s/%06d", prefix, i)
		held[k] = valueOf(k, size)
		keys = append(keys, k)
	}
	var next atomic.Int64
	var wg sync.WaitGroup
	errs := make([]error, 16)
	for w := range errs {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for {
				i := int(next.Add(1)) - 1
				if i >= n || errs[w] != nil {
					return
				}
				ctx, cancel := within(patience)
				_, errs[w] = c.Put(ctx, []byte(keys[i]), []byte(held[keys[i]]))
				cancel()
			}
		}()
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
	return held
}

// valueOf is size bytes that differ from key to key and do not compress.
func valueOf(key string, size int) string {
	b := make([]byte, size)
	x := uint64(len(key)) + 0x9e3779b97f4a7c15
	for _, c := range []byte(key) {
		x = (x ^ uint64(c)) * 0x100000001b3
	}
	for i := range b {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		b[i] = byte(x >> 32)
	}
	return string(b)
}

// check reads everything back.
func check(t testing.TB, c *client.Client, held map[string]string, opts ...client.ReadOption) {
	t.Helper()
	for k, want := range held {
		ctx, cancel := within(patience)
		v, err := c.Get(ctx, []byte(k), opts...)
		cancel()
		require.NoError(t, err, k)
		require.True(t, want == string(v.Data), "%s came back with other bytes", k)
	}
}

// warmUp gets every key until the client reads all one-sidedly: sessions to all nodes
// are open then, routes and locations known.
func warmUp(t testing.TB, c *client.Client, held map[string]string) {
	t.Helper()
	await(t, "every get is one-sided", func() error {
		before := c.Stats()
		check(t, c, held)
		d := c.Stats().Sub(before)
		for _, g := range d.Gets {
			if g.Via == client.TransportGRPC {
				return fmt.Errorf("%d of %d gets over gRPC: %v", g.Count, len(held), d.Fallbacks)
			}
		}
		if d.CacheMisses > 0 {
			return fmt.Errorf("%d locations were not known", d.CacheMisses)
		}
		for _, p := range c.Stats().Peers {
			if !p.Connected {
				return fmt.Errorf("node %d is not connected: %s", p.NodeID, p.Reason)
			}
		}
		return nil
	})
}

func via(s client.Stats, names ...string) (n uint64) {
	for _, g := range s.Gets {
		for _, name := range names {
			if g.Via == name {
				n += g.Count
			}
		}
	}
	return n
}

func sum(counts map[string]uint64) (n uint64) {
	for _, c := range counts {
		n += c
	}
	return n
}

// since measures without a name for the start.
func since(f func()) time.Duration {
	began := time.Now()
	f()
	return time.Since(began)
}
