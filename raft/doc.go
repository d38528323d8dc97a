// Package raft hosts many groups of go.etcd.io/raft/v3 on one node: the Ready
// loop, batching, group commit, snapshots, membership. Consensus itself is etcd's;
// log, state machine, message transport and clock are small interfaces declared
// here and implemented elsewhere.
//
// A Host is made with NewHost, gets its groups with AddGroup, and runs from Start
// to Close. The transport gives it what it receives with Host.Step. Callers use a
// Group: Propose waits until this replica, as leader, has applied; ReadIndex
// confirms leadership; Status is free.
//
// DESIGN.md tells which goroutine does what, in which order terms and leadership
// are published, and what a crash leaves behind.
package raft
