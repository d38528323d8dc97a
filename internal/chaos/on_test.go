//go:build chaos

package chaos

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNames(t *testing.T) {
	seen := map[string]bool{}
	for _, v := range All() {
		require.NotEmpty(t, v.String(), "variant %d", uint8(v))
		require.False(t, seen[v.String()], "two variants are called %s", v)
		seen[v.String()] = true
		got, err := Parse(v.String())
		require.NoError(t, err)
		require.Equal(t, []Variant{v}, got)
	}
	got, err := Parse(" no-confirmation,, retry-twice ")
	require.NoError(t, err)
	require.Equal(t, []Variant{NoConfirmation, RetryTwice}, got)
	_, err = Parse("no-confirmation,nonsense")
	require.ErrorContains(t, err, `"nonsense" is not known`)
}

func TestBreakAndMend(t *testing.T) {
	require.False(t, slices.ContainsFunc(All(), Broken))
	mend := Break(EngineAhead)
	again := Break(EngineAhead)
	require.True(t, Broken(EngineAhead))
	require.False(t, Broken(RetryTwice))
	again()
	require.True(t, Broken(EngineAhead), "whoever broke it first mends it")
	mend()
	require.False(t, Broken(EngineAhead))
}

func TestLater(t *testing.T) {
	var done []int
	Later("a", func() { done = append(done, 1) })
	Later("b", func() { done = append(done, 2) })
	Later("a", func() { done = append(done, 3) })
	RunLater("a")
	RunLater("a")
	require.Equal(t, []int{1, 3}, done)
	RunLater("b")
	require.Equal(t, []int{1, 3, 2}, done)
}

// A process whose variants nobody knows must not run as if it had none.
func TestUnknownVariantEndsTheProcess(t *testing.T) {
	for list, want := range map[string]string{"nonsense": "not known", "no-confirmation": ""} {
		cmd := exec.Command(os.Args[0], "-test.run=^TestNames$")
		cmd.Env = append(os.Environ(), EnvBreak+"="+list)
		out, err := cmd.CombinedOutput()
		require.Equal(t, want == "", err == nil, "%s", out)
		require.True(t, strings.Contains(string(out), want), "%s", out)
	}
}
