//go:build e2e

// Package e2e tests kvd as its users and its operators meet it: real kvd processes on
// loopback, the SDK, kvctl, signals, damaged files and hostile bytes. It has tests only,
// under the build tag e2e:
//
//	go test -tags e2e ./internal/e2e/
//
// Every test waits for conditions, never for time; it prints the ends of the nodes' logs
// when it fails, and looks for stack traces in all of them when it ends. With
// KVD_E2E_RACE=1 the programs are built with the race detector.
package e2e
