// Package engine keeps a node's durable data in two Pebble stores:
//
//	Dir/FORMAT   one line: the version of this layout
//	Dir/log/     Raft entries and hard states of all groups; synced (log/wal/)
//	Dir/state/   applied key-values of all groups; no write-ahead log of its own,
//	             because the Raft log is one
//	Dir/staging/ snapshots being received; emptied by Open
//
// What the owner (the Raft host) has to hold to:
//
//  1. The log is cut (LogBatch.Truncate) only up to Group.DurableApplied.
//  2. At start, a hard state whose commit is below Meta.Applied is raised to it
//     before raft sees it: the state may be ahead of the last persisted commit.
//  3. At start, a group whose Meta.Applied lies beyond LogState.Last had a snapshot
//     installed just before the crash: LogBatch.Reset(group, Meta.Applied,
//     Meta.AppliedTerm) finishes what was begun.
//  4. After Config.OnFatal nothing is promised any more except that what was
//     acknowledged before is on the disk: close and open again.
//
// DESIGN.md tells the layout of the keys, the crash cases and the options.
package engine
