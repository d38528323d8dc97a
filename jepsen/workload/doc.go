// Package workload decides what the processes of a run do. A process does one operation at a
// time; what it does next follows from its own random source and from what it was answered.
// pool.go says how keys come and go, kinds.go what each workload does.
package workload
