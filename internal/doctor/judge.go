package doctor

import (
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/dustin/go-humanize"

	"github.com/kvd-io/kvd/rdma/verbs"
)

// judge draws findings from facts, problems first. It is a function of its arguments.
func judge(h Host, v verbs.Report, c *Cluster, w Wish) []Finding {
	var j judgement
	j.devices(h, v, w)
	if v.Usable {
		j.ports(h, v)
		j.memory(h, v, w)
	}
	j.hugePages(h, w)
	if c != nil {
		j.cluster(h, v, c, w)
	}
	slices.SortStableFunc(j, func(a, b Finding) int {
		return rank(a.Level) - rank(b.Level)
	})
	return j
}

func rank(l Level) int {
	if l == Problem {
		return 0
	}
	return 1
}

type judgement []Finding

func (j *judgement) add(level Level, area, do, what string, args ...any) {
	*j = append(*j, Finding{Level: level, Area: area, What: fmt.Sprintf(what, args...), Do: do})
}

// hasDevice: the kernel has an RDMA device for this host, whether or not it can be used.
func hasDevice(h Host, v verbs.Report) bool { return len(h.Devices) > 0 || len(v.Devices) > 0 }

// devices says why RDMA cannot be used, one cause at a time: what follows from an earlier
// one would only hide it.
func (j *judgement) devices(h Host, v verbs.Report, w Wish) {
	if v.Usable {
		for _, p := range v.Problems {
			j.add(Problem, "devices", "correct the setting, or the device", "%s", p)
		}
		return
	}
	if !hasDevice(h, v) {
		j.noDevice(h, w)
		return
	}
	names := strings.Join(deviceNames(h, v), ", ")
	switch {
	case !builtWithVerbs(v):
		j.add(Problem, "libraries", "use a binary that was built with cgo and the headers of rdma-core (Debian: libibverbs-dev, librdmacm-dev)",
			"this host has %s, but this program cannot use it: %s", names, v.Build)
		return
	case missing(v, "libibverbs") != "":
		j.add(Problem, "libraries", "install rdma-core (Debian: libibverbs1 ibverbs-providers librdmacm1)",
			"this host has %s, but %s", names, missing(v, "libibverbs"))
		return
	}
	if j.deviceFiles(h, names) {
		return
	}
	j.add(Problem, "devices", "see the verdict on each device and port below", "this host has %s, but: %s", names, strings.TrimPrefix(v.Verdict, "not used: "))
}

func (j *judgement) noDevice(h Host, w Wish) {
	level := Notice
	if w.RequireRDMA {
		level = Problem
	}
	for _, a := range h.Adapters {
		if a.Device != "" {
			continue
		}
		do := "load its RDMA driver, and ib_uverbs"
		if m := rdmaVendors[a.Vendor]; m != "" {
			do = fmt.Sprintf("modprobe %s ib_uverbs", m)
		}
		if h.Container != "" {
			do += " on the host, and give the device to this container"
		}
		j.add(level, "devices", do, "the adapter at PCI %s may do RDMA, but the kernel shows no RDMA device for it", a.Address)
		return
	}
	do := "nothing, if that is meant; without hardware, for trials: rdma link add rxe0 type rxe netdev eth0"
	if h.Container != "" {
		do = "nothing, if that is meant; else give the host's device to this container (" + containerHint(h.Container) + ")"
	}
	j.add(level, "devices", do, "this host has no RDMA device: memory is read by shm on the same host, and by tcp from others")
}

func containerHint(kind string) string {
	if kind == "kubernetes" {
		return "an RDMA device plugin, or the network operator's"
	}
	return "--device=/dev/infiniband"
}

