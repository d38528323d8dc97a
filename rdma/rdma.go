package rdma

import (
	"context"
	"log/slog"
	"time"
)

// RegionID names a region within a Domain. Region 0 is the node's table of
// control records; the others are the namespace's chunks. An id is never used
// twice during one boot of the target.
type RegionID uint32

// ControlRegion is the table of control records of the node.
const ControlRegion RegionID = 0

// Peer says who is at the other end, for logs, limits and checks. It proves
// nothing by itself.
type Peer struct {
	Name    string // what the client calls itself
	Session string // session it belongs to, for logs (never the secret)
}

// Provider is one way of moving bytes: shm, tcp, verbs, simnic.
type Provider interface {
	// Name is the word used in flags, logs and metrics.
	Name() string
	// NewTarget starts the serving side. It returns ErrUnsupported where this host
	// cannot serve the provider.
	NewTarget(cfg TargetConfig) (Target, error)
	// NewInitiator starts the reading side.
	NewInitiator(cfg InitiatorConfig) (Initiator, error)
}

// TargetConfig holds what every provider's serving side needs. A provider's own
// settings are fields of its Provider value.
type TargetConfig struct {
	NodeID uint64
	BootID uint64 // random, drawn at each start
	Logger *slog.Logger
}

// InitiatorConfig holds what every provider's reading side needs.
type InitiatorConfig struct {
	Logger *slog.Logger
	// ConnectTimeout bounds a Connect whose context has no earlier deadline.
	ConnectTimeout time.Duration
}

// Target is the serving side of a provider on one node. Its methods may be
// called from several goroutines.
type Target interface {
	// NewDomain makes a protection domain. The name is for logs.
	NewDomain(name string) (Domain, error)
	// Stats of all domains together.
	Stats() TargetStats
	// Close revokes every connection and releases every registration. It does not
	// release the memory itself. Idempotent.
	Close() error
}

// TargetStats counts what the target's own CPU did. A provider whose READs cost
// the target nothing (shm, verbs) leaves Reads at 0.
type TargetStats struct {
	Connections int64  // open now
	Accepted    uint64 // since the start
	Reads       uint64 // READs answered by this process's CPU
	Queries     uint64 // queries (see Querier) answered by this process's CPU
	Bytes       uint64 // sent in answer to both
}

// Domain is a protection domain: regions, and the connections that may READ
// them.
type Domain interface {
	// Register exposes m, READ only, as region id, which must not be in use, and
	// returns the transport's
	// description of it (attr), which an authorized client passes to
	// Conn.AddRegion. m must stay allocated until Deregister has returned.
	Register(id RegionID, m *Memory) (attr []byte, err error)
	// Deregister ends access to the region: after it returned no READ of it
	// succeeds, except through what a provider documents that it cannot take back
	// (a shared mapping).
	Deregister(id RegionID) error
	// Accept answers an offer. The context bounds the exchange only.
	Accept(ctx context.Context, peer Peer, offer []byte) (answer []byte, ep Endpoint, err error)
	// Close revokes the domain's connections and deregisters its regions. Idempotent.
	Close() error
}

// Endpoint is the target's end of one connection.
type Endpoint interface {
	// Close revokes the connection: READs that are posted after it returned fail.
	// Idempotent.
	Close() error
	// Done is closed when the connection has ended, for whichever reason. A
	// connection which the client never completes ends by itself after the
	// provider's accept timeout.
	Done() <-chan struct{}
}

// Initiator is the reading side of a provider in one process.
type Initiator interface {
	// Prepare gathers what the other side must know. It returns ErrUnsupported
	// where this host cannot use the provider.
	Prepare(ctx context.Context) (Dial, error)
	// Close closes every connection. Idempotent.
	Close() error
}

// Dial is a connection in the making. Either Connect or Abort must be called,
// once.
type Dial interface {
	// Offer is sent to the target's Domain.Accept.
	Offer() []byte
	// Connect completes the connection with Accept's answer.
	Connect(ctx context.Context, answer []byte) (Conn, error)
	Abort()
}

