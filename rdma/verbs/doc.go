// Package verbs is the transport over RDMA devices: InfiniBand, RoCEv2 and iWARP through
// libibverbs, which is opened at run time. A target's memory is read by the client's
// device and the target's device alone; no CPU of the target takes part. See DESIGN.md
// for how connections come about, what happens when a device goes, and who may do what.
//
// Where to start reading: Provider (settings), choose.go (which ports and GIDs), fleet in
// nic.go (devices that come and go), domain.go and endpoint.go (the target), initiator.go,
// conn.go and rail.go (the initiator), post.go and wait.go (the data path).
package verbs