// deviceFiles: true where they are what is wrong.
func (j *judgement) deviceFiles(h Host, names string) bool {
	var uverbs []DeviceFile
	for _, f := range h.DeviceFiles {
		if strings.Contains(f.Path, "uverbs") {
			uverbs = append(uverbs, f)
		}
	}
	if len(uverbs) == 0 {
		switch {
		case h.Container != "":
			j.add(Problem, "devices", "give them to the container: "+containerHint(h.Container), "the kernel has %s, but this container has no /dev/infiniband/uverbs*", names)
		case !loaded(h, "ib_uverbs"):
			j.add(Problem, "devices", "modprobe ib_uverbs, and name it in /etc/modules-load.d", "the kernel has %s, but the module ib_uverbs is not loaded: there is no /dev/infiniband/uverbs*", names)
		default:
			j.add(Problem, "devices", "start udev, or make the files that /sys/class/infiniband_verbs names", "the kernel has %s, but there is no /dev/infiniband/uverbs*", names)
		}
		return true
	}
	for _, f := range uverbs {
		if f.Problem == "" {
			return false // one at least can be opened: it is something else
		}
	}
	f := uverbs[0]
	j.add(Problem, "devices", "let user "+fmt.Sprint(h.UID)+" read and write it: a udev rule, or its group; in a container also its device cgroup",
		"%s (%s) cannot be opened by user %d: %s", f.Path, f.Mode, h.UID, f.Problem)
	return true
}

func deviceNames(h Host, v verbs.Report) []string {
	names := slices.Clone(h.Devices)
	for _, d := range v.Devices {
		if !slices.Contains(names, d.Name) {
			names = append(names, d.Name)
		}
	}
	return names
}

// builtWithVerbs: without the shim no library was looked for, and the note on the build
// stands for what was found of each.
func builtWithVerbs(v verbs.Report) bool {
	for _, l := range v.Libraries {
		if l.Found || l.Problem != v.Build {
			return true
		}
	}
	return false
}

// missing is why a library cannot be used; empty where it can.
func missing(v verbs.Report, prefix string) string {
	for _, l := range v.Libraries {
		if strings.HasPrefix(l.Name, prefix) && !l.Found {
			return l.Name + " was not found: " + l.Problem
		}
	}
	return ""
}

func loaded(h Host, module string) bool {
	return slices.ContainsFunc(h.Modules, func(m Module) bool { return m.Name == module && m.Loaded })
}

// jumboMTU leaves room for a path MTU of 4096 and its headers.
const jumboMTU = 4200

// ports looks at what is used for what would make it slow.
func (j *judgement) ports(h Host, v verbs.Report) {
	for _, d := range v.Devices {
		if !d.Used {
			j.unused(h, d)
			continue
		}
		if n := d.Limits.ReadsServed; n > 0 && n < 4 {
			j.add(Notice, "device "+d.Name, "nothing can be set for that", "it serves %d READs at a time on a queue pair: want 16 for full throughput", n)
		}
		if far(h, d.NUMANode) {
			j.add(Notice, "device "+d.Name, fmt.Sprintf("run on that node: numactl --cpunodebind=%d --membind=%d", d.NUMANode, d.NUMANode),
				"it belongs to NUMA node %d, on none of whose CPUs this process may run", d.NUMANode)
		}
		for _, p := range d.Ports {
			if p.Used && p.LinkLayer == "Ethernet" {
				j.ethernet(h, d, p)
			}
		}
	}
	if len(h.CgroupRDMA) > 0 {
		j.add(Notice, "devices", "raise them in the cgroup's rdma.max if queue pairs or registrations are refused", "the cgroup limits RDMA: %s", strings.Join(h.CgroupRDMA, "; "))
	}
}

// unused devices are mostly meant to be. One whose port is only down is most often not.
func (j *judgement) unused(h Host, d verbs.Device) {
	if d.Transport == "iwarp" && !slices.ContainsFunc(h.DeviceFiles, func(f DeviceFile) bool { return strings.HasSuffix(f.Path, "rdma_cm") && f.Problem == "" }) {
		j.add(Notice, "device "+d.Name, "modprobe rdma_ucm, and make /dev/infiniband/rdma_cm accessible", "it is an iWARP device, which needs /dev/infiniband/rdma_cm: %s", d.Verdict)
		return
	}
	what := d.Verdict
	for _, p := range d.Ports {
		if p.Verdict != "" {
			what += fmt.Sprintf("; port %d: %s", p.Number, p.Verdict)
		}
	}
	j.add(Notice, "device "+d.Name, "nothing, if that is meant", "not used: %s", what)
}

