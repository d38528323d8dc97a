//go:build linux

package shm

import (
	"bytes"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kvd-io/kvd/rdma"
)

// fakeServer answers one client with whatever a case wants.
type fakeServer struct {
	t    testing.TB
	l    *net.UnixListener
	a    answer
	sock *net.UnixConn
	open int // descriptors that file made and Cleanup will close
}

func newFakeServer(t testing.TB) *fakeServer {
	f := &fakeServer{t: t}
	f.a = answer{node: 1, boot: 2, path: filepath.Join(t.TempDir(), "s"), host: HostID(), proof: [proofSize]byte{9}}
	var err error
	f.l, err = net.ListenUnix("unixpacket", &net.UnixAddr{Name: f.a.path, Net: "unixpacket"})
	require.NoError(t, err)
	t.Cleanup(func() {
		_ = f.l.Close()
		if f.sock != nil {
			_ = f.sock.Close()
		}
	})
	return f
}

// greet accepts the client and reads its hello.
func (f *fakeServer) greet() error {
	var err error
	if f.sock, err = f.l.AcceptUnix(); err != nil {
		return err
	}
	var buf [maxMessage]byte
	_, _, err = receive(f.sock, buf[:], 0)
	return err
}

// file makes a memfd with the given seals and size and gives its descriptor.
func (f *fakeServer) file(size int, seals int, fill func([]byte)) int {
	fd, err := unix.MemfdCreate("kvd-shm-fake", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	require.NoError(f.t, err)
	f.open++
	f.t.Cleanup(func() { _ = unix.Close(fd) })
	require.NoError(f.t, unix.Ftruncate(fd, int64(size)))
	if fill != nil {
		b, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		require.NoError(f.t, err)
		fill(b)
		require.NoError(f.t, unix.Munmap(b))
	}
	_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
	require.NoError(f.t, err)
	return fd
}

const goodSeals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW

const fakeTID, fakeProcess = 77, 0xabc

func (f *fakeServer) deathPage(seals int) int {
	return f.file(os.Getpagesize(), seals, func(b []byte) {
		store64(b, offMagic, deathMagic)
		store64(b, offProcess, fakeProcess)
		*deathWord(b) = fakeTID
	})
}

func (f *fakeServer) connPage(change func([]byte)) int {
	return f.file(os.Getpagesize(), goodSeals, func(b []byte) {
		store64(b, offMagic, connMagic)
		store64(b, offProcess, fakeProcess)
		store64(b, offNode, f.a.node)
		store64(b, offBoot, f.a.boot)
		if change != nil {
			change(b)
		}
	})
}

func (f *fakeServer) welcome() []byte { return welcome{proof: f.a.proof, tid: fakeTID}.encode() }

func (f *fakeServer) send(msg []byte, fds ...int) error { return sendNow(f.sock, msg, fds...) }

// welcomed connects a client properly.
func (f *fakeServer) welcomed(limit time.Duration) *conn {
	death, page := f.deathPage(goodSeals), f.connPage(nil)
	greeted := make(chan error, 1)
	go func() {
		err := f.greet()
		if err == nil {
			err = f.send(f.welcome(), death, page)
		}
		greeted <- err
	}()
	c, err := f.connect(limit)
	require.NoError(f.t, err)
	require.NoError(f.t, <-greeted)
	f.t.Cleanup(func() { require.NoError(f.t, c.Close()) })
	return c.(*conn)
}

func (f *fakeServer) connect(limit time.Duration) (rdma.Conn, error) {
	in, err := (&Provider{}).NewInitiator(rdma.InitiatorConfig{ConnectTimeout: limit})
	require.NoError(f.t, err)
	f.t.Cleanup(func() { require.NoError(f.t, in.Close()) })
	d, err := in.Prepare(background)
	require.NoError(f.t, err)
	return d.Connect(background, f.a.encode())
}

// resources are what a refused server must not leave with the client.
func resources(t testing.TB) (fds, maps int) {
	e, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	m, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	return len(e), bytes.Count(m, []byte("/memfd:kvd-shm"))
}

func TestHostileHandshake(t *testing.T) {
	type server = *fakeServer
	cases := []struct {
		name  string
		serve func(server) error
		want  error
		text  string
	}{
		{"hangs up", func(server) error { return nil }, rdma.ErrConnLost, "hung up"},
		{"noise", func(f server) error { return f.send([]byte("HTTP/1.1 400 Bad Request")) }, rdma.ErrHandshake, "not a kvd shm peer"},
		{"too long", func(f server) error { return f.send(make([]byte, maxMessage+1)) }, rdma.ErrHandshake, "more than 512 bytes"},
		{"cut short", func(f server) error { return f.send(f.welcome()[:9], f.deathPage(goodSeals), f.connPage(nil)) }, rdma.ErrHandshake, "cut short"},
		{"no descriptors", func(f server) error { return f.send(f.welcome()) }, rdma.ErrHandshake, "0 descriptors"},
		{"one descriptor", func(f server) error { return f.send(f.welcome(), f.deathPage(goodSeals)) }, rdma.ErrHandshake, "1 descriptors"},
		{"many descriptors", func(f server) error {
			d := f.deathPage(goodSeals)
			return f.send(f.welcome(), d, d, d, d, d, d)
		}, rdma.ErrHandshake, "more than"},
		{"another version", func(f server) error {
			w := f.welcome()
			w[1]++
			return f.send(w, f.deathPage(goodSeals), f.connPage(nil))
		}, rdma.ErrHandshake, "version 2, want 1"},
		{"wrong proof", func(f server) error {
			return f.send(welcome{tid: fakeTID}.encode(), f.deathPage(goodSeals), f.connPage(nil))
		}, rdma.ErrHandshake, "not the server that sent the answer"},
		{"not sealed", func(f server) error { return f.send(f.welcome(), f.deathPage(unix.F_SEAL_GROW), f.connPage(nil)) }, rdma.ErrHandshake, "seals"},
		{"not a memfd", func(f server) error {
			r, err := os.Open("/proc/self/exe")
			if err != nil {
				return err
			}
			defer func() { _ = r.Close() }()
			return f.send(f.welcome(), f.deathPage(goodSeals), int(r.Fd()))
		}, rdma.ErrHandshake, "not a memfd"},
		{"wrong size", func(f server) error {
			return f.send(f.welcome(), f.deathPage(goodSeals), f.file(3*os.Getpagesize(), goodSeals, nil))
		}, rdma.ErrHandshake, "bytes, want"},
		{"empty file", func(f server) error { return f.send(f.welcome(), f.file(0, goodSeals, nil), f.connPage(nil)) }, rdma.ErrHandshake, "0 bytes"},
		{"another boot", func(f server) error {
			return f.send(f.welcome(), f.deathPage(goodSeals), f.connPage(func(b []byte) { store64(b, offBoot, 99) }))
		}, rdma.ErrHandshake, "boot id"},
		{"another node", func(f server) error {
			return f.send(f.welcome(), f.deathPage(goodSeals), f.connPage(func(b []byte) { store64(b, offNode, 99) }))
		}, rdma.ErrHandshake, "node id"},
		{"another process's death", func(f server) error {
			return f.send(f.welcome(), f.deathPage(goodSeals), f.connPage(func(b []byte) { store64(b, offProcess, 99) }))
		}, rdma.ErrHandshake, "process"},
		{"pages swapped", func(f server) error { return f.send(f.welcome(), f.connPage(nil), f.deathPage(goodSeals)) }, rdma.ErrHandshake, "magic"},
		{"thread id of nobody", func(f server) error {
			return f.send(welcome{proof: f.a.proof}.encode(), f.deathPage(goodSeals), f.connPage(nil))
		}, rdma.ErrHandshake, "thread id"},
		{"refusal", func(f server) error { return f.send(refusal{code: refuseUID, text: "user 5 may not"}.encode()) }, rdma.ErrRevoked, "user 5 may not"},
		{"refusal that lies", func(f server) error { return f.send([]byte{msgRefuse, 1, 0, 255, 255}) }, rdma.ErrHandshake, "refusal"},
		{"empty message", func(f server) error { return f.send(nil) }, rdma.ErrConnLost, "hung up"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			f := newFakeServer(t)
			served := make(chan error, 1)
			fds, maps := resources(t)
			go func() {
				err := f.greet()
				if err == nil {
					err = c.serve(f)
				}
				_ = f.sock.Close()
				served <- err
			}()
			_, err := f.connect(patience)
			require.NoError(t, <-served)
			require.ErrorIs(t, err, c.want)
			require.ErrorContains(t, err, c.text)
			nowFDs, nowMaps := resources(t)
			require.Equal(t, maps, nowMaps, "mappings left")
			require.Equal(t, fds+f.open, nowFDs, "descriptors left")
		})
	}
}

