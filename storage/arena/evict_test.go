package arena

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// At the cap a put evicts of its own class and stays resident itself.
func TestEvictionAtTheCap(t *testing.T) {
	const limit = 256 << 10
	r := newRig(t, Config{Shards: 4, LimitBytes: limit, MinChunkBytes: 64 << 10})
	for i := range 20000 {
		require.True(t, r.put(fmt.Sprintf("key-%05d", i), "0123456789012345678901234567890123456789", uint64(i+1)))
	}
	st := r.a.Stats()
	require.LessOrEqual(t, st.RegisteredBytes, uint64(limit))
	require.Greater(t, st.Objects, uint64(1500))
	require.EqualValues(t, 20000, st.Objects+st.Evictions)
}
