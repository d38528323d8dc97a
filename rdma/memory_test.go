package rdma

import (
	"math"
	"os"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

func TestMemoryAlloc(t *testing.T) {
	page := os.Getpagesize()
	for _, shareable := range []bool{false, true} {
		for _, size := range []int{1, page - 1, page, page + 1, 10 * page} {
			m, err := AllocMemory("kvd-test", uint64(size), MemoryOptions{Shareable: shareable})
			require.NoError(t, err)
			want := (size + page - 1) / page * page
			require.EqualValues(t, want, m.Size())
			require.Len(t, m.Bytes(), want)
			require.Zero(t, uintptr(unsafe.Pointer(&m.Bytes()[0]))%uintptr(page), "page aligned")
			require.Equal(t, make([]byte, want), m.Bytes(), "zeroed")
			require.Equal(t, "kvd-test", m.Name())
			require.False(t, m.Huge())
			require.NoError(t, m.HugeErr())
			m.Bytes()[want-1] = 1
			require.NoError(t, m.Free())
			require.NoError(t, m.Free(), "idempotent")
			require.Nil(t, m.Bytes())
			require.EqualValues(t, want, m.Size())
		}
	}
}

func TestMemoryRefusals(t *testing.T) {
	for _, c := range []struct {
		name string
		size uint64
		is   error
	}{
		{"zero", 0, nil},
		{"all", math.MaxUint64, ErrNoMemory},
		{"overflow when rounded", math.MaxInt64, ErrNoMemory},
		{"more than there is", 1 << 60, ErrNoMemory},
		{"nul\x00", 1, nil},
		{strings.Repeat("n", maxMemoryName+1), 1, nil},
	} {
		for _, opt := range []MemoryOptions{{}, {Shareable: true}, {HugePages: true}, {HugePages: true, Shareable: true}} {
			m, err := AllocMemory(c.name, c.size, opt)
			require.Error(t, err, "%q %+v", c.name, opt)
			require.Nil(t, m)
			if c.is != nil {
				require.ErrorIs(t, err, c.is)
			}
		}
	}
}

// TestMemoryHugePages holds on any host: huge pages are given, or the memory is as
// good without and says why.
func TestMemoryHugePages(t *testing.T) {
	for _, shareable := range []bool{false, true} {
		m, err := AllocMemory("kvd-huge", 3<<20, MemoryOptions{HugePages: true, Shareable: shareable})
		require.NoError(t, err)
		require.Equal(t, m.Huge(), m.HugeErr() == nil)
		if m.Huge() {
			require.EqualValues(t, 4<<20, m.Size())
		} else {
			require.EqualValues(t, 3<<20, m.Size())
			t.Log(m.HugeErr())
		}
		clear(m.Bytes())
		require.NoError(t, m.Free())
	}
}
