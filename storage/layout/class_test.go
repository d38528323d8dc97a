package layout

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestClassTable(t *testing.T) {
	require.Zero(t, ClassSize(0))
	require.Zero(t, ClassFor(0))
	require.Zero(t, ClassFor(-1))
	require.Zero(t, ClassFor(MaxObjectSize+1))
	require.Equal(t, MaxClass, ClassFor(MaxObjectSize))
	require.Equal(t, MaxObjectSize, ClassSize(MaxClass))
	for c := MaxClass + 1; c != 0; c++ {
		require.Zero(t, ClassSize(c))
	}
	last := 0
	for c := Class(1); c <= MaxClass; c++ {
		size := ClassSize(c)
		require.Greater(t, size, last, "class %d", c)
		require.Equal(t, c, ClassFor(size), "class %d holds its own size", c)
		require.Equal(t, c, ClassFor(last+1), "class %d is the smallest for one byte more than the last", c)
		require.Zero(t, size%Unit)
		if size > 512 {
			require.Zero(t, size%64, "class %d of %d bytes", c, size)
			require.LessOrEqual(t, float64(size-last), 0.125*float64(last)+1, "class %d wastes too much", c)
		}
		if size > 32<<10 {
			require.Zero(t, size%2048)
			require.LessOrEqual(t, float64(size-last), 0.0625*float64(last)+1, "class %d wastes too much", c)
			require.Greater(t, c, MaxSlabClass)
		} else {
			require.LessOrEqual(t, c, MaxSlabClass)
		}
		last = size
	}
}

func TestClassForEverySize(t *testing.T) {
	for size := 1; size <= MaxObjectSize; size += 1 + size/512 {
		c := ClassFor(size)
		require.GreaterOrEqual(t, ClassSize(c), size)
		require.Less(t, ClassSize(c-1), size)
	}
}
