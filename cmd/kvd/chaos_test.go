//go:build chaos

package main

import (
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/internal/chaos"
	"github.com/kvd-io/kvd/server"
)

// What the log says is broken is what is broken.
func TestBreakInTheEnvironmentOnly(t *testing.T) {
	begin := func(broken string) error {
		s := chaosSettings{broken: broken}
		stop, err := s.begin(&server.Config{Logger: slog.New(slog.DiscardHandler)})
		if err == nil {
			stop()
		}
		return err
	}
	t.Setenv(chaos.EnvBreak, "")
	require.NoError(t, begin(""))
	require.ErrorContains(t, begin("engine-ahead"), `--chaos-break "engine-ahead": it is read from the environment only`)
	t.Setenv(chaos.EnvBreak, "engine-ahead") // as a setting it comes from there
	require.NoError(t, begin("engine-ahead"))
	require.Error(t, begin(""))
}
