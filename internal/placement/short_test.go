package placement

import "testing"

// clusters is how many random clusters a property is checked on.
func clusters(n int) int {
	if testing.Short() {
		return n / 10
	}
	return n
}
