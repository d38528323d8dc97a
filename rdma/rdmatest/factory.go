package rdmatest

import (
	"testing"
	"time"

	"github.com/kvd-io/kvd/rdma"
)

// Factory makes the provider under test and says which of the contract's
// permitted ways it goes. New and AcceptTimeout are required; the zero value of
// every other field is the strictest choice.
type Factory struct {
	// New starts a fresh Target and a fresh Initiator, both in this process. The
	// suite closes both, in either order. It may call tb.Skip with a reason.
	New func(tb testing.TB) Rig

	// AcceptTimeout is what New configured: after it an Endpoint whose client never
	// completed the connection ends by itself. Keep it short (200 ms), but longer
	// than a Connect takes under the race detector.
	AcceptTimeout time.Duration

	// Synchronous is what Conn.Synchronous must say; then Post must return with the
	// batch complete.
	Synchronous bool

	// TargetServes says that the target's CPU answers READs, and so that
	// TargetStats.Reads and Bytes count them. Otherwise both must stay 0.
	TargetServes bool

	// LastingMappings says that what a client has mapped stays readable to it until
	// it notices that the target took it back (shared memory). Then a READ posted
	// just after a Deregister or a revocation may still succeed. Deregister may go
	// unnoticed for good; a revocation must be noticed soon.
	LastingMappings bool

	// MaxConns bounds how many connections the suite opens at once; 0 is no bound.
	MaxConns int
	// RefusalIsLoss: the device may show a READ that the target's refused as the loss of
	// the connection, so the suite takes ErrConnLost for ErrAccess.
	RefusalIsLoss bool

	// Reconnects is how many connections are made and ended to see that nothing is left.
	// Default 1000, for a second rig of the same provider fewer will do.
	Reconnects int

	// MaxAllocs bounds the heap allocations of one Post and Wait in steady state.
	// The figure is always logged; the bound is not applied under -race.
	MaxAllocs float64

	// Query is an example of a query, for providers whose Conn is an rdma.Querier.
	// nil: the Conn must not be one.
	Query *QueryExample

	// ForgeAnswers derives, from a good answer, answers that only this provider's
	// author can think of (another token, another boot id). None may connect.
	// Optional. It must not name a host other than this one.
	ForgeAnswers func(answer []byte) [][]byte
}

// Rig is one Target and one Initiator that can reach each other.
type Rig struct {
	Target    rdma.Target
	Initiator rdma.Initiator

	// Hold keeps every READ that is posted from now on from completing, until
	// release is called. Optional: without it the cases that need an outstanding
	// READ do nothing but say so. release is called once.
	Hold func() (release func())
}

// QueryExample is a query with its answer.
type QueryExample struct {
	// Regions that must be registered for it, with their content.
	Regions map[rdma.RegionID][]byte
	Query   []byte
	Want    []byte // the answer; not empty
	// Bad are queries that must complete with an error, or with an answer that says
	// so, and never take the target down.
	Bad [][]byte
}

// patience is how long the suite waits for what must happen. Far longer than any
// provider needs, so that a loaded machine does not fail a good one.
const patience = 20 * time.Second

// Run runs the whole suite, each case as a subtest.
func Run(t *testing.T, f Factory) {
	if f.New == nil || f.AcceptTimeout <= 0 {
		t.Fatal("rdmatest: Factory.New and Factory.AcceptTimeout are required")
	}
	cases := []struct {
		name string
		run  func(*testing.T, Factory)
	}{
		{"Connect", testConnect},
		{"ReadSizes", testReadSizes},
		{"ReadUnaligned", testReadUnaligned},
		{"ReadRandomChains", testReadRandomChains},
		{"ReadLongChain", testReadLongChain},
		{"ReadCanaries", testReadCanaries},
		{"ReadEmpty", testReadEmpty},
		{"ReadOutOfBounds", testReadOutOfBounds},
		{"ReadUnknownRegion", testReadUnknownRegion},
		{"ReadLyingLength", testReadLyingLength},
		{"ReadGarbageAttr", testReadGarbageAttr},
		{"DomainsAreApart", testDomainsAreApart},
		{"AddRegionTwice", testAddRegionTwice},
		{"RegisterRefusals", testRegisterRefusals},
		{"RegionsGrowWhileLive", testRegionsGrowWhileLive},
		{"Deregister", testDeregister},
		{"Stats", testStats},
		{"EndpointClose", testEndpointClose},
		{"DomainClose", testDomainClose},
		{"TargetClose", testTargetClose},
		{"ConnClose", testConnClose},
		{"InitiatorClose", testInitiatorClose},
		{"CloseWhileOutstanding", testCloseWhileOutstanding},
		{"RevokeWhileOutstanding", testRevokeWhileOutstanding},
		{"CompletesUnwatched", testCompletesUnwatched},
		{"Backlog", testBacklog},
		{"KilledWhilePosting", testKilledWhilePosting},
		{"EverythingClosedAtOnce", testEverythingClosedAtOnce},
		{"WaitGivesUp", testWaitGivesUp},
		{"SharedWait", testSharedWait},
		{"BadOffers", testBadOffers},
		{"BadAnswers", testBadAnswers},
		{"AnswerOfAnother", testAnswerOfAnother},
		{"AnswerReplayed", testAnswerReplayed},
		{"DialNeverCompleted", testDialNeverCompleted},
		{"DialAborted", testDialAborted},
		{"ConnectCancelled", testConnectCancelled},
		{"WordsAreWhole", testWordsAreWhole},
		{"ChainOrder", testChainOrder},
		{"ReadsAreFresh", testReadsAreFresh},
		{"Query", testQuery},
		{"QueryKilled", testQueryKilled},
		{"Allocations", testAllocations},
		{"Reconnects", testReconnects},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) { c.run(t, f) })
	}
}

// refused are the classes of a READ that was refused.
func (f Factory) refused() []error {
	if f.RefusalIsLoss {
		return []error{rdma.ErrAccess, rdma.ErrConnLost}
	}
	return []error{rdma.ErrAccess}
}
