package doctor

import (
	"context"
	"log/slog"
	"strings"
)

// Log writes the report in short: what is used, and a line for each finding. Of a host
// without a device that is not asked for one there is nothing to say that the transport
// did not say by itself.
func (r *Report) Log(log *slog.Logger) {
	if r.Healthy && len(r.RDMA.Devices) == 0 && len(r.Host.Devices) == 0 {
		return
	}
	attrs := []any{"verdict", r.RDMA.Verdict}
	if len(r.RDMA.Devices) > 0 {
		attrs = append(attrs, "memlock", r.RDMA.Memlock.Verdict)
		for _, l := range r.RDMA.Libraries {
			attrs = append(attrs, strings.SplitN(l.Name, ".", 2)[0], libraryText(l.Found, l.Version))
		}
	}
	log.Info("RDMA devices", attrs...)
	for _, f := range r.Findings {
		level := slog.LevelInfo
		if f.Level == Problem {
			level = slog.LevelWarn
		}
		log.Log(context.Background(), level, "RDMA "+string(f.Level)+": "+f.What, "where", f.Area, "do", f.Do)
	}
}

func libraryText(found bool, version string) string {
	switch {
	case !found:
		return "not found"
	case version == "":
		return "found"
	}
	return version
}
