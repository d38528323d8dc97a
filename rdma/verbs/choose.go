package verbs

import (
	"fmt"
	"net/netip"
	"slices"
	"sort"
	"strings"

	"github.com/kvd-io/kvd/rdma/verbs/ibv"
)

// deviceView is what is known of a device before anything is decided about it.
type deviceView struct {
	info  ibv.DeviceInfo
	err   error // why it could not be looked at
	attr  ibv.DeviceAttr
	ports []portView
}

type portView struct {
	number int
	attr   ibv.PortAttr
	gids   []ibv.GIDEntry // in use, by index
	pkeys  []uint16
	err    error
}

// railSpec is a rail that the configuration and the devices allow: one port of one
// device, and the GIDs to try on it, best first.
type railSpec struct {
	device    string
	port      int
	gids      []ibv.GIDEntry // at least one
	present   []ibv.GIDEntry // all of the port: what a connection may be using
	pkeyIndex int
	speed     uint64 // bits a second, 0 unknown
	// grhRequired: the port sends no packets without a global header.
	grhRequired bool
}

// slowFraction: a port slower than this part of the best one is left out, unless its
// device is named. A rail takes whole batches, so a slow one would set the pace.
const slowFraction = 4

// maxGIDChoices is how many GIDs of a port are offered to be tried.
const maxGIDChoices = 4

// gidRank orders the GIDs of a port: 1 is best, 0 is never used. why says it in words.
func gidRank(e ibv.GIDEntry, link ibv.LinkLayer) (rank int, why string) {
	addr := e.GID.Addr()
	switch {
	case e.GID.IsZero() || addr.IsUnspecified():
		return 0, "zero GID: never used"
	case addr.IsMulticast():
		return 0, "multicast: never used"
	case link == ibv.LinkInfiniBand:
		return 1, "InfiniBand"
	}
	local := e.GID.LinkLocal()
	switch {
	case addr.IsLoopback():
		return 6, "loopback: reaches this host only"
	case e.Type == ibv.GIDTypeRoCEv2 && !local:
		return 1, "RoCE v2, routable"
	case e.Type == ibv.GIDTypeRoCEv2:
		return 2, "RoCE v2, link-local"
	case e.Type == ibv.GIDTypeRoCEv1 && !local:
		return 3, "RoCE v1"
	case e.Type == ibv.GIDTypeRoCEv1:
		return 4, "RoCE v1, link-local"
	}
	return 5, "type unknown: the library and the kernel do not tell"
}

// rankGIDs returns the usable GIDs, best first, equals by index.
func rankGIDs(gids []ibv.GIDEntry, link ibv.LinkLayer) []ibv.GIDEntry {
	out := make([]ibv.GIDEntry, 0, len(gids))
	for _, e := range gids {
		if r, _ := gidRank(e, link); r > 0 {
			out = append(out, e)
		}
	}
	sort.SliceStable(out, func(i, j int) bool {
		a, _ := gidRank(out[i], link)
		b, _ := gidRank(out[j], link)
		if a != b {
			return a < b
		}
		return out[i].Index < out[j].Index
	})
	return out
}

// byAddress applies the settings that name addresses to ranked GIDs. InfiniBand's and
// iWARP's carry none.
func (p Provider) byAddress(ranked []ibv.GIDEntry) []ibv.GIDEntry {
	out := make([]ibv.GIDEntry, 0, len(ranked))
	for _, e := range ranked {
		if len(p.GIDAddresses) == 0 || slices.Contains(p.GIDAddresses, e.GID.Addr().Unmap()) {
			out = append(out, e)
		}
	}
	sort.SliceStable(out, func(i, j int) bool { return p.prefers(out[i]) && !p.prefers(out[j]) })
	return out
}

func (p Provider) prefers(e ibv.GIDEntry) bool {
	return p.PreferAddress.IsValid() && e.GID.Addr().Unmap() == p.PreferAddress.Unmap()
}

