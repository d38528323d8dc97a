package doctor

import (
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kvd-io/kvd/rdma/shm"
)

// sources of what is known of a host.
type sources struct {
	root   fs.FS                   // "/"
	access func(path string) error // whether this process may read and write it
	env    func(string) string
	uid    int
	hostID string
}

func thisHost() sources {
	return sources{
		root: os.DirFS("/"),
		access: func(p string) error {
			return unix.Access(p, unix.R_OK|unix.W_OK)
		},
		env: os.Getenv, uid: os.Getuid(), hostID: shm.HostID(),
	}
}

// modules that are looked for. Any of the devices' drivers may be built into the kernel.
var modules = []string{
	"ib_core", "ib_uverbs", "rdma_cm", "rdma_ucm", "mlx5_ib", "mlx4_ib", "irdma", "bnxt_re", "qedr", "iw_cxgb4", "hns_roce", "erdma", "efa",
	"rdma_rxe", "siw",
}

// rdmaVendors make network adapters most of which do RDMA. Others make too many that do not.
var rdmaVendors = map[string]string{"15b3": "mlx5_ib", "1425": "iw_cxgb4", "1d0f": "efa"}

const (
	classNetwork    = "0x0200"
	classInfiniBand = "0x0207"
	capIPCLock      = 14
)

// look gathers the facts. What a host does not have is left empty.
func (s sources) look() Host {
	h := Host{
		Kernel: s.text("proc/sys/kernel/osrelease"), ID: s.hostID, UID: s.uid, Container: s.container(),
		Devices: s.names("sys/class/infiniband"), THP: chosen(s.text("sys/kernel/mm/transparent_hugepage/enabled")),
		THPShared: chosen(s.text("sys/kernel/mm/transparent_hugepage/shmem_enabled")),
	}
	caps, _ := strconv.ParseUint(field(s.text("proc/self/status"), "CapEff"), 16, 64)
	h.IPCLock = caps&(1<<capIPCLock) != 0
	h.DeviceFiles = s.deviceFiles()
	for _, name := range modules {
		if _, err := fs.Stat(s.root, path.Join("sys/module", name)); err == nil {
			h.Modules = append(h.Modules, Module{name, true})
		} else if slices.Contains([]string{"ib_uverbs", "rdma_ucm"}, name) {
			h.Modules = append(h.Modules, Module{name, false})
		}
	}
	h.Adapters = s.adapters()
	h.CgroupRDMA = s.cgroupLimits()
	h.HugePages = s.hugePages()
	h.NUMA = s.numa()
	for _, name := range s.names("sys/class/net") {
		at := path.Join("sys/class/net", name)
		if state := s.text(path.Join(at, "operstate")); state != "up" && state != "unknown" {
			continue
		}
		mtu, _ := strconv.Atoi(s.text(path.Join(at, "mtu")))
		h.Interfaces = append(h.Interfaces, Interface{name, mtu})
	}
	h.Devices, h.DeviceFiles, h.Modules = orEmpty(h.Devices), orEmpty(h.DeviceFiles), orEmpty(h.Modules)
	h.Adapters, h.HugePages, h.NUMA, h.Interfaces = orEmpty(h.Adapters), orEmpty(h.HugePages), orEmpty(h.NUMA), orEmpty(h.Interfaces)
	return h
}

// orEmpty makes the JSON of a list a list.
func orEmpty[T any](s []T) []T {
	if s == nil {
		return []T{}
	}
	return s
}

