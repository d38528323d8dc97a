package chaos

// Variant is one way in which a kvd may be broken.
type Variant uint8

// The variants. In parentheses: the obligation of the design, by number, or the duty of
// the arena that each does not meet.
const (
	// NoConfirmation: the leader's own record is enough, no quorum is asked (1).
	NoConfirmation Variant = iota
	// RouteWithObject: the term of the leader is taken from the record that is READ behind
	// the object, not from an exchange that was complete before (1).
	RouteWithObject
	// TermAfterMessage: a term is published with the next tick, after the messages of its
	// Ready (1).
	TermAfterMessage
	// ServedEarly: a term is served from the election on, before an entry of it is shown (1).
	ServedEarly
	// EngineAhead: the arena shows an entry only when the next one is applied, after the
	// engine did and after the answer (1, 7).
	EngineAhead
	// FrozenMapping: memory of a dead process on this host is believed (2).
	FrozenMapping
	// ForgetTerm: a restarted replica has neither term nor vote (3).
	ForgetTerm
	// SnapshotUnannounced: an installed snapshot replaces the table without a new
	// layout_gen (4).
	SnapshotUnannounced
	// RetryTwice: a write that is repeated is applied again (5).
	RetryTwice
	// ExpiryUnfenced: an entry that expires a key takes whichever version is there (6).
	ExpiryUnfenced
	// OldTermAcknowledged: who waits for a proposal when its term ends is told that it was
	// applied (7).
	OldTermAcknowledged
	// ConfigIgnored: a confirmation may rest on another configuration than the leader shows.
	ConfigIgnored
	// OverwriteReversed: the new object is live before the old one is marked (order of an
	// overwrite).
	OverwriteReversed
	// EvictUnmarked: neither the object that is evicted nor its bucket says so (unlink in
	// one place; absent).
	EvictUnmarked
	// LayoutGenIgnored: remembered addresses are believed whatever layout_gen the record
	// shows (no forged objects; absent).
	LayoutGenIgnored
	// BucketSumIgnored: slots are believed, and their absence, without the check sum (absent).
	BucketSumIgnored
	// ChecksumIgnored: an object is believed without its check sum (no forged objects).
	ChecksumIgnored
	variants // their number
)
