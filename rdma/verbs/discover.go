package verbs

import (
	"fmt"
	"strings"

	"github.com/kvd-io/kvd/rdma/verbs/ibv"
)

// Report is what Discover found, for people and for JSON.
type Report struct {
	Build     string    `json:"build"` // "built with verbs" or why not
	Libraries []Library `json:"libraries"`
	Devices   []Device  `json:"devices"`
	// Rails are the ports that a target or initiator with these settings would use now,
	// in words.
	Rails []string `json:"rails"`
	// Problems are settings that this host cannot meet, as sentences. A target and an
	// initiator refuse to start with any.
	Problems []string `json:"problems,omitempty"`
	// Verdict is one sentence: what would be used, or why nothing can be.
	Verdict string  `json:"verdict"`
	Usable  bool    `json:"usable"`
	Memlock Memlock `json:"memlock"`
}

// Library is one shared library.
type Library struct {
	Name    string `json:"name"`
	Found   bool   `json:"found"`
	Path    string `json:"path,omitempty"`
	Version string `json:"version,omitempty"`
	Problem string `json:"problem,omitempty"`
}

// Device is an RDMA device with the verdict on it.
type Device struct {
	Name      string `json:"name"`
	Type      string `json:"type"`      // "channel adapter", "RNIC"
	Transport string `json:"transport"` // ib (InfiniBand and RoCE), iwarp
	Driver    string `json:"driver,omitempty"`
	Firmware  string `json:"firmware,omitempty"`
	GUID      string `json:"guid"`
	NUMANode  int    `json:"numa_node"` // -1 unknown
	Limits    Limits `json:"limits"`
	Ports     []Port `json:"ports"`
	Used      bool   `json:"used"`
	Verdict   string `json:"verdict"`
}

// Limits of a device. They are hints: other processes use it too.
type Limits struct {
	QueuePairs      int    `json:"queue_pairs"`
	QueueDepth      int    `json:"queue_depth"`
	Completions     int    `json:"completions"`
	Regions         int    `json:"regions"`
	RegionBytes     uint64 `json:"region_bytes"`
	ReadsServed     int    `json:"reads_served"`     // at a time on one queue pair, as target
	ReadsOutbound   int    `json:"reads_outbound"`   // at a time on one queue pair, as initiator
	MemoryWindows   int    `json:"memory_windows"`   // 0: none
	OnDemandPaging  bool   `json:"on_demand_paging"` // of READs
	ProtectionDoms  int    `json:"protection_domains"`
	ScatterElements int    `json:"scatter_elements"`
}

// Port of a device.
type Port struct {
	Number        int      `json:"number"`
	State         string   `json:"state"`
	PhysicalState string   `json:"physical_state"`
	LinkLayer     string   `json:"link_layer"`
	LID           uint16   `json:"lid,omitempty"`
	MTU           int      `json:"mtu"`
	MaxMTU        int      `json:"max_mtu"`
	BitsPerSecond uint64   `json:"bits_per_second"` // 0 unknown
	PKeys         []string `json:"pkeys,omitempty"`
	GIDs          []GID    `json:"gids"`
	Used          bool     `json:"used"`
	Verdict       string   `json:"verdict"`
}

// GID of a port, with its rank.
type GID struct {
	Index   int    `json:"index"`
	Address string `json:"address"`
	Type    string `json:"type"`
	Netdev  string `json:"netdev,omitempty"`
	Rank    int    `json:"rank"` // 1 is best, 0 is never used
	Used    bool   `json:"used"`
	Verdict string `json:"verdict"`
}

func (p *Port) mark(used []ibv.GIDEntry) {
	p.Used = true
	for i := range p.GIDs {
		for _, e := range used {
			p.GIDs[i].Used = p.GIDs[i].Used || p.GIDs[i].Index == e.Index
		}
	}
}

// Discover looks at the libraries and devices of this host and says what would be used
// with these settings and why. It opens each device for a moment, registers nothing, and
// works on a host without any of it.
func (p Provider) Discover() Report {
	p = p.withDefaults()
	s := ibv.Status()
	r := Report{Build: s.BuildNote, Memlock: memlock()}
	for _, l := range []ibv.Library{s.Verbs, s.RDMACM} {
		r.Libraries = append(r.Libraries, Library{Name: l.Name, Found: l.Found, Path: l.Path, Version: l.Version, Problem: l.Err})
	}
	if err := p.Validate(); err != nil {
		r.Problems = append(r.Problems, err.Error())
		r.Verdict = "not used: " + err.Error()
		return r
	}
	if err := ibv.Available(); err != nil {
		r.Verdict = "not used: " + err.Error()
		return r
	}
	views, err := survey()
	if err != nil {
		r.Verdict = "not used: " + err.Error()
		return r
	}
	c := choose(p, views, cmAvailable())
	r.Devices, r.Problems = c.devices, c.problems
	for _, s := range c.rails {
		r.Rails = append(r.Rails, s.String())
	}
	if err := c.refusal(); err != nil {
		r.Verdict = "not used: " + err.Error()
		return r
	}
	r.Usable = true
	r.Verdict = "used: " + strings.Join(r.Rails, "; ")
	return r
}

