package client

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/storage/layout"
)

func TestGetMany(t *testing.T) {
	for _, opt := range []netOptions{{sync: true}, {}, {query: true}} {
		f := start(t, fakeOptions{shards: 8}, opt, nil)
		var keys [][]byte
		for i := range 300 {
			k := fmt.Sprint("key ", i)
			keys = append(keys, []byte(k))
			if i%10 != 0 {
				f.put(k, "value of "+k)
			}
		}
		check := func() {
			t.Helper()
			for i, r := range f.c.GetMany(ctxFor(t, time.Minute), keys) {
				if i%10 == 0 {
					require.ErrorIs(t, r.Err, ErrNotFound)
					continue
				}
				require.NoError(t, r.Err, "%s", keys[i])
				require.Equal(t, "value of "+string(keys[i]), string(r.Value.Data))
			}
		}
		check()
		s := f.during(check)
		require.EqualValues(t, 300, s.TotalGets())
		require.Empty(t, s.Fallbacks)
		// Two rounds (256 keys at most in each), three nodes, and whatever keys share a
		// bucket with more than fits.
		require.Less(t, s.RecordReads, uint64(60))
	}
}

// TestGetManyShares: one confirmation a shard.
func TestGetManyShares(t *testing.T) {
	f := start(t, fakeOptions{shards: 8}, netOptions{sync: true}, nil)
	var keys [][]byte
	for i := range 100 {
		k := fmt.Sprint("key ", i)
		f.put(k, k)
		f.want(t, k, k)
		keys = append(keys, []byte(k))
	}
	s := f.during(func() {
		for _, r := range f.c.GetMany(context.Background(), keys) {
			require.NoError(t, r.Err)
		}
	})
	require.EqualValues(t, 8, s.Confirmations)
	require.EqualValues(t, 3, s.RecordReads)
	require.EqualValues(t, 100, s.ObjectReads)
}

// TestGetManyMixed: keys that a chain can not answer are answered all the same.
func TestGetManyMixed(t *testing.T) {
	f := start(t, fakeOptions{}, netOptions{}, nil)
	f.put("good", "1")
	f.put("torn", "2")
	f.put("moved", "3")
	for _, k := range []string{"good", "torn", "moved"} {
		f.want(t, k, map[string]string{"good": "1", "torn": "2", "moved": "3"}[k])
	}
	f.locked(func() { f.objectAt(1, "torn")[layout.HeaderSize+1] ^= 1 })
	f.put("moved", "4")
	r := f.c.GetMany(context.Background(), [][]byte{[]byte("good"), []byte("torn"), nil, []byte("moved"), []byte("nobody")})
	require.Equal(t, "1", string(r[0].Value.Data))
	require.Equal(t, "2", string(r[1].Value.Data))
	require.ErrorIs(t, r[2].Err, ErrInvalid)
	require.Equal(t, "4", string(r[3].Value.Data))
	require.ErrorIs(t, r[4].Err, ErrNotFound)
}
