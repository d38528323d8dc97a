//go:build linux

package shm

import (
	"context"
	"encoding/hex"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kvd-io/kvd/rdma"
)

// serverChild is a server in another process, a connection to it, and a second
// connection made by hand, whose pages the test itself has mapped: they stay when
// the client drops its own.
type serverChild struct {
	*child
	lock        *os.File
	conn        rdma.Conn
	death, page []byte
	tid         uint32
}

func startServer(t *testing.T) *serverChild {
	dir := t.TempDir()
	lock := filepath.Join(dir, "lock")
	s := &serverChild{child: startChild(t, "server", filepath.Join(dir, "s"), lock)}
	attr := s.expectHex("attr")
	in, err := (&Provider{}).NewInitiator(rdma.InitiatorConfig{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, in.Close()) })

	dial, err := in.Prepare(t.Context())
	require.NoError(t, err)
	s.conn, err = dial.Connect(t.Context(), s.accept(dial.Offer()))
	require.NoError(t, err)
	require.NoError(t, s.conn.AddRegion(1, 1<<20, attr))
	require.NoError(t, s.read())

	a, err := decodeAnswer(s.accept(dial.Offer()))
	require.NoError(t, err)
	s.death, s.page, s.tid = handshakeByHand(t, a)

	s.lock, err = os.OpenFile(lock, os.O_RDWR, 0)
	require.NoError(t, err)
	t.Cleanup(func() { _ = s.lock.Close() })
	require.False(t, s.tryLock(), "the child does not hold its lock")
	return s
}

func (s *serverChild) accept(offer []byte) []byte {
	s.say("offer %s", hex.EncodeToString(offer))
	return s.expectHex("answer")
}

// read READs once and checks what came.
func (s *serverChild) read() error {
	b := &rdma.Batch{Reads: []rdma.Read{{Region: 1, Offset: 4096, Dst: make([]byte, 1024)}, {Region: 1, Dst: make([]byte, 64)}}}
	b.Reset()
	s.conn.Post(b)
	if b.Err() == nil {
		for _, r := range b.Reads {
			for _, v := range r.Dst {
				require.Equal(s.t, byte(0x5a), v)
			}
		}
	}
	return b.Err()
}

func (s *serverChild) tryLock() bool {
	return unix.Flock(int(s.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil
}

func (s *serverChild) word() uint32 { return atomic.LoadUint32(deathWord(s.death)) }

func handshakeByHand(t testing.TB, a answer) (death, page []byte, tid uint32) {
	sock, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: a.path, Net: "unixpacket"})
	require.NoError(t, err)
	t.Cleanup(func() { _ = sock.Close() })
	_, err = sock.Write(hello{token: a.token}.encode())
	require.NoError(t, err)
	var buf [maxMessage]byte
	msg, fds, err := receive(sock, buf[:], 2)
	require.NoError(t, err)
	w, err := decodeWelcome(msg)
	require.NoError(t, err)
	require.Len(t, fds, 2)
	death, err = mapSealed(fds[0], uint64(os.Getpagesize()), "death page")
	require.NoError(t, err)
	page, err = mapSealed(fds[1], uint64(os.Getpagesize()), "connection page")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unmapAll(death, page)) })
	return death, page, w.tid
}

// TestDeathWord: however a server dies, the word is set by the time that the lock
// on a file of it falls, and nothing is accepted from its memory after that.
func TestDeathWord(t *testing.T) {
	cases := []struct {
		name string
		kill func(*testing.T, *serverChild)
	}{
		{"SIGKILL", func(t *testing.T, s *serverChild) { require.NoError(t, s.cmd.Process.Kill()) }},
		{"panic", func(t *testing.T, s *serverChild) { s.say("panic") }},
		{"os.Exit", func(t *testing.T, s *serverChild) { s.say("exit") }},
		{"SIGKILL while stopped", func(t *testing.T, s *serverChild) {
			require.NoError(t, s.cmd.Process.Signal(syscall.SIGSTOP))
			require.NoError(t, s.cmd.Process.Kill())
		}},
		{"out of memory", func(t *testing.T, s *serverChild) {
			g := newMemoryGroup(t, 64<<20)
			g.add(t, s.cmd.Process.Pid)
			t.Cleanup(func() {
				require.Equal(t, 1, g.kills(t), "the kernel's count of OOM kills")
			})
			s.say("oom")
		}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s := startServer(t)
			require.Equal(t, s.tid, s.word())
			c.kill(t, s)
			// No pause between attempts, so that the word is looked at as soon after the
			// lock fell as can be.
			deadline := time.Now().Add(patience)
			for !s.tryLock() {
				require.True(t, time.Now().Before(deadline), "the child still holds its lock")
				runtime.Gosched()
			}
			require.Equal(t, uint32(ownerDied), s.word(), "the lock fell before the word was set")
			require.ErrorIs(t, s.read(), rdma.ErrConnLost)
			ended(t, "connection", s.conn.Done())
			require.ErrorIs(t, s.conn.Err(), rdma.ErrConnLost)
			require.Zero(t, load64(s.page, offWord), "nobody ended the connection in an orderly way")
			_ = s.cmd.Wait()
		})
	}
}