// Conn READs the regions of one Domain of one Target in one boot of it. Its
// methods may be called from several goroutines.
type Conn interface {
	// AddRegion makes a region known: attr is Domain.Register's, length its size in
	// bytes. Adding a known region again does nothing.
	AddRegion(id RegionID, length uint64, attr []byte) error
	// HasRegion tells whether the region was added.
	HasRegion(id RegionID) bool
	// Post starts the chain b.Reads. See the package comment for who owns what. A
	// failure to post completes the batch with that error.
	Post(b *Batch)
	// Done is closed when the connection is finished; Err then says why.
	Done() <-chan struct{}
	Err() error
	// Synchronous tells that Post returns with the batch complete (shared memory).
	// Callers then need no sharing of READs.
	Synchronous() bool
	// Close releases the connection after everything outstanding was completed, with
	// ErrClosed. Idempotent. Err is ErrClosed then, unless the connection had
	// finished before for another reason: that one stays.
	Close() error
}

// Querier is implemented by connections whose target has to spend CPU on READs
// anyway and can therefore run a dependent chain of READs (a look-up) in one
// round trip. The query is opaque here: it is run by TargetQuery. Such a connection executes
// queries and chains in the order in which they were posted, so a record READ that
// is posted behind a query is read after the look-up.
type Querier interface {
	// PostQuery starts a query. The answer is stored in b.Reads[0].Dst and its
	// length in b.Reads[0].N; Region and Offset are ignored. An answer that does
	// not fit completes the batch with ErrExhausted. query is borrowed until
	// PostQuery returns.
	PostQuery(b *Batch, query []byte)
}

// Allocator is implemented by initiators whose READs arrive without a copy only in
// memory that they registered. With all others every Dst is as good as another.
type Allocator interface {
	// AllocSink makes memory outside the Go heap, of at least size bytes, that the
	// initiator's connections, present and later ones, write into directly. It returns
	// ErrExhausted where the device or a limit of the system refuses; the message
	// names have, need and the setting.
	AllocSink(size int) (Sink, error)
}

// Sink is memory of an Allocator. Any part of it may be a Dst.
type Sink interface {
	Bytes() []byte
	// Free ends the registrations and unmaps the memory. No batch that names a part of
	// it may be outstanding, and no slice of it be used afterwards. Idempotent.
	Free() error
}

// Confidential is implemented by targets of providers which may be told whether the
// bytes of a READ can be read along on a network. A target without it sends plain text.
type Confidential interface {
	// Confidential tells that READs are encrypted or never leave the host.
	Confidential() bool
}

// Pinning is implemented by targets whose Register pins the pages of a region, which
// takes time in proportion to its size and counts against a limit of the system
// (RLIMIT_MEMLOCK) or of the device. Who has others to serve meanwhile registers beside
// its work.
type Pinning interface {
	// TryPin registers that many bytes of memory of its own, on every device, and lets
	// them go. ErrExhausted where a limit is below it: the text names what there is, what
	// is needed and where to set it.
	TryPin(bytes uint64) error
}

// AttrSource is implemented by domains whose regions may get another attr while they are
// registered: a device went away or came back, so addresses and keys are others. Whoever
// gives attrs out asks each time instead of keeping what Register returned. Attrs given
// out before stay good for the connections that can still use them; a connection that
// cannot has ended, and its client asks again.
type AttrSource interface {
	// Attr is the region's attr as of now; ErrAccess for a region that is not
	// registered, ErrExhausted while no device is there to read it through.
	Attr(id RegionID) ([]byte, error)
}

// Read is one READ of a chain. A chain without a READ, or with one of no bytes, is
// the caller's mistake and completes with ErrAccess.
type Read struct {
	Region RegionID
	Offset uint64 // bytes from the start of the region
	Dst    []byte // where the bytes go; its length is the READ's length
	N      int    // queries: bytes of the answer. READs: len(Dst)
}
