package doctor

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma/verbs"
)

// The facts of hosts, from which each case takes one and changes it.
var (
	libraries = []verbs.Library{{Name: "libibverbs.so.1", Found: true}, {Name: "librdmacm.so.1", Found: true}}

	bare = func() (Host, verbs.Report) {
		return Host{Kernel: "6.1"}, verbs.Report{Build: "built with verbs", Libraries: libraries, Verdict: "not used: this host has no RDMA device"}
	}
	// roce has one good port.
	roce = func() (Host, verbs.Report) {
		h := Host{
			Kernel: "6.1", UID: 1000, Devices: []string{"mlx5_0"}, DeviceFiles: []DeviceFile{{Path: "/dev/infiniband/uverbs0", Mode: "crw-rw-rw-"}},
			Modules: []Module{{"ib_uverbs", true}, {"rdma_ucm", true}}, NUMA: []NUMANode{{0, "0-3", true}, {1, "4-7", false}},
			Interfaces: []Interface{{"eth0", 9000}},
		}
		v := verbs.Report{
			Build: "built with verbs", Libraries: libraries, Usable: true, Verdict: "used: mlx5_0 port 1",
			Memlock: verbs.Memlock{Soft: -1, Hard: -1},
			Devices: []verbs.Device{{
				Name: "mlx5_0", Transport: "ib", Used: true, NUMANode: 0, Verdict: "used", Limits: verbs.Limits{ReadsServed: 16, ReadsOutbound: 16},
				Ports: []verbs.Port{{
					Number: 1, State: "active", LinkLayer: "Ethernet", MTU: 4096, MaxMTU: 4096, BitsPerSecond: 100e9, Used: true,
					GIDs: []verbs.GID{{Index: 3, Address: "10.0.0.1", Type: "RoCE v2", Netdev: "eth0", Rank: 1, Used: true, Verdict: "RoCE v2, routable"}},
				}},
			}},
		}
		return h, v
	}
	broken = func(h Host, v verbs.Report) (Host, verbs.Report) {
		v.Usable, v.Devices, v.Verdict = false, nil, "not used: no device can be used"
		return h, v
	}
)

// want is a finding of a case: its level, and words of what and do.
type want struct {
	level Level
	area  string
	what  string
	do    string
}

