package verbs

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/verbs/ibv"
	"github.com/kvd-io/kvd/rdma/wire"
)

// cmAvailable is nil where iWARP devices can be used.
func cmAvailable() error { return ibv.RDMACMAvailable() }

// cmLink connects the queue pairs of one iWARP device by rdma_cm. The answer of the
// exchange over gRPC names where the target listens and a token; the client's connect
// request carries the token, which is good for one connection until the endpoint
// expires. The two files beside this one hold its two ends.
//
// What iWARP has not, and what stands in for it:
//   - SENDs with an immediate: the client's words are of no bytes (it came, it reads),
//     the target's goodbye carries its reason as payload.
//   - A sink without remote rights: READ answers are written by the peer with a key to the
//     sink. So a rail has a domain and a bounce ring of its own, and nothing else is in it.
//   - A status that tells a refused READ from a lost connection (soft-iWARP): see refusal.
//   - Completions after the peer is gone: the end is an event of rdma_cm.
type cmLink struct {
	n   *nic
	p   Provider
	log *slog.Logger
	ch  *ibv.CMChannel

	running sync.WaitGroup
	quit    chan struct{}

	mu struct {
		sync.Mutex
		addrs     []netip.Addr // of the device's interfaces
		listeners []*ibv.CMID
		at        []netip.AddrPort // where they listen
		tokens    map[cmToken]*servedRail
		owners    map[*ibv.CMID]any // *servedRail or *cmDial
	}
	// listen is held while listeners are made: the first accept makes them.
	listen sync.Mutex
}

// cmToken lets one client in, once.
type cmToken [16]byte

// openCM opens a device whose queue pairs connect by rdma_cm. Queue pairs are made on a
// context of our own: rdma_cm needs their numbers only, and so one registration of a
// region serves all connections.
func openCM(n *nic, p Provider, log *slog.Logger) error {
	ch, err := ibv.NewCMChannel()
	if err != nil {
		return err
	}
	l := &cmLink{n: n, p: p, log: log, ch: ch, quit: make(chan struct{})}
	l.mu.tokens = make(map[cmToken]*servedRail)
	l.mu.owners = make(map[*ibv.CMID]any)
	if n.ctx, err = ibv.Open(n.name); err != nil {
		return errors.Join(err, ch.Close())
	}
	if _, err := l.addresses(); err != nil {
		return errors.Join(err, n.ctx.Close(), ch.Close())
	}
	if n.fill, err = fillRefusedKey(n.ctx); err != nil {
		return errors.Join(err, n.ctx.Close(), ch.Close())
	}
	n.events, n.link, n.release = n.ctx, l, l.close
	l.running.Go(l.run)
	return nil
}

// fillRefusedKey keeps soft-iWARP's library from refusing one queue for ever. A queue is
// mapped at an offset of the context's file, which the kernel gives out by first fit. The
// library takes one of them, 0x90000, for its mark of a queue that can not be mapped
// (SIW_INVAL_UOBJ_KEY of its ABI) and fails, without an errno; so does every later queue
// that gets this offset. A completion queue that is made first and lies across it leaves
// it to no other.
func fillRefusedKey(ctx *ibv.Context) (*ibv.CQ, error) {
	const softIWARP, refused, entryBytes = 0x626d74, 0x90000, 32
	attr, err := ctx.QueryDevice()
	if err != nil || attr.VendorID != softIWARP {
		return nil, err
	}
	return ctx.NewCQ(ibv.CQConfig{Depth: refused/entryBytes + 1})
}

func (l *cmLink) kind() kind { return kindCM }

// close frees the listeners and the channel; the rails are gone.
func (l *cmLink) close() error {
	close(l.quit)
	if err := l.ch.SetDeadline(past); err != nil {
		l.log.Error("verbs: rdma_cm events not woken", "device", l.n.name, "err", err)
	}
	l.running.Wait()
	l.mu.Lock()
	listeners := l.mu.listeners
	l.mu.listeners, l.mu.at = nil, nil
	l.mu.Unlock()
	var errs []error
	for _, id := range listeners {
		errs = append(errs, id.Close())
	}
	return errors.Join(append(errs, l.ch.Close())...)
}

