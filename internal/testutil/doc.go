// Package testutil is for tests of every layer: it imports nothing of kvd.
package testutil
