// Package rdmatest is the conformance suite of the transport contract in package
// rdma. Every provider runs it against itself:
//
//	func TestConformance(t *testing.T) {
//		rdmatest.Run(t, rdmatest.Factory{New: newRig, AcceptTimeout: 200 * time.Millisecond})
//	}
//
//	func BenchmarkRead(b *testing.B) { rdmatest.Benchmark(b, rdmatest.Factory{New: newRig}) }
//
// The suite checks what the contract promises and nothing beyond it. Where
// providers may differ, a field of Factory says which way this one goes. Each
// case starts from a fresh Rig, and no case sleeps to let something happen: it
// waits for the condition, up to a deadline after which the case fails.
//
// Run it under -race too: a provider that touches a Dst after it completed the
// batch is a data race with the suite, which writes to every Dst it gets back.
// The provider's TestMain should verify with goleak that nothing is left running.
package rdmatest
