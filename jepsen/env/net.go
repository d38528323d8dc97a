package env

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Cut drops what one host sends to another. One direction only: packets from From are
// dropped where they arrive, at To.
type Cut struct{ From, To string }

// network is the bridge, the hosts on it, and what is cut.
type network struct {
	name  string // prefix of the namespaces
	sw    *thread
	hosts []*Host
	nonce uint64

	mu    sync.Mutex // one change at a time
	cuts  map[Cut]bool
	drops uint64 // packets dropped by rules that are gone
}

const (
	tableName = "jepsen"
	probePort = 7009
)

func (n *network) namespace(host string) string { return n.name + "-" + host }

// tool runs ip or nft, on a host's thread if there is one.
func tool(t *thread, stdin string, name string, args ...string) (string, error) {
	cmd := exec.Command(name, args...)
	cmd.Stdin = strings.NewReader(stdin)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err := cmd.Start
	if t != nil {
		err = func() error { return t.do(cmd.Start) }
	}
	if err := err(); err != nil {
		return "", fmt.Errorf("env: %s: %w", name, err)
	}
	if err := cmd.Wait(); err != nil {
		return "", fmt.Errorf("env: %s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(errOut.String()))
	}
	return out.String(), nil
}

// newNetwork makes the namespaces, the bridge and the veth pairs.
func newNetwork(name string, hosts []*Host) (n *network, err error) {
	n = &network{name: name, hosts: hosts, cuts: map[Cut]bool{}}
	defer func() {
		if err != nil {
			_ = n.remove()
		}
	}()
	if _, err := tool(nil, "", "ip", "netns", "add", n.namespace("sw")); err != nil {
		return nil, err
	}
	var batch strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&batch, format+"\n", args...) }
	sw := n.namespace("sw")
	for i, h := range hosts {
		ns := n.namespace(h.Name)
		if _, err := tool(nil, "", "ip", "netns", "add", ns); err != nil {
			return nil, err
		}
		h.port = fmt.Sprintf("p%d", i+1)
		line("link add %s netns %s type veth peer name eth0 netns %s", h.port, sw, ns)
	}
	if _, err := tool(nil, batch.String(), "ip", "-batch", "-"); err != nil {
		return nil, err
	}
	if n.sw, err = newThread("/run/netns/" + sw); err != nil {
		return nil, err
	}
	batch.Reset()
	line("link add br0 type bridge")
	line("link set br0 up")
	for _, h := range hosts {
		line("link set %s master br0", h.port)
		line("link set %s up", h.port)
	}
	if _, err := tool(n.sw, batch.String(), "ip", "-batch", "-"); err != nil {
		return nil, err
	}
	for _, h := range hosts {
		if h.thread, err = newThread("/run/netns/" + n.namespace(h.Name)); err != nil {
			return nil, err
		}
		setup := fmt.Sprintf("addr add %s/24 dev eth0\nlink set eth0 up\nlink set lo up\n", h.Addr)
		if _, err := tool(h.thread, setup, "ip", "-batch", "-"); err != nil {
			return nil, err
		}
		rules := fmt.Sprintf("add table inet %s\nadd chain inet %s in { type filter hook input priority 0; policy accept; }\n", tableName, tableName)
		if _, err := tool(h.thread, rules, "nft", "-f", "-"); err != nil {
			return nil, err
		}
		if err := h.listen(); err != nil {
			return nil, err
		}
	}
	return n, nil
}

// remove takes everything down; what is gone already is no error.
func (n *network) remove() error {
	var first error
	for _, h := range n.hosts {
		if h.probe != nil {
			_ = h.probe.Close()
			<-h.probeDone
			h.probe = nil
		}
		if h.thread != nil {
			h.thread.close()
			h.thread = nil
		}
	}
	if n.sw != nil {
		n.sw.close()
		n.sw = nil
	}
	for _, name := range append(hostNames(n.hosts), "sw") {
		if _, err := os.Stat("/run/netns/" + n.namespace(name)); err != nil {
			continue
		}
		if _, err := tool(nil, "", "ip", "netns", "del", n.namespace(name)); err != nil && first == nil {
			first = err
		}
	}
	return first
}

func hostNames(hosts []*Host) []string {
	var out []string
	for _, h := range hosts {
		out = append(out, h.Name)
	}
	return out
}

var counted = regexp.MustCompile(`counter packets (\d+)`)

