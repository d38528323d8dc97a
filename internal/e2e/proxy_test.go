//go:build e2e

package e2e

import (
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// spoiling is what a proxy does to what a node answers.
type spoiling int

const (
	pass     spoiling = iota
	flipBits          // one bit of some reads
	cutShort          // ends the connection in the middle of an answer
	stall             // delivers nothing for the time being
	lose              // leaves bytes out and goes on
)

func (s spoiling) String() string {
	return [...]string{"pass", "flip", "cut", "stall", "lose"}[s]
}

// proxy lies between a client and one node's READ port.
type proxy struct {
	l  net.Listener
	wg sync.WaitGroup
	mu struct {
		sync.Mutex
		target string
		how    spoiling
		better chan struct{} // closed when how is set
		conns  map[net.Conn]bool
		closed bool
		bytes  int
		hurt   int
	}
}

func newProxy(t testing.TB) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &proxy{l: l}
	p.mu.conns = map[net.Conn]bool{}
	p.mu.better = make(chan struct{})
	p.wg.Add(1)
	go p.accept()
	t.Cleanup(p.close)
	return p
}

func (p *proxy) addr() string { return p.l.Addr().String() }

func (p *proxy) setTarget(addr string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.target = addr
}

func (p *proxy) set(how spoiling) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.how = how
	close(p.mu.better)
	p.mu.better = make(chan struct{})
}

func (p *proxy) bytes() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.bytes
}

func (p *proxy) count(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.bytes += n
}

func (p *proxy) spoiled() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.hurt
}

func (p *proxy) close() {
	_ = p.l.Close()
	p.mu.Lock()
	p.mu.closed = true
	for c := range p.mu.conns {
		_ = c.Close()
	}
	close(p.mu.better)
	p.mu.better = nil
	p.mu.Unlock()
	p.wg.Wait()
}

// hold keeps a connection until release; false where the proxy is closed.
func (p *proxy) hold(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.closed {
		_ = c.Close()
		return false
	}
	p.mu.conns[c] = true
	return true
}

func (p *proxy) release(c net.Conn) {
	_ = c.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.mu.conns, c)
}

func (p *proxy) accept() {
	defer p.wg.Done()
	for {
		down, err := p.l.Accept()
		if err != nil {
			return
		}
		p.mu.Lock()
		target := p.mu.target
		p.mu.Unlock()
		up, err := net.DialTimeout("tcp", target, 5*time.Second)
		if err != nil {
			_ = down.Close()
			continue
		}
		if !p.hold(down) || !p.hold(up) {
			_ = up.Close()
			return
		}
		p.wg.Add(2)
		go func() {
			defer p.wg.Done()
			_, _ = io.Copy(up, down)
			p.release(up)
		}()
		go func() {
			defer p.wg.Done()
			_ = p.answers(down, up)
			p.release(down)
		}()
	}
}

var errCut = errors.New("cut")

// spared is the beginning of each connection, in bytes, that is not spoiled: after a
// handshake that failed a client reads the node otherwise for half a minute, which
// would be all that is tested.
const spared = 512

// answers carries what the node sends, and spoils it.
func (p *proxy) answers(down, up net.Conn) error {
	buf := make([]byte, 64<<10)
	for sent := 0; ; {
		n, err := up.Read(buf)
		if n > 0 {
			b, cut := buf[:n], false
			if sent >= spared {
				b, cut = p.spoil(b)
			}
			sent += n
			p.count(n)
			if _, werr := down.Write(b); werr != nil {
				return werr
			}
			if cut {
				return errCut
			}
		}
		if err != nil {
			return err
		}
	}
}

// spoil returns what to send instead of b, and whether to end the connection then.
func (p *proxy) spoil(b []byte) (out []byte, cut bool) {
	p.mu.Lock()
	how, better := p.mu.how, p.mu.better
	hurt := true
	switch {
	case how == flipBits && rand.IntN(3) == 0:
		b[rand.IntN(len(b))] ^= 1 << rand.IntN(8)
	case how == cutShort && rand.IntN(10) == 0:
		b, cut = b[:rand.IntN(len(b))], true
	case how == lose && rand.IntN(10) == 0:
		b = b[:rand.IntN(len(b))]
	case how == stall && better != nil:
	default:
		hurt = false
	}
	if hurt {
		p.mu.hurt++
	}
	p.mu.Unlock()
	if how == stall && better != nil {
		<-better
	}
	return b, cut
}
