// Package gossip finds the nodes of a cluster and tells which of them seem to live. It
// wraps hashicorp/memberlist, and is a hint, never the source of truth: who is a member of
// the cluster or of a Raft group is decided elsewhere, and nothing here changes it.
//
// A node is known by its id and its incarnation, whatever its address. What it tells the
// others of itself is a Meta. Packets are encrypted by a key of 32 bytes and labelled with
// the cluster's id: a node with another key or of another cluster is neither heard nor
// told anything.
//
// Start, then Join; OnEvent tells of changes and Members lists what is known; Leave, then
// Close. See DESIGN.md for why it is as it is.
package gossip
