// Command jepsen runs real kvd processes under faults, records what clients saw, and judges it.
// README.md says how to run it and how to read a verdict.
//
//	go run ./jepsen --workload register --nemesis all --time 60s --transport mixed --seed 7
//
// Start reading at run.go (the order of a run); history is what a run leaves behind, check the
// judge, nemesis the faults, workload the operations, env the hosts and processes, worker the
// clients.
package main
