//go:build e2e

package e2e

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/internal/devcluster"
)

// http2Preface begins every gRPC connection.
const http2Preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

// hostileBytes are things that no client of ours would send.
func hostileBytes(rng *rand.Rand) []byte {
	noise := make([]byte, 1+rng.IntN(8<<10))
	for i := range noise {
		noise[i] = byte(rng.Uint32())
	}
	switch rng.IntN(7) {
	case 0:
		return nil // connects and leaves
	case 1:
		return noise[:1+rng.IntN(min(16, len(noise)))]
	case 2:
		return append([]byte(http2Preface), noise...)
	case 3: // a length that promises much
		return append(binary.LittleEndian.AppendUint32(nil, 0xffffffff), noise...)
	case 4:
		return append([]byte("GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n"), noise...)
	case 5:
		return bytes.Repeat([]byte{0}, len(noise))
	default:
		return noise
	}
}

// TestHostileBytes: torn, short and random bytes on every socket of every node. The nodes
// live, say little, and serve the others as before.
func TestHostileBytes(t *testing.T) {
	c := newCluster(t, devcluster.Config{})
	held := fill(t, c.dial(t, nil), "hostile", 40, 1500)
	clients := []*client.Client{c.dial(t, overTransport("shm")), c.dial(t, overTransport("tcp")), c.dial(t, overTransport(client.TransportGRPC))}
	for _, cl := range clients[:2] {
		warmUp(t, cl, held)
	}
	stop := readOn(t, held, clients...)
	var logged []int
	for _, n := range c.Nodes() {
		logged = append(logged, len(c.logOf(t, n.ID)))
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	const rounds = 40
	var wg sync.WaitGroup
	for i, n := range c.Nodes() {
		for j, target := range c.sockets(t, n) {
			rng := rand.New(rand.NewPCG(seed, uint64(i*10+j)))
			wg.Add(1)
			go func() {
				defer wg.Done()
				var open []net.Conn
				for range rounds {
					conn, err := net.DialTimeout(target.network, target.addr, 5*time.Second)
					if err != nil {
						t.Errorf("%s %s: %v", target.network, target.addr, err)
						return
					}
					_ = conn.SetDeadline(time.Now().Add(500 * time.Millisecond))
					_, _ = conn.Write(hostileBytes(rng)) // it may be hung up on
					if rng.IntN(3) == 0 {
						_, _ = io.CopyN(io.Discard, conn, 64)
					}
					if rng.IntN(2) == 0 {
						open = append(open, conn) // idle for the rest of the test
						continue
					}
					if tc, ok := conn.(*net.TCPConn); ok && rng.IntN(2) == 0 {
						_ = tc.SetLinger(0) // reset instead of an orderly end
					}
					_ = conn.Close()
				}
				for _, conn := range open {
					_ = conn.Close()
				}
			}()
		}
	}
	wg.Wait()
	gets := stop()
	for i, n := range c.Nodes() {
		require.True(t, n.Running(), "node %d", n.ID)
		grown := len(c.logOf(t, n.ID)) - logged[i]
		require.Less(t, grown, 256<<10, "node %d logged %d bytes about %d connections", n.ID, grown, 4*rounds)
	}
	for _, cl := range clients {
		check(t, cl, held)
	}
	require.Zero(t, c.kvctl(t, "put", "hostile/after", "x").code)
	t.Logf("%d gets meanwhile, none failed", gets)
}

type socket struct{ network, addr string }

// sockets are all places where a node listens.
func (c *cluster) sockets(t testing.TB, n *devcluster.Node) []socket {
	t.Helper()
	unix, err := filepath.Glob(filepath.Join(c.dir, "shm", fmt.Sprintf("%x-*.sock", n.ID)))
	require.NoError(t, err)
	require.Len(t, unix, 1)
	metrics := strings.TrimSuffix(strings.TrimPrefix(n.Metrics, "http://"), "/metrics")
	return []socket{{"tcp", n.Address}, {"tcp", n.TCP}, {"tcp", metrics}, {"unixpacket", unix[0]}}
}

// TestSpoiledStream: between a client and the nodes' READ ports lies a network that flips
// bits, cuts and stalls. The client returns right values or errors, and reads one-sidedly
// again when the network is good.
func TestSpoiledStream(t *testing.T) { spoiledStream(t, flipBits, cutShort, stall) }

// TestLostBytes: the network leaves bytes out and goes on, so that an answer is never
// complete.
func TestLostBytes(t *testing.T) { spoiledStream(t, lose) }

func spoiledStream(t *testing.T, kinds ...spoiling) {
	var proxies []*proxy
	args := map[uint64][]string{}
	for id := uint64(1); id <= 3; id++ {
		p := newProxy(t)
		proxies = append(proxies, p)
		args[id] = []string{"--tcp-advertise", p.addr()}
	}
	c := newCluster(t, devcluster.Config{NodeArgs: args})
	for i, p := range proxies {
		p.setTarget(c.Node(uint64(i + 1)).TCP)
	}
	cl := c.dial(t, func(cfg *client.Config) { cfg.Transport, cfg.CallTimeout = "tcp", 5*time.Second })
	held := fill(t, cl, "spoiled", 40, 1200)
	warmUp(t, cl, held)
	require.Positive(t, proxies[0].bytes(), "the client reads through the proxies")
	for _, how := range kinds {
		spoiled := 0
		for _, p := range proxies {
			spoiled -= p.spoiled()
			p.set(how)
		}
		right, failed := getUnderFire(t, cl, held)
		for _, p := range proxies {
			spoiled += p.spoiled()
			p.set(pass)
		}
		require.Positive(t, spoiled)
		require.Positive(t, right)
		warmUp(t, cl, held) // as good as before
		t.Logf("%s: %d gets right, %d failed, %d answers spoiled; retries %v, fallbacks %v", how, right, failed, spoiled, cl.Stats().Retries, cl.Stats().Fallbacks)
	}
}

// getUnderFire gets for a while: what it gets must be right.
func getUnderFire(t testing.TB, cl *client.Client, held map[string]string) (right, failed int) {
	t.Helper()
	end := time.Now().Add(2 * time.Second)
	for {
		for k, want := range held {
			if time.Now().After(end) {
				return right, failed
			}
			ctx, cancel := within(4 * time.Second)
			v, err := cl.Get(ctx, []byte(k))
			cancel()
			if err != nil {
				require.NotErrorIs(t, err, client.ErrNotFound, "%s is there", k)
				failed++
				continue
			}
			require.True(t, want == string(v.Data), "%s came back with other bytes", k)
			right++
		}
	}
}

// TestMetricsPort answers only what it should.
func TestMetricsPort(t *testing.T) {
	c := sharedNodes(t)
	resp, err := http.Get(strings.TrimSuffix(c.Node(1).Metrics, "metrics") + "nonsense")
	require.NoError(t, err)
	defer func() { _ = resp.Body.Close() }()
	require.Equal(t, http.StatusNotFound, resp.StatusCode)
}