// far: the NUMA node is known, and this process may run on another only.
func far(h Host, node int) bool {
	for _, n := range h.NUMA {
		if n.ID == node {
			return !n.Allowed
		}
	}
	return false
}

func (j *judgement) ethernet(h Host, d verbs.Device, p verbs.Port) {
	area := fmt.Sprintf("device %s port %d", d.Name, p.Number)
	for _, g := range p.GIDs {
		if !g.Used {
			continue
		}
		if d.Transport != "iwarp" && g.Rank > 1 {
			j.add(Notice, area, "give the interface "+g.Netdev+" an IP address, or name another GID by --rdma-gid-index",
				"the GID in use is not a routable one of RoCE v2: %s (%s)", g.Address, g.Verdict)
		}
		mtu := interfaceMTU(h, g.Netdev)
		if d.Transport != "iwarp" && p.MTU > 0 && p.MTU < min(p.MaxMTU, 4096) && mtu > 0 && mtu < jumboMTU {
			j.add(Notice, area, fmt.Sprintf("set the MTU of %s and of the switches to %d or more (ip link set %s mtu 9000)", g.Netdev, jumboMTU, g.Netdev),
				"the path MTU is %d, because the MTU of %s is %d", p.MTU, g.Netdev, mtu)
		}
		return
	}
}

func interfaceMTU(h Host, name string) int {
	for _, i := range h.Interfaces {
		if i.Name == name {
			return i.MTU
		}
	}
	return 0
}

// memory compares what may be pinned with what a node would pin.
func (j *judgement) memory(h Host, v verbs.Report, w Wish) {
	soft := v.Memlock.Soft
	used, iwarp := 0, false
	for _, d := range v.Devices {
		if d.Used {
			used++
			iwarp = iwarp || d.Transport == "iwarp"
		}
	}
	if soft < 0 || h.IPCLock && !iwarp || used == 0 {
		return
	}
	do := "raise it: ulimit -l, LimitMEMLOCK= in the systemd unit; in Kubernetes the container runtime's LimitMEMLOCK, or the capability IPC_LOCK"
	need := w.ArenaBytes * uint64(used)
	switch {
	case w.ArenaBytes == 0 && soft < 16<<20:
		j.add(Notice, "memory", do, "RLIMIT_MEMLOCK is %s: enough for few connections of a client, and for no node", humanize.IBytes(uint64(soft)))
	case need > uint64(soft):
		j.add(Problem, "memory", do, "RLIMIT_MEMLOCK is %s, and %s are needed: an arena of %s, on %d devices", humanize.IBytes(uint64(soft)), humanize.IBytes(need), humanize.IBytes(w.ArenaBytes), used)
	}
}

func (j *judgement) hugePages(h Host, w Wish) {
	if !w.HugePages {
		return
	}
	for _, p := range h.HugePages {
		if p.Free > 0 {
			return
		}
	}
	j.add(Notice, "memory", "reserve some: sysctl vm.nr_hugepages=N; in Kubernetes the resource hugepages-2Mi", "huge pages are asked for and none is free: plain pages are used")
}

// farReason tells of what is no failure of a path.
func farReason(reason string) bool {
	return slices.Contains([]string{"none", "not_served", "another_host", "two_sided"}, reason)
}

func (j *judgement) cluster(h Host, v verbs.Report, c *Cluster, w Wish) {
	if c.Error != "" {
		do := "start a node, or name those that run by --endpoints, and, where they speak TLS, their CA by --ca; --local leaves the cluster out"
		if c.Denied {
			do = "give a token with the right to read the namespace, by --token-file; --local leaves the cluster out"
		}
		j.add(Problem, "cluster", do, "no node can be used: %s", c.Error)
	}
	if c.Token && !c.TLS && slices.ContainsFunc(c.Nodes, func(n Node) bool { return !loopback(n.Address) }) {
		j.add(Problem, "cluster", "use TLS: whoever reads along has the token", "a token is sent without TLS")
	}
	for _, n := range c.Nodes {
		j.node(h, v, n, w)
	}
}

