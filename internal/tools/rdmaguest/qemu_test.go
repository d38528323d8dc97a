//go:build linux

package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestVirtualizes(t *testing.T) {
	for cpuinfo, want := range map[string]bool{
		"processor\t: 0\nflags\t\t: fpu vmx sse\nbugs\t: spectre_v1\n": true,
		"processor\t: 0\nflags\t\t: fpu svm\n":                         true,
		"processor\t: 0\nflags\t\t: fpu vmmcall\nvmx flags\t: svm\n":   false,
		"processor\t: 0\nFeatures\t: fp asimd\n":                       false,
		"":                                                             false,
	} {
		require.Equal(t, want, virtualizes([]byte(cpuinfo)), cpuinfo)
	}
}