// missingAddresses are those that no GID of any device carries.
func (p Provider) missingAddresses(views []deviceView) []netip.Addr {
	return slices.DeleteFunc(slices.Clone(p.GIDAddresses), func(a netip.Addr) bool {
		for _, v := range views {
			for _, port := range v.ports {
				if slices.ContainsFunc(port.gids, func(e ibv.GIDEntry) bool { return e.GID.Addr().Unmap() == a }) {
					return true
				}
			}
		}
		return false
	})
}

// pkeyIndex finds a partition in a port's table; bit 15 is the membership.
func pkeyIndex(table []uint16, want uint16) (int, bool) {
	if want == 0 {
		return 0, true
	}
	limited := -1
	for i, k := range table {
		if k&0x7fff != want&0x7fff || k == 0 {
			continue
		}
		if k&0x8000 != 0 {
			return i, true
		}
		if limited < 0 {
			limited = i
		}
	}
	return limited, limited >= 0
}

// choice is what the configuration makes of the devices: a verdict on each, and the
// rails to use.
type choice struct {
	rails    []railSpec
	devices  []Device // with verdicts, in the order of the views
	problems []string // settings that cannot be met, as sentences
}

// choose decides. It is a function of its arguments alone.
func choose(p Provider, views []deviceView, cmErr error) choice {
	var c choice
	best := uint64(0)
	for _, v := range views {
		if ok, _ := p.allows(v.info.Name); !ok || v.info.Unusable != "" {
			continue
		}
		for _, port := range v.ports {
			if port.attr.State == ibv.PortActive && (p.Port == 0 || p.Port == port.number) {
				best = max(best, port.attr.BitsPerSecond)
			}
		}
	}
	for _, v := range views {
		d := describe(v)
		c.judgeDevice(p, v, &d, best, cmErr)
		c.devices = append(c.devices, d)
	}
	for _, pattern := range p.Devices {
		only := Provider{Devices: []string{pattern}}
		found := false
		for _, v := range views {
			ok, _ := only.allows(v.info.Name)
			found = found || ok
		}
		if !found {
			c.problems = append(c.problems, fmt.Sprintf("device %q does not exist: this host has %s", pattern, deviceNames(views)))
		}
	}
	for _, a := range p.missingAddresses(views) {
		c.problems = append(c.problems, fmt.Sprintf("no device has a GID with the address %s: give it to the network interface of an RDMA device", a))
	}
	return c
}

func deviceNames(views []deviceView) string {
	if len(views) == 0 {
		return "no RDMA device"
	}
	names := make([]string, len(views))
	for i, v := range views {
		names[i] = v.info.Name
	}
	return strings.Join(names, ", ")
}

func (c *choice) judgeDevice(p Provider, v deviceView, d *Device, best uint64, cmErr error) {
	ok, why := p.allows(v.info.Name)
	switch {
	case !ok:
		d.Verdict = why
	case v.info.Unusable != "":
		d.Verdict = "skipped: " + v.info.Unusable
		c.problemIfNamed(p, v, d.Verdict)
	case v.err != nil:
		d.Verdict = "cannot be opened: " + v.err.Error()
		c.problemIfNamed(p, v, d.Verdict)
	case v.info.Transport == ibv.TransportIWARP && cmErr != nil:
		d.Verdict = "iWARP connects by rdma_cm only: " + cmErr.Error()
		c.problemIfNamed(p, v, d.Verdict)
	default:
		if p.Port > len(v.ports) {
			d.Verdict = fmt.Sprintf("has %d ports, port %d is wanted", len(v.ports), p.Port)
			c.problemIfNamed(p, v, d.Verdict)
			return
		}
		for i, port := range v.ports {
			c.judgePort(p, v, port, &d.Ports[i], best)
			d.Used = d.Used || d.Ports[i].Used
		}
		d.Verdict = "no port can be used"
		if d.Used {
			d.Verdict = "used"
		}
	}
}

// problemIfNamed: what keeps a device out matters to a user who named it.
func (c *choice) problemIfNamed(p Provider, v deviceView, why string) {
	if p.names(v.info.Name) {
		c.problems = append(c.problems, fmt.Sprintf("device %s: %s", v.info.Name, why))
	}
}

