// Package simnic is a NIC inside the process, for tests. It stands behind the same
// contract as the real transports (package rdma), moves bytes word by word, and
// misbehaves on request or by chance, the chance coming from one seed.
//
//	fabric, _ := simnic.New(simnic.Config{Seed: 1, Delay: simnic.Range{Max: time.Millisecond}})
//	defer fabric.Close()
//	target, _ := fabric.Host("n1").NewTarget(rdma.TargetConfig{NodeID: 1, BootID: 7})
//	initiator, _ := fabric.Host("client").NewInitiator(rdma.InitiatorConfig{})
//
// # What it models of a real NIC
//
//   - One-sided: the target's CPU takes no part in a READ, counts none, and may be
//     frozen while its memory is still read (Freeze). A killed target answers
//     nothing, and its clients learn that only from the retransmission timeout.
//   - In order: READs on a connection are executed in the order posted, each at one
//     moment between Post and completion, and the completion arrives later still
//     (Return). So what a client holds may be outdated by the time it looks.
//   - Words: a READ copies aligned 8-byte words one by one. A torn READ (TearOneIn)
//     is cut between words and its pieces are read at different times and not from
//     front to back, as DMA engines may. Even a READ of one cache line may be cut
//     between its words, for the contract promises whole words and no more.
//   - Protection: a key drawn for each registration is looked up by the target and
//     checked against its domain and bounds; what fails the check takes the
//     connection down, as on queue pairs. A region that is deregistered, or a
//     connection that is revoked, between two pieces of a READ fails that READ.
//   - Loss: a READ on a broken path stalls. When the path heals in time the chain is
//     executed again from its first READ, as a retransmitted READ is; otherwise the
//     connection is lost, and everything queued behind it is flushed with it.
//   - A posted batch outlives whoever waited for it, and its buffers are written by
//     another goroutine, so a Dst that is touched before the completion shows as a
//     data race under -race.
//
// # What it does not model
//
//   - Connecting takes no time, and fails at once where the path is broken.
//   - Bandwidth, congestion, several rails, and memory registration costs.
//   - Writes and atomics: kvd's clients have none.
//   - Corruption on the wire. Link check sums are the network's; kvd's own check
//     sums are tested by torn READs.
//   - A client process that dies. Close its Initiator, or Lose its connections.
//
// # Time and chance
//
// All time comes from Config.Clock and all chance from one source seeded with
// Config.Seed, drawn from in the order in which things happen. With Config.Stepped
// there is no goroutine: the caller runs each event by Step, so that a program of
// one goroutine with a clock.Manual is a function of its seed: same seed, same
// bytes, same failures. In that mode READs run on the caller's goroutine, and the
// race detector cannot see a Dst misused. Without Stepped one goroutine serves the
// fabric, and how it interleaves with the callers is up to the scheduler.
package simnic
