package main

import (
	"fmt"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// quorumWithout tells what group 0 would lack if a node were stopped, and all that are
// drained as well; "": nothing. Who is silent is not counted on.
func quorumWithout(list []*kvdv1.MemberStatus, node uint64) string {
	voters, left := 0, 0
	for _, m := range list {
		if !m.GetVoter() {
			continue
		}
		voters++
		r := m.GetNode()
		stops := r.GetNodeId() == node
		switch r.GetState() {
		case kvdv1.NodeState_NODE_STATE_DRAINING:
			stops = stops || !r.GetLeadersOnly()
		case kvdv1.NodeState_NODE_STATE_DECOMMISSIONED, kvdv1.NodeState_NODE_STATE_GONE:
			stops = true
		}
		if m.GetLive() && !stops {
			left++
		}
	}
	need := voters/2 + 1
	if voters == 0 || left >= need {
		return ""
	}
	return fmt.Sprintf("group 0 (the cluster's own), which decides about nodes, would stand still: %d of its %d voters would be left that are neither stopped, drained nor silent, and it needs %d; start a node that is silent, let another join, or undo a drain",
		left, voters, need)
}
