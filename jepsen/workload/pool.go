package workload

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"

	"github.com/kvd-io/kvd/jepsen/history"
)

// Settings of a workload.
type Settings struct {
	Keys             int // in use at a time
	Processes        int // that work on them
	MinSize, MaxSize int // of a value, in bytes
	// A key is retired after so many operations, or so many of unknown fate: what
	// checking costs grows steeply with both.
	OpsPerKey, UnknownsPerKey int
}

// Key that processes work on. For lists and sets it is a prefix.
type Key struct {
	Name    string
	ops     int
	unknown int
	made    int // elements, of a set
	// version and value that somebody saw last.
	version uint64
}

// Pool of keys in use. Its methods may be called from several goroutines.
type Pool struct {
	set    Settings
	prefix string
	values atomic.Uint64
	mu     struct {
		sync.Mutex
		active []*Key
		all    []*Key
	}
}

func newPool(prefix string, set Settings) *Pool {
	p := &Pool{set: set, prefix: prefix}
	p.mu.active = make([]*Key, max(1, set.Keys))
	for i := range p.mu.active {
		p.mu.active[i] = p.freshLocked()
	}
	return p
}

func (p *Pool) freshLocked() *Key {
	k := &Key{Name: fmt.Sprintf("%s%06d", p.prefix, len(p.mu.all))}
	p.mu.all = append(p.mu.all, k)
	return k
}

// take chooses a key in use and counts an operation on it.
func (p *Pool) take(rng *rand.Rand) (*Key, uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.takeLocked(rng.IntN(len(p.mu.active)))
}

func (p *Pool) takeLocked(i int) (*Key, uint64) {
	k := p.mu.active[i]
	if k.ops >= p.set.OpsPerKey || k.unknown >= p.set.UnknownsPerKey {
		k = p.freshLocked()
		p.mu.active[i] = k
	}
	k.ops++
	return k, k.version
}

// takeSome chooses up to n different keys.
func (p *Pool) takeSome(rng *rand.Rand, n int) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var names []string
	for _, i := range rng.Perm(len(p.mu.active))[:min(n, len(p.mu.active))] {
		k, _ := p.takeLocked(i)
		names = append(names, k.Name)
	}
	return names
}

// element is the next new element of a set; a full set is replaced.
func (p *Pool) element(rng *rand.Rand, most int) (prefix string, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := rng.IntN(len(p.mu.active))
	if p.mu.active[i].made >= most {
		p.mu.active[i] = p.freshLocked()
	}
	k, _ := p.takeLocked(i)
	k.made++
	return k.Name, k.made
}

// saw takes in what an operation on a key told. Versions in conflicts are left out: the
// judge must know the value of each version that a condition names.
func (p *Pool) saw(k *Key, op *history.Op) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case op.Outcome == history.Unknown:
		k.unknown++
	case op.Outcome == history.OK && (op.Kind == history.Get || op.Kind.Stores()):
		k.version = max(k.version, op.Version)
	}
}

// Names of all keys that there have been, and of those in use.
func (p *Pool) Names() (all, active []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, k := range p.mu.all {
		all = append(all, k.Name)
	}
	for _, k := range p.mu.active {
		active = append(active, k.Name)
	}
	return all, active
}

// store makes an operation that stores a new value.
func (p *Pool) store(rng *rand.Rand, kind history.Kind, key string) *history.Op {
	return &history.Op{Kind: kind, Key: key, Value: p.values.Add(1), Size: p.size(rng)}
}

// size is drawn so that each power of two is as likely: most values are small, and some
// take several pages.
func (p *Pool) size(rng *rand.Rand) int {
	low, high := p.set.MinSize, p.set.MaxSize
	for low < high && rng.IntN(3) > 0 {
		high = max(low, high/2)
	}
	return low + rng.IntN(high-low+1)
}
