// Package worker is the part of jepsen that uses kvd's client. A worker is a process of
// its own, so that it can live in a network namespace; it is told by its parent, over a
// pipe, which operations to run, and answers with what came out and when. Start is the
// parent's side, Serve the worker's.
package worker
