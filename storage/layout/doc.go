// Package layout defines the bytes of registered memory: what a server writes
// and what a client reads by one-sided READs. It encodes, decodes and validates;
// it does no I/O and keeps no state.
//
// All integers are little-endian. Version is the number of this layout; a
// client refuses a node that speaks another one. A reader treats everything as
// untrusted: nothing here panics or reads outside of its argument, whatever the
// bytes are.
//
// # Control record, 64 bytes, one for each shard replica (region 0)
//
//	offset  0  term         highest Raft term adopted; MaxUint64: retired
//	        8  served_term  T while leading term T with an entry of T shown; else 0
//	       16  config_id    index of the last Raft configuration applied
//	       24  applied      index up to which the arena shows the log
//	       32  layout_gen   generation of remembered addresses
//	       40  shard
//	       48  replica
//	       56  boot_id
//
// Each word is stored atomically.
//
// # Object, at a multiple of 8 bytes in a chunk
//
//	offset  0  bits 0..7 state, 8..63 check sum (its low 56 bits)
//	        8  version: Raft index of the write
//	       16  expiry, Unix milliseconds; 0: never
//	       24  bits 0..7 flags, 8..15 zero, 16..31 key length, 32..63 value length
//	       32  key, then value
//
// The check sum covers everything but the state, and also the chunk and the
// offset, and a seed of the cluster: bytes that were copied to another place do
// not validate. Only the state changes during an object's life, by one 8-byte
// store. State and check sum share a word, so a torn read cannot join the state of
// one object to the bytes of the next object in the same block.
//
// # Index bucket, 64 bytes (a cache line)
//
//	word 0     bits 0..31 check sum, 32..55 chain, 56..63 flags
//	words 1..7 slots: bits 0..39 location, 40..47 size class, 48..63 finger print
//
// A location is bits 0..23 offset in units of 8 bytes, bits 24..39 chunk. An empty
// slot is 0. chain is the number of the next bucket plus one, counted in the
// overflow area; 0 ends the chain. The check sum covers the seven slots, flags,
// chain, the bucket's number and the table's id. A hit needs no valid check sum:
// the object itself is the proof. "Absent" needs one in every bucket of the
// chain, none of them marked incomplete, and no slot with the key's finger print:
// such a slot may lead to another key's object because the block changed hands
// after the bucket was read. Whoever meets that asks the leader.
//
// # Index table
//
// Buckets home buckets, then Overflow overflow buckets, contiguous in one chunk.
// A key's home bucket is the high word of hash.Hi * Buckets, its finger print the
// low 16 bits of hash.Hi.
//
// # Size classes
//
// A slot names the class, so that a reader knows how many bytes to READ before
// it knows the object: see ClassSize.
package layout
