package verbsflags

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/pflag"

	"github.com/kvd-io/kvd/rdma/verbs"
)

// Prefix of the flags' names.
const Prefix = "rdma-"

// Define adds a flag for every setting of p, whose fields the flags then set. A field of
// p that stays at zero has the provider's default.
func Define(fs *pflag.FlagSet, p *verbs.Provider) {
	v := func(value pflag.Value, name, usage string) { fs.Var(value, Prefix+name, usage) }
	number := func(to *int, name, usage string) { v((*number)(to), name, usage) }
	d := func(to *time.Duration, name, usage string) { fs.DurationVar(to, Prefix+name, 0, usage) }

	fs.StringSliceVar(&p.Devices, Prefix+"devices", nil, "RDMA devices to use, as names or patterns (mlx5_*); a name must exist, and is used even where others are faster (default: all)")
	fs.StringSliceVar(&p.DenyDevices, Prefix+"deny-devices", nil, "RDMA devices never to use, as names or patterns")
	number(&p.Port, "port", "port to use on every device, from 1 (default 0: all that are active)")
	fs.IntSliceVar(&p.GIDIndexes, Prefix+"gid-index", nil, "GID indexes to use on every port, each a rail of its own (default: by rank, see kvctl doctor)")
	v((*addresses)(&p.GIDAddresses), "gid-address", "IP addresses whose GIDs are used, wherever they are, and no others (default: any; the address that others reach the node at is preferred)")
	v((*partition)(&p.PKey), "pkey", "partition, such as 0x8001 (default: entry 0 of the port's table)")
	number(&p.MaxMTU, "max-mtu", "cap of the path MTU: 256, 512, 1024, 2048 or 4096 (default 0: none)")
	number(&p.MaxReadDepth, "max-read-depth", "cap of the READs under way on one queue pair (default 0: what both devices can)")
	number(&p.TrafficClass, "traffic-class", "of RoCE packets: the DSCP times four (default 0)")
	number(&p.ServiceLevel, "service-level", "of InfiniBand, 0 to 15 (default 0)")
	number(&p.Timeout, "timeout", "exponent of the wait for an acknowledgement, 4.096 us * 2^N (default 14: 67 ms)")
	number(&p.Retry, "retry", "how often an unacknowledged request is sent again, 1 to 7 (default 6; 7 never ends on some devices)")
	number(&p.MinRNRTimer, "min-rnr-timer", "code of the wait for a peer that is not ready, 1 to 31 (default 12: 0.64 ms)")
	number(&p.CMPort, "cm-port", "TCP port at which iWARP devices wait for clients, on each of their addresses (default 0: a free one)")
	number(&p.MaxQueuePairs, "max-queue-pairs", "budget of active queue pairs on each device; beyond it the one idle for longest is closed, and its client reads otherwise (default 1024)")
	number(&p.QueueDepth, "queue-depth", "READs posted on one queue pair at a time (default 256)")
	number(&p.MaxInFlight, "max-in-flight", "batches outstanding on one connection (default 16384)")
	v((*size)(&p.BounceBytes), "bounce", "registered memory of each queue pair for READs into ordinary memory (default 512KiB)")
	d(&p.SpinTime, "spin", "how long a reader looks at the completion queue before it sleeps (default 200us)")
	d(&p.ReadTimeout, "read-timeout", "ends a queue pair on which READs are outstanding and nothing completes (default 5s)")
	d(&p.AcceptTimeout, "accept-timeout", "how long a client has to connect (default 10s)")
	d(&p.RescanInterval, "rescan", "how often devices that went or came are looked for (default 1s)")
}

// flagOf names the flag of each field that Validate looks at.
var flagOf = map[string]string{
	"Devices": "devices", "DenyDevices": "deny-devices", "Port": "port", "GIDIndexes": "gid-index", "GIDAddresses": "gid-address", "PKey": "pkey",
	"MaxMTU": "max-mtu", "MaxReadDepth": "max-read-depth", "TrafficClass": "traffic-class", "ServiceLevel": "service-level", "Timeout": "timeout",
	"Retry": "retry", "MinRNRTimer": "min-rnr-timer", "CMPort": "cm-port", "MaxQueuePairs": "max-queue-pairs", "QueueDepth": "queue-depth",
	"MaxInFlight": "max-in-flight", "BounceBytes": "bounce", "SpinTime": "spin", "ReadTimeout": "read-timeout", "AcceptTimeout": "accept-timeout",
	"RescanInterval": "rescan",
}

// Validate is the provider's, with the names of the flags in place of the fields'.
func Validate(p verbs.Provider) error {
	err := p.Validate()
	all := []error{err}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		all = slices.Clone(joined.Unwrap()) // the slice is the error's
	}
	for i, e := range all {
		var f *verbs.FieldError
		if errors.As(e, &f) && flagOf[f.Field] != "" {
			all[i] = fmt.Errorf("--%s%s is %v: want %s", Prefix, flagOf[f.Field], f.Got, f.Want)
		}
	}
	return errors.Join(all...)
}

// MayBeZero tells of a flag that 0 is a value of, and not only the word for the default.
func MayBeZero(name string) bool {
	switch strings.TrimPrefix(name, Prefix) {
	case "port", "pkey", "max-mtu", "max-read-depth", "traffic-class", "service-level", "cm-port":
		return true
	}
	return false
}

// number is an int in decimal, or in hexadecimal with 0x.
type number int

func (n *number) String() string { return strconv.Itoa(int(*n)) }
func (n *number) Type() string   { return "int" }

func (n *number) Set(s string) error {
	i, err := strconv.ParseInt(s, 0, 32)
	if err != nil {
		return errors.New("want a number")
	}
	*n = number(i)
	return nil
}

type partition uint16

func (p *partition) String() string {
	if *p == 0 {
		return "0"
	}
	return fmt.Sprintf("%#04x", uint16(*p))
}

func (p *partition) Type() string { return "pkey" }

func (p *partition) Set(s string) error {
	i, err := strconv.ParseUint(s, 0, 16)
	if err != nil {
		return errors.New("want a partition key such as 0x8001")
	}
	*p = partition(i)
	return nil
}

// size is an int that takes 64KiB, 1MB, 65536.
type size int

func (b *size) String() string {
	if *b == 0 {
		return "0"
	}
	return strings.ReplaceAll(humanize.IBytes(uint64(*b)), " ", "")
}

func (b *size) Type() string { return "size" }

func (b *size) Set(s string) error {
	n, err := humanize.ParseBytes(s)
	if err != nil || n > 1<<31 {
		return errors.New("want a size such as 512KiB or 65536")
	}
	*b = size(n)
	return nil
}

// addresses takes IP addresses with commas between them, and adds them.
type addresses []netip.Addr

func (a *addresses) String() string {
	var parts []string
	for _, x := range *a {
		parts = append(parts, x.String())
	}
	return "[" + strings.Join(parts, ",") + "]"
}

func (a *addresses) Type() string { return "ips" }

func (a *addresses) Set(s string) error {
	for part := range strings.SplitSeq(s, ",") {
		addr, err := netip.ParseAddr(strings.TrimSpace(part))
		if err != nil {
			return fmt.Errorf("%q is no IP address", part)
		}
		*a = append(*a, addr.Unmap())
	}
	return nil
}