func (s railSpec) String() string {
	return fmt.Sprintf("%s port %d, GID %d (%s, %s), %s", s.device, s.port, s.gids[0].Index, s.gids[0].GID, s.gids[0].Type, rateText(s.speed))
}

// refusal is nil where there are rails to work with and no setting is violated.
func (c choice) refusal() error {
	switch {
	case len(c.problems) > 0:
		return fmt.Errorf("%s", strings.Join(c.problems, "; "))
	case len(c.devices) == 0:
		return fmt.Errorf("this host has no RDMA device (a virtual one: rdma link add rxe0 type rxe netdev eth0)")
	case len(c.rails) == 0:
		var why []string
		for _, d := range c.devices {
			line := d.Name + ": " + d.Verdict
			for _, p := range d.Ports {
				if p.Verdict != "" {
					line += fmt.Sprintf(", port %d %s", p.Number, p.Verdict)
				}
			}
			why = append(why, line)
		}
		return fmt.Errorf("no device can be used: %s", strings.Join(why, "; "))
	}
	return nil
}

// survey looks at every device. One that cannot be opened is part of the result.
func survey() ([]deviceView, error) {
	infos, err := ibv.Devices()
	if err != nil {
		return nil, err
	}
	views := make([]deviceView, len(infos))
	for i, info := range infos {
		views[i] = lookAt(info)
	}
	return views, nil
}

func lookAt(info ibv.DeviceInfo) deviceView {
	v := deviceView{info: info}
	ctx, err := ibv.Open(info.Name)
	if err != nil {
		v.err = err
		return v
	}
	v.view(ctx)
	if err := ctx.Close(); err != nil && v.err == nil {
		v.err = err
	}
	return v
}

// view fills in what an open device tells.
func (v *deviceView) view(ctx *ibv.Context) {
	if v.attr, v.err = ctx.QueryDevice(); v.err != nil {
		return
	}
	v.ports = nil
	for n := 1; n <= v.attr.Ports; n++ {
		v.ports = append(v.ports, viewPort(ctx, n, v.info))
	}
}

func viewPort(ctx *ibv.Context, n int, info ibv.DeviceInfo) portView {
	p := portView{number: n}
	if p.attr, p.err = ctx.QueryPort(n); p.err != nil {
		return p
	}
	if p.gids, p.err = ctx.GIDs(n); p.err != nil {
		return p
	}
	if info.Transport != ibv.TransportIWARP {
		p.pkeys, p.err = ctx.PKeys(n)
	}
	return p
}

// describe is a view in words, without a verdict.
func describe(v deviceView) Device {
	a := v.attr
	d := Device{
		Name: v.info.Name, Type: v.info.NodeType, Transport: v.info.Transport.String(), Driver: v.info.Driver,
		Firmware: a.FirmwareVersion, GUID: fmt.Sprintf("%016x", v.info.GUID), NUMANode: v.info.NUMANode,
		Limits: Limits{
			QueuePairs: a.MaxQP, QueueDepth: a.MaxQPWR, Completions: a.MaxCQE, Regions: a.MaxMR, RegionBytes: a.MaxMRSize,
			ReadsServed: a.MaxQPRdAtomic, ReadsOutbound: a.MaxQPInitRdAtomic, MemoryWindows: a.MaxMW,
			OnDemandPaging: a.ODPReadRC, ProtectionDoms: a.MaxPD, ScatterElements: a.MaxSGE,
		},
	}
	for _, p := range v.ports {
		out := Port{
			Number: p.number, State: p.attr.State.String(), PhysicalState: p.attr.PhysState, LinkLayer: p.attr.LinkLayer.String(),
			LID: p.attr.LID, MTU: p.attr.ActiveMTU.Bytes(), MaxMTU: p.attr.MaxMTU.Bytes(), BitsPerSecond: p.attr.BitsPerSecond,
		}
		for _, k := range p.pkeys {
			if k != 0 {
				out.PKeys = append(out.PKeys, fmt.Sprintf("%#04x", k))
			}
		}
		for _, e := range p.gids {
			g := GID{Index: e.Index, Address: e.GID.String(), Type: e.Type.String(), Netdev: e.Netdev}
			g.Rank, g.Verdict = gidRank(e, p.attr.LinkLayer)
			if v.info.Transport == ibv.TransportIWARP {
				g.Rank, g.Verdict = 1, "iWARP: connects to the address of "+e.Netdev
			}
			out.GIDs = append(out.GIDs, g)
		}
		d.Ports = append(d.Ports, out)
	}
	return d
}
