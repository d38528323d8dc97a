// Package check judges a history. All judges run on every history, whatever the workload was:
//
//   - sanity.go: what no store may ever show (torn bytes, values that nobody wrote, a write that
//     was said to have failed, one write under two versions, a list out of order);
//   - model.go: linearizability of each key, by porcupine, with versions;
//   - levels.go: what the levels session and stale promise;
//   - lock.go: a lock made of conditional writes is held by one at a time.
//
// judge.go puts them together. Nothing that was not decided counts as a pass.
package check
