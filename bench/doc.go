// Command bench loads kvd and the systems that people compare it with by one loop,
// on one machine, in one run, and prints both sides. README.md says what is fair
// about each comparison and what is not.
//
//	go run ./bench --systems kvd,memcached --op get --clients 64 --size 1024
//
// Start reading at compare.go (the order of a run) and loop.go (how one measurement
// is taken); each system has a file.
package main
