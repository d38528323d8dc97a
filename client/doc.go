// Package client is the Go SDK of kvd. A Client belongs to one namespace of one
// cluster. It reads by one-sided READs of the nodes' registered memory, which it
// confirms against a quorum, and it speaks gRPC for everything else: writes, lists,
// sessions, and the gets that one-sided reading could not answer.
//
//	c, err := client.Dial(ctx, client.Config{Endpoints: []string{"127.0.0.1:7070"}})
//	...
//	defer c.Close()
//	version, err := c.Put(ctx, []byte("greeting"), []byte("hello"))
//	v, err := c.Get(ctx, []byte("greeting"))
//
// # Promises
//
// A get at level Linearizable (the default) sees every write that was acknowledged,
// and every value that was revealed to anybody, before the get started. Session
// and Stale promise less and cost less; see Level.
//
// A write is applied once, also when the SDK had to send it several times. Where
// its fate cannot be learnt in time the error is ErrOutcomeUnknown, never a guess.
//
// Every call ends: by the context's deadline, else by Config.CallTimeout.
//
// # Errors
//
// Errors are sorted by what the caller may do; test them with errors.Is against
// the sentinels of this package. See errors.go.
//
// # Where to start reading
//
// read.go is the get from end to end, confirm.go the quorum's part of it, route.go
// what is known of a shard, node.go the session with one node. DESIGN.md says which
// rule is enforced where.
package client
