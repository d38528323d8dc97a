package server

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// calmHandler bounds what others can make a node write: of one warning (its constant
// text) it lets so many through in a while and counts the rest. The next one that goes
// through tells how many. Below slog.LevelWarn, and for errors, nothing changes.
type calmHandler struct {
	slog.Handler
	state *calmState // shared by what With made
}

const (
	calmBurst  = 10
	calmWindow = time.Minute
	// calmTexts bounds the texts that are told apart.
	calmTexts = 256
)

type calmState struct {
	mu struct {
		sync.Mutex
		texts map[string]*calmCount
	}
}

type calmCount struct {
	began            time.Time // of the window
	passed, withheld int
}

func newCalmHandler(h slog.Handler) *calmHandler {
	s := &calmState{}
	s.mu.texts = map[string]*calmCount{}
	return &calmHandler{h, s}
}

// Handle implements slog.Handler.
func (h *calmHandler) Handle(ctx context.Context, r slog.Record) error {
	if r.Level < slog.LevelWarn || r.Level >= slog.LevelError {
		return h.Handler.Handle(ctx, r)
	}
	pass, withheld := h.state.count(r.Message, r.Time)
	if !pass {
		return nil
	}
	if withheld > 0 {
		r = r.Clone()
		r.AddAttrs(slog.Int("more_like_it", withheld))
	}
	return h.Handler.Handle(ctx, r)
}

func (s *calmState) count(text string, now time.Time) (pass bool, withheld int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.mu.texts[text]
	if c == nil {
		if len(s.mu.texts) >= calmTexts {
			return true, 0
		}
		c = &calmCount{began: now}
		s.mu.texts[text] = c
	}
	if now.Sub(c.began) >= calmWindow {
		withheld = c.withheld
		*c = calmCount{began: now}
	}
	if c.passed == calmBurst {
		c.withheld++
		return false, 0
	}
	c.passed++
	return true, withheld
}

// WithAttrs implements slog.Handler.
func (h *calmHandler) WithAttrs(a []slog.Attr) slog.Handler {
	return &calmHandler{h.Handler.WithAttrs(a), h.state}
}

// WithGroup implements slog.Handler.
func (h *calmHandler) WithGroup(name string) slog.Handler {
	return &calmHandler{h.Handler.WithGroup(name), h.state}
}
