// Package shm is the transport for clients on the server's own host: the
// registered memory is a sealed memfd, which the server passes over a unix socket
// and the client maps for reading. A READ is then a copy, and costs the server
// nothing.
//
// Reading order: provider.go (settings), wire.go (what is said over the socket),
// page.go (the two pages that tell a client whether what it read may be used),
// death_linux.go (how a process's death is published by the kernel),
// target_linux.go and endpoint_linux.go (serving side), dial_linux.go,
// conn_linux.go and post_linux.go (reading side). DESIGN.md has the reasons.
//
// One goroutine of a serving process never ends: it holds the thread whose death
// the kernel reports (see death_linux.go). Leak checkers have to leave out the
// function named by DeathWordGoroutine.
package shm

// DeathWordGoroutine names the function of the one goroutine that a serving
// process keeps until it exits, for leak checkers.
const DeathWordGoroutine = "github.com/kvd-io/kvd/rdma/shm.holdDeathWord"
