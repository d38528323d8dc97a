//go:build rdmaguest

package e2e

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/rdma"
)

// TestRDMAAccess: nodes with TLS, tokens and a small budget of queue pairs. Whose namespace
// demands TLS is not read by verbs unless its owner says so; what was given out ends with
// the keys and with the token, by the kernel's word; and beyond the budget clients go on
// by other ways.
func TestRDMAAccess(t *testing.T) {
	const budget = 4
	cfg := rdmaConfig(t)
	cfg.Args = append(cfg.Args, "--rdma-max-queue-pairs", strconv.Itoa(budget))
	s := startSecured(t, cfg)
	must := func(t *testing.T, args ...string) result {
		t.Helper()
		r := s.as(t, s.root, args...)
		require.Zero(t, r.code, r.text())
		return r
	}
	must(t, "namespace", "create", "secrets", "--require-tls")
	must(t, "namespace", "create", "trusted", "--require-tls", "--plaintext-reads")
	reads, id := s.token(t, "reads", "secrets:read", "trusted:read")
	in := func(namespace, token string) func(*client.Config) {
		return func(cfg *client.Config) {
			byAny(cfg)
			cfg.TLS, cfg.Token, cfg.Namespace = s.ca.trust(), readFile(t, token), namespace
		}
	}
	held := map[string]map[string]string{}
	for _, ns := range []string{"secrets", "trusted"} {
		writer := s.dial(t, func(cfg *client.Config) { in(ns, s.root)(cfg); cfg.Transport = "tcp" })
		held[ns] = fill(t, writer, ns, 6, 700)
		require.NoError(t, writer.Close())
	}
	awaitQueuePairs(t, s.cluster, 0)

	t.Run("plain text is not for secrets", func(t *testing.T) {
		for _, transport := range []string{client.TransportAuto, "verbs"} {
			c := s.dial(t, func(cfg *client.Config) { in("secrets", reads)(cfg); cfg.Transport = transport })
			check(t, c, held["secrets"])
			require.Zero(t, via(c.Stats(), "verbs"))
			if transport == client.TransportAuto {
				warmUp(t, c, held["secrets"])
				require.NotZero(t, via(c.Stats(), "tcp"), "under TLS")
			}
			require.NoError(t, c.Close())
		}
		cfg := client.Config{Endpoints: s.Endpoints(), DialTimeout: patience, RequireRDMA: true}
		in("secrets", reads)(&cfg)
		_, err := client.Dial(context.Background(), cfg)
		require.ErrorIs(t, err, client.ErrNoRDMA)
		t.Log(err)
		raw := rawSession{namespace: "secrets", token: readFile(t, reads), tls: s.ca.trust()}.mustOpen(t, s.Node(1).Address)
		require.NotContains(t, fmt.Sprint(raw.opened.GetTransports()), "verbs")
		_, err = raw.connect()
		require.Equal(t, codes.PermissionDenied, status.Code(err), "%v", err)
		require.ErrorContains(t, err, "requires TLS")
		awaitQueuePairs(t, s.cluster, 0)
	})

	trusted := s.dial(t, in("trusted", reads))
	warmUp(t, trusted, held["trusted"])
	byVerbsAgain := func(t *testing.T) {
		t.Helper()
		await(t, "every get by verbs", func() error {
			d := counted(trusted, func() { check(t, trusted, held["trusted"]) })
			if n := via(d, "verbs"); n != uint64(len(held["trusted"])) {
				return fmt.Errorf("%d of %d: retries %v, fallbacks %v", n, len(held["trusted"]), d.Retries, d.Fallbacks)
			}
			return nil
		})
	}
	byVerbsAgain(t)
	session := rawSession{namespace: "trusted", token: readFile(t, reads), tls: s.ca.trust()}
	var conns []rdma.Conn // one with each node
	var keys []byte       // of the first node
	connect := func(t *testing.T) {
		t.Helper()
		conns = nil
		for _, n := range s.Nodes() {
			c := session.mustOpen(t, n.Address)
			conns = append(conns, c.reading())
			if n.ID == 1 {
				keys = c.control().GetAttr()
			}
		}
		awaitQueuePairs(t, s.cluster, 2) // with trusted's
	}
	ended := func(t *testing.T) {
		t.Helper()
		for i, conn := range conns {
			await(t, fmt.Sprintf("node %d has ended the connection", i+1), func() error {
				if readRecord(conn) == nil {
					return errors.New("a READ succeeded")
				}
				return nil
			})
		}
	}

	t.Run("rotated keys", func(t *testing.T) {
		connect(t)
		rotated := must(t, "namespace", "rotate-keys", "trusted", "-o", "json")
		require.Equal(t, 3, strings.Count(rotated.stdout, `"rotated": true`), rotated.stdout)
		for i, conn := range conns {
			require.Error(t, readRecord(conn), "node %d: the command has returned", i+1)
		}
		byVerbsAgain(t)
		awaitQueuePairs(t, s.cluster, 1)
		// Keys that were given out before are worth nothing on a new queue pair.
		c := session.mustOpen(t, s.Node(1).Address)
		fresh := c.control()
		require.NotEqual(t, keys, fresh.GetAttr())
		conn, err := c.connect()
		require.NoError(t, err)
		require.NoError(t, conn.AddRegion(rdma.ControlRegion, fresh.GetLength(), keys))
		require.ErrorIs(t, readRecord(conn), rdma.ErrAccess)
		require.NoError(t, readRecord(c.reading()))
		require.NoError(t, c.in.Close())
		awaitQueuePairs(t, s.cluster, 1)
	})

	t.Run("revoked token", func(t *testing.T) {
		connect(t)
		must(t, "token", "revoke", id)
		ended(t)
		awaitQueuePairs(t, s.cluster, 0)
		await(t, "the client is denied", func() error {
			ctx, cancel := within(patience)
			defer cancel()
			if _, err := trusted.Get(ctx, []byte("trusted/000001")); !errors.Is(err, client.ErrDenied) {
				return fmt.Errorf("seen %v", err)
			}
			return nil
		})
		_, err := session.open(t, s.Node(1).Address)
		require.Equal(t, codes.Unauthenticated, status.Code(err), "%v", err)
	})

	t.Run("more clients than queue pairs", func(t *testing.T) {
		clients := make([]*client.Client, budget+1)
		for i := range clients {
			clients[i] = s.dial(t, in("trusted", s.root))
			check(t, clients[i], held["trusted"])
		}
		// Who lost a queue pair hears of it a moment later.
		await(t, "some read by verbs, some by tcp", func() error {
			ways := map[string]int{}
			for _, c := range clients {
				check(t, c, held["trusted"])
				for _, p := range c.Stats().Peers {
					ways[p.Transport]++
				}
			}
			if ways["verbs"] == 0 || ways["tcp"] == 0 {
				return fmt.Errorf("%v", ways)
			}
			return nil
		})
		for id, have := range queuePairs(t, s.cluster) {
			require.LessOrEqual(t, have, budget, "node %d", id)
		}
		for _, n := range s.Nodes() {
			require.Contains(t, s.logOf(t, n.ID), "limit of queue pairs reached")
		}
	})
}
