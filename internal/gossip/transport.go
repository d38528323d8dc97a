package gossip

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/memberlist"
)

// maxStreams that others may have open here at a time. More are closed at once: a stream is
// an exchange of state, which is tried again.
const maxStreams = 64

// transport is memberlist's UDP and TCP with three things that it lacks: counters, a bound
// on the connections that others open, and a Shutdown that ends those that are open.
type transport struct {
	*memberlist.NetTransport
	advertise netip.AddrPort

	packets chan *memberlist.Packet
	streams chan net.Conn
	slots   chan struct{} // one for each stream of others that is open

	ctx    context.Context // ends when Shutdown begins
	cancel context.CancelFunc
	ended  chan struct{} // closed when nothing comes any more
	wg     sync.WaitGroup
	mu     struct {
		sync.Mutex
		open   map[net.Conn]struct{}
		closed bool
	}

	packetsIn, packetsOut, bytesIn, bytesOut, streamsIn, streamsOut, streamsRefused atomic.Uint64
}

var _ memberlist.NodeAwareTransport = (*transport)(nil)

// bindAttempts: UDP and TCP are to have the same port, so a free one is tried for.
const bindAttempts = 20

func newTransport(listen netip.AddrPort, advertise string, log slog.Handler) (*transport, error) {
	t := &transport{
		packets: make(chan *memberlist.Packet), streams: make(chan net.Conn), slots: make(chan struct{}, maxStreams), ended: make(chan struct{}),
	}
	t.mu.open = map[net.Conn]struct{}{}
	var err error
	for range bindAttempts {
		t.NetTransport, err = memberlist.NewNetTransport(&memberlist.NetTransportConfig{
			BindAddrs: []string{listen.Addr().String()}, BindPort: int(listen.Port()), Logger: slog.NewLogLogger(log, slog.LevelDebug),
		})
		if err == nil || listen.Port() != 0 {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("%w: gossip can not listen on %s by UDP and TCP: %w", ErrConfig, listen, err)
	}
	t.advertise = netip.AddrPortFrom(listen.Addr(), uint16(t.GetAutoBindPort()))
	if advertise != "" {
		t.advertise = netip.MustParseAddrPort(advertise) // Validate looked at it
	}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	t.wg.Add(2)
	go t.receivePackets()
	go t.receiveStreams()
	return t, nil
}

func (t *transport) receivePackets() {
	defer t.wg.Done()
	for {
		select {
		case p := <-t.NetTransport.PacketCh():
			t.packetsIn.Add(1)
			t.bytesIn.Add(uint64(len(p.Buf)))
			select {
			case t.packets <- p:
			case <-t.ctx.Done(): // dropped
			}
		case <-t.ended:
			return
		}
	}
}

func (t *transport) receiveStreams() {
	defer t.wg.Done()
	for {
		select {
		case c := <-t.NetTransport.StreamCh():
			select {
			case t.slots <- struct{}{}:
			default:
				t.streamsRefused.Add(1)
				_ = c.Close()
				continue
			}
			tracked := t.track(c, func() { <-t.slots })
			if tracked == nil {
				continue
			}
			t.streamsIn.Add(1)
			select {
			case t.streams <- tracked:
			case <-t.ctx.Done():
				_ = tracked.Close()
			}
		case <-t.ended:
			return
		}
	}
}

// track has Shutdown close the connection. It returns nil, and closes it, after that.
func (t *transport) track(c net.Conn, onClose func()) net.Conn {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed {
		_ = c.Close()
		onClose()
		return nil
	}
	t.mu.open[c] = struct{}{}
	return &conn{Conn: c, t: t, onClose: onClose}
}

type conn struct {
	net.Conn
	t       *transport
	once    sync.Once
	onClose func()
}

func (c *conn) Close() error {
	c.once.Do(func() {
		c.t.mu.Lock()
		delete(c.t.mu.open, c.Conn)
		c.t.mu.Unlock()
		c.onClose()
	})
	return c.Conn.Close()
}

// FinalAdvertiseAddr implements memberlist.Transport.
func (t *transport) FinalAdvertiseAddr(string, int) (net.IP, int, error) {
	return t.advertise.Addr().Unmap().AsSlice(), int(t.advertise.Port()), nil
}

// PacketCh implements memberlist.Transport.
func (t *transport) PacketCh() <-chan *memberlist.Packet { return t.packets }

// StreamCh implements memberlist.Transport.
func (t *transport) StreamCh() <-chan net.Conn { return t.streams }

// WriteTo implements memberlist.Transport.
func (t *transport) WriteTo(b []byte, addr string) (time.Time, error) {
	return t.WriteToAddress(b, memberlist.Address{Addr: addr})
}

// WriteToAddress implements memberlist.NodeAwareTransport.
func (t *transport) WriteToAddress(b []byte, addr memberlist.Address) (time.Time, error) {
	t.packetsOut.Add(1)
	t.bytesOut.Add(uint64(len(b)))
	return t.NetTransport.WriteToAddress(b, addr)
}

// DialTimeout implements memberlist.Transport.
func (t *transport) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	return t.DialAddressTimeout(memberlist.Address{Addr: addr}, timeout)
}

// DialAddressTimeout implements memberlist.NodeAwareTransport.
func (t *transport) DialAddressTimeout(addr memberlist.Address, timeout time.Duration) (net.Conn, error) {
	t.streamsOut.Add(1)
	c, err := (&net.Dialer{Timeout: timeout}).DialContext(t.ctx, "tcp", addr.Addr)
	if err != nil {
		return nil, err
	}
	if tracked := t.track(c, func() {}); tracked != nil {
		return tracked, nil
	}
	return nil, ErrClosed
}

// Shutdown implements memberlist.Transport: it returns when no packet and no stream comes
// any more, and ends the streams that are open.
func (t *transport) Shutdown() error {
	t.cancelStreams()
	err := t.NetTransport.Shutdown() // its listeners hand over what they have: we still take it
	close(t.ended)
	t.wg.Wait()
	return err
}

// cancelStreams ends what is open and what is being opened: whoever waits for it goes on.
func (t *transport) cancelStreams() {
	t.cancel()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.closed = true
	for c := range t.mu.open {
		_ = c.Close()
	}
}