// set makes exactly these cuts.
func (n *network) set(cuts map[Cut]bool) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, h := range n.hosts {
		var rules strings.Builder
		fmt.Fprintf(&rules, "flush chain inet %s in\n", tableName)
		changed := false
		for _, from := range n.hosts {
			c := Cut{from.Name, h.Name}
			if cuts[c] != n.cuts[c] {
				changed = true
			}
			if cuts[c] {
				fmt.Fprintf(&rules, "add rule inet %s in ip saddr %s counter drop\n", tableName, from.Addr)
			}
		}
		if !changed {
			continue
		}
		dropped, err := n.dropped(h)
		if err != nil {
			return err
		}
		if _, err := tool(h.thread, rules.String(), "nft", "-f", "-"); err != nil {
			return err
		}
		n.drops += dropped
		for _, from := range n.hosts {
			c := Cut{from.Name, h.Name}
			if cuts[c] {
				n.cuts[c] = true
			} else {
				delete(n.cuts, c)
			}
		}
	}
	return nil
}

// dropped is how many packets the present rules of a host have dropped.
func (n *network) dropped(h *Host) (uint64, error) {
	cut := false
	for c := range n.cuts {
		cut = cut || c.To == h.Name
	}
	if !cut {
		return 0, nil // it has no rules
	}
	text, err := tool(h.thread, "", "nft", "list", "chain", "inet", tableName, "in")
	if err != nil {
		return 0, err
	}
	var sum uint64
	for _, m := range counted.FindAllStringSubmatch(text, -1) {
		v, err := strconv.ParseUint(m[1], 10, 64)
		if err != nil {
			return 0, err
		}
		sum += v
	}
	return sum, nil
}

// totalDropped is how many packets all rules have dropped so far.
func (n *network) totalDropped() (uint64, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	sum := n.drops
	for _, h := range n.hosts {
		d, err := n.dropped(h)
		if err != nil {
			return 0, err
		}
		sum += d
	}
	return sum, nil
}

// link takes a host's cable out of the bridge, or plugs it in.
func (n *network) link(h *Host, up bool) error {
	state := "down"
	if up {
		state = "up"
	}
	_, err := tool(n.sw, "", "ip", "link", "set", h.port, state)
	return err
}

// arrivals of one probe.
type arrivals struct {
	sync.Mutex
	nonce uint64
	seen  map[Cut]bool
}

// listen opens the host's socket for probes, in its namespace.
func (h *Host) listen() error {
	err := h.thread.do(func() (err error) {
		h.probe, err = net.ListenUDP("udp4", &net.UDPAddr{IP: net.ParseIP(h.Addr), Port: probePort})
		return err
	})
	if err != nil {
		return fmt.Errorf("env: probe of host %s: %w", h.Name, err)
	}
	h.probeDone = make(chan struct{})
	go func(conn *net.UDPConn) {
		defer close(h.probeDone)
		buf := make([]byte, 64)
		for {
			k, _, err := conn.ReadFromUDP(buf)
			if err != nil {
				return
			}
			if k < 8 {
				continue
			}
			h.arrived.Lock()
			if binary.LittleEndian.Uint64(buf) == h.arrived.nonce {
				h.arrived.seen[Cut{string(buf[8:k]), h.Name}] = true
			}
			h.arrived.Unlock()
		}
	}(h.probe)
	return nil
}

// reach probes every direction between two hosts and tells which ones a datagram got
// through, of several sent. It waits for settle after the last.
func (n *network) reach(settle time.Duration) map[Cut]bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.nonce++
	for _, h := range n.hosts {
		h.arrived.Lock()
		h.arrived.nonce, h.arrived.seen = n.nonce, map[Cut]bool{}
		h.arrived.Unlock()
	}
	const rounds = 4 // one can be lost while a neighbour is looked up
	for range rounds {
		for _, from := range n.hosts {
			msg := append(binary.LittleEndian.AppendUint64(nil, n.nonce), from.Name...)
			for _, to := range n.hosts {
				if from != to {
					// An error is a way that is not there.
					_, _ = from.probe.WriteToUDP(msg, &net.UDPAddr{IP: net.ParseIP(to.Addr), Port: probePort})
				}
			}
		}
		time.Sleep(settle / rounds)
	}
	out := map[Cut]bool{}
	for _, h := range n.hosts {
		h.arrived.Lock()
		for c := range h.arrived.seen {
			out[c] = true
		}
		h.arrived.Unlock()
	}
	return out
}
