package server

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A keeper that rests asks again in time, also where the clock was a day ahead when it
// began to rest.
func TestKeeperIsDue(t *testing.T) {
	now := time.Unix(1000, 0)
	for wait, due := range map[time.Duration]bool{
		-time.Hour: true, 0: true, time.Millisecond: false, keepRest: false, keepRest + 1: true, 26 * time.Hour: true,
	} {
		require.Equal(t, due, (&keeper{next: now.Add(wait)}).due(now), "%v", wait)
	}
	require.True(t, (&keeper{}).due(now))
}
