package doctor

import (
	"context"
	"errors"
	"time"

	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/shm"
	"github.com/kvd-io/kvd/rdma/tcp"
	"github.com/kvd-io/kvd/rdma/verbs"
)

// Here looks at this host. devices are the settings of the verbs transport.
func Here(version string, devices verbs.Provider, w Wish) Report {
	r := Report{Version: version, Time: time.Now().UTC(), Host: thisHost().look(), RDMA: devices.Discover()}
	r.RDMA.Libraries, r.RDMA.Devices, r.RDMA.Rails = orEmpty(r.RDMA.Libraries), orEmpty(r.RDMA.Devices), orEmpty(r.RDMA.Rails)
	r.judged(w)
	return r
}

// DefaultReads is how many READs of each transport are measured.
const DefaultReads = 300

// AddCluster dials the cluster as any client of cfg would, tries every transport to every
// node, and adds what that brings to the report. That no node is there is part of it.
// ctx bounds everything.
func (r *Report) AddCluster(ctx context.Context, cfg client.Config, devices verbs.Provider, reads int, w Wish) {
	// What is required is judged below, beside everything else: it is no reason not to look.
	cfg.RequireRDMA = false
	cfg.Providers = []rdma.Provider{&shm.Provider{}, devices, tcp.Provider{ClientTLS: cfg.TLS}}
	c := &Cluster{Endpoints: cfg.Endpoints, Namespace: cfg.Namespace, TLS: cfg.TLS != nil, Token: cfg.Token != "" || cfg.TokenFile != "", ReadsMeasured: reads, Nodes: []Node{}}
	r.Cluster = c
	defer r.judged(w)
	cl, err := client.Dial(ctx, cfg)
	if err != nil {
		c.Error, c.Denied = err.Error(), errors.Is(err, client.ErrDenied)
		return
	}
	defer func() { _ = cl.Close() }()
	for _, e := range cl.Examine(ctx, reads) {
		c.Nodes = append(c.Nodes, nodeOf(e))
	}
}

func nodeOf(e client.Examination) Node {
	n := Node{ID: e.NodeID, Address: e.Address, SameHost: e.SameHost, Transport: e.Transport, Reason: e.Reason, Paths: []Path{}}
	if e.Err != nil {
		n.Error = e.Err.Error()
	}
	for _, t := range e.Trials {
		n.Paths = append(n.Paths, Path{
			Transport: t.Transport, Usable: t.Usable, Reason: t.Reason, Detail: t.Detail, Confidential: t.Confidential,
			ConnectNS: t.Connect.Nanoseconds(), Reads: t.Reads, ReadBytes: t.Bytes, P50NS: t.P50.Nanoseconds(), P99NS: t.P99.Nanoseconds(),
		})
	}
	return n
}
