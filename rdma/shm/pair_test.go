//go:build linux

package shm

import (
	"bytes"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma"
)

func itoa(n int) string                { return strconv.Itoa(n) }
func contains(b []byte, s string) bool { return bytes.Contains(b, []byte(s)) }

// pair is a target with one region of 1 MiB, and an initiator, in this process.
type pair struct {
	t      testing.TB
	p      *Provider
	target *target
	domain rdma.Domain
	memory *rdma.Memory
	attr   []byte
	in     rdma.Initiator
}

const pairRegion = 5

func newPair(t testing.TB, p *Provider) *pair {
	if p.SocketPath == "" {
		p.SocketPath = filepath.Join(t.TempDir(), "s")
	}
	s := &pair{t: t, p: p}
	tg, err := p.NewTarget(rdma.TargetConfig{NodeID: 3, BootID: 0xfeed})
	require.NoError(t, err)
	s.target = tg.(*target)
	s.domain, err = tg.NewDomain("d")
	require.NoError(t, err)
	s.memory = s.alloc(1 << 20)
	for i := range s.memory.Bytes() {
		s.memory.Bytes()[i] = byte(i * 7)
	}
	s.attr, err = s.domain.Register(pairRegion, s.memory)
	require.NoError(t, err)
	s.in, err = p.NewInitiator(rdma.InitiatorConfig{})
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, s.in.Close())
		require.NoError(t, s.target.Close())
	})
	return s
}

func (s *pair) alloc(size uint64) *rdma.Memory {
	m, err := rdma.AllocMemory("kvd-shm-test", size, rdma.MemoryOptions{Shareable: true})
	require.NoError(s.t, err)
	s.t.Cleanup(func() { require.NoError(s.t, m.Free()) })
	return m
}

func (s *pair) accept() (rdma.Dial, []byte, *endpoint) {
	d, err := s.in.Prepare(background)
	require.NoError(s.t, err)
	answer, ep, err := s.domain.Accept(background, rdma.Peer{Name: "test"}, d.Offer())
	require.NoError(s.t, err)
	return d, answer, ep.(*endpoint)
}

func (s *pair) connectEndpoint() (*conn, *endpoint) {
	d, answer, ep := s.accept()
	c, err := d.Connect(background, answer)
	require.NoError(s.t, err)
	require.NoError(s.t, c.AddRegion(pairRegion, s.memory.Size(), s.attr))
	return c.(*conn), ep
}

func (s *pair) connect() *conn {
	c, _ := s.connectEndpoint()
	return c
}

// read READs the pair's region, compares, and returns the outcome.
func (s *pair) read(c rdma.Conn, offset uint64, n int) error {
	b := &rdma.Batch{Reads: []rdma.Read{{Region: pairRegion, Offset: offset, Dst: make([]byte, n)}}}
	b.Reset()
	c.Post(b)
	require.True(s.t, b.Completed())
	if b.Err() == nil {
		require.Equal(s.t, n, b.Reads[0].N)
		require.Equal(s.t, s.memory.Bytes()[offset:offset+uint64(n)], b.Reads[0].Dst)
	}
	return b.Err()
}
