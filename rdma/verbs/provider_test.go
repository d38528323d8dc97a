package verbs

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/verbs/ibv"
)

func TestDefaults(t *testing.T) {
	require.NoError(t, Provider{}.Validate())
	p := Provider{}.withDefaults()
	require.Equal(t, 14, p.Timeout)
	require.Equal(t, 6, p.Retry)
	require.Equal(t, 12, p.MinRNRTimer)
	require.Equal(t, p, p.withDefaults(), "once is enough")
}

func TestValidate(t *testing.T) {
	for _, c := range []struct {
		p    Provider
		want string
	}{
		{Provider{Devices: []string{"mlx5_["}}, `verbs: Devices is "mlx5_[": want device names or patterns such as mlx5_*`},
		{Provider{DenyDevices: []string{""}}, `verbs: DenyDevices is "": want`},
		{Provider{Port: -1}, "verbs: Port is -1: want 0 to 255"},
		{Provider{GIDIndexes: []int{-1}}, "verbs: GIDIndexes is -1: want 0 to 4095"},
		{Provider{GIDIndexes: []int{1, 2, 1}}, "verbs: GIDIndexes is [1 2 1]: want each index once"},
		{Provider{GIDIndexes: []int{1, 2, 3, 4, 5}}, "want at most 4"},
		{Provider{MaxMTU: 1500}, "verbs: MaxMTU is 1500: want 0 (no cap), 256, 512, 1024, 2048 or 4096"},
		{Provider{MaxReadDepth: 256}, "verbs: MaxReadDepth is 256: want 0 to 255"},
		{Provider{TrafficClass: 256}, "verbs: TrafficClass is 256: want 0 to 255"},
		{Provider{ServiceLevel: 16}, "verbs: ServiceLevel is 16: want 0 to 15"},
		{Provider{Timeout: 32}, "verbs: Timeout is 32: want 1 to 31"},
		{Provider{Retry: 8}, "verbs: Retry is 8: want 1 to 7"},
		{Provider{MinRNRTimer: -1}, "verbs: MinRNRTimer is -1: want 1 to 31"},
		{Provider{MaxQueuePairs: -1}, "verbs: MaxQueuePairs is -1"},
		{Provider{QueueDepth: 4}, "verbs: QueueDepth is 4: want 8 to 65536"},
		{Provider{MaxInFlight: -1}, "verbs: MaxInFlight is -1"},
		{Provider{BounceBytes: 4096}, "verbs: BounceBytes is 4096: want 65536 to"},
		{Provider{AcceptTimeout: -time.Second}, "verbs: AcceptTimeout is -1s: want at least 1ms"},
		{Provider{ReadTimeout: time.Nanosecond}, "verbs: ReadTimeout is 1ns"},
	} {
		require.ErrorContains(t, c.p.Validate(), c.want)
	}
	err := Provider{Port: -1, Retry: 9}.Validate()
	require.ErrorContains(t, err, "Port")
	require.ErrorContains(t, err, "Retry", "all that is wrong is told at once")
}

// TestDiscoverAnywhere: a report makes sense on whatever host this is, and a target and
// an initiator agree with it.
func TestDiscoverAnywhere(t *testing.T) {
	r := Provider{}.Discover()
	require.NotEmpty(t, r.Build)
	require.NotEmpty(t, r.Verdict)
	require.Len(t, r.Libraries, 2)
	require.NotEmpty(t, r.Memlock.Verdict)
	_, err := json.Marshal(r)
	require.NoError(t, err)
	target, terr := Provider{}.NewTarget(rdma.TargetConfig{})
	in, ierr := Provider{}.NewInitiator(rdma.InitiatorConfig{})
	if r.Usable {
		require.NoError(t, terr)
		require.NoError(t, ierr)
		require.NoError(t, target.Close())
		require.NoError(t, in.Close())
		return
	}
	require.True(t, strings.HasPrefix(r.Verdict, "not used: "), r.Verdict)
	for _, err := range []error{terr, ierr} {
		require.ErrorIs(t, err, rdma.ErrUnsupported)
		require.ErrorContains(t, err, strings.TrimPrefix(r.Verdict, "not used: "))
	}
}

func TestDiscoverBadSettings(t *testing.T) {
	r := Provider{Retry: 9}.Discover()
	require.False(t, r.Usable)
	require.Contains(t, r.Verdict, "Retry is 9")
	_, err := Provider{Retry: 9}.NewTarget(rdma.TargetConfig{})
	require.ErrorContains(t, err, "Retry is 9")
}

// TestNothingNeeded: a device that does not exist is refused with what there is, on any
// host.
func TestNothingNeeded(t *testing.T) {
	_, err := Provider{Devices: []string{"no_such_device"}}.NewTarget(rdma.TargetConfig{})
	require.ErrorIs(t, err, rdma.ErrUnsupported)
	if ibv.Available() == nil {
		require.ErrorContains(t, err, `device "no_such_device" does not exist: this host has`)
	}
}

func TestMemlockSentence(t *testing.T) {
	require.EqualValues(t, 123, statusField("Name:\tx\nVmPin:\t     123 kB\n", "VmPin", 10))
	require.EqualValues(t, 0x4000, statusField("CapEff:\t0000000000004000\n", "CapEff", 16))
	require.Zero(t, statusField("Name:\tx\n", "VmPin", 10))
	require.EqualValues(t, -1, limitBytes(^uint64(0)))
	require.Equal(t, "8 MiB", sizeText(8<<20))
	require.Equal(t, "1.5 GiB", sizeText(3<<29))
	require.Equal(t, "17 bytes", sizeText(17))
}

func TestTrialMemory(t *testing.T) {
	b, free, err := trialMemory(200 << 20)
	require.NoError(t, err)
	require.Len(t, b, 200<<20)
	b[0] = 42
	require.EqualValues(t, 42, b[64<<20], "the same page again")
	require.EqualValues(t, 42, b[128<<20])
	free()
}
