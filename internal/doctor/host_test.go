package doctor

import (
	"encoding/json"
	"io/fs"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/kvd-io/kvd/rdma/verbs"
)

func files(content map[string]string) fstest.MapFS {
	m := fstest.MapFS{}
	for name, text := range content {
		m[name] = &fstest.MapFile{Data: []byte(text)}
	}
	return m
}

func on(root fs.FS) sources {
	return sources{root: root, access: func(string) error { return nil }, env: func(string) string { return "" }, uid: 1000, hostID: "host/1"}
}

func TestLook(t *testing.T) {
	root := files(map[string]string{
		"proc/sys/kernel/osrelease":                                  "6.1.0-18-amd64\n",
		"proc/self/status":                                           "Name:\tkvd\nCapEff:\t0000000000004000\nCpus_allowed_list:\t4-5\n",
		"proc/self/cgroup":                                           "0::/system.slice/kvd.service\n",
		"sys/fs/cgroup/system.slice/kvd.service/rdma.max":            "mlx5_0 hca_handle=2 hca_object=2000\nmlx5_1 hca_handle=max hca_object=max\n",
		"sys/class/infiniband/mlx5_0/node_type":                      "1: CA",
		"dev/infiniband/uverbs0":                                     "",
		"dev/infiniband/umad0":                                       "",
		"dev/infiniband/rdma_cm":                                     "",
		"sys/module/ib_uverbs/initstate":                             "live",
		"sys/module/mlx5_ib/initstate":                               "live",
		"sys/bus/pci/devices/0000:81:00.0/class":                     "0x020000\n",
		"sys/bus/pci/devices/0000:81:00.0/vendor":                    "0x15b3\n",
		"sys/bus/pci/devices/0000:81:00.0/uevent":                    "DRIVER=mlx5_core\nPCI_CLASS=20000\n",
		"sys/bus/pci/devices/0000:81:00.0/infiniband/mlx5_0/x":       "",
		"sys/bus/pci/devices/0000:82:00.0/class":                     "0x020700\n",
		"sys/bus/pci/devices/0000:82:00.0/vendor":                    "0x1077\n",
		"sys/bus/pci/devices/0000:00:03.0/class":                     "0x020000\n", // a plain NIC
		"sys/bus/pci/devices/0000:00:03.0/vendor":                    "0x8086\n",
		"sys/bus/pci/devices/0000:00:1f.0/class":                     "0x060100\n",
		"sys/kernel/mm/transparent_hugepage/enabled":                 "always [madvise] never\n",
		"sys/kernel/mm/transparent_hugepage/shmem_enabled":           "always within_size advise [never] deny force\n",
		"sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages":   "0\n",
		"sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages": "0\n",
		"sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages":      "512\n",
		"sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages":    "12\n",
		"sys/devices/system/node/node1/cpulist":                      "4-7\n",
		"sys/devices/system/node/node0/cpulist":                      "0-3\n",
		"sys/devices/system/node/possible":                           "0-1\n",
		"sys/class/net/eth0/operstate":                               "up\n",
		"sys/class/net/eth0/mtu":                                     "9000\n",
		"sys/class/net/eth1/operstate":                               "down\n",
		"sys/class/net/eth1/mtu":                                     "1500\n",
	})
	s := on(root)
	s.access = func(p string) error {
		if p == "/dev/infiniband/uverbs0" {
			return unix.EACCES
		}
		return nil
	}
	h := s.look()
	require.Equal(t, "6.1.0-18-amd64", h.Kernel)
	require.Equal(t, "host/1", h.ID)
	require.Equal(t, 1000, h.UID)
	require.True(t, h.IPCLock)
	require.Empty(t, h.Container)
	require.Equal(t, []string{"mlx5_0"}, h.Devices)
	require.Len(t, h.DeviceFiles, 2)
	require.Equal(t, "/dev/infiniband/rdma_cm", h.DeviceFiles[0].Path)
	require.Empty(t, h.DeviceFiles[0].Problem)
	require.Equal(t, "permission denied", h.DeviceFiles[1].Problem)
	require.Equal(t, []Module{{"ib_uverbs", true}, {"rdma_ucm", false}, {"mlx5_ib", true}}, h.Modules)
	require.Equal(t, []Adapter{{"0000:81:00.0", "15b3", "mlx5_core", "mlx5_0"}, {"0000:82:00.0", "1077", "", ""}}, h.Adapters)
	require.Equal(t, []string{"mlx5_0 hca_handle=2 hca_object=2000"}, h.CgroupRDMA)
	require.Equal(t, "madvise", h.THP)
	require.Equal(t, "never", h.THPShared)
	require.Equal(t, []HugePages{{2 << 20, 512, 12}, {1 << 30, 0, 0}}, h.HugePages)
	require.Equal(t, []NUMANode{{0, "0-3", false}, {1, "4-7", true}}, h.NUMA)
	require.Equal(t, []Interface{{"eth0", 9000}}, h.Interfaces)
}

func TestContainer(t *testing.T) {
	env := func(name string) func(string) string {
		return func(asked string) string {
			if asked == name {
				return "x"
			}
			return ""
		}
	}
	for _, c := range []struct {
		files map[string]string
		env   string
		want  string
	}{
		{nil, "", ""},
		{nil, "KUBERNETES_SERVICE_HOST", "kubernetes"},
		{map[string]string{"proc/self/cgroup": "0::/kubepods/pod1"}, "", "kubernetes"},
		{map[string]string{"run/.containerenv": ""}, "", "podman"},
		{map[string]string{".dockerenv": ""}, "", "docker"},
		{nil, "container", "x"},
	} {
		s := on(files(c.files))
		s.env = env(c.env)
		require.Equal(t, c.want, s.container(), "%+v", c)
	}
}

// A host that shows nothing at all, and this one, are looked at without a complaint, and
// lists stay lists in JSON.
func TestLookAnywhere(t *testing.T) {
	for _, h := range []Host{on(fstest.MapFS{}).look(), thisHost().look()} {
		b, err := json.Marshal(h)
		require.NoError(t, err)
		require.NotContains(t, string(b), "null")
	}
	r := Here("v", verbs.Provider{}, Wish{})
	require.NotEmpty(t, r.RDMA.Verdict)
	require.NotEmpty(t, r.Host.Kernel)
}

func FuzzCPUList(f *testing.F) {
	f.Add("0-3,8,10-11")
	f.Add("9-1,-,--5,1-99999999999")
	f.Fuzz(func(t *testing.T, s string) {
		for cpu := range cpuList(s) {
			require.True(t, cpu >= 0 && cpu <= maxCPU)
		}
	})
}

func TestCPUList(t *testing.T) {
	require.Equal(t, map[int]bool{0: true, 1: true, 2: true, 8: true}, cpuList("0-2,8"))
	require.Empty(t, cpuList(""))
	require.Empty(t, cpuList("x"))
}
