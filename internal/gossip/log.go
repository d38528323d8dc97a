package gossip

import (
	"context"
	"log/slog"
	"regexp"
	"strings"
)

// logHandler turns the lines of memberlist's logger into records. They are all at the
// level of debugging, for what matters of them is told by events. Some lines are the only
// place where memberlist tells a thing; those are heard here. That the lines are still
// those is what the tests of this package find out.
type logHandler struct {
	slog.Handler
	heard func(heard, string)
}

// heard is a thing that memberlist tells in a line of its log only.
type heard uint8

const (
	heardSuspect    heard = iota + 1 // this node's probes of the named one failed
	heardTCP                         // it answers by TCP, if not by UDP
	heardWrongLabel                  // the rest says from where
	heardWrongKey
)

var heardLines = []struct {
	what heard
	line *regexp.Regexp // its group is what is told
}{
	{heardSuspect, regexp.MustCompile(`memberlist: Suspect (\S+) has failed, no acks received`)},
	{heardTCP, regexp.MustCompile(`memberlist: Was able to connect to (\S+) over TCP`)},
	{heardWrongLabel, regexp.MustCompile(`memberlist: discarding (?:stream|packet) with unacceptable label .*from=(\S+)`)},
	{heardWrongKey, regexp.MustCompile(`memberlist: (?:Decrypt packet failed|failed to receive): .*(?:no installed keys|not encrypted).* from=(\S+)`)},
}

// Enabled implements slog.Handler: every line may be one to hear.
func (h *logHandler) Enabled(context.Context, slog.Level) bool { return true }

// Handle implements slog.Handler.
func (h *logHandler) Handle(ctx context.Context, r slog.Record) error {
	for _, l := range heardLines {
		if m := l.line.FindStringSubmatch(r.Message); m != nil {
			h.heard(l.what, m[1])
		}
	}
	if !h.Handler.Enabled(ctx, slog.LevelDebug) {
		return nil
	}
	r.Level = slog.LevelDebug
	// "[WARN] memberlist: Refuting ..." gives the level and the rest.
	if level, rest, ok := strings.Cut(r.Message, "] memberlist: "); ok && strings.HasPrefix(level, "[") {
		r.Message = "memberlist: " + rest
		r.AddAttrs(slog.String("its_level", strings.ToLower(level[1:])))
	}
	return h.Handler.Handle(ctx, r)
}
