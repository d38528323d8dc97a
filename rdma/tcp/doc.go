// Package tcp is the transport for hosts without an RNIC: READs, and look-ups
// run by the target, in a pipelined binary protocol over one TCP connection,
// optionally under TLS.
//
// The target's CPU answers each READ. So the contract of package rdma holds as it
// stands (order within a chain, whole 8-byte words in short READs, an end of
// access when Deregister or Endpoint.Close returned), and it holds for every
// READ of a chain that it is executed by a process that was alive after the READ
// was posted.
//
// DESIGN.md has the frames byte by byte, how callers share one socket without a
// goroutine between them and the kernel, and what happens in each failure.
// Reading order: wire.go, handshake.go; then serve.go for the target; then
// conn.go, send.go, receive.go and role.go for the reading side; tls.go last.
package tcp
