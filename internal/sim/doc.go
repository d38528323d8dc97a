// Package sim runs a whole cluster from one seed: the code of server, raft, storage and
// client as it is, on a network, disks, NICs and a time that one source of chance moves.
// It injects faults and judges what the clients saw; then it ends all faults and demands
// progress.
//
//	go test ./internal/sim -run Sim              # hundreds of seeds
//	go test ./internal/sim -run Sim -seed 17     # one of them again, step by step the same
//	go test ./internal/sim -run Sim -seed 17 -events trace.txt
//
// DESIGN.md says why a seed replays exactly, what is real and what is not.
package sim
