package nemesis

import (
	"fmt"

	"github.com/kvd-io/kvd/jepsen/env"
)

// hostOf is the name of a node's host.
func hostOf(node uint64) string { return fmt.Sprintf("n%d", node) }

// apart cuts two groups from each other, both ways.
func apart(a, b []uint64) []env.Cut {
	var cuts []env.Cut
	for _, x := range a {
		for _, y := range b {
			cuts = append(cuts, env.Cut{From: hostOf(x), To: hostOf(y)}, env.Cut{From: hostOf(y), To: hostOf(x)})
		}
	}
	return cuts
}

// halves: the smaller part first.
func halves(order []uint64) []env.Cut {
	k := len(order) / 2
	return apart(order[:k], order[k:])
}

// bridge: the last node of the order sees both parts.
func bridge(order []uint64) []env.Cut {
	last := len(order) - 1
	k := last / 2
	return apart(order[:k], order[k:last])
}

// ring: each node hears itself and those that follow it in the order, up to a majority.
func ring(order []uint64) []env.Cut {
	n := len(order)
	var cuts []env.Cut
	for i, to := range order {
		for d := n/2 + 1; d < n; d++ {
			cuts = append(cuts, env.Cut{From: hostOf(order[(i+d)%n]), To: hostOf(to)})
		}
	}
	return cuts
}

// oneWay: the node is mute, or deaf (mode 1).
func oneWay(node uint64, order []uint64, mode int) []env.Cut {
	var cuts []env.Cut
	for _, other := range order {
		if other == node {
			continue
		}
		c := env.Cut{From: hostOf(node), To: hostOf(other)}
		if mode == 1 {
			c.From, c.To = c.To, c.From
		}
		cuts = append(cuts, c)
	}
	return cuts
}

// others of a node.
func others(node uint64, order []uint64) []uint64 {
	var out []uint64
	for _, o := range order {
		if o != node {
			out = append(out, o)
		}
	}
	return out
}

// fromClients cuts clients from a node: both ways, requests only (1), answers only (2).
// What is cut is the half of the clients that the seed says, or all.
func fromClients(node uint64, clients []string, mode int, seed uint64) []env.Cut {
	if seed%2 == 0 && len(clients) > 1 {
		clients = clients[:1]
	}
	var cuts []env.Cut
	for _, c := range clients {
		if mode != 2 {
			cuts = append(cuts, env.Cut{From: c, To: hostOf(node)})
		}
		if mode != 1 {
			cuts = append(cuts, env.Cut{From: hostOf(node), To: c})
		}
	}
	return cuts
}
