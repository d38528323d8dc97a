//go:build race

package sim

// usualSeeds are run where -seeds does not say. The race detector makes a seed ten times as
// long, and finds little where one goroutine runs at a time.
const usualSeeds = 20
