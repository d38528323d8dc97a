package nemesis

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kvd-io/kvd/jepsen/env"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestSeedsGiveTheSamePlan(t *testing.T) {
	for seed := range uint64(20) {
		a := Plan(seed, Kinds(), 2*time.Minute, 3, 1)
		require.Equal(t, a, Plan(seed, Kinds(), 2*time.Minute, 3, 1))
		require.NotEqual(t, a, Plan(seed+1, Kinds(), 2*time.Minute, 3, 1))
		// A longer run begins like a shorter one, so a finding near its begin comes again.
		longer := Plan(seed, Kinds(), 3*time.Minute, 3, 1)
		for i, lane := range a {
			require.Equal(t, lane, longer[i][:len(lane)])
		}
	}
}

func TestPlanDealsEveryKind(t *testing.T) {
	lanes := Plan(7, Kinds(), 6*time.Minute, 5, 1)
	require.NotEmpty(t, lanes[0])
	require.NotEmpty(t, lanes[1])
	require.NotEmpty(t, lanes[2])
	for i, class := range laneKinds {
		seen := map[string]int{}
		var end time.Duration
		for _, e := range lanes[i] {
			require.Contains(t, class, e.Kind)
			require.GreaterOrEqual(t, e.At, end, "faults of one lane do not overlap")
			require.Less(t, e.At, 6*time.Minute)
			require.GreaterOrEqual(t, e.For, span[e.Kind][0])
			require.LessOrEqual(t, e.For, span[e.Kind][1])
			require.ElementsMatch(t, []uint64{1, 2, 3, 4, 5, 6}, e.Order, "with the spare one")
			require.Equal(t, e.Order[0], e.Node)
			end = e.At + e.For
			seen[e.Kind]++
		}
		require.Len(t, seen, len(class), "each kind comes before one comes a third time")
	}
	require.Empty(t, Plan(7, nil, time.Minute, 3, 1)[0])
	require.Empty(t, Plan(7, []string{Kill}, time.Minute, 3, 1)[1])
	for _, e := range Plan(7, []string{Kill}, time.Minute, 3, 1)[0] {
		require.ElementsMatch(t, []uint64{1, 2, 3}, e.Order, "without faults of membership there is no spare one")
	}
}

func TestEveryKindHasASpan(t *testing.T) {
	for _, k := range Kinds() {
		require.Contains(t, span, k)
		require.Less(t, span[k][0], span[k][1])
	}
}

func TestParseKinds(t *testing.T) {
	all, err := ParseKinds("all")
	require.NoError(t, err)
	require.Len(t, all, len(Kinds()))
	some, err := ParseKinds("network,kill,kill")
	require.NoError(t, err)
	require.Len(t, some, len(networkKinds)+1)
	disk, err := ParseKinds("disk,tiny")
	require.NoError(t, err)
	require.Len(t, disk, len(chaosKinds)+1)
	for _, k := range disk {
		require.Equal(t, k != Tiny, NeedsChaos(k))
	}
	members, err := ParseKinds("membership,kill")
	require.NoError(t, err)
	require.Equal(t, []string{Churn, Drain, Kill, Moves, Replace}, members)
	for _, k := range members {
		require.Equal(t, k != Kill, NeedsSpare(k))
	}
	none, err := ParseKinds("none")
	require.NoError(t, err)
	require.Empty(t, none)
	_, err = ParseKinds("kill,earthquake")
	require.ErrorContains(t, err, "earthquake")
}

// hears tells who still hears whom, over the given nodes.
func hears(cuts []env.Cut, nodes []uint64) map[uint64][]uint64 {
	gone := map[env.Cut]bool{}
	for _, c := range cuts {
		gone[c] = true
	}
	out := map[uint64][]uint64{}
	for _, to := range nodes {
		for _, from := range nodes {
			if !gone[env.Cut{From: hostOf(from), To: hostOf(to)}] {
				out[to] = append(out[to], from)
			}
		}
	}
	return out
}

func TestCuts(t *testing.T) {
	three, five := []uint64{1, 2, 3}, []uint64{1, 2, 3, 4, 5}
	require.Equal(t, map[uint64][]uint64{1: {1}, 2: {2, 3}, 3: {2, 3}}, hears(halves(three), three))
	require.Equal(t, map[uint64][]uint64{1: {1, 2}, 2: {1, 2}, 3: {3, 4, 5}, 4: {3, 4, 5}, 5: {3, 4, 5}}, hears(halves(five), five))
	require.Equal(t, map[uint64][]uint64{1: {1, 3}, 2: {2, 3}, 3: {1, 2, 3}}, hears(bridge(three), three))
	require.Equal(t, map[uint64][]uint64{1: {1, 2, 5}, 2: {1, 2, 5}, 3: {3, 4, 5}, 4: {3, 4, 5}, 5: {1, 2, 3, 4, 5}}, hears(bridge(five), five))
	require.Equal(t, map[uint64][]uint64{1: {1, 2}, 2: {2, 3}, 3: {1, 3}}, hears(ring(three), three))
	require.Equal(t, map[uint64][]uint64{1: {1, 2, 3}, 2: {2, 3, 4}, 3: {3, 4, 5}, 4: {1, 4, 5}, 5: {1, 2, 5}}, hears(ring(five), five))
	require.Equal(t, map[uint64][]uint64{1: {1, 3}, 2: {1, 2, 3}, 3: {1, 3}}, hears(oneWay(2, three, 0), three), "mute")
	require.Equal(t, map[uint64][]uint64{1: {1, 2, 3}, 2: {2}, 3: {1, 2, 3}}, hears(oneWay(2, three, 1), three), "deaf")
	require.Equal(t, map[uint64][]uint64{1: {1, 3}, 2: {2}, 3: {1, 3}}, hears(apart([]uint64{2}, others(2, three)), three))

	clients := []string{"beside", "apart"}
	require.ElementsMatch(t, []env.Cut{{From: "beside", To: "n2"}, {From: "n2", To: "beside"}, {From: "apart", To: "n2"}, {From: "n2", To: "apart"}},
		fromClients(2, clients, 0, 1))
	require.ElementsMatch(t, []env.Cut{{From: "beside", To: "n2"}}, fromClients(2, clients, 1, 2))
	require.ElementsMatch(t, []env.Cut{{From: "n2", To: "beside"}, {From: "n2", To: "apart"}}, fromClients(2, clients, 2, 3))
}

// A faster run has more faults, each of which fits.
func TestTempo(t *testing.T) {
	count := func(tempo float64) (n int) {
		for _, lane := range Plan(3, []string{Kill, Stop, Halves}, 10*time.Second, 3, tempo) {
			end := time.Duration(0)
			for _, e := range lane {
				require.GreaterOrEqual(t, e.At, end)
				require.GreaterOrEqual(t, e.For, faster(span[e.Kind][0], tempo))
				require.LessOrEqual(t, e.For, faster(span[e.Kind][1], tempo))
				end = e.At + e.For
			}
			n += len(lane)
		}
		return n
	}
	require.Greater(t, count(4), 2*count(1))
	for seed := range uint64(50) {
		for _, tempo := range []float64{0.5, 1, 4} {
			require.NotEmpty(t, Plan(seed, []string{Kill}, RoomForOne(tempo), 3, tempo)[0])
		}
	}
}