// text of a small file, without the spaces around it; empty where it cannot be read.
func (s sources) text(name string) string {
	b, err := fs.ReadFile(s.root, name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

func (s sources) names(dir string) []string {
	entries, err := fs.ReadDir(s.root, dir)
	if err != nil {
		return nil
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

// field finds "Name: value" among the lines of text.
func field(text, name string) string {
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(rest)
		}
	}
	return ""
}

// chosen is the word in brackets: "always [madvise] never".
func chosen(s string) string {
	_, rest, ok := strings.Cut(s, "[")
	word, _, closed := strings.Cut(rest, "]")
	if !ok || !closed {
		return ""
	}
	return word
}

func (s sources) container() string {
	exists := func(name string) bool {
		_, err := fs.Stat(s.root, name)
		return err == nil
	}
	cgroups := s.text("proc/self/cgroup")
	switch {
	case s.env("KUBERNETES_SERVICE_HOST") != "" || strings.Contains(cgroups, "kubepods"):
		return "kubernetes"
	case exists("run/.containerenv"):
		return "podman"
	case exists(".dockerenv") || strings.Contains(cgroups, "docker"):
		return "docker"
	case s.env("container") != "":
		return s.env("container")
	}
	return ""
}

// deviceFiles below /dev/infiniband that READs need: uverbs, and rdma_cm for iWARP.
func (s sources) deviceFiles() []DeviceFile {
	var out []DeviceFile
	for _, name := range s.names("dev/infiniband") {
		if !strings.HasPrefix(name, "uverbs") && name != "rdma_cm" {
			continue
		}
		f := DeviceFile{Path: "/dev/infiniband/" + name}
		if info, err := fs.Stat(s.root, f.Path[1:]); err == nil {
			f.Mode = info.Mode().String()
		}
		if err := s.access(f.Path); err != nil {
			f.Problem = err.Error()
		}
		out = append(out, f)
	}
	return out
}

func (s sources) adapters() []Adapter {
	var out []Adapter
	for _, address := range s.names("sys/bus/pci/devices") {
		at := path.Join("sys/bus/pci/devices", address)
		class, vendor := s.text(path.Join(at, "class")), strings.TrimPrefix(s.text(path.Join(at, "vendor")), "0x")
		infiniBand := strings.HasPrefix(class, classInfiniBand)
		if !infiniBand && (!strings.HasPrefix(class, classNetwork) || rdmaVendors[vendor] == "") {
			continue
		}
		a := Adapter{Address: address, Vendor: vendor, Driver: driverOf(s.text(path.Join(at, "uevent")))}
		if devices := s.names(path.Join(at, "infiniband")); len(devices) > 0 {
			a.Device = devices[0]
		}
		out = append(out, a)
	}
	return out
}

func driverOf(uevent string) string {
	for line := range strings.Lines(uevent) {
		if name, ok := strings.CutPrefix(line, "DRIVER="); ok {
			return strings.TrimSpace(name)
		}
	}
	return ""
}

// cgroupLimits are the lines of rdma.max that limit something.
func (s sources) cgroupLimits() []string {
	for line := range strings.Lines(s.text("proc/self/cgroup")) {
		at, ok := strings.CutPrefix(strings.TrimSpace(line), "0::/")
		if !ok {
			continue
		}
		var out []string
		for limit := range strings.Lines(s.text(path.Join("sys/fs/cgroup", at, "rdma.max"))) {
			limit = strings.TrimSpace(limit)
			for _, f := range strings.Fields(limit)[min(1, len(strings.Fields(limit))):] {
				if !strings.HasSuffix(f, "=max") {
					out = append(out, limit)
					break
				}
			}
		}
		return out
	}
	return nil
}

func (s sources) hugePages() []HugePages {
	var out []HugePages
	number := func(name string) uint64 {
		n, _ := strconv.ParseUint(s.text(name), 10, 64)
		return n
	}
	for _, name := range s.names("sys/kernel/mm/hugepages") {
		kb, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimPrefix(name, "hugepages-"), "kB"), 10, 64)
		if err != nil {
			continue
		}
		at := path.Join("sys/kernel/mm/hugepages", name)
		out = append(out, HugePages{Bytes: kb << 10, Total: number(path.Join(at, "nr_hugepages")), Free: number(path.Join(at, "free_hugepages"))})
	}
	slices.SortFunc(out, func(a, b HugePages) int { return int(a.Bytes>>10) - int(b.Bytes>>10) })
	return out
}

func (s sources) numa() []NUMANode {
	allowed := cpuList(field(s.text("proc/self/status"), "Cpus_allowed_list"))
	var out []NUMANode
	for _, name := range s.names("sys/devices/system/node") {
		id, err := strconv.Atoi(strings.TrimPrefix(name, "node"))
		if err != nil {
			continue
		}
		n := NUMANode{ID: id, CPUs: s.text(path.Join("sys/devices/system/node", name, "cpulist"))}
		for cpu := range cpuList(n.CPUs) {
			n.Allowed = n.Allowed || allowed[cpu]
		}
		out = append(out, n)
	}
	slices.SortFunc(out, func(a, b NUMANode) int { return a.ID - b.ID })
	return out
}

// maxCPU bounds what a damaged list may ask for.
const maxCPU = 1 << 16

// cpuList reads "0-3,8,10-11".
func cpuList(s string) map[int]bool {
	out := map[int]bool{}
	for part := range strings.SplitSeq(s, ",") {
		first, last, isRange := strings.Cut(strings.TrimSpace(part), "-")
		from, err := strconv.Atoi(first)
		to := from
		if err == nil && isRange {
			to, err = strconv.Atoi(last)
		}
		if err != nil || from < 0 || to > maxCPU {
			continue
		}
		for i := from; i <= to; i++ {
			out[i] = true
		}
	}
	return out
}
