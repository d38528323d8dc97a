package simnic

import (
	"testing"

	"github.com/kvd-io/kvd/rdma"
	"github.com/stretchr/testify/require"
)

// FuzzDecode: whatever comes in, each decoder refuses it as a bad handshake or reads
// exactly what encoding writes.
func FuzzDecode(f *testing.F) {
	f.Add(encodeOffer(1))
	f.Add(encodeAttr(2))
	f.Add(answer{nonce: 1, boot: 2, token: 3, target: "n1"}.encode())
	f.Add(answer{}.encode())
	f.Add([]byte("knic"))
	f.Fuzz(func(t *testing.T, msg []byte) {
		if nonce, err := decodeOffer(msg); err != nil {
			require.ErrorIs(t, err, rdma.ErrHandshake)
		} else {
			require.Equal(t, msg, encodeOffer(nonce))
		}
		if key, err := decodeAttr(msg); err != nil {
			require.ErrorIs(t, err, rdma.ErrHandshake)
		} else {
			require.Equal(t, msg, encodeAttr(key))
		}
		if a, err := decodeAnswer(msg); err != nil {
			require.ErrorIs(t, err, rdma.ErrHandshake)
		} else {
			require.Equal(t, msg, a.encode())
		}
	})
}

func TestDecodeRefuses(t *testing.T) {
	good := answer{nonce: 1, boot: 2, token: 3, target: "n1"}.encode()
	for n := range good {
		_, err := decodeAnswer(good[:n])
		require.ErrorIs(t, err, rdma.ErrHandshake, "cut to %d bytes", n)
	}
	_, err := decodeAnswer(encodeOffer(1))
	require.ErrorIs(t, err, rdma.ErrHandshake, "another kind of message")
	other := append([]byte(nil), good...)
	other[headerLen-1]++
	_, err = decodeAnswer(other)
	require.ErrorContains(t, err, "version 2, want 1")
}
