package rdma

import (
	"encoding/binary"
	"math/rand/v2"
	"strconv"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

func TestCopyExposed(t *testing.T) {
	m, err := AllocMemory("copy", 8192, MemoryOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, m.Free()) }()
	src := m.Bytes()
	for i := range src {
		src[i] = byte(rand.Uint32())
	}
	for name, f := range map[string]func(dst, src []byte){"CopyExposed": CopyExposed, "copyWords": copyWords} {
		for off := range 17 {
			for _, n := range []int{1, 2, 7, 8, 9, 15, 16, 63, 64, 65, 72, 100, 1000, 4096} {
				for _, at := range []int{off, len(src) - off - n} { // to the last byte of the mapping
					dst := make([]byte, n+2)
					dst[0], dst[n+1] = 0xc5, 0xc5
					f(dst[1:n+1], src[at:at+n])
					require.Equal(t, src[at:at+n], dst[1:n+1], "%s [%d,+%d)", name, at, n)
					require.Equal(t, []byte{0xc5, 0xc5}, []byte{dst[0], dst[n+1]}, "%s [%d,+%d)", name, at, n)
				}
			}
		}
	}
	CopyExposed(nil, nil)
	require.Panics(t, func() { CopyExposed(make([]byte, 8), src[:9]) })
}

func TestCopyExposedWholeWords(t *testing.T) {
	m, err := AllocMemory("copy", 4096, MemoryOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, m.Free()) }()
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for k := uint64(0); ; k++ {
			select {
			case <-stop:
				return
			default:
			}
			for i := 0; i < WholeReadBytes; i += 8 {
				atomic.StoreUint64((*uint64)(unsafe.Pointer(&m.Bytes()[i])), k&0xff*0x0101010101010101)
			}
		}
	}()
	dst := make([]byte, WholeReadBytes)
	for range 50_000 {
		CopyExposed(dst, m.Bytes()[:WholeReadBytes])
		for i := 0; i < len(dst); i += 8 {
			w := binary.NativeEndian.Uint64(dst[i:])
			if w != w&0xff*0x0101010101010101 {
				t.Fatalf("torn word %#x", w)
			}
		}
	}
	close(stop)
	<-done
}

func BenchmarkCopyExposed(b *testing.B) {
	m, err := AllocMemory("copy", 1<<20, MemoryOptions{})
	require.NoError(b, err)
	defer func() { require.NoError(b, m.Free()) }()
	for _, n := range []int{8, 64, 1024, 64 << 10} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			dst := make([]byte, n)
			b.SetBytes(int64(n))
			for b.Loop() {
				CopyExposed(dst, m.Bytes()[:n])
			}
		})
	}
}
