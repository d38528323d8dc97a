package doctor

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"

	"github.com/kvd-io/kvd/rdma/verbs"
)

// textWidth is where sentences in tables are broken.
const textWidth = 60

// Print writes the report for people: what was found first, what it was drawn from below.
func (r *Report) Print(w io.Writer) {
	p := printer{w}
	p.findings(r)
	p.host(r.Host)
	p.rdma(r)
	if r.Cluster != nil {
		p.cluster(r.Cluster)
	}
}

// Summary is one line.
func (r *Report) Summary() string {
	problems := 0
	for _, f := range r.Findings {
		if f.Level == Problem {
			problems++
		}
	}
	notices := len(r.Findings) - problems
	switch {
	case problems == 0 && notices == 0:
		return "nothing to mend"
	case problems == 0:
		return "nothing to mend, " + count(notices, "notice")
	}
	return count(problems, "problem") + ", " + count(notices, "notice")
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return strconv.Itoa(n) + " " + what + "s"
}

type printer struct{ w io.Writer }

func (p printer) line(format string, args ...any) { fmt.Fprintf(p.w, format+"\n", args...) }

func (p printer) table(header ...any) table.Writer {
	t := table.NewWriter()
	t.SetOutputMirror(p.w)
	t.SetStyle(table.StyleLight)
	t.AppendHeader(header)
	return t
}

// sentences breaks the long columns, counted from 1.
func sentences(t table.Writer, columns ...int) {
	var c []table.ColumnConfig
	for _, n := range columns {
		c = append(c, table.ColumnConfig{Number: n, WidthMax: textWidth, WidthMaxEnforcer: text.WrapSoft})
	}
	t.SetColumnConfigs(c)
}

func (p printer) findings(r *Report) {
	p.line("%s", r.Summary())
	if len(r.Findings) == 0 {
		return
	}
	t := p.table("", "where", "what", "what to do")
	sentences(t, 3, 4)
	t.Style().Options.SeparateRows = true
	for _, f := range r.Findings {
		t.AppendRow(table.Row{f.Level, f.Area, f.What, f.Do})
	}
	t.Render()
}

