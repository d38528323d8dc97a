//go:build race

package simnic

import (
	"errors"
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestMisuseIsARace: the race detector must see a caller that uses a buffer which
// is the NIC's. It runs itself as a child, because a race is fatal to a test.
func TestMisuseIsARace(t *testing.T) {
	child := exec.Command(os.Args[0])
	child.Env = append(os.Environ(), misuseEnv+"=1")
	out, err := child.CombinedOutput()
	var exit *exec.ExitError
	require.True(t, errors.As(err, &exit), "the child ended with %v: %s", err, out)
	require.Contains(t, string(out), "DATA RACE")
}
