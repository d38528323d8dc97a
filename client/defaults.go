package client

import (
	"strings"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/shm"
	"github.com/kvd-io/kvd/rdma/tcp"
	"github.com/kvd-io/kvd/rdma/verbs"
)

const (
	shmName = "shm" // needs both sides on one kernel
	tcpName = "tcp"
)

// defaultProviders lists what Config.Providers means when it is nil, in order of
// preference.
func defaultProviders(cfg *Config) []rdma.Provider {
	return []rdma.Provider{&shm.Provider{}, verbs.Provider{}, tcp.Provider{ClientTLS: cfg.TLS}}
}

// defaultHostID says on which kernel this process runs.
func defaultHostID() string { return shm.HostID() }

// sameHost compares two host ids. What precedes the first "/" names the kernel; the
// rest (name spaces) may differ and a connection may still work.
func sameHost(a, b string) bool {
	a, _, _ = strings.Cut(a, "/")
	b, _, _ = strings.Cut(b, "/")
	return a != "" && a == b
}
