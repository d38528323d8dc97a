// Command model checks the confirmed read (confirmedread.pml, in Promela) with spin: it
// makes the verifier of each check, compiles and runs it, and says whether the outcome is
// the expected one: nothing found in the protocol as it is, a counterexample in each of
// its broken variants.
//
//	go run ./model            the searches that CI runs
//	go run ./model -full      larger bounds too, minutes each
//	go run ./model -only NAME -story    one check, with its counterexample
//
// It needs spin (Debian's package of that name) and a C compiler.
package main