func TestJudgeHost(t *testing.T) {
	iwarp := func(v *verbs.Report) {
		v.Devices[0].Transport, v.Devices[0].Ports[0].MTU = "iwarp", 1024
	}
	for name, c := range map[string]struct {
		base   func() (Host, verbs.Report)
		change func(h *Host, v *verbs.Report)
		wish   Wish
		want   []want
	}{
		"no device":           {base: bare, want: []want{{Notice, "devices", "no RDMA device", "nothing, if that is meant"}}},
		"no device, required": {base: bare, wish: Wish{RequireRDMA: true}, want: []want{{Problem, "devices", "no RDMA device", "rdma link add"}}},
		"no device in a container": {
			base: bare, change: func(h *Host, _ *verbs.Report) { h.Container = "kubernetes" },
			want: []want{{Notice, "devices", "no RDMA device", "device plugin"}},
		},
		"adapter without driver": {
			base: bare, change: func(h *Host, _ *verbs.Report) { h.Adapters = []Adapter{{Address: "0000:81:00.0", Vendor: "15b3"}} },
			want: []want{{Notice, "devices", "PCI 0000:81:00.0", "modprobe mlx5_ib ib_uverbs"}},
		},
		"all well": {base: roce},
		"no headers at build": {
			base: func() (Host, verbs.Report) { return broken(roce()) },
			change: func(_ *Host, v *verbs.Report) {
				v.Build = "built without cgo"
				v.Libraries = []verbs.Library{{Name: "libibverbs.so.1", Problem: v.Build}, {Name: "librdmacm.so.1", Problem: v.Build}}
			},
			want: []want{{Problem, "libraries", "mlx5_0, but this program cannot use it: built without cgo", "libibverbs-dev"}},
		},
		"no headers, and no device": {
			base: bare, change: func(_ *Host, v *verbs.Report) {
				v.Build = "built without cgo"
				v.Libraries = []verbs.Library{{Name: "libibverbs.so.1", Problem: v.Build}}
			},
			want: []want{{Notice, "devices", "no RDMA device", ""}},
		},
		"no library": {
			base: func() (Host, verbs.Report) { return broken(roce()) },
			change: func(_ *Host, v *verbs.Report) {
				v.Libraries = []verbs.Library{{Name: "libibverbs.so.1", Problem: "no such file"}, libraries[1]}
			},
			want: []want{{Problem, "libraries", "libibverbs.so.1 was not found: no such file", "install rdma-core"}},
		},
		"no module": {
			base:   func() (Host, verbs.Report) { return broken(roce()) },
			change: func(h *Host, _ *verbs.Report) { h.DeviceFiles, h.Modules = nil, []Module{{"ib_uverbs", false}} },
			want:   []want{{Problem, "devices", "ib_uverbs is not loaded", "modprobe ib_uverbs"}},
		},
		"no device file": {
			base:   func() (Host, verbs.Report) { return broken(roce()) },
			change: func(h *Host, _ *verbs.Report) { h.DeviceFiles = nil },
			want:   []want{{Problem, "devices", "no /dev/infiniband/uverbs*", "udev"}},
		},
		"no device file in a container": {
			base:   func() (Host, verbs.Report) { return broken(roce()) },
			change: func(h *Host, _ *verbs.Report) { h.DeviceFiles, h.Container = nil, "docker" },
			want:   []want{{Problem, "devices", "this container has no /dev/infiniband/uverbs*", "--device=/dev/infiniband"}},
		},
		"device file of root": {
			base: func() (Host, verbs.Report) { return broken(roce()) },
			change: func(h *Host, _ *verbs.Report) {
				h.DeviceFiles[0].Mode, h.DeviceFiles[0].Problem = "crw-------", "permission denied"
			},
			want: []want{{Problem, "devices", "uverbs0 (crw-------) cannot be opened by user 1000: permission denied", "udev rule"}},
		},
		"port down": {
			base: func() (Host, verbs.Report) { return broken(roce()) },
			change: func(_ *Host, v *verbs.Report) {
				v.Verdict = "not used: no device can be used: mlx5_0: port 1 is down (polling)"
			},
			want: []want{{Problem, "devices", "mlx5_0, but: no device can be used: mlx5_0: port 1 is down", "verdict"}},
		},
		"setting that cannot be met": {
			base:   roce,
			change: func(_ *Host, v *verbs.Report) { v.Problems = []string{`device "mlx9" does not exist`} },
			want:   []want{{Problem, "devices", "mlx9", "correct"}},
		},
		"one of two": {
			base: roce,
			change: func(_ *Host, v *verbs.Report) {
				v.Devices = append(v.Devices, verbs.Device{Name: "mlx5_1", Verdict: "no port can be used", Ports: []verbs.Port{{Number: 1, Verdict: "it is down"}}})
			},
			want: []want{{Notice, "device mlx5_1", "no port can be used; port 1: it is down", "nothing"}},
		},
		"iWARP without rdma_cm": {
			base: roce,
			change: func(_ *Host, v *verbs.Report) {
				v.Devices = append(v.Devices, verbs.Device{Name: "siw0", Transport: "iwarp", Verdict: "iWARP connects by rdma_cm only"})
			},
			want: []want{{Notice, "device siw0", "needs /dev/infiniband/rdma_cm", "modprobe rdma_ucm"}},
		},
		"far from its memory": {
			base: roce, change: func(_ *Host, v *verbs.Report) { v.Devices[0].NUMANode = 1 },
			want: []want{{Notice, "device mlx5_0", "NUMA node 1", "--cpunodebind=1"}},
		},
		"NUMA unknown": {base: roce, change: func(_ *Host, v *verbs.Report) { v.Devices[0].NUMANode = -1 }},
		"few READs":    {base: roce, change: func(_ *Host, v *verbs.Report) { v.Devices[0].Limits.ReadsServed = 1 }, want: []want{{Notice, "device mlx5_0", "1 READs at a time", ""}}},
		"plain Ethernet frames": {
			base: roce,
			change: func(h *Host, v *verbs.Report) {
				h.Interfaces[0].MTU, v.Devices[0].Ports[0].MTU = 1500, 1024
			},
			want: []want{{Notice, "device mlx5_0 port 1", "path MTU is 1024, because the MTU of eth0 is 1500", "mtu 9000"}},
		},
		"small frames of iWARP do not matter": {base: roce, change: func(h *Host, v *verbs.Report) { h.Interfaces[0].MTU = 1500; iwarp(v) }},
		"GID is link-local": {
			base: roce,
			change: func(_ *Host, v *verbs.Report) {
				g := &v.Devices[0].Ports[0].GIDs[0]
				g.Rank, g.Verdict = 2, "RoCE v2, link-local"
			},
			want: []want{{Notice, "device mlx5_0 port 1", "RoCE v2, link-local", "give the interface eth0 an IP address"}},
		},
		"memlock of a client": {
			base: roce, change: func(_ *Host, v *verbs.Report) { v.Memlock.Soft = 8 << 20 },
			want: []want{{Notice, "memory", "8.0 MiB", "ulimit -l"}},
		},
		"memlock of a node": {
			base: roce, change: func(_ *Host, v *verbs.Report) { v.Memlock.Soft = 1 << 30 }, wish: Wish{ArenaBytes: 16 << 30},
			want: []want{{Problem, "memory", "is 1.0 GiB, and 16 GiB are needed", "LimitMEMLOCK"}},
		},
		"memlock suffices": {base: roce, change: func(_ *Host, v *verbs.Report) { v.Memlock.Soft = 16 << 30 }, wish: Wish{ArenaBytes: 16 << 30}},
		"memlock times devices": {
			base: roce, wish: Wish{ArenaBytes: 16 << 30},
			change: func(_ *Host, v *verbs.Report) {
				v.Memlock.Soft = 16 << 30
				v.Devices = append(v.Devices, v.Devices[0])
			},
			want: []want{{Problem, "memory", "32 GiB are needed: an arena of 16 GiB, on 2 devices", ""}},
		},
		"memlock lifted":           {base: roce, wish: Wish{ArenaBytes: 16 << 30}, change: func(h *Host, v *verbs.Report) { v.Memlock.Soft, h.IPCLock = 8<<20, true }},
		"not lifted for iWARP":     {base: roce, wish: Wish{ArenaBytes: 16 << 30}, change: func(h *Host, v *verbs.Report) { v.Memlock.Soft, h.IPCLock = 8<<20, true; iwarp(v) }, want: []want{{Problem, "memory", "16 GiB are needed", ""}}},
		"memlock without a device": {base: bare, wish: Wish{ArenaBytes: 16 << 30}, change: func(_ *Host, v *verbs.Report) { v.Memlock.Soft = 8 << 20 }, want: []want{{Notice, "devices", "no RDMA device", ""}}},
		"no huge pages": {
			base: roce, wish: Wish{HugePages: true}, change: func(h *Host, _ *verbs.Report) { h.HugePages = []HugePages{{Bytes: 2 << 20, Total: 8}} },
			want: []want{{Notice, "memory", "none is free", "vm.nr_hugepages"}},
		},
		"huge pages":    {base: roce, wish: Wish{HugePages: true}, change: func(h *Host, _ *verbs.Report) { h.HugePages = []HugePages{{Bytes: 2 << 20, Total: 8, Free: 1}} }},
		"cgroup limits": {base: roce, change: func(h *Host, _ *verbs.Report) { h.CgroupRDMA = []string{"mlx5_0 hca_handle=2 hca_object=max"} }, want: []want{{Notice, "devices", "hca_handle=2", "rdma.max"}}},
	} {
		t.Run(name, func(t *testing.T) {
			h, v := c.base()
			if c.change != nil {
				c.change(&h, &v)
			}
			mustFind(t, c.want, judge(h, v, nil, c.wish))
		})
	}
}

