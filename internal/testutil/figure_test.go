package testutil

import (
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFigure(t *testing.T) {
	f := Figure{What: "READ of 64 B, p50", Value: 45, Unit: "us", Than: "ib_read_lat", Base: 36, AtMost: 1.25}
	require.InDelta(t, 1.25, f.Ratio(), 1e-9)
	require.True(t, f.Met())
	require.Equal(t, "READ of 64 B, p50: 45 us, ib_read_lat 36: ratio 1.25", f.String())
	f.Value = 46
	require.False(t, f.Met())
	require.False(t, Figure{Value: 0.6, Base: 1, AtLeast: 0.7}.Met())
	require.True(t, Figure{Value: 1.2, AtMost: 1.3}.Met(), "a bound of the value itself")
	require.Equal(t, "READs a get: 1.2 ", Figure{What: "READs a get", Value: 1.2}.String())
}

func TestRecord(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("KVD_GUEST_OUT", dir)
	Figure{What: "a", Value: 1, Unit: "us"}.Record(t)
	Figure{What: "b", Value: 2}.Record(t)
	got, err := os.ReadFile(filepath.Join(dir, "figures.jsonl"))
	require.NoError(t, err)
	require.Equal(t, `{"Test":"TestRecord","What":"a","Value":1,"Unit":"us","Than":"","Base":0,"AtMost":0,"AtLeast":0}
{"Test":"TestRecord","What":"b","Value":2,"Unit":"","Than":"","Base":0,"AtMost":0,"AtLeast":0}
`, string(got))
	require.False(t, math.IsNaN(Figure{}.Ratio()))
}
