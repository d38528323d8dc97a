//go:build chaos

package chaos

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Enabled tells whether this program can be broken.
const Enabled = true

// EnvBreak names the variable that names the variants of a process.
const EnvBreak = "KVD_CHAOS_BREAK"

// lingering is long beside a READ of shared memory, short beside anything that is timed.
const lingering = 200 * time.Microsecond

var names = [variants]string{
	NoConfirmation: "no-confirmation", RouteWithObject: "route-with-object", TermAfterMessage: "term-after-message",
	ServedEarly: "served-early", EngineAhead: "engine-ahead", FrozenMapping: "frozen-mapping", ForgetTerm: "forget-term",
	SnapshotUnannounced: "snapshot-unannounced", RetryTwice: "retry-twice", ExpiryUnfenced: "expiry-unfenced",
	OldTermAcknowledged: "old-term-acknowledged", ConfigIgnored: "config-ignored", OverwriteReversed: "overwrite-reversed",
	EvictUnmarked: "evict-unmarked", LayoutGenIgnored: "layout-gen-ignored", BucketSumIgnored: "bucket-sum-ignored",
	ChecksumIgnored: "checksum-ignored",
}

var active atomic.Uint32 // a bit for each variant

var later = struct {
	sync.Mutex
	kept map[any][]func()
}{kept: map[any][]func(){}}

func init() {
	list, err := Parse(os.Getenv(EnvBreak))
	if err != nil {
		panic(fmt.Sprintf("%s: %v", EnvBreak, err)) // bug: of a test, which would prove nothing if this went on
	}
	for _, v := range list {
		Break(v)
	}
}

// All lists the variants.
func All() []Variant {
	var list []Variant
	for v := range variants {
		list = append(list, v)
	}
	return list
}

// Parse reads names of variants with commas between; none is no error.
func Parse(s string) ([]Variant, error) {
	var list []Variant
next:
	for _, name := range strings.Split(s, ",") {
		if name = strings.TrimSpace(name); name == "" {
			continue
		}
		for v, n := range names {
			if n == name {
				list = append(list, Variant(v))
				continue next
			}
		}
		return nil, fmt.Errorf("chaos: variant %q is not known: want some of %s", name, strings.Join(names[:], ","))
	}
	return list, nil
}

// String is the variant's name.
func (v Variant) String() string { return names[v] }

// Break turns a variant on in this process, and returns what turns it off again.
func Break(v Variant) (mend func()) {
	if active.Or(1<<v)&(1<<v) != 0 {
		return func() {} // whoever was first mends it
	}
	return func() { active.And(^uint32(1 << v)) }
}

// Broken tells whether a variant is on.
func Broken(v Variant) bool { return active.Load()&(1<<v) != 0 }

// Linger makes the moment between two steps of a broken variant long enough to be met.
func Linger() { time.Sleep(lingering) }

// Later keeps what a broken variant does too late, until RunLater of the same key.
func Later(key any, f func()) {
	later.Lock()
	defer later.Unlock()
	later.kept[key] = append(later.kept[key], f)
}

// RunLater does, in order, what was kept for the key.
func RunLater(key any) {
	later.Lock()
	kept := later.kept[key]
	delete(later.kept, key)
	later.Unlock()
	for _, f := range kept {
		f()
	}
}
