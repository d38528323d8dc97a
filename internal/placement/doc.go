// Package placement decides where the replicas and leaders of shards belong. It is a
// pure function: no I/O, no clock, no randomness. Equal input gives equal output, in
// whatever order nodes and shards are listed.
//
// Plan looks at the whole cluster and returns the next few steps. The caller carries them
// out, in whole or in part, and asks again with what is then true; nothing needs to be
// remembered in between. A cluster in balance gets an empty plan.
//
// # What comes first
//
// For each shard at most one move is planned, and moves are chosen in this order:
//
//  1. what is under way: a learner is made a voter, or given up where it is of no use;
//  2. repair: replicas that are missing, or on dead nodes; the shard that is nearest to
//     losing its quorum first;
//  3. drain: replicas on draining nodes;
//  4. surplus: voters beyond the replication factor;
//  5. spread: a replica goes to another failure domain;
//  6. balance: a replica goes from a fuller node to an emptier one.
//
// Leaders are moved off draining nodes and off replicas that are about to go, and then
// balanced.
//
// # Spread
//
// A failure domain is a zone, a rack of a zone, or a host. The spread of a set of replicas
// is the number of distinct zones, then racks, then hosts, and then how many pairs share a
// zone, a rack, a host (fewer is better; this makes 2-2-1 of 3-1-1). Spreads are compared
// level by level. Racks lie in zones and hosts in racks, so a move of one replica that
// keeps the number of zones or raises it, and so on down, never loses a domain at any
// level: steps 5 and 6 only ever make moves whose spread is not worse. Steps 2 and 3 have
// to leave a node, and choose the best spread that is to be had.
//
// # Balance
//
// A node has two loads: the number of its replicas and their bytes, each divided by the
// node's weight and by the cluster's mean. The cost of a node is its weight times the sum
// of the squares. A move from node a to node b is considered only if a is fuller than b by
// more than Tolerance in one of the loads (in bytes: and by more than ToleranceBytes), and
// made only if it lowers the sum of the costs; the best such move goes first. The mean of
// bytes counts as at least the one of which ToleranceBytes is the tolerated fraction, so
// that a few bytes do not outweigh a replica. Where none does, two replicas may change places.
// The sum is convex, so where nothing but load matters the greedy walk ends near the
// optimum, and since each step lowers it (steps 1 to 5 lower the number of misplaced
// replicas, or raise a spread, and step 6 undoes neither), no walk goes round in circles.
//
// Leaders are a flow problem with convex costs: node a can hand one to node b where a
// leads a shard of which b is a voter, and along a path through others likewise. The
// shortest path from a fuller node to an emptier one is taken until there is none that
// lowers the sum of squares, which is the optimum.
//
// # Sources
//
// The order of concerns, failure domains from the largest to the smallest, and one small
// step at a time that must pay for itself are those of CockroachDB's allocator (diversity
// score, then convergence score) and of TiKV's placement driver (location labels,
// isolation level). Leaders by augmenting paths: Ahuja, Magnanti, Orlin, "Network Flows",
// chapter 14. None of their code is here.
package placement
