package health

import (
	"strings"
	"time"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// View is what one node hears of the others by gossip; nil: it does not say.
type View struct {
	Observer uint64
	Heard    *kvdv1.LivenessResponse
}

// Hint is what gossip says of a node. It decides nothing.
type Hint struct {
	Observer uint64 // who says so
	State    kvdv1.LivenessState
	Since    time.Time // in this state, by the observer's clock
	Heard    time.Time // when it last answered the observer; zero: never
	Address  string    // as the node told it itself
	Version  string
}

// Word for the state: alive, suspect, dead, left, or never heard.
func (h Hint) Word() string {
	if h.State == kvdv1.LivenessState_LIVENESS_STATE_UNSPECIFIED {
		return "never heard"
	}
	return strings.ToLower(strings.TrimPrefix(h.State.String(), "LIVENESS_STATE_"))
}

// Hints draws what is said of each node from several views: the one of whoever heard it
// last, of two that did at once the later change. What a node says of itself counts only
// where nobody else gossips of it.
func Hints(views ...View) map[uint64]Hint {
	best := map[uint64]Hint{}
	for _, v := range views {
		for _, l := range v.Heard.GetNodes() {
			h := Hint{Observer: v.Observer, State: l.GetState(), Address: l.GetAddress(), Version: l.GetVersion()}
			if ms := l.GetSinceUnixMs(); ms != 0 {
				h.Since = time.UnixMilli(ms)
			}
			if ms := l.GetHeardUnixMs(); ms != 0 {
				h.Heard = time.UnixMilli(ms)
			}
			have, ok := best[l.GetNodeId()]
			if !ok || h.better(have, l.GetNodeId()) {
				best[l.GetNodeId()] = h
			}
		}
	}
	return best
}

func (h Hint) better(than Hint, node uint64) bool {
	switch {
	case (h.Observer == node) != (than.Observer == node):
		return than.Observer == node
	case !h.Heard.Equal(than.Heard):
		return h.Heard.After(than.Heard)
	}
	return h.Since.After(than.Since)
}
