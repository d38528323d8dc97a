//go:build !linux

package shm

import (
	"fmt"
	"runtime"

	"github.com/kvd-io/kvd/rdma"
)

func unsupported() error {
	return fmt.Errorf("%w: shm needs memfd and robust futexes of Linux, this is %s; use tcp", rdma.ErrUnsupported, runtime.GOOS)
}

// NewTarget implements rdma.Provider: always ErrUnsupported on this system.
func (p *Provider) NewTarget(rdma.TargetConfig) (rdma.Target, error) { return nil, unsupported() }

// NewInitiator implements rdma.Provider: always ErrUnsupported on this system.
func (p *Provider) NewInitiator(rdma.InitiatorConfig) (rdma.Initiator, error) {
	return nil, unsupported()
}

// HostID is empty on this system: no two processes are known to share a host.
func HostID() string { return "" }

// ScanHolders is ErrUnsupported on this system.
func ScanHolders(string, string) (Holders, error) { return Holders{}, unsupported() }
