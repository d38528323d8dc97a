//go:build linux

package shm

import (
	"encoding/hex"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma"
)

// rawClient is a client without manners.
func rawClient(t testing.TB, path string) *net.UnixConn {
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(patience)))
	return c
}

func receiveRefusal(t testing.TB, c *net.UnixConn) refusal {
	var buf [maxMessage]byte
	msg, _, err := receive(c, buf[:], 0)
	require.NoError(t, err)
	m, err := decodeRefusal(msg)
	require.NoError(t, err)
	_, _, err = receive(c, buf[:], 0)
	require.ErrorIs(t, err, io.EOF, "the server hangs up after a refusal")
	return m
}

// TestHostileClients: none of them gets in, takes memory, or disturbs another
// client.
func TestHostileClients(t *testing.T) {
	s := newPair(t, &Provider{HandshakeTimeout: 100 * time.Millisecond})
	good := s.connect()
	path := s.p.SocketPath

	t.Run("noise", func(t *testing.T) {
		for _, noise := range []string{"x", "GET / HTTP/1.0\r\n\r\n", string(hello{}.encode()[:20]), string(make([]byte, 200))} {
			c := rawClient(t, path)
			_, err := c.Write([]byte(noise))
			require.NoError(t, err)
			require.Equal(t, refuseVersion, receiveRefusal(t, c).code)
		}
	})
	t.Run("wrong token", func(t *testing.T) {
		c := rawClient(t, path)
		_, err := c.Write(hello{token: token{1}}.encode())
		require.NoError(t, err)
		require.Equal(t, refuseToken, receiveRefusal(t, c).code)
	})
	t.Run("silence", func(t *testing.T) {
		c := rawClient(t, path)
		_, err := c.Read(make([]byte, 1)) // until the server's deadline
		require.ErrorIs(t, err, io.EOF)
	})
	t.Run("too long", func(t *testing.T) {
		c := rawClient(t, path)
		_, err := c.Write(make([]byte, 4096))
		require.NoError(t, err)
		_, err = c.Read(make([]byte, 1))
		require.Error(t, err)
	})
	t.Run("garbage after the handshake", func(t *testing.T) {
		_, answer, ep := s.accept()
		a, err := decodeAnswer(answer)
		require.NoError(t, err)
		c := rawClient(t, path)
		_, err = c.Write(hello{token: a.token}.encode())
		require.NoError(t, err)
		_, err = c.Write([]byte("what"))
		require.NoError(t, err)
		ended(t, "endpoint", ep.Done())
	})
	t.Run("does not read", func(t *testing.T) {
		_, answer, ep := s.accept()
		a, err := decodeAnswer(answer)
		require.NoError(t, err)
		c := rawClient(t, path)
		_, err = c.Write(hello{token: a.token}.encode())
		require.NoError(t, err)
		for err == nil { // until its answers fill the socket
			_, err = c.Write(encodeGetRegion(99))
		}
		require.False(t, errors.Is(err, os.ErrDeadlineExceeded), "the server waited for a client that does not read")
		ended(t, "endpoint", ep.Done())
	})
	require.NoError(t, s.read(good, 64, 64))
	require.NoError(t, good.Err())
}

func TestManyHandshakes(t *testing.T) {
	s := newPair(t, &Provider{HandshakeTimeout: time.Minute})
	path := s.p.SocketPath
	for range maxHandshakes {
		rawClient(t, path)
	}
	eventually(t, "another is refused", func() bool {
		c := rawClient(t, path)
		_ = c.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
		var buf [maxMessage]byte
		msg, _, err := receive(c, buf[:], 0)
		_ = c.Close()
		return err == nil && msg[0] == msgRefuse
	})
	// The target's Close (in Cleanup) does not wait for the minute.
}

// TestOtherUser: the uid is checked though the socket is open to all, and the file's
// permissions keep others out where they can.
func TestOtherUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can become another user: the uid check is tested with other lists below")
	}
	try := func(t *testing.T, allowed []uint32) string {
		// Not t.TempDir, whose parents only its owner may search.
		dir, err := os.MkdirTemp("", "kvd-shm-test")
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
		require.NoError(t, os.Chmod(dir, 0o755))
		s := newPair(t, &Provider{SocketPath: dir + "/s", AllowedUIDs: allowed})
		_, answer, _ := s.accept()
		c := startChild(t, "client", hex.EncodeToString(answer))
		require.True(t, c.out.Scan(), &c.err)
		return c.out.Text()
	}
	t.Run("only us", func(t *testing.T) {
		require.Contains(t, try(t, nil), "may not open the server's socket")
	})
	t.Run("listed", func(t *testing.T) {
		require.Equal(t, "connected", try(t, []uint32{0, 54321}))
	})
	t.Run("others listed", func(t *testing.T) {
		said := try(t, []uint32{0, 54322})
		require.Contains(t, said, rdma.ErrRevoked.Error())
		require.Contains(t, said, "user 54321 may not connect, allowed: 0, 54322")
	})
}

