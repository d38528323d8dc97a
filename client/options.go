package client

import "time"

// Value is what a get found.
type Value struct {
	// Data is the caller's. For GetInto it is dst's memory where that was large
	// enough.
	Data []byte
	// Version of the write that stored it, for IfVersion. Versions of one key only
	// rise.
	Version uint64
	// Expires is the zero time for a value without an expiry.
	Expires time.Time
}

// Result is the answer to one key of a GetMany.
type Result struct {
	Value Value
	Err   error
}

// ReadOption changes one read. It is a plain value, so passing one costs no
// allocation.
type ReadOption struct {
	level    Level
	maxLag   uint64
	limitLag bool
}

// WithLevel reads at that level instead of Config.Level.
func WithLevel(l Level) ReadOption { return ReadOption{level: l} }

// WithMaxLag makes a read Stale, answered only by a replica that has been seen to
// be at most that many log entries behind the newest index that this Client knows
// of in the shard.
func WithMaxLag(entries uint64) ReadOption {
	return ReadOption{level: Stale, maxLag: entries, limitLag: true}
}

// WriteOption changes one write.
type WriteOption struct {
	ifAbsent  bool
	ifVersion uint64
	ttl       time.Duration
	noWriter  bool
}

// IfAbsent makes a put fail with ErrConflict where the key is present.
func IfAbsent() WriteOption { return WriteOption{ifAbsent: true} }

// IfVersion makes a write fail with ErrConflict where the key's version is another
// (or the key is absent: the current version is then 0). version 0 is IfAbsent.
func IfVersion(version uint64) WriteOption {
	return WriteOption{ifVersion: version, ifAbsent: version == 0}
}

// TTL after which the value expires, rounded up to a millisecond. Expiry is not
// linearizable to the millisecond. 0: the namespace's default.
func TTL(d time.Duration) WriteOption { return WriteOption{ttl: d} }

// NoWriter sends the write without registering a writer first: one round trip less
// for a program that writes once. Such a write is sent only once; where the
// answer is lost the error is ErrOutcomeUnknown.
func NoWriter() WriteOption { return WriteOption{noWriter: true} }

// Item is one key of a List.
type Item struct {
	Key     []byte // the caller's
	Value   []byte // the caller's; nil with KeysOnly
	Version uint64
	Size    int64     // bytes of the value
	Expires time.Time // zero: never
}

// ListOption changes one List.
type ListOption struct {
	keysOnly   bool
	startAfter []byte
	limit      int
	pageSize   int
	level      Level
}

// KeysOnly leaves the values out.
func KeysOnly() ListOption { return ListOption{keysOnly: true} }

// StartAfter begins behind that key. The slice is borrowed until the iteration
// ends.
func StartAfter(key []byte) ListOption { return ListOption{startAfter: key} }

// Limit ends the list after n items.
func Limit(n int) ListOption { return ListOption{limit: n} }

// PageSize is how many items are asked of a shard at once; default 256.
func PageSize(n int) ListOption { return ListOption{pageSize: n} }

// ListLevel lists at that level instead of Config.Level.
func ListLevel(l Level) ListOption { return ListOption{level: l} }

// NamespaceSpec describes a namespace to be created.
type NamespaceSpec struct {
	Name string
	// Immutable: a key that is present never changes. Hits then need no confirmation.
	Immutable bool
	// TwoSidedOnly keeps the namespace out of one-sided READs.
	TwoSidedOnly bool
	DefaultTTL   time.Duration // 0: values do not expire
	QuotaBytes   uint64        // 0: the node's arena limit
	// RequireTLS refuses calls without TLS, and READs by transports that can be read along
	// on a network; PlaintextReads excepts the READs.
	RequireTLS, PlaintextReads bool
}

// Namespace describes one that exists.
type Namespace struct {
	ID           uint32
	Name         string
	Immutable    bool
	OneSided     bool
	DefaultTTL   time.Duration
	QuotaBytes   uint64
	DefaultLevel Level
	// As in NamespaceSpec.
	RequireTLS, PlaintextReads bool
}