func TestSilentServer(t *testing.T) {
	f := newFakeServer(t) // its kernel accepts, nobody answers
	start := time.Now()
	_, err := f.connect(50 * time.Millisecond)
	require.ErrorIs(t, err, rdma.ErrTimeout)
	require.Less(t, time.Since(start), patience)
}

// TestHostileMessages: after a good handshake, a message that does not fit ends the
// connection; memory that does not fit is not mapped.
func TestHostileMessages(t *testing.T) {
	const id, size = 4, 1 << 16
	good := regionReply{id: id, known: true, size: size}.encode()
	cases := []struct {
		name  string
		serve func(*fakeServer) error
		text  string
	}{
		{"unknown type", func(f *fakeServer) error { return f.send([]byte{200, 1, 2}) }, "unknown type 200"},
		{"second welcome", func(f *fakeServer) error { return f.send(f.welcome()) }, "unknown type"},
		{"region cut short", func(f *fakeServer) error { return f.send(good[:5], f.file(size, goodSeals, nil)) }, "cut short"},
		{"region without memory", func(f *fakeServer) error { return f.send(good) }, "came with 0"},
		{"unknown with memory", func(f *fakeServer) error {
			return f.send(regionReply{id: id}.encode(), f.file(size, goodSeals, nil))
		}, "came with 1"},
		{"region not asked for", func(f *fakeServer) error {
			return f.send(regionReply{id: id + 1, known: true, size: size}.encode(), f.file(size, goodSeals, nil))
		}, "not asked for"},
		{"region not sealed", func(f *fakeServer) error { return f.send(good, f.file(size, 0, nil)) }, "seals"},
		{"region smaller than it says", func(f *fakeServer) error { return f.send(good, f.file(size/2, goodSeals, nil)) }, "bytes, want"},
		{"region of another size", func(f *fakeServer) error {
			return f.send(regionReply{id: id, known: true, size: size * 2}.encode(), f.file(size*2, goodSeals, nil))
		}, "bytes at the server"},
		{"drop of what was not given", func(f *fakeServer) error { return f.send(drop{id: 9, count: 1}.encode()) }, "has not given"},
		{"drop cut short", func(f *fakeServer) error { return f.send(drop{id: 9, count: 1}.encode()[:4]) }, "cut short"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			f := newFakeServer(t)
			conn := f.welcomed(patience)
			asked := make(chan error, 1)
			go func() {
				var buf [maxMessage]byte
				_, _, err := receive(f.sock, buf[:], 0)
				if err == nil {
					err = c.serve(f)
				}
				asked <- err
			}()
			err := conn.AddRegion(id, size, attr{id: id, size: size, boot: f.a.boot}.encode())
			require.NoError(t, <-asked)
			require.ErrorIs(t, err, rdma.ErrHandshake)
			require.ErrorContains(t, err, c.text)
			ended(t, "connection", conn.Done())
			require.ErrorIs(t, conn.Err(), rdma.ErrHandshake)
			require.False(t, conn.HasRegion(id))
		})
	}
}