// TestDeathWordAlone: without any news from the socket, the word alone makes a READ
// fail.
func TestDeathWordAlone(t *testing.T) {
	s := newPair(t, &Provider{})
	c := s.connect()
	fake := *c.table.Load()
	fake.alive = new(uint32)
	*fake.alive = fake.tid | ownerDied
	c.table.Store(&fake)
	require.ErrorIs(t, s.read(c, 0, 64), rdma.ErrConnLost)
	ended(t, "connection", c.Done())
	require.ErrorIs(t, c.Err(), errServerDied)
}

// TestStopped: a stopped server is not a dead one; its memory goes on being read.
func TestStopped(t *testing.T) {
	s := startServer(t)
	require.NoError(t, s.cmd.Process.Signal(syscall.SIGSTOP))
	eventually(t, "child stopped", func() bool {
		stat, err := os.ReadFile(filepath.Join("/proc", itoa(s.cmd.Process.Pid), "stat"))
		return err == nil && contains(stat, ") T ")
	})
	for range 1000 {
		require.NoError(t, s.read())
	}
	require.Equal(t, s.tid, s.word())
	require.False(t, s.tryLock())
	require.NoError(t, s.conn.Err())
	require.NoError(t, s.cmd.Process.Signal(syscall.SIGCONT))
	require.NoError(t, s.read())
	// An orderly end of the target is told apart from a death.
	s.say("close")
	ended(t, "connection", s.conn.Done())
	require.ErrorIs(t, s.conn.Err(), rdma.ErrRevoked)
	eventually(t, "the page says why", func() bool { return load64(s.page, offWord) == stateEnded|endTarget })
	_ = s.cmd.Wait()
}

// TestWelcomedIsNotShaking: Close ends the sockets that still shake hands without a
// word, so one whose client is welcomed must not be among them: the client would take
// an orderly end for a loss.
func TestWelcomedIsNotShaking(t *testing.T) {
	s := newPair(t, &Provider{})
	dial, answer, e := s.accept()
	e.mu.Lock() // the welcome waits
	welcome := sync.OnceFunc(e.mu.Unlock)
	t.Cleanup(welcome)
	connected := make(chan error, 1)
	go func() {
		c, err := dial.Connect(background, answer)
		if err == nil {
			err = c.Close()
		}
		connected <- err
	}()
	eventually(t, "token redeemed, handshake over", func() bool {
		s.target.mu.Lock()
		defer s.target.mu.Unlock()
		return s.target.mu.pending[e.token] == nil && len(s.target.mu.shaking) == 0
	})
	welcome()
	require.NoError(t, <-connected)
}

// TestOneDeathWord: targets of one process share the word.
func TestOneDeathWord(t *testing.T) {
	a, err := processDeath()
	require.NoError(t, err)
	b, err := processDeath()
	require.NoError(t, err)
	require.Same(t, a, b)
	// The thread stays while others end: a goroutine that ends locked takes its
	// thread with it.
	for range 20 {
		var wg, together sync.WaitGroup
		together.Add(16)
		for range 16 {
			wg.Go(func() {
				runtime.LockOSThread()
				together.Done()
				together.Wait()
			})
		}
		wg.Wait()
	}
	require.Equal(t, a.tid, atomic.LoadUint32(deathWord(a.memory.Bytes())))
	_, err = os.Stat(filepath.Join("/proc/self/task", itoa(int(a.tid))))
	require.NoError(t, err)
}

var background = context.Background()
