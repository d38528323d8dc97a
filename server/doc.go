// Package server is one kvd node: it joins the Raft groups, the durable engine, the
// registered memory and the transports, and serves them over gRPC. DESIGN.md says
// how a node starts, what a write does and who may read what.
package server
