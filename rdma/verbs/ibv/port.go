package ibv

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// LinkLayer of a port.
type LinkLayer uint8

const (
	LinkUnspecified LinkLayer = iota // as iWARP devices may say
	LinkInfiniBand
	LinkEthernet
)

func (l LinkLayer) String() string {
	switch l {
	case LinkInfiniBand:
		return "InfiniBand"
	case LinkEthernet:
		return "Ethernet"
	}
	return "unspecified"
}

// PortState of a port; only PortActive carries READs.
type PortState uint8

const (
	PortNop PortState = iota
	PortDown
	PortInit
	PortArmed
	PortActive
	PortActiveDefer
)

func (s PortState) String() string {
	names := [...]string{"nop", "down", "init", "armed", "active", "active defer"}
	if int(s) < len(names) {
		return names[s]
	}
	return fmt.Sprintf("state %d", int(s))
}

// MTU is a path MTU as verbs encode it.
type MTU uint8

const (
	MTU256 MTU = 1 + iota
	MTU512
	MTU1024
	MTU2048
	MTU4096
)

// Bytes of the MTU, 0 for a value that is none.
func (m MTU) Bytes() int {
	if m < MTU256 || m > MTU4096 {
		return 0
	}
	return 128 << m
}

func (m MTU) String() string { return strconv.Itoa(m.Bytes()) }

// MTUOf is the largest MTU of at most n bytes, 0 where there is none.
func MTUOf(n int) MTU {
	var best MTU
	for m := MTU256; m <= MTU4096; m++ {
		if m.Bytes() <= n {
			best = m
		}
	}
	return best
}

// PortAttr is the state of one port.
type PortAttr struct {
	State       PortState
	PhysState   string
	LinkLayer   LinkLayer
	MaxMTU      MTU
	ActiveMTU   MTU
	LID, SMLID  uint16 // InfiniBand; otherwise 0
	LMC         uint8
	SMSL        uint8
	GIDTableLen int
	PKeyTblLen  int
	MaxMsgSize  uint32 // bytes
	// BitsPerSecond is the active rate, 0 where neither the library nor the system tells.
	BitsPerSecond uint64
	ActiveWidth   int // lanes
	// GRHRequired: the port sends no packets without a global routing header.
	GRHRequired bool
}

// QueryPort asks for the state of a port, counted from 1.
func (c *Context) QueryPort(port int) (PortAttr, error) {
	raw, errno := cQueryPort(c.handle(), port)
	if errno != 0 {
		return PortAttr{}, refused(errno, "ibv_query_port", "%s port %d", c.name, port)
	}
	a := raw.attr()
	if a.BitsPerSecond == 0 {
		if b, err := os.ReadFile(c.portFile(port, "rate")); err == nil {
			a.BitsPerSecond = parseRate(string(b))
		}
	}
	return a, nil
}

func (c *Context) portFile(port int, elem ...string) string {
	return filepath.Join(append([]string{sysfsDevices, c.name, "ports", strconv.Itoa(port)}, elem...)...)
}

// rawPort has the shim's layout.
type rawPort struct {
	maxMsgSize  uint32
	activeSpeed uint32 // code of a lane's speed
	gidTblLen   int32
	pkeyTblLen  uint16
	lid, smLID  uint16
	state       uint8
	maxMTU      uint8
	activeMTU   uint8
	lmc         uint8
	smSL        uint8
	activeWidth uint8 // code
	physState   uint8
	linkLayer   uint8
	flags       uint8
	_           uint8
}

func (r rawPort) attr() PortAttr {
	lanes, laneRate := widthLanes(r.activeWidth), laneBits(r.activeSpeed)
	return PortAttr{
		State: PortState(r.state), PhysState: physStateName(r.physState), LinkLayer: LinkLayer(min(r.linkLayer, 3) % 3),
		MaxMTU: MTU(r.maxMTU), ActiveMTU: MTU(r.activeMTU), LID: r.lid, SMLID: r.smLID, LMC: r.lmc, SMSL: r.smSL,
		GIDTableLen: int(r.gidTblLen), PKeyTblLen: int(r.pkeyTblLen), MaxMsgSize: r.maxMsgSize,
		BitsPerSecond: uint64(lanes) * laneRate, ActiveWidth: lanes, GRHRequired: r.flags&portGRHRequired != 0,
	}
}

const portGRHRequired = 1 // IBV_QPF_GRH_REQUIRED

func widthLanes(code uint8) int {
	switch code {
	case 1:
		return 1
	case 2:
		return 4
	case 4:
		return 8
	case 8:
		return 12
	case 16:
		return 2
	}
	return 0
}

// laneBits is the signalling rate of one lane for a speed code of the standard, 0 for
// an unknown code.
func laneBits(code uint32) uint64 {
	const mega = 1_000_000
	switch code {
	case 1:
		return 2500 * mega // SDR
	case 2:
		return 5000 * mega // DDR
	case 4, 8:
		return 10000 * mega // QDR, FDR10
	case 16:
		return 14000 * mega // FDR, as the kernel names it
	case 32:
		return 25000 * mega // EDR
	case 64:
		return 50000 * mega // HDR
	case 128:
		return 100000 * mega // NDR
	case 256:
		return 200000 * mega // XDR
	}
	return 0
}

// parseRate reads the kernel's "100 Gb/sec (4X EDR)".
func parseRate(s string) uint64 {
	f := strings.Fields(s)
	if len(f) < 2 || f[1] != "Gb/sec" {
		return 0
	}
	g, err := strconv.ParseFloat(f[0], 64)
	if err != nil || !(g > 0 && g < 1e6) { // nor a NaN
		return 0
	}
	return uint64(g * 1e9)
}

