package health

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// A node that was drained is safe to stop only where the groups in which it still votes,
// group 0 above all, go on without it.
func TestDrainedIsNeeded(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(s *scene)
		level  Verdict
		text   string
	}{
		{"the others are there", func(*scene) {}, Info, "it is safe to stop"},
		{"another voter is gone", func(s *scene) { s.kill(2) }, Degraded, "too few of those that vote in group 0 (the cluster's own) and shards 1-4 would be left"},
		{"it votes in group 0 only", func(s *scene) {
			s.kill(2)
			for _, n := range []uint64{1, 3} {
				for _, r := range s.node(n).Replicas {
					if r.GetShard() != 0 {
						r.Voters = []uint64{1, 2, 4, 5, 6}
					}
				}
			}
		}, Degraded, "too few of those that vote in group 0 (the cluster's own) would be left"},
		{"it votes nowhere", func(s *scene) {
			s.kill(2)
			for _, n := range []uint64{1, 3} {
				for _, r := range s.node(n).Replicas {
					r.Voters = []uint64{1, 2, 4}
				}
			}
		}, Info, "it is safe to stop"},
		{"an older configuration counts for nothing", func(s *scene) {
			s.kill(2)
			for _, r := range s.node(1).Replicas {
				r.Voters, r.ConfigId = []uint64{1}, r.GetConfigId()+1
			}
		}, Info, "it is safe to stop"},
		{"the old half of a joint configuration", func(s *scene) {
			s.kill(2)
			for _, r := range s.node(1).Replicas {
				r.Voters, r.VotersOutgoing, r.ConfigId = []uint64{1}, []uint64{1, 2, 3}, r.GetConfigId()+1
			}
		}, Degraded, "group 0 (the cluster's own) and shards 1-4"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := wellCluster()
			m := s.member(3)
			m.Node.State, m.Node.SinceUnixMs, m.Replicas, m.Leads = kvdv1.NodeState_NODE_STATE_DRAINING, start, 0, 0
			c.change(s)
			reasons := Judge(s.Survey, Limits{}).Reasons
			i := slices.IndexFunc(reasons, func(r Reason) bool { return r.Code == NodeDraining })
			require.GreaterOrEqual(t, i, 0)
			require.Equal(t, c.level, reasons[i].Level)
			require.Contains(t, reasons[i].Text, c.text)
		})
	}
}
