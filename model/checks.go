package main

import "strings"

// check is one search of the model.
type check struct {
	name string
	// what says what is searched, or what is broken.
	what string
	// defs are the -D of bounds and variant.
	defs []string
	// broken: a counterexample must be found. Else none may be.
	broken bool
	// sample: the search keeps a bit a state (spin's supertrace) and goes in random order, until
	// sampleMinutes have passed. It can miss states; every other search visits all.
	sample bool
	// full: only with -full.
	full bool
}

func bounds(s string) []string { return strings.Fields(s) }

// variant is a broken protocol at the smallest bounds, and more where it takes more.
func variant(name, what string, more ...string) check {
	return check{name: name, what: what, defs: append([]string{name}, more...), broken: true}
}

var checks = []check{
	{name: "as-is", what: "2 terms, 1 write, 1 crash", defs: bounds("TERMS=2 WRITES=1 CRASHES=1")},
	{name: "requests-early", what: "the same, requests for votes before they are durable, as etcd's core would send them", defs: bounds("TERMS=2 WRITES=1 CRASHES=1 REQUEST_BEFORE_SYNC")},

	variant("NOT_CONFIRMED", "an object is believed without any record"),
	variant("ONE_SHORT", "one voter fewer than a quorum"),
	variant("CONFIRMATION_REUSED", "voters' records READ before the get began"),
	variant("POSTED_TOGETHER", "served_term first seen behind the object"),
	variant("RECORD_FIRST", "the leader's record READ before the object"),
	variant("SERVED_NOT_CHECKED", "a leader is read whether it serves or not"),
	variant("SERVED_EARLY", "served_term stored before an entry of the term is shown"),
	variant("TERM_AFTER_MESSAGE", "the term published after the vote left"),
	variant("TERM_FORGOTTEN", "a restarted voter forgets its term"),
	variant("FROZEN", "the record of a dead process is believed"),
	variant("ENGINE_AHEAD", "gRPC answers what the arena does not show yet"),
	variant("LEADER_NOT_ASKED_AGAIN", "gRPC answers after another was elected"),
	variant("ACKNOWLEDGED_EARLY", "a write answered when committed, not when shown"),
	variant("OLD_TERM_ACKNOWLEDGED", "a write answered by another's entry in its place"),
	variant("SHOWN_UNCOMMITTED", "an entry shown before it is committed"),
	variant("CONFIG_NOT_CHECKED", "config_id not READ again; a voter is replaced", "RECONFIG", "CRASHES=0"),

	{name: "two-writes", what: "2 terms, 2 writes, no crash", defs: bounds("TERMS=2 WRITES=2 CRASHES=0"), full: true},
	{name: "two-crashes", what: "2 terms, 1 write, 2 crashes", defs: bounds("TERMS=2 WRITES=1 CRASHES=2"), full: true},
	{name: "three-terms", what: "3 terms, 2 writes, 1 crash", defs: bounds("TERMS=3 WRITES=2 CRASHES=1"), sample: true, full: true},
	{name: "five-voters", what: "5 voters, 2 terms, 2 writes, 1 crash", defs: bounds("N=5 TERMS=2 WRITES=2 CRASHES=1"), sample: true, full: true},
	{name: "reconfiguration", what: "a voter replaced by joint consensus, 2 terms, 1 write, 1 crash", defs: bounds("RECONFIG TERMS=2 WRITES=1 CRASHES=1"), sample: true, full: true},
}
