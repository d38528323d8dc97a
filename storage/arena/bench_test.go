package arena

import (
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/kvd-io/kvd/internal/clock"
)

func BenchmarkPut(b *testing.B) {
	for _, size := range []int{100, 1 << 10, 64 << 10} {
		value := make([]byte, size)
		b.Run(fmt.Sprintf("new/%d", size), func(b *testing.B) {
			limit := uint64(1 << 30)
			r := newRig(b, Config{LimitBytes: limit, Clock: clock.System})
			key := make([]byte, 20)
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for i := range b.N {
				binary.LittleEndian.PutUint64(key, uint64(i))
				r.shards[0].Put(Item{Key: key, Value: value, Version: uint64(i)})
			}
		})
		b.Run(fmt.Sprintf("evicting/%d", size), func(b *testing.B) {
			r := newRig(b, Config{LimitBytes: 32 << 20, Clock: clock.System})
			key := make([]byte, 20)
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for i := range b.N {
				binary.LittleEndian.PutUint64(key, uint64(i))
				r.shards[0].Put(Item{Key: key, Value: value, Version: uint64(i)})
			}
		})
		b.Run(fmt.Sprintf("overwrite/%d", size), func(b *testing.B) {
			r := newRig(b, Config{Clock: clock.System})
			key := make([]byte, 20)
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for i := range b.N {
				binary.LittleEndian.PutUint64(key, uint64(i%1000))
				r.shards[0].Put(Item{Key: key, Value: value, Version: uint64(i)})
			}
		})
	}
}
