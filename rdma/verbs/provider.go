package verbs

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"path"
	"strings"
	"time"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/verbs/ibv"
)

// Provider holds the settings of the transport; the zero value uses every suitable
// device with the defaults below. It is only read: one value may serve several targets
// and initiators.
type Provider struct {
	// Devices that may be used, as patterns of path.Match ("mlx5_*", "rxe0"). Default:
	// all. A pattern that matches no device is an error at the start, and a device that
	// is named without a wildcard is used even where others are far faster.
	Devices []string
	// DenyDevices are patterns of devices that must not be used; they win over Devices.
	DenyDevices []string
	// Port to use on every device, counted from 1. Default 0: all that are active.
	Port int
	// GIDIndexes override the choice of GIDs. Each makes a rail of its own on every port:
	// with two of them a connection has two queue pairs a port. Default: the best GID
	// of each port, see the ranking in DESIGN.md.
	GIDIndexes []int
	// GIDAddresses limits the choice to GIDs that carry one of these IP addresses; a RoCE
	// port without any of them is left out. Default: every address.
	GIDAddresses []netip.Addr
	// PreferAddress is the address whose GID comes first on a port that has it: the one
	// at which others reach this process. Default: none.
	PreferAddress netip.Addr
	// PKey is the partition, as the subnet manager numbers it (0x8001); bit 15, the
	// membership, is not compared. Default 0: entry 0 of the port's table.
	PKey uint16
	// MaxMTU caps the path MTU in bytes: 256, 512, 1024, 2048 or 4096. Both sides use the
	// lesser of their ports. Default 0: no cap.
	MaxMTU int
	// MaxReadDepth caps the READs that are under way at a time on one queue pair. Both
	// sides use the least of what the devices can. Default 0: no cap; 1 costs most of
	// the throughput.
	MaxReadDepth int
	// TrafficClass of RoCE packets: the DSCP times four. Default 0.
	TrafficClass int
	// ServiceLevel of InfiniBand, 0 to 15; the priority of RoCE v1. Default 0.
	ServiceLevel int
	// Timeout is the exponent of how long a queue pair waits for an acknowledgement:
	// 4.096 us * 2^Timeout, 1 to 31. With Retry it decides how late a dead peer is
	// noticed: (Retry+1) times that, in practice up to four times longer. Default 14
	// (67 ms).
	Timeout int
	// Retry is how often an unacknowledged request is sent again, 1 to 7. Default 6. 7
	// never ends on some software devices; ReadTimeout does then.
	Retry int
	// MinRNRTimer is the code of how long a peer waits that found us not ready, 1 to 31.
	// Default 12 (0.64 ms); the code 0 would be 655 ms and is not available.
	MinRNRTimer int

	// CMPort is the TCP port on which a target's iWARP devices wait for clients, on each of
	// their addresses. Default 0: any that is free.
	CMPort int

	// MaxQueuePairs bounds a target's active queue pairs on each NIC. The count grows
	// with client processes times namespaces times rails. Beyond it the connection that
	// was not used for the longest time is closed, and its client reads by another
	// transport. Default 1024.
	MaxQueuePairs int
	// QueueDepth is how many READs are posted on one queue pair at a time; longer
	// chains are posted in pieces. Default 256, less where the device has less.
	QueueDepth int
	// MaxInFlight is how many batches may be outstanding on one connection; a Post
	// beyond it completes with ErrExhausted. Default 16384.
	MaxInFlight int
	// BounceBytes is the registered memory of each queue pair into which READs go whose
	// Dst is ordinary memory. Default 512 KiB; at least 64 KiB. It counts against
	// RLIMIT_MEMLOCK.
	BounceBytes int
	// SpinTime is how long a waiting caller looks at the completion queue before it
	// sleeps on the completion channel. Longer costs CPU while a peer is slow, shorter
	// costs latency. Default 200 us; negative: sleep at once.
	SpinTime time.Duration
	// ReadTimeout ends a queue pair on which nothing completed for so long although READs
	// are outstanding. It is the last resort behind Timeout and Retry. Default 5 s.
	ReadTimeout time.Duration
	// AcceptTimeout is how long a client has to connect after Accept. Default 10 s.
	AcceptTimeout time.Duration
	// RescanInterval is how often devices that went or came are looked for. Default 1 s.
	RescanInterval time.Duration
}

const defaultConnectTimeout = 5 * time.Second

var _ rdma.Provider = Provider{}

// Name is "verbs".
func (p Provider) Name() string { return "verbs" }

