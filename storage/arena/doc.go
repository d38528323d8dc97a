// Package arena is the writer's side of registered memory: control records,
// chunks, slabs, index tables, quarantine, residency and eviction.
//
// What is in the arena can be read by others at any moment, in any order of its
// words, without the arena noticing. So every change is a sequence of atomic
// stores, each of which leaves something true behind; DESIGN.md says which
// sequences, and why. Readers are defined by storage/layout.
//
// A Namespace is cut into chunks (registered memory), a chunk into pages of 4 KiB,
// and runs of pages serve one of three purposes: a slab of equal blocks for
// objects, an index table, or nothing. Reading order: record.go, chunk.go, slab.go,
// table.go, unlink.go, shard.go, then evict.go, reclaim.go, grow.go and load.go.
package arena
