// Command rdmaguest boots a small Linux guest that has RDMA devices in software
// (Soft-RoCE, soft-iWARP) and runs programs in it: real libibverbs against a real
// kernel, on a host that has neither a NIC nor the modules.
//
//	go run ./internal/tools/rdmaguest run ./prog -v        # a program and its arguments
//	go test -tags rdmaguest -exec "$PWD/bin/rdmaguest run" ./rdma/verbs/...
//
// DESIGN.md says how the guest is made and what runs in it.
package main