// TestRootIsNotSpecial: a user that is not listed is refused, whoever it is.
func TestRootIsNotSpecial(t *testing.T) {
	s := newPair(t, &Provider{AllowedUIDs: []uint32{uint32(os.Getuid()) + 1}})
	for range 300 { // the refusal must arrive however the two messages meet
		d, answer, ep := s.accept()
		_, err := d.Connect(background, answer)
		require.ErrorIs(t, err, rdma.ErrRevoked)
		require.ErrorContains(t, err, "may not connect")
		require.NoError(t, ep.Close())
	}
}

func TestMaxConnections(t *testing.T) {
	s := newPair(t, &Provider{MaxConnections: 2})
	c, ep := s.connectEndpoint()
	_, _, expected := s.accept()
	d, err := s.in.Prepare(background)
	require.NoError(t, err)
	_, _, err = s.domain.Accept(background, rdma.Peer{}, d.Offer())
	require.ErrorIs(t, err, rdma.ErrExhausted)
	require.NoError(t, expected.Close())
	require.NoError(t, c.Close())
	ended(t, "endpoint", ep.Done())
	s.connect()
	s.connect()
}

func TestOtherHost(t *testing.T) {
	s := newPair(t, &Provider{})
	_, _, err := s.domain.Accept(background, rdma.Peer{}, offer{host: "elsewhere/mnt:1/pid:1"}.encode())
	require.ErrorIs(t, err, rdma.ErrUnsupported)

	dial := func(change func(*answer)) error {
		d, b, _ := s.accept()
		a, err := decodeAnswer(b)
		require.NoError(t, err)
		change(&a)
		_, err = d.Connect(background, a.encode())
		return err
	}
	require.ErrorIs(t, dial(func(a *answer) { a.host = "elsewhere/mnt:1/pid:1" }), rdma.ErrUnsupported)
	err = dial(func(a *answer) { a.host, a.path = otherMounts(), "/nowhere/socket" })
	require.ErrorIs(t, err, rdma.ErrUnsupported)
	require.ErrorContains(t, err, "mount its directory into this container")
	require.ErrorIs(t, dial(func(a *answer) { a.path += "-gone" }), rdma.ErrConnLost)
	// Namespaces differ, but the directory is shared.
	require.NoError(t, dial(func(a *answer) { a.host = otherMounts() }))
}

// otherMounts is the id of a process on this host in another mount namespace.
func otherMounts() string {
	boot, _, _ := strings.Cut(HostID(), "/")
	return boot + "/mnt:[1]/pid:[1]"
}

func TestRegisterNotShareable(t *testing.T) {
	s := newPair(t, &Provider{})
	m, err := rdma.AllocMemory("private", 4096, rdma.MemoryOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, m.Free()) }()
	_, err = s.domain.Register(1, m)
	require.ErrorIs(t, err, rdma.ErrUnsupported)
	require.ErrorContains(t, err, "MemoryOptions.Shareable")
}

// TestMemoryFreedWhileGiven: the memory may be freed as soon as Deregister returned,
// with a request for it under way.
func TestMemoryFreedWhileGiven(t *testing.T) {
	s := newPair(t, &Provider{})
	c := s.connect()
	for i := range 200 {
		m, err := rdma.AllocMemory("kvd-shm-test", 4096, rdma.MemoryOptions{Shareable: true})
		require.NoError(t, err)
		id := rdma.RegionID(100 + i)
		at, err := s.domain.Register(id, m)
		require.NoError(t, err)
		added := make(chan error, 1)
		go func() { added <- c.AddRegion(id, m.Size(), at) }()
		require.NoError(t, s.domain.Deregister(id))
		require.NoError(t, m.Free())
		if err := <-added; err != nil {
			require.ErrorIs(t, err, rdma.ErrAccess)
		}
		b := benchBatch(rdma.Read{Region: id, Dst: make([]byte, 8)})
		b.Reset()
		c.Post(b)
		require.ErrorIs(t, b.Err(), rdma.ErrAccess)
	}
	require.NoError(t, s.read(c, 0, 64))
}