func mustFind(t *testing.T, wanted []want, got []Finding) {
	t.Helper()
	require.Len(t, got, len(wanted), "%+v", got)
	for i, w := range wanted {
		f := got[i]
		require.Equal(t, w.level, f.Level, "%+v", f)
		require.Equal(t, w.area, f.Area, "%+v", f)
		require.Contains(t, f.What, w.what)
		require.Contains(t, f.Do, w.do)
		require.NotEmpty(t, f.Do, "a finding says what to do")
	}
}

func TestJudgeCluster(t *testing.T) {
	good := func() Node {
		return Node{ID: 2, Address: "10.0.0.2:7400", Transport: "verbs", Reason: "shm: another host", Paths: []Path{
			{Transport: "shm", Reason: "another_host"},
			{Transport: "verbs", Usable: true, Reason: "none", P50NS: 3000},
			{Transport: "tcp", Usable: true, Reason: "none", P50NS: 40_000},
			{Transport: "grpc", Usable: true, Reason: "none", P50NS: 300_000},
		}}
	}
	for name, c := range map[string]struct {
		base   func() (Host, verbs.Report)
		change func(c *Cluster, n *Node)
		wish   Wish
		want   []want
	}{
		"all well":   {change: func(*Cluster, *Node) {}},
		"no cluster": {change: func(c *Cluster, _ *Node) { c.Error, c.Nodes = "connection refused", nil }, want: []want{{Problem, "cluster", "connection refused", "--endpoints"}}},
		"node away":  {change: func(_ *Cluster, n *Node) { *n = Node{ID: 2, Address: n.Address, Error: "did not answer"} }, want: []want{{Problem, "node 2", "did not answer", "10.0.0.2:7400"}}},
		"no device here": {
			base: bare,
			change: func(_ *Cluster, n *Node) {
				n.Transport, n.Paths[1] = "tcp", Path{Transport: "verbs", Reason: "unsupported", Detail: "no RDMA device"}
			},
			want: []want{{Notice, "devices", "no RDMA device", ""}},
		},
		"no device here, required": {
			base: bare, wish: Wish{RequireRDMA: true},
			change: func(_ *Cluster, n *Node) {
				n.Transport, n.Paths[1] = "tcp", Path{Transport: "verbs", Reason: "unsupported", Detail: "no RDMA device"}
			},
			want: []want{{Problem, "devices", "no RDMA device", ""}, {Problem, "node 2", "cannot be read by verbs", "devices of this host"}},
		},
		"verbs do not connect": {
			change: func(_ *Cluster, n *Node) {
				n.Transport, n.Paths[1] = "tcp", Path{Transport: "verbs", Reason: "timeout", Detail: "RTR: ETIMEDOUT"}
			},
			want: []want{{Problem, "node 2", "cannot be read by verbs: RTR: ETIMEDOUT", "ping"}},
		},
		"shm of another user": {
			change: func(_ *Cluster, n *Node) {
				n.SameHost, n.Paths[0] = true, Path{Transport: "shm", Reason: "revoked", Detail: "user 1000 is not admitted"}
			},
			want: []want{{Problem, "node 2", "user 1000 is not admitted", "--shm-uids"}},
		},
		"second best broken": {
			change: func(_ *Cluster, n *Node) {
				n.Paths[2] = Path{Transport: "tcp", Reason: "timeout", Detail: "dial timeout"}
			},
			want: []want{{Notice, "node 2", "by tcp instead of verbs: dial timeout", "firewall"}},
		},
		"plain text, TLS required": {
			change: func(_ *Cluster, n *Node) {
				n.Transport, n.Paths[1] = "tcp", Path{Transport: "verbs", Reason: "plaintext", Detail: "READs are plain text"}
			},
			want: []want{{Problem, "node 2", "plain text", "TLS"}},
		},
		"served only gRPC": {
			change: func(_ *Cluster, n *Node) {
				n.Transport, n.Reason = "grpc", "nothing served"
				for i := range 3 {
					n.Paths[i] = Path{Transport: n.Paths[i].Transport, Reason: "not_served"}
				}
			},
			want: []want{{Notice, "node 2", "over gRPC", "--transports"}},
		},
		"two-sided namespace": {
			change: func(_ *Cluster, n *Node) {
				n.Transport = "grpc"
				for i := range 3 {
					n.Paths[i] = Path{Transport: n.Paths[i].Transport, Reason: "two_sided"}
				}
			},
		},
		"tcp, RDMA required": {
			wish: Wish{RequireRDMA: true},
			change: func(_ *Cluster, n *Node) {
				n.Transport, n.Paths[1] = "tcp", Path{Transport: "verbs", Reason: "not_served"}
			},
			want: []want{{Problem, "node 2", "read over tcp", "let it serve verbs"}},
		},
		"slower than the next": {
			change: func(_ *Cluster, n *Node) { n.Paths[1].P50NS = 90_000 },
			want:   []want{{Notice, "node 2", "by verbs took 90µs in the median, by tcp 40µs", "--transport tcp"}},
		},
		"hardly slower":                 {change: func(_ *Cluster, n *Node) { n.Paths[1].P50NS = 50_000 }},
		"token in the clear":            {change: func(c *Cluster, _ *Node) { c.Token = true }, want: []want{{Problem, "cluster", "token", "TLS"}}},
		"token under TLS":               {change: func(c *Cluster, _ *Node) { c.Token, c.TLS = true, true }},
		"token in the clear, this host": {change: func(c *Cluster, n *Node) { c.Token, n.Address = true, "127.0.0.1:7400" }},
	} {
		t.Run(name, func(t *testing.T) {
			base := c.base
			if base == nil {
				base = roce
			}
			h, v := base()
			cluster := &Cluster{Nodes: []Node{good()}}
			n := &cluster.Nodes[0]
			c.change(cluster, n)
			mustFind(t, c.want, judge(h, v, cluster, c.wish))
		})
	}
}

func TestProblemsComeFirst(t *testing.T) {
	h, v := roce()
	v.Devices[0].NUMANode = 1
	c := &Cluster{Error: "refused", Nodes: []Node{}}
	r := Report{Host: h, RDMA: v, Cluster: c}
	r.judged(Wish{})
	require.False(t, r.Healthy)
	require.Equal(t, []Level{Problem, Notice}, []Level{r.Findings[0].Level, r.Findings[1].Level})
	require.Equal(t, "1 problem, 1 notice", r.Summary())
	c.Error = ""
	r.judged(Wish{})
	require.True(t, r.Healthy)
	require.Equal(t, "nothing to mend, 1 notice", r.Summary())
}