// TestSilentRegion: a server that does not answer a request costs the limit, and no
// READ that runs meanwhile.
func TestSilentRegion(t *testing.T) {
	f := newFakeServer(t)
	conn := f.welcomed(50 * time.Millisecond)
	const size = 1 << 16
	a := attr{id: 4, size: size, boot: f.a.boot}.encode()
	require.ErrorIs(t, conn.AddRegion(4, size, a), rdma.ErrTimeout)
	require.NoError(t, conn.Err())
	// A late answer is still worked in.
	require.NoError(t, f.send(regionReply{id: 4, known: true, size: size}.encode(), f.file(size, goodSeals, nil)))
	eventually(t, "region added", func() bool { return conn.HasRegion(4) })
	require.NoError(t, conn.AddRegion(4, size, a))
}

// TestUnexplainedState: a page that says more than the messages do ends the
// connection after the limit, and nothing read meanwhile is accepted.
func TestUnexplainedState(t *testing.T) {
	f := newFakeServer(t)
	conn := f.welcomed(100 * time.Millisecond)
	const size = 1 << 16
	require.NoError(t, addLate(f, conn, size))
	fake := *conn.table.Load()
	fake.state = new(uint64)
	*fake.state = 1
	conn.table.Store(&fake)
	b := benchBatch(rdma.Read{Region: 4, Dst: make([]byte, 8)})
	b.Reset()
	conn.Post(b)
	require.ErrorIs(t, b.Err(), rdma.ErrConnLost)
	require.ErrorContains(t, b.Err(), "has not said which")
}

func addLate(f *fakeServer, c *conn, size int) error {
	served := make(chan error, 1)
	go func() {
		var buf [maxMessage]byte
		_, _, err := receive(f.sock, buf[:], 0)
		if err == nil {
			err = f.send(regionReply{id: 4, known: true, size: uint64(size)}.encode(), f.file(size, goodSeals, nil))
		}
		served <- err
	}()
	err := c.AddRegion(4, uint64(size), attr{id: 4, size: uint64(size), boot: f.a.boot}.encode())
	if served := <-served; served != nil {
		return served
	}
	return err
}