func (p Provider) withDefaults() Provider {
	setDefault(&p.Timeout, 14)
	setDefault(&p.Retry, 6)
	setDefault(&p.MinRNRTimer, 12)
	setDefault(&p.MaxQueuePairs, 1024)
	setDefault(&p.QueueDepth, 256)
	setDefault(&p.MaxInFlight, 16384)
	setDefault(&p.BounceBytes, 512<<10)
	setDefault(&p.SpinTime, 200*time.Microsecond)
	setDefault(&p.ReadTimeout, 5*time.Second)
	setDefault(&p.AcceptTimeout, 10*time.Second)
	setDefault(&p.RescanInterval, time.Second)
	return p
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// maxGIDIndexes bounds the rails that GIDIndexes makes of a port.
const maxGIDIndexes = 4

// FieldError says what is wrong with one field of a Provider. Programs whose settings
// have other names than the fields put theirs in.
type FieldError struct {
	Field string // of Provider
	Got   any
	Want  string // in words
}

// Error names the field.
func (e *FieldError) Error() string {
	return fmt.Sprintf("verbs: %s is %v: want %s", e.Field, e.Got, e.Want)
}

// Validate checks the settings without looking at any device, and changes nothing. What
// is wrong it tells all at once: errors that were joined, each a FieldError.
func (p Provider) Validate() error {
	p = p.withDefaults()
	var errs []error
	bad := func(field string, got any, want string) {
		errs = append(errs, &FieldError{Field: field, Got: got, Want: want})
	}
	between := func(field string, got, low, high int) {
		if got < low || got > high {
			bad(field, got, fmt.Sprintf("%d to %d", low, high))
		}
	}
	for _, list := range []struct {
		field    string
		patterns []string
	}{{"Devices", p.Devices}, {"DenyDevices", p.DenyDevices}} {
		for _, pattern := range list.patterns {
			if _, err := path.Match(pattern, ""); err != nil || pattern == "" {
				bad(list.field, fmt.Sprintf("%q", pattern), "device names or patterns such as mlx5_*")
			}
		}
	}
	between("Port", p.Port, 0, 255)
	if len(p.GIDIndexes) > maxGIDIndexes {
		bad("GIDIndexes", p.GIDIndexes, fmt.Sprintf("at most %d", maxGIDIndexes))
	}
	for i, g := range p.GIDIndexes {
		between("GIDIndexes", g, 0, 4095)
		for _, other := range p.GIDIndexes[:i] {
			if g == other {
				bad("GIDIndexes", p.GIDIndexes, "each index once")
			}
		}
	}
	if p.MaxMTU != 0 && ibv.MTUOf(p.MaxMTU).Bytes() != p.MaxMTU {
		bad("MaxMTU", p.MaxMTU, "0 (no cap), 256, 512, 1024, 2048 or 4096")
	}
	between("MaxReadDepth", p.MaxReadDepth, 0, 255)
	between("TrafficClass", p.TrafficClass, 0, 255)
	between("ServiceLevel", p.ServiceLevel, 0, 15)
	between("Timeout", p.Timeout, 1, 31)
	between("Retry", p.Retry, 1, 7)
	between("MinRNRTimer", p.MinRNRTimer, 1, 31)
	between("CMPort", p.CMPort, 0, 65535)
	between("MaxQueuePairs", p.MaxQueuePairs, 1, 1<<20)
	between("QueueDepth", p.QueueDepth, 8, 1<<16)
	between("MaxInFlight", p.MaxInFlight, 1, 1<<30)
	between("BounceBytes", p.BounceBytes, minBounceBytes, 1<<30)
	for _, d := range []struct {
		field string
		got   time.Duration
	}{{"ReadTimeout", p.ReadTimeout}, {"AcceptTimeout", p.AcceptTimeout}, {"RescanInterval", p.RescanInterval}} {
		if d.got < time.Millisecond {
			bad(d.field, d.got, "at least 1ms")
		}
	}
	return errors.Join(errs...)
}

// allows tells whether the lists let a device be used; why is the reason where not.
func (p Provider) allows(device string) (ok bool, why string) {
	for _, pattern := range p.DenyDevices {
		if m, _ := path.Match(pattern, device); m {
			return false, fmt.Sprintf("denied by %q", pattern)
		}
	}
	if len(p.Devices) == 0 {
		return true, ""
	}
	for _, pattern := range p.Devices {
		if m, _ := path.Match(pattern, device); m {
			return true, ""
		}
	}
	return false, fmt.Sprintf("not among the devices to use (%s)", strings.Join(p.Devices, ", "))
}

// names tells whether the configuration means this very device.
func (p Provider) names(device string) bool {
	for _, name := range p.Devices {
		if name == device {
			return true
		}
	}
	return false
}

func orDiscard(l *slog.Logger) *slog.Logger {
	if l == nil {
		return slog.New(slog.DiscardHandler)
	}
	return l
}

// unsupported wraps a reason of this host or build.
func unsupported(err error) error { return fmt.Errorf("%w: verbs: %w", rdma.ErrUnsupported, err) }