func (j *judgement) node(h Host, v verbs.Report, n Node, w Wish) {
	area := fmt.Sprintf("node %d", n.ID)
	if n.Error != "" {
		j.add(Problem, area, "see whether it runs and can be reached at "+n.Address, "%s", n.Error)
		return
	}
	before := len(*j)
	chosen := slices.IndexFunc(n.Paths, func(p Path) bool { return p.Transport == n.Transport })
	for i, p := range n.Paths {
		switch {
		case farReason(p.Reason):
		case p.Reason == "unsupported" && p.Transport == "verbs" && !hasDevice(h, v) && !w.RequireRDMA:
			// Said once, of the host.
		case chosen >= 0 && i > chosen && p.Transport != "grpc":
			j.add(Notice, area, remedy(p, h), "it could not be read by %s instead of %s: %s", p.Transport, n.Transport, p.Detail)
		default:
			j.add(Problem, area, remedy(p, h), "it cannot be read by %s: %s", p.Transport, p.Detail)
		}
	}
	if w.RequireRDMA && n.Transport != "verbs" && len(*j) == before {
		j.add(Problem, area, "let it serve verbs: --transports on the node, and a device there", "it is read over %s (%s), and RDMA is required", n.Transport, n.Reason)
	}
	if n.Transport == "grpc" && len(*j) == before && !slices.ContainsFunc(n.Paths, func(p Path) bool { return p.Reason == "two_sided" }) {
		j.add(Notice, area, "let kvd serve another transport (--transports), or allow one here (--transport auto)", "it is read over gRPC, the slowest way: %s", n.Reason)
	}
	j.speed(area, n, chosen)
}

// speed: a way that is preferred and slower in the measure than one further down. Below a
// difference of half nothing is said: the measure is a short one.
func (j *judgement) speed(area string, n Node, chosen int) {
	if chosen < 0 || !n.Paths[chosen].Usable {
		return
	}
	is := n.Paths[chosen]
	for _, p := range n.Paths[chosen+1:] {
		if p.Usable && p.Transport != "grpc" && p.P50NS*3 < is.P50NS*2 {
			j.add(Notice, area, "measure again on an idle host; --transport "+p.Transport+" would use the faster way (a software device costs what tcp does)",
				"a READ by %s took %s in the median, by %s %s", is.Transport, time.Duration(is.P50NS), p.Transport, time.Duration(p.P50NS))
			return
		}
	}
}

// remedy for a path that failed.
func remedy(p Path, h Host) string {
	switch {
	case p.Reason == "plaintext":
		return "let the node serve READs over tcp with TLS, or allow READs in plain text where the network is trusted"
	case p.Reason == "exhausted":
		return "a limit of the node, of a device or of memlock is reached: the text names it"
	case p.Reason == "denied":
		return "check the token and its rights, and the namespace"
	case p.Transport == "shm":
		// Also where it is revoked, which is what the node calls a user that it refuses.
		return fmt.Sprintf("let the node admit user %d (--shm-uids), and share its --shm-dir with this process (the same mount, in containers)", h.UID)
	case p.Reason == "revoked":
		return "try again: the node took the connection back; its log says why"
	case p.Transport == "tcp":
		return "let the node listen where this host reaches it (--tcp-listen, --tcp-advertise), and the firewall let it through"
	case p.Transport == "verbs" && p.Reason == "unsupported":
		return "see the devices of this host below"
	case p.Transport == "verbs":
		return "see that both ports are active and in one network: the same VLAN, MTU and (InfiniBand) partition; ping between the addresses of the GIDs"
	}
	return "see the node's log"
}

func loopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}
