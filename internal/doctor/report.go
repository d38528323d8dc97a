package doctor

import (
	"time"

	"github.com/kvd-io/kvd/rdma/verbs"
)

// Report is everything that was looked at. Its JSON is what kvctl -o json doctor prints;
// fields are added to it, and never change their meaning.
type Report struct {
	Version string    `json:"version"` // of the program that looked
	Time    time.Time `json:"time"`
	Healthy bool      `json:"healthy"` // no finding is a problem
	// Findings, problems first.
	Findings []Finding    `json:"findings"`
	Host     Host         `json:"host"`
	RDMA     verbs.Report `json:"rdma"`
	// Cluster is missing where it was not asked for.
	Cluster *Cluster `json:"cluster,omitempty"`
}

// Level of a Finding.
type Level string

const (
	// Problem: something that is wanted does not work, or worse than it should.
	Problem Level = "problem"
	// Notice: nothing is wrong with it, but it is good to know.
	Notice Level = "notice"
)

// Finding is one sentence on what is, and one on what to do.
type Finding struct {
	Level Level  `json:"level"`
	Area  string `json:"area"` // libraries, devices, memory, node 2, ...
	What  string `json:"what"`
	Do    string `json:"do,omitempty"`
}

// Wish is what the host is to be good for.
type Wish struct {
	// RequireRDMA makes the lack of an RDMA device a problem.
	RequireRDMA bool
	// ArenaBytes that a node here would register; 0: no node is to run here.
	ArenaBytes uint64
	// HugePages are asked for by that node.
	HugePages bool
}

// Host is this machine, or this container of it.
type Host struct {
	Kernel    string `json:"kernel"`
	ID        string `json:"id"` // the same on both sides: shared memory may work
	UID       int    `json:"uid"`
	Container string `json:"container,omitempty"` // kubernetes, docker, podman, or another word; empty: none seen
	IPCLock   bool   `json:"cap_ipc_lock"`        // lifts the memlock limit

	Devices     []string     `json:"rdma_devices"` // as the kernel names them
	DeviceFiles []DeviceFile `json:"device_files"` // below /dev/infiniband
	Modules     []Module     `json:"modules"`
	Adapters    []Adapter    `json:"adapters"` // PCI devices that may do RDMA
	CgroupRDMA  []string     `json:"cgroup_rdma_limits,omitempty"`

	HugePages  []HugePages `json:"huge_pages"`
	THP        string      `json:"transparent_huge_pages"`        // always, madvise, never
	THPShared  string      `json:"transparent_huge_pages_shared"` // of shared memory: always, within_size, advise, never, deny, force
	NUMA       []NUMANode  `json:"numa_nodes"`
	Interfaces []Interface `json:"interfaces"` // network interfaces that are up
}

// DeviceFile is a file by which programs reach RDMA devices.
type DeviceFile struct {
	Path    string `json:"path"`
	Mode    string `json:"mode"`
	Problem string `json:"problem,omitempty"` // why this process cannot use it
}

// Module is a kernel module that RDMA may need.
type Module struct {
	Name   string `json:"name"`
	Loaded bool   `json:"loaded"` // or built in
}

// Adapter is a PCI device of a kind that often does RDMA.
type Adapter struct {
	Address string `json:"address"`
	Vendor  string `json:"vendor"` // hexadecimal
	Driver  string `json:"driver,omitempty"`
	Device  string `json:"rdma_device,omitempty"` // that it is
}

// HugePages of one size.
type HugePages struct {
	Bytes uint64 `json:"page_bytes"`
	Total uint64 `json:"total"`
	Free  uint64 `json:"free"`
}

// NUMANode of the machine.
type NUMANode struct {
	ID   int    `json:"id"`
	CPUs string `json:"cpus"`
	// Allowed: this process may run on some of them.
	Allowed bool `json:"allowed"`
}

// Interface is a network interface.
type Interface struct {
	Name string `json:"name"`
	MTU  int    `json:"mtu"`
}

// Cluster is what the nodes said and how they can be read.
type Cluster struct {
	Endpoints     []string `json:"endpoints"`
	Namespace     string   `json:"namespace"`
	TLS           bool     `json:"tls"`   // gRPC and, where they are offered, READs over tcp
	Token         bool     `json:"token"` // one is sent
	Error         string   `json:"error,omitempty"`
	Denied        bool     `json:"denied,omitempty"` // Error is that a token, or a right, is missing
	Nodes         []Node   `json:"nodes"`
	ReadsMeasured int      `json:"reads_measured"` // asked for, on each one-sided transport
}

// Node of the cluster.
type Node struct {
	ID       uint64 `json:"node_id"`
	Address  string `json:"address"`
	SameHost bool   `json:"same_host"`
	// Transport is how gets read the node, and Reason why.
	Transport string `json:"transport,omitempty"`
	Reason    string `json:"reason,omitempty"`
	Error     string `json:"error,omitempty"`
	Paths     []Path `json:"paths"`
}

// Path is one transport to a node, tried.
type Path struct {
	Transport    string `json:"transport"`
	Usable       bool   `json:"usable"`
	Reason       string `json:"reason"` // none, not_served, another_host, two_sided, plaintext, unsupported, denied, ...
	Detail       string `json:"detail,omitempty"`
	Confidential bool   `json:"confidential"`
	ConnectNS    int64  `json:"connect_ns,omitempty"`
	Reads        int    `json:"reads,omitempty"` // of a control record; grpc: calls
	ReadBytes    int    `json:"read_bytes,omitempty"`
	P50NS        int64  `json:"p50_ns,omitempty"`
	P99NS        int64  `json:"p99_ns,omitempty"`
}

// judged draws the findings.
func (r *Report) judged(w Wish) {
	r.Findings = orEmpty(judge(r.Host, r.RDMA, r.Cluster, w))
	r.Healthy = true
	for _, f := range r.Findings {
		r.Healthy = r.Healthy && f.Level != Problem
	}
}