// run hands out events until the link is closed.
func (l *cmLink) run() {
	for {
		ev, err := l.ch.Next()
		select {
		case <-l.quit:
			if err == nil && ev.Type == ibv.CMConnectRequest {
				l.turnAway(ev.ID)
			}
			return
		default:
		}
		if err != nil {
			l.log.Error("verbs: no more rdma_cm events", "device", l.n.name, "err", err)
			l.n.fatal.Store(true) // the fleet looks at it with its next scan
			return
		}
		if ev.Type == ibv.CMConnectRequest {
			l.request(ev)
			continue
		}
		l.mu.Lock()
		owner := l.mu.owners[ev.ID]
		l.mu.Unlock()
		switch o := owner.(type) {
		case *servedRail:
			l.servedEvent(o, ev)
		case *cmDial:
			o.event(ev)
		default:
			if ev.Type == ibv.CMDeviceRemoval { // told to a listener
				l.n.fatal.Store(true)
			}
		}
	}
}

func (l *cmLink) own(id *ibv.CMID, owner any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.owners[id] = owner
}

// shut destroys an id.
func (l *cmLink) shut(id *ibv.CMID) {
	l.mu.Lock()
	delete(l.mu.owners, id)
	l.mu.Unlock()
	if err := id.Close(); err != nil {
		l.log.Error("verbs: rdma_cm id not released", "device", l.n.name, "err", err)
	}
}

// maxCMAddrs bounds the addresses of a device that are tried.
const maxCMAddrs = 16

