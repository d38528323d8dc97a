package main

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
)

// report is the result of one run. Its JSON is meant to be kept and compared:
// fields are added, never given another meaning.
type report struct {
	Time     time.Time      `json:"time"`
	Commit   string         `json:"commit"` // of the source tree; "+dirty" with changes
	Machine  machine        `json:"machine"`
	Workload workloadReport `json:"workload"`
	Baseline string         `json:"baseline"` // what the ratios are to
	Systems  []systemReport `json:"systems"`
	Notes    []string       `json:"notes"`
}

type workloadReport struct {
	Op              operation `json:"op"`
	Clients         int       `json:"clients"`
	ValueBytes      int       `json:"value_bytes"`
	KeyBytes        int       `json:"key_bytes"`
	Keys            int       `json:"keys"`
	Seed            uint64    `json:"seed"`
	Rounds          int       `json:"rounds"`
	SecondsARound   float64   `json:"seconds_a_round"`
	WarmupSeconds   float64   `json:"warmup_seconds"`
	Loop            string    `json:"loop"`
	KeyDistribution string    `json:"key_distribution"`
}

// systemReport: throughput is the median of the rounds, latencies are over all
// rounds, in microseconds.
type systemReport struct {
	Name string `json:"name"`
	description
	OpsPerSecond float64 `json:"ops_per_second"`
	P50Micros    float64 `json:"p50_us"`
	P99Micros    float64 `json:"p99_us"`
	P999Micros   float64 `json:"p999_us"`
	MaxMicros    float64 `json:"max_us"`
	Errors       uint64  `json:"errors"`
	FirstError   string  `json:"first_error,omitempty"`
	// ServerCPUMicros that all its processes used for one operation, warm-up counted
	// on both sides; nil where the system does not tell.
	ServerCPUMicros *float64 `json:"server_cpu_us_per_op"`
	// Ratios to the baseline, round by round; nil for want of a baseline.
	OpsRatio *ratio        `json:"ops_ratio"`
	P50Ratio *ratio        `json:"p50_ratio"`
	Rounds   []roundReport `json:"rounds"`
}

type roundReport struct {
	OpsPerSecond float64 `json:"ops_per_second"`
	P50Micros    float64 `json:"p50_us"`
	P99Micros    float64 `json:"p99_us"`
	P999Micros   float64 `json:"p999_us"`
}

// makeReport of what compare measured. The baseline is kvd, or without it nothing.
func makeReport(subjects []*subject, w workload, rounds int) report {
	r := report{
		Time:   time.Now().UTC().Truncate(time.Second),
		Notes:  []string{},
		Commit: sourceCommit(),
		Workload: workloadReport{
			Op: w.op, Clients: w.clients, ValueBytes: w.size, Keys: len(w.keys), Seed: w.seed, Rounds: rounds,
			SecondsARound: w.measure.Seconds(), WarmupSeconds: w.warmup.Seconds(),
			Loop: "closed", KeyDistribution: "uniform",
		},
	}
	if len(w.keys) > 0 {
		r.Workload.KeyBytes = len(w.keys[0].bytes)
	}
	var base *subject
	for _, s := range subjects {
		if s.name() == "kvd" {
			base, r.Baseline = s, s.name()
		}
	}
	for _, s := range subjects {
		r.Systems = append(r.Systems, s.report(base, w))
		if n, ok := s.system.(noter); ok {
			r.Notes = append(r.Notes, n.notes()...)
		}
	}
	return r
}

func (s *subject) report(base *subject, w workload) systemReport {
	h := s.latency()
	out := systemReport{
		Name:        s.name(),
		description: s.describe(),
		P50Micros:   percentileMicros(h, 50),
		P99Micros:   percentileMicros(h, 99),
		P999Micros:  percentileMicros(h, 99.9),
		MaxMicros:   float64(h.Max()) / 1e3,
	}
	var perSecond []float64
	var ops uint64
	for _, smp := range s.samples {
		perSecond = append(perSecond, smp.perSecond())
		ops += smp.ops
		out.Errors += smp.errors
		if out.FirstError == "" && smp.firstErr != nil {
			out.FirstError = smp.firstErr.Error()
		}
		out.Rounds = append(out.Rounds, roundReport{
			OpsPerSecond: smp.perSecond(),
			P50Micros:    percentileMicros(smp.latency, 50),
			P99Micros:    percentileMicros(smp.latency, 99),
			P999Micros:   percentileMicros(smp.latency, 99.9),
		})
	}
	out.OpsPerSecond = median(perSecond)
	if len(s.cpu) == len(s.samples) && ops > 0 {
		out.ServerCPUMicros = s.cpuMicros(w, ops)
	}
	if base != nil && base != s {
		out.OpsRatio = pairedRatio(s.samples, base.samples, sample.perSecond)
		out.P50Ratio = pairedRatio(s.samples, base.samples, func(smp sample) float64 { return percentileMicros(smp.latency, 50) })
	}
	return out
}

