// Package kvdv1 is the gRPC contract of kvd and the content of its Raft log
// entries. The generated code is checked in; a test tells when it is not current
// (go generate ./api/kvd/v1 makes it so).
package kvdv1

//go:generate go -C ../../.. run ./internal/tools/genproto
