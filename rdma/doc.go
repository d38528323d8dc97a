// Package rdma is the transport contract of kvd: memory that a node exposes,
// connections over which a client READs it, and the errors by class. It moves
// bytes and knows no message type.
//
// # Who does what
//
// The serving side of a provider is a Target. A Target makes one Domain (a
// protection domain) for each namespace; a Domain has Regions registered in it
// and accepts connections. A connection can READ the regions of its own Domain
// and nothing else, and it can never write.
//
// The reading side is an Initiator. Connecting is an exchange of two opaque
// byte strings which some authorized channel (gRPC, in kvd) carries:
//
//	dial, _ := initiator.Prepare(ctx)           // client
//	answer, endpoint, _ := domain.Accept(ctx, peer, dial.Offer()) // server
//	conn, _ := dial.Connect(ctx, answer)        // client
//
// The server keeps the Endpoint; closing it revokes the connection.
//
// # Who posts, who polls, when a buffer may be reused
//
// A Batch is a chain of READs on one connection. Conn.Post hands it to the
// provider and never blocks on the network for longer than it takes to queue the
// chain. From then until the batch is complete the provider owns the batch and
// every Dst in it: the caller must neither read nor write nor reuse them. A
// posted batch always completes, whether or not anyone waits for it: with nil,
// or with an error that is one of the classes in errors.go. Cancelling a context
// stops the waiting, not the READ; the buffers stay the provider's until the
// completion. Conn.Close completes whatever is outstanding before it returns.
//
// Batch.Wait may lend the caller's goroutine to the provider (to spin on a
// completion queue, or to read the socket), so a lone caller pays for no
// hand-over between goroutines.
//
// # What a READ promises
//
// READs of a chain are executed at the target in the order in which they were
// posted, each after Post was called. A READ of at most 64 bytes that does not
// cross a 64-byte boundary, whose offset and length are multiples of 8, sees
// each 8-byte word whole. Nothing else is promised: a longer READ may be torn,
// and only a check sum in the data tells.
package rdma