// cpuMicros spreads the CPU time of warm-up and measurement over the operations of
// both, supposing that the warm-up went at the same pace.
func (s *subject) cpuMicros(w workload, measuredOps uint64) *float64 {
	var cpu time.Duration
	for _, c := range s.cpu {
		cpu += c
	}
	all := float64(measuredOps) * float64(w.warmup+w.measure) / float64(w.measure)
	us := float64(cpu.Microseconds()) / all
	return &us
}

// failedSystems had errors: their figures must not be used.
func (r report) failedSystems() []string {
	var out []string
	for _, s := range r.Systems {
		if s.Errors > 0 {
			out = append(out, fmt.Sprintf("%s had %d errors, the first: %s", s.Name, s.Errors, s.FirstError))
		}
	}
	return out
}

func (r report) writeJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

func (r report) writeTable(w io.Writer) error {
	var b strings.Builder
	wl := r.Workload
	fmt.Fprintf(&b, "%s, %d clients, values of %d bytes, %d keys of %d bytes, %d rounds of %g s after %g s of warm-up, seed %d\n",
		wl.Op, wl.Clients, wl.ValueBytes, wl.Keys, wl.KeyBytes, wl.Rounds, wl.SecondsARound, wl.WarmupSeconds, wl.Seed)
	t := table.NewWriter()
	t.SetStyle(table.StyleLight)
	t.Style().Format.Header = text.FormatDefault
	header := table.Row{"system", "ops/s", "p50 us", "p99 us", "p99.9 us", "server CPU us/op", "errors"}
	if r.Baseline != "" {
		header = append(header, "ops/s to "+r.Baseline, "p50 to "+r.Baseline)
	}
	t.AppendHeader(header)
	for _, s := range r.Systems {
		row := table.Row{s.Name, fmt.Sprintf("%.0f", s.OpsPerSecond), micros(s.P50Micros), micros(s.P99Micros), micros(s.P999Micros), "-", s.Errors}
		if s.ServerCPUMicros != nil {
			row[5] = fmt.Sprintf("%.2f", *s.ServerCPUMicros)
		}
		if r.Baseline != "" {
			row = append(row, s.OpsRatio.String(), s.P50Ratio.String())
		}
		t.AppendRow(row)
	}
	var columns []table.ColumnConfig
	for n := 2; n <= len(header); n++ {
		columns = append(columns, table.ColumnConfig{Number: n, Align: text.AlignRight, AlignHeader: text.AlignRight})
	}
	t.SetColumnConfigs(columns)
	b.WriteString(t.Render())
	b.WriteString("\n")
	if r.Baseline != "" {
		fmt.Fprintf(&b, "ratios: %s = 1; median of the rounds (least to most)\n", r.Baseline)
	}
	for _, s := range r.Systems {
		fmt.Fprintf(&b, "%s: %s; %s\n", s.Name, s.Version, joinSettings(s.Settings))
	}
	for _, n := range r.Notes {
		fmt.Fprintln(&b, n)
	}
	fmt.Fprintf(&b, "machine: %s\ncommit: %s\n", r.Machine, r.Commit)
	_, err := io.WriteString(w, b.String())
	return err
}

// String is "1.23 (1.20 to 1.31)", or "1" for the baseline itself.
func (r *ratio) String() string {
	if r == nil {
		return "1"
	}
	decimals := 2
	switch {
	case r.Median < 0.1:
		decimals = 4
	case r.Median >= 10:
		decimals = 1
	}
	return fmt.Sprintf("%.*f (%.*f to %.*f)", decimals, r.Median, decimals, r.Min, decimals, r.Max)
}

// micros with as many digits as a person can use.
func micros(us float64) string {
	switch {
	case us < 10:
		return fmt.Sprintf("%.2f", us)
	case us < 1000:
		return fmt.Sprintf("%.1f", us)
	default:
		return fmt.Sprintf("%.0f", us)
	}
}

func joinSettings(settings map[string]string) string {
	var parts []string
	for k, v := range settings {
		parts = append(parts, k+": "+v)
	}
	slices.Sort(parts)
	return strings.Join(parts, "; ")
}