func (c *choice) judgePort(p Provider, v deviceView, port portView, out *Port, best uint64) {
	refuse := func(problem bool, format string, args ...any) {
		out.Verdict = fmt.Sprintf(format, args...)
		if problem {
			c.problems = append(c.problems, fmt.Sprintf("device %s port %d: %s", v.info.Name, port.number, out.Verdict))
		}
	}
	named := p.names(v.info.Name)
	rate := port.attr.BitsPerSecond
	pkey, pkeyFound := pkeyIndex(port.pkeys, p.PKey)
	iwarp := v.info.Transport == ibv.TransportIWARP
	switch {
	case p.Port != 0 && p.Port != port.number:
		refuse(false, "port %d is wanted", p.Port)
		return
	case port.err != nil:
		refuse(named, "cannot be looked at: %v", port.err)
		return
	case port.attr.State != ibv.PortActive:
		refuse(named || p.Port != 0, "it is %s (%s): want active; bring its network interface or link up", port.attr.State, port.attr.PhysState)
		return
	case !named && rate > 0 && rate < best/slowFraction:
		refuse(false, "left out: %s, the best port has %s; name the device to use it", rateText(rate), rateText(best))
		return
	case !iwarp && !pkeyFound:
		refuse(true, "P_Key %#04x is not in its table, which has %s", p.PKey, pkeyList(port.pkeys))
		return
	}
	spec := railSpec{device: v.info.Name, port: port.number, present: port.gids, pkeyIndex: max(pkey, 0), speed: rate, grhRequired: port.attr.GRHRequired}
	ranked := rankGIDs(port.gids, port.attr.LinkLayer)
	if port.attr.LinkLayer != ibv.LinkInfiniBand {
		ranked = p.byAddress(ranked)
	}
	if iwarp {
		// Its table has one entry made of the MAC; rdma_cm goes by the interface's address.
		ranked = port.gids
	}
	if len(p.GIDIndexes) == 0 || iwarp {
		switch {
		case len(ranked) == 0 && len(p.GIDAddresses) > 0 && len(port.gids) > 0:
			refuse(false, "left out: no GID with an address that is wanted (%v); in use are %s", p.GIDAddresses, gidList(port.gids))
			return
		case len(ranked) == 0:
			refuse(named, "no usable GID: give its network interface an address")
			return
		}
		spec.gids = ranked[:min(len(ranked), maxGIDChoices)]
		c.rails = append(c.rails, spec)
		out.mark(spec.gids[:1])
	} else {
		for _, index := range p.GIDIndexes {
			e, ok := findGID(ranked, index)
			if !ok {
				refuse(true, "GID index %d is empty, zero or outside of its table of %d: in use are %s", index, port.attr.GIDTableLen, gidList(ranked))
				continue
			}
			one := spec
			one.gids = []ibv.GIDEntry{e}
			c.rails = append(c.rails, one)
			out.mark(one.gids)
		}
		if !out.Used {
			return
		}
	}
	out.Verdict = "used"
}

func findGID(gids []ibv.GIDEntry, index int) (ibv.GIDEntry, bool) {
	for _, e := range gids {
		if e.Index == index {
			return e, true
		}
	}
	return ibv.GIDEntry{}, false
}

func gidList(gids []ibv.GIDEntry) string {
	if len(gids) == 0 {
		return "none"
	}
	parts := make([]string, len(gids))
	for i, e := range gids {
		parts[i] = fmt.Sprintf("%d (%s, %s)", e.Index, e.GID, e.Type)
	}
	return strings.Join(parts, ", ")
}

func pkeyList(keys []uint16) string {
	var parts []string
	for _, k := range keys {
		if k != 0 {
			parts = append(parts, fmt.Sprintf("%#04x", k))
		}
	}
	if len(parts) == 0 {
		return "none"
	}
	return strings.Join(parts, ", ")
}

func rateText(bits uint64) string {
	if bits == 0 {
		return "an unknown rate"
	}
	return fmt.Sprintf("%g Gb/s", float64(bits)/1e9)
}