// addresses are the IP addresses that lead to the device: binding to one tells.
func (l *cmLink) addresses() ([]netip.Addr, error) {
	l.mu.Lock()
	addrs := l.mu.addrs
	l.mu.Unlock()
	if len(addrs) > 0 {
		return addrs, nil
	}
	host, err := l.hostAddresses()
	if err != nil {
		return nil, fmt.Errorf("verbs: %s: addresses of this host: %w", l.n.name, err)
	}
	for _, a := range host {
		prefix, err := netip.ParsePrefix(a.String())
		if err != nil || len(addrs) == maxCMAddrs {
			continue
		}
		ip := prefix.Addr().Unmap()
		if ip.IsLinkLocalUnicast() || ip.IsLoopback() || (len(l.p.GIDAddresses) > 0 && !slices.Contains(l.p.GIDAddresses, ip)) {
			continue
		}
		id, err := l.ch.NewID()
		if err != nil {
			return nil, fmt.Errorf("verbs: %s: %w", l.n.name, err)
		}
		if id.Bind(netip.AddrPortFrom(ip, 0)) == nil && id.DeviceName() == l.n.name {
			addrs = append(addrs, ip)
		}
		if err := id.Close(); err != nil {
			return nil, fmt.Errorf("verbs: %s: %w", l.n.name, err)
		}
	}
	if len(addrs) == 0 {
		return nil, fmt.Errorf("%w: verbs: no IP address of this host leads to %s, which rdma_cm goes by: give its network interface one", rdma.ErrUnsupported, l.n.name)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.addrs = addrs
	return addrs, nil
}

// hostAddresses are those that may lead to the device. Binding an id to the address of
// another one makes librdmacm open that, for as long as the process lives, and the
// kernel can not remove a device that is open: so only the interface with the hardware
// address is asked which an iWARP device shows as its GID, where one has it.
func (l *cmLink) hostAddresses() ([]net.Addr, error) {
	attr, err := l.n.ctx.QueryDevice()
	if err != nil {
		return nil, err
	}
	interfaces, err := net.Interfaces()
	if err != nil {
		return nil, err
	}
	var own []net.Addr
	for port := 1; port <= attr.Ports; port++ {
		gids, err := l.n.ctx.GIDs(port)
		if err != nil {
			return nil, err
		}
		for _, i := range interfaces {
			has := func(e ibv.GIDEntry) bool {
				return len(i.HardwareAddr) == 6 && bytes.HasPrefix(e.GID[:], i.HardwareAddr)
			}
			if !slices.ContainsFunc(gids, has) {
				continue
			}
			addrs, err := i.Addrs()
			if err != nil {
				return nil, err
			}
			own = append(own, addrs...)
		}
	}
	if len(own) > 0 {
		return own, nil
	}
	return net.InterfaceAddrs()
}

// nearest puts the addresses first that share most with one of those of the peer.
func (l *cmLink) nearest(at []netip.AddrPort, peer []netip.Addr) []netip.AddrPort {
	bits := func(a netip.AddrPort) int {
		best := 0
		if a.Addr() == l.p.PreferAddress.Unmap() {
			best++ // among equals
		}
		for _, p := range peer {
			if p.Is4() == a.Addr().Is4() {
				best = max(best, 2*commonBits(p.As16(), a.Addr().As16())+best&1)
			}
		}
		return best
	}
	out := slices.Clone(at)
	slices.SortStableFunc(out, func(a, b netip.AddrPort) int { return cmp.Compare(bits(b), bits(a)) })
	return out
}

// What the two sides put into side.extra, and into the connect request.
const (
	maxCMOfferAddrs  = 3
	maxCMAnswerAddrs = 2
	cmPrivateMagic   = "kvdv"
)

// encodeCMOffer names where the client is.
func encodeCMOffer(addrs []netip.Addr) []byte {
	addrs = addrs[:min(len(addrs), maxCMOfferAddrs)]
	w := wire.Writer{}
	w.U8(uint8(len(addrs)))
	for _, a := range addrs {
		b := a.As16()
		w = append(w, b[:]...)
	}
	return w
}

func decodeCMOffer(b []byte) (addrs []netip.Addr, err error) {
	r := wire.NewReader(b, "verbs offer of rdma_cm")
	for range r.Count(maxCMOfferAddrs, "addresses") {
		if b := r.Take(16); b != nil {
			addrs = append(addrs, netip.AddrFrom16([16]byte(b)).Unmap())
		}
	}
	return addrs, r.End()
}

// cmAnswer says where to connect, and with what.
type cmAnswer struct {
	token cmToken
	at    []netip.AddrPort
}

func (a cmAnswer) encode() []byte {
	w := append(wire.Writer{}, a.token[:]...)
	w.U8(uint8(len(a.at)))
	for _, at := range a.at {
		b := at.Addr().As16()
		w = append(w, b[:]...)
		w.U16(at.Port())
	}
	return w
}

func decodeCMAnswer(b []byte) (a cmAnswer, err error) {
	r := wire.NewReader(b, "verbs answer of rdma_cm")
	copy(a.token[:], r.Take(len(a.token)))
	for range r.Count(maxCMAnswerAddrs, "addresses") {
		ip := r.Take(16)
		port := r.U16()
		if ip != nil {
			a.at = append(a.at, netip.AddrPortFrom(netip.AddrFrom16([16]byte(ip)).Unmap(), port))
		}
	}
	if r.Err() == nil && len(a.at) == 0 {
		r.Fail("no address: want at least one")
	}
	return a, r.End()
}

// cmPrivate is the private data of a connect request.
func cmPrivate(t cmToken) []byte {
	w := wire.Writer(cmPrivateMagic)
	w.U8(protocolVersion)
	return append(w, t[:]...)
}

// parseCMPrivate reads it; what follows is padding.
func parseCMPrivate(b []byte) (t cmToken, err error) {
	r := newReader(b, "connect request", cmPrivateMagic)
	if v := r.U8(); r.Err() == nil && v != protocolVersion {
		r.Fail("protocol version %d, want %d: bring both sides to the same release", v, protocolVersion)
	}
	copy(t[:], r.Take(len(t)))
	return t, r.Err()
}

// cmWord is the payload of a goodbye.
func cmWord(imm uint32) []byte { return binary.LittleEndian.AppendUint32(nil, imm) }
