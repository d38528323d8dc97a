// Package chaos holds kvd's broken variants: for each rule that the read protocol rests
// on, a kvd that does not keep it. They show that the tests of those rules can fail.
//
// Only programs that were built with the tag chaos can be broken. In all others Broken
// is the constant false, and the compiler leaves nothing of it or of what depends on it.
//
// With the tag, the variable KVD_CHAOS_BREAK names the variants of a process, with
// commas between; a name that is not known ends the process. Tests use Break.
// A hook is one line where the rule is kept, and takes nothing from ordinary builds; where
// it makes a closure it asks Enabled first, so that no variable escapes for its sake.
// docs/correctness.md says what catches each variant.
package chaos
