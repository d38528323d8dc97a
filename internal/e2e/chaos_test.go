//go:build e2e

package e2e

import (
	"bytes"
	"debug/elf"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestCannotBeBroken: without the build tag chaos nothing is left of the broken variants
// and the orders for disk and clock, and what selects them means nothing.
func TestCannotBeBroken(t *testing.T) {
	for _, bin := range []string{kvdBin, kvctlBin} {
		b, err := os.ReadFile(bin)
		require.NoError(t, err)
		require.True(t, bytes.Contains(b, []byte("kvd/server.(*Node).Put")) || bin == kvctlBin, "names of functions are not to be found in %s at all", bin)
		for _, trace := range []string{"kvd/internal/chaos", "kvd/internal/faults", "KVD_CHAOS", "chaos-socket", "no-confirmation"} {
			require.False(t, bytes.Contains(b, []byte(trace)), "%s holds %q", bin, trace)
		}
		f, err := elf.Open(bin)
		require.NoError(t, err)
		symbols, err := f.Symbols()
		require.NoError(t, err)
		require.NoError(t, f.Close())
		for _, s := range symbols {
			require.NotContains(t, s.Name, "acknowledgeLocked", "what only a broken variant calls is linked")
		}
	}
	// An address of documentation: the start goes no further than that.
	args := []string{"start", "--node-id", "1", "--data-dir", filepath.Join(tempDir(t), "data"), "--listen", "192.0.2.1:7400"}
	command{bin: kvdBin, args: append(args, "--chaos-socket", "x")}.run(t).refused(t, 2, "unknown flag: --chaos-socket")
	r := command{bin: kvdBin, args: args, env: []string{"KVD_CHAOS_BREAK=no-confirmation", "KVD_CHAOS_SOCKET=x"}}.run(t)
	require.NotZero(t, r.code)
	for _, name := range []string{"KVD_CHAOS_BREAK", "KVD_CHAOS_SOCKET"} {
		require.Contains(t, r.text(), `"environment variable means nothing here" name=`+name)
	}
}