func (p printer) host(h Host) {
	p.line("\nTHIS HOST")
	t := p.table("", "")
	t.ResetHeaders()
	row := func(name, format string, args ...any) { t.AppendRow(table.Row{name, fmt.Sprintf(format, args...)}) }
	row("kernel", "%s", orNone(h.Kernel))
	row("user", "%d", h.UID)
	row("container", "%s", orNone(h.Container))
	row("id for shared memory", "%s", orNone(h.ID))
	var numa []string
	for _, n := range h.NUMA {
		s := fmt.Sprintf("node %d: CPUs %s", n.ID, n.CPUs)
		if !n.Allowed {
			s += " (none for this process)"
		}
		numa = append(numa, s)
	}
	row("NUMA", "%s", orNone(strings.Join(numa, "; ")))
	var huge []string
	for _, p := range h.HugePages {
		huge = append(huge, fmt.Sprintf("%s: %d of %d free", humanize.IBytes(p.Bytes), p.Free, p.Total))
	}
	row("huge pages", "%s", orNone(strings.Join(huge, "; ")))
	row("transparent huge pages", "%s, of shared memory: %s", orNone(h.THP), orNone(h.THPShared))
	var modules []string
	for _, m := range h.Modules {
		if m.Loaded {
			modules = append(modules, m.Name)
		} else {
			modules = append(modules, m.Name+" (not loaded)")
		}
	}
	row("kernel modules", "%s", orNone(strings.Join(modules, " ")))
	var files []string
	for _, f := range h.DeviceFiles {
		s := f.Path + " " + f.Mode
		if f.Problem != "" {
			s += " (" + f.Problem + ")"
		}
		files = append(files, s)
	}
	row("device files", "%s", orNone(strings.Join(files, "; ")))
	for _, a := range h.Adapters {
		row("adapter "+a.Address, "vendor %s, driver %s, RDMA device %s", a.Vendor, orNone(a.Driver), orNone(a.Device))
	}
	if len(h.CgroupRDMA) > 0 {
		row("cgroup limits", "%s", strings.Join(h.CgroupRDMA, "; "))
	}
	t.Render()
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

func (p printer) rdma(r *Report) {
	v := r.RDMA
	p.line("\nRDMA DEVICES")
	p.line("%s", v.Verdict)
	t := p.table("library", "found", "version", "file")
	sentences(t, 4)
	for _, l := range v.Libraries {
		t.AppendRow(table.Row{l.Name, yes(l.Found), l.Version, l.Path + l.Problem})
	}
	t.Render()
	p.line("%s; memory that may be pinned: %s", v.Build, v.Memlock.Verdict)
	if len(v.Devices) == 0 {
		return
	}
	devices := p.table("device", "used", "kind", "driver", "firmware", "NUMA", "queue pairs", "regions", "READs in/out", "verdict")
	ports := p.table("device", "port", "used", "state", "link", "rate", "MTU", "LID", "verdict")
	gids := p.table("device", "port", "index", "GID", "type", "interface", "rank", "used", "verdict")
	sentences(devices, 10)
	sentences(ports, 9)
	sentences(gids, 9)
	rows := 0
	for _, d := range v.Devices {
		numa := "unknown"
		if d.NUMANode >= 0 {
			numa = strconv.Itoa(d.NUMANode)
		}
		devices.AppendRow(table.Row{d.Name, yes(d.Used), d.Transport, d.Driver, d.Firmware, numa, d.Limits.QueuePairs, d.Limits.Regions,
			fmt.Sprintf("%d/%d", d.Limits.ReadsServed, d.Limits.ReadsOutbound), d.Verdict})
		for _, port := range d.Ports {
			ports.AppendRow(table.Row{d.Name, port.Number, yes(port.Used), port.State + ", " + port.PhysicalState, port.LinkLayer, rate(port), fmt.Sprintf("%d of %d", port.MTU, port.MaxMTU), port.LID, port.Verdict})
			for _, g := range port.GIDs {
				gids.AppendRow(table.Row{d.Name, port.Number, g.Index, g.Address, g.Type, g.Netdev, g.Rank, yes(g.Used), g.Verdict})
				rows++
			}
		}
	}
	devices.Render()
	ports.Render()
	if rows > 0 {
		gids.Render()
	}
}

func rate(p verbs.Port) string {
	if p.BitsPerSecond == 0 {
		return "unknown"
	}
	return fmt.Sprintf("%.4g Gbit/s", float64(p.BitsPerSecond)/1e9)
}

func (p printer) cluster(c *Cluster) {
	p.line("\nCLUSTER at %s, namespace %s", strings.Join(c.Endpoints, ", "), c.Namespace)
	p.line("TLS: %s; token: %s", yes(c.TLS), yes(c.Token))
	if c.Error != "" {
		p.line("%s", c.Error)
		return
	}
	t := p.table("node", "address", "this host", "by", "usable", "READ p50", "p99", "connect", "private", "why")
	sentences(t, 10)
	for i, n := range c.Nodes {
		if i > 0 {
			t.AppendSeparator()
		}
		if n.Error != "" {
			t.AppendRow(table.Row{n.ID, n.Address, "", "", "no", "", "", "", "", n.Error})
			continue
		}
		for _, path := range n.Paths {
			by, why := path.Transport, path.Detail
			if path.Transport == n.Transport {
				by += " (chosen)"
				if why == "" {
					why = n.Reason
				}
			}
			t.AppendRow(table.Row{n.ID, n.Address, yes(n.SameHost), by, yes(path.Usable), took(path.P50NS), took(path.P99NS), took(path.ConnectNS), yes(path.Confidential), why})
		}
	}
	t.Render()
	p.line("READs of a control record (64 bytes), %d of each transport after as many as a tenth to warm up; grpc: calls.", c.ReadsMeasured)
}

func took(ns int64) string {
	switch d := time.Duration(ns); {
	case d == 0:
		return ""
	case d < 10*time.Microsecond:
		return d.Round(10 * time.Nanosecond).String()
	case d < time.Millisecond:
		return d.Round(100 * time.Nanosecond).String()
	default:
		return d.Round(10 * time.Microsecond).String()
	}
}
