package verbsflags

import (
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma/verbs"
)

// Every setting of the provider has a flag, and each flag sets its own.
func TestEverySettingHasAFlag(t *testing.T) {
	p := verbs.Provider{}
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	Define(fs, &p)
	require.NoError(t, fs.Parse([]string{
		"--rdma-devices=mlx5_*,rxe0", "--rdma-deny-devices=mlx5_3", "--rdma-port=2", "--rdma-gid-index=0,3",
		"--rdma-gid-address=10.0.0.1,::ffff:10.0.0.2", "--rdma-gid-address=fd00::1",
		"--rdma-pkey=0x8001", "--rdma-max-mtu=1024", "--rdma-max-read-depth=16", "--rdma-traffic-class=0x68", "--rdma-service-level=3",
		"--rdma-timeout=15", "--rdma-retry=5", "--rdma-min-rnr-timer=13", "--rdma-cm-port=7402", "--rdma-max-queue-pairs=64", "--rdma-queue-depth=128",
		"--rdma-max-in-flight=100", "--rdma-bounce=256KiB", "--rdma-spin=50us", "--rdma-read-timeout=2s", "--rdma-accept-timeout=3s", "--rdma-rescan=4s",
	}))
	require.NoError(t, p.Validate())
	want := verbs.Provider{
		Devices: []string{"mlx5_*", "rxe0"}, DenyDevices: []string{"mlx5_3"}, Port: 2, GIDIndexes: []int{0, 3},
		GIDAddresses: []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("fd00::1")},
		PKey:         0x8001, MaxMTU: 1024, MaxReadDepth: 16, TrafficClass: 0x68, ServiceLevel: 3,
		Timeout: 15, Retry: 5, MinRNRTimer: 13, CMPort: 7402, MaxQueuePairs: 64, QueueDepth: 128, MaxInFlight: 100, BounceBytes: 256 << 10,
		SpinTime: 50 * time.Microsecond, ReadTimeout: 2 * time.Second, AcceptTimeout: 3 * time.Second, RescanInterval: 4 * time.Second,
	}
	require.Equal(t, want, p)
	// Set by the program, from the address that it knows.
	without := map[string]bool{"PreferAddress": true}
	v := reflect.ValueOf(p)
	for i := range v.NumField() {
		if name := v.Type().Field(i).Name; !without[name] {
			require.False(t, v.Field(i).IsZero(), "no flag sets %s", name)
		}
	}
	fs.VisitAll(func(f *pflag.Flag) {
		require.True(t, strings.HasPrefix(f.Name, Prefix))
		require.True(t, f.Changed, "%s is not tried here", f.Name)
		// What is shown can be given again.
		require.NoError(t, pflagSet(f.Name, f.Value.String()), f.Name)
	})
}

// What is wrong is told by the names that its setter knows.
func TestValidateNamesFlags(t *testing.T) {
	err := Validate(verbs.Provider{GIDIndexes: []int{1, 2, 1}, BounceBytes: 5, Port: -1, AcceptTimeout: -1})
	for _, words := range []string{"--rdma-gid-index is [1 2 1]: want each index once", "--rdma-bounce is 5: want", "--rdma-port is -1: want 0 to 255", "--rdma-accept-timeout is"} {
		require.ErrorContains(t, err, words)
	}
	for _, field := range []string{"GIDIndexes", "BounceBytes", "AcceptTimeout"} {
		require.NotContains(t, err.Error(), field)
	}
	require.NoError(t, Validate(verbs.Provider{}))
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	Define(fs, &verbs.Provider{})
	v := reflect.TypeOf(verbs.Provider{})
	for field, flag := range flagOf {
		require.NotNil(t, fs.Lookup(Prefix+flag), flag)
		_, ok := v.FieldByName(field)
		require.True(t, ok, field)
	}
	n := 0
	fs.VisitAll(func(*pflag.Flag) { n++ })
	require.Len(t, flagOf, n)
}

// pflagSet sets one flag of a fresh set.
func pflagSet(name, value string) error {
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	Define(fs, &verbs.Provider{})
	return fs.Set(name, strings.Trim(value, "[]"))
}

func TestDefaults(t *testing.T) {
	p := verbs.Provider{}
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	Define(fs, &p)
	require.NoError(t, fs.Parse(nil))
	require.Zero(t, p.Port+p.MaxMTU+p.Timeout+p.Retry+p.MaxQueuePairs+p.BounceBytes)
	require.NoError(t, p.Validate())
}

func TestBadValues(t *testing.T) {
	for name, value := range map[string]string{
		"rdma-port": "one", "rdma-pkey": "0x18001", "rdma-bounce": "much", "rdma-gid-address": "host", "rdma-gid-index": "a",
		"rdma-timeout": "1.5", "rdma-spin": "200",
	} {
		require.Error(t, pflagSet(name, value), "%s=%s", name, value)
	}
	require.True(t, MayBeZero("rdma-port"))
	require.False(t, MayBeZero("rdma-timeout"), "there 0 would mean without end")
	require.False(t, MayBeZero("shards"))
}
