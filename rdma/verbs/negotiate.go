package verbs

import (
	"fmt"
	"strings"

	"github.com/kvd-io/kvd/rdma/verbs/ibv"
)

// gidPair is a way between two ports: indexes into the client's and the server's GIDs.
type gidPair struct{ client, server int }

// maxGIDTries bounds the pairs that are tried for one rail: each may wait for an
// address to be resolved.
const maxGIDTries = 4

// gidPairs lists the ways between two ports of the same link layer, best first: the
// server's preference decides, then the client's.
func gidPairs(client, server []wireGID) []gidPair {
	var out []gidPair
	for s := range server {
		for c := range client {
			if reaches(client[c], server[s]) && len(out) < maxGIDTries {
				out = append(out, gidPair{client: c, server: s})
			}
		}
	}
	return out
}

// reaches tells whether packets between two GIDs can be of one kind: the same protocol
// and address family, and link-local only among themselves.
func reaches(a, b wireGID) bool {
	return a.typ == b.typ && a.gid.Addr().Is4() == b.gid.Addr().Is4() && a.gid.LinkLocal() == b.gid.LinkLocal()
}

// commonBits is how many leading bits two GIDs share: ports of one subnet come first.
func commonBits(a, b ibv.GID) int {
	for i := range a {
		if x := a[i] ^ b[i]; x != 0 {
			n := i * 8
			for x&0x80 == 0 {
				x <<= 1
				n++
			}
			return n
		}
	}
	return len(a) * 8
}

// railPair joins a rail of the client with one of the server.
type railPair struct {
	client, server int
	gids           []gidPair // ways to try; empty for rdma_cm
}

// pairRails matches each rail of the client with at most one of the server and the other
// way round: those of the closest addresses first.
func pairRails(client, server []side) []railPair {
	type candidate struct {
		railPair
		bits int
	}
	var all []candidate
	for s := range server {
		for c := range client {
			if client[c].kind != server[s].kind || client[c].link != server[s].link {
				continue
			}
			p := candidate{railPair: railPair{client: c, server: s}}
			if client[c].kind == kindExchange {
				p.gids = gidPairs(client[c].gids, server[s].gids)
				if len(p.gids) == 0 {
					continue
				}
				best := p.gids[0]
				p.bits = commonBits(client[c].gids[best.client].gid, server[s].gids[best.server].gid)
			}
			all = append(all, p)
		}
	}
	var out []railPair
	clientUsed, serverUsed := make([]bool, len(client)), make([]bool, len(server))
	for {
		best := -1
		for i, p := range all {
			if clientUsed[p.client] || serverUsed[p.server] {
				continue
			}
			if best < 0 || p.bits > all[best].bits {
				best = i
			}
		}
		if best < 0 {
			return out
		}
		clientUsed[all[best].client], serverUsed[all[best].server] = true, true
		out = append(out, all[best].railPair)
	}
}

// describeSides is for the sentence that says why nothing matches.
func describeSides(sides []side) string {
	if len(sides) == 0 {
		return "none"
	}
	parts := make([]string, len(sides))
	for i, s := range sides {
		var gids []string
		for _, g := range s.gids {
			gids = append(gids, fmt.Sprintf("%s %s", g.typ, g.gid))
		}
		parts[i] = fmt.Sprintf("%s by %s (%s)", s.link, s.kind, strings.Join(gids, ", "))
	}
	return strings.Join(parts, "; ")
}

// lesserMTU is the path MTU of two ports under a cap in bytes (0: none).
func lesserMTU(a, b ibv.MTU, capBytes int) ibv.MTU {
	m := min(a, b)
	if capBytes > 0 {
		m = min(m, ibv.MTUOf(capBytes))
	}
	return m
}

// readDepth is how many READs may be under way on a queue pair: the least of both
// devices' limits and the cap (0: none), at least 1.
func readDepth(initiator, target, capDepth int) int {
	d := min(initiator, target, 255)
	if capDepth > 0 {
		d = min(d, capDepth)
	}
	return max(d, 1)
}

// hopLimit of routed packets; the usual default of a host.
const hopLimit = 64

// needsGRH: Ethernet always sends the global header, InfiniBand only between subnets or
// where the port demands it.
func needsGRH(link ibv.LinkLayer, required bool, own, peer ibv.GID) bool {
	if link != ibv.LinkInfiniBand {
		return true
	}
	return required || [8]byte(own[:8]) != [8]byte(peer[:8])
}