func physStateName(s uint8) string {
	names := [...]string{1: "sleep", 2: "polling", 3: "disabled", 4: "training", 5: "link up", 6: "error recovery", 7: "phy test"}
	if int(s) < len(names) && s > 0 {
		return names[s]
	}
	return fmt.Sprintf("state %d", s)
}

// GID is a global id, in network byte order.
type GID [16]byte

// IsZero tells the GID that must never be used.
func (g GID) IsZero() bool { return g == GID{} }

// Addr is the GID as an address: IPv4 where it is one (::ffff:a.b.c.d), else IPv6.
func (g GID) Addr() netip.Addr { return netip.AddrFrom16(g).Unmap() }

// LinkLocal tells a fe80::/64 GID.
func (g GID) LinkLocal() bool { return netip.AddrFrom16(g).Unmap().IsLinkLocalUnicast() }

func (g GID) String() string { return g.Addr().String() }

// GIDType says by which protocol packets of a GID travel.
type GIDType uint8

const (
	GIDTypeIB GIDType = iota // InfiniBand; iWARP devices say this too
	GIDTypeRoCEv1
	GIDTypeRoCEv2
	GIDTypeUnknown // the library and the system are too old to tell
)

func (t GIDType) String() string {
	switch t {
	case GIDTypeIB:
		return "IB"
	case GIDTypeRoCEv1:
		return "RoCE v1"
	case GIDTypeRoCEv2:
		return "RoCE v2"
	}
	return "unknown"
}

// GIDEntry is one entry of a port's GID table.
type GIDEntry struct {
	Index   int
	GID     GID
	Type    GIDType
	Netdev  string // network interface it belongs to, "" for none
	Ifindex int    // 0 for none, or where the system does not tell
}

// GIDs lists the entries of a port's table that are in use; zero GIDs are left out.
func (c *Context) GIDs(port int) ([]GIDEntry, error) {
	a, err := c.QueryPort(port)
	if err != nil {
		return nil, err
	}
	h := c.handle()
	var out []GIDEntry
	for i := range a.GIDTableLen {
		e, ok, err := c.gid(h, port, i, a.LinkLayer)
		if err != nil {
			return nil, err
		}
		if ok {
			out = append(out, e)
		}
	}
	return out, nil
}

// GID is one entry of a port's table; ok is false where that entry is empty. An index
// outside of the table is an error.
func (c *Context) GID(port, index int) (e GIDEntry, ok bool, err error) {
	a, err := c.QueryPort(port)
	if err != nil {
		return GIDEntry{}, false, err
	}
	if index < 0 || index >= a.GIDTableLen {
		return GIDEntry{}, false, fmt.Errorf("ibv: %s port %d: GID index %d: want 0 to %d", c.name, port, index, a.GIDTableLen-1)
	}
	return c.gid(c.handle(), port, index, a.LinkLayer)
}

func (c *Context) gid(h uintptr, port, index int, link LinkLayer) (GIDEntry, bool, error) {
	e := GIDEntry{Index: index}
	errno := cQueryGID(h, port, &e)
	// The kernel says ENODATA for an empty entry, some versions EINVAL or ENOENT.
	if errno == syscall.ENODATA || errno == syscall.ENOENT || errno == syscall.EINVAL {
		return e, false, nil
	}
	if errno != 0 {
		return e, false, refused(errno, "query of GID", "%s port %d index %d", c.name, port, index)
	}
	if e.GID.IsZero() {
		return e, false, nil
	}
	idx := strconv.Itoa(index)
	if e.Type == GIDTypeUnknown {
		if b, err := os.ReadFile(c.portFile(port, "gid_attrs", "types", idx)); err == nil {
			e.Type = parseGIDType(string(b), link)
		} else if link == LinkInfiniBand {
			e.Type = GIDTypeIB
		}
	}
	if b, err := os.ReadFile(c.portFile(port, "gid_attrs", "ndevs", idx)); err == nil {
		e.Netdev = strings.TrimSpace(string(b))
	}
	if e.Ifindex == 0 {
		e.Ifindex = ifindexOf(e.Netdev)
	} else if e.Netdev == "" {
		e.Netdev = ifnameOf(e.Ifindex)
	}
	return e, true, nil
}

// parseGIDType reads the kernel's words. "IB/RoCE v1" is one word for two types, which
// the link layer tells apart.
func parseGIDType(s string, link LinkLayer) GIDType {
	switch strings.TrimSpace(s) {
	case "RoCE v2":
		return GIDTypeRoCEv2
	case "IB/RoCE v1":
		if link == LinkEthernet {
			return GIDTypeRoCEv1
		}
		return GIDTypeIB
	}
	return GIDTypeUnknown
}

// PKeys is a port's table of partition keys by index; 0 is an empty entry. Bit 15 tells
// full membership.
func (c *Context) PKeys(port int) ([]uint16, error) {
	a, err := c.QueryPort(port)
	if err != nil {
		return nil, err
	}
	h := c.handle()
	out := make([]uint16, a.PKeyTblLen)
	for i := range out {
		k, errno := cQueryPKey(h, port, i)
		if errno != 0 {
			return nil, refused(errno, "ibv_query_pkey", "%s port %d index %d", c.name, port, i)
		}
		out[i] = k
	}
	return out, nil
}
