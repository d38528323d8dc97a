// Package doctor looks at what reading by RDMA hangs on, here and to each node of a
// cluster, and says what to do about what is wrong: kvctl doctor in full, kvd at its start
// in short.
//
// It is in two halves. Facts are gathered (host.go from the kernel's files, rdma/verbs
// from the devices, cluster.go from the nodes) and are not judged there. Findings are
// drawn from facts alone (judge.go), so that every one of them is tested on hosts that
// have no device at all.
package doctor
