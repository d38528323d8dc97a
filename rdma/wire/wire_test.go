package wire

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma"
)

func message() []byte {
	w := Writer("magic")
	w.U16(3)
	w.U8(1)
	w.U32(1 << 20)
	w.U64(1 << 40)
	w.Text("text")
	w.U8(2)
	return w
}

func read(b []byte, magic string, version uint16, limit, most int) error {
	r := NewReader(b, "test message")
	r.Magic(magic, "nobody's")
	r.Version(version)
	_, _, _ = r.U8(), r.U32(), r.U64()
	_ = r.Text(limit)
	_ = r.Count(most, "things")
	return r.End()
}

func TestReader(t *testing.T) {
	r := NewReader(message(), "test message")
	r.Magic("magic", "nobody's")
	r.Version(3)
	require.Equal(t, uint8(1), r.U8())
	require.Equal(t, uint32(1<<20), r.U32())
	require.Equal(t, uint64(1<<40), r.U64())
	require.Equal(t, "text", r.Text(4))
	require.Equal(t, 2, r.Count(2, "things"))
	require.NoError(t, r.End())

	for says, err := range map[string]error{
		"27 bytes that do not begin like one: nobody's": read(message(), "other", 3, 9, 9),
		"protocol version 3, want 4":                    read(message(), "magic", 4, 9, 9),
		"text of 4 bytes, want at most 3":               read(message(), "magic", 3, 3, 9),
		"2 things, want at most 1":                      read(message(), "magic", 3, 9, 1),
		"1 bytes too many":                              read(append(message(), 0), "magic", 3, 9, 9),
		"0 bytes that do not begin like one":            read(nil, "magic", 3, 9, 9),
	} {
		require.ErrorIs(t, err, rdma.ErrHandshake)
		require.ErrorContains(t, err, "test message: "+says)
	}
	// Cut short anywhere it is an error, and nothing is read beyond the end.
	for n := range len(message()) {
		require.ErrorIs(t, read(message()[:n:n], "magic", 3, 9, 9), rdma.ErrHandshake, "%d bytes", n)
	}
}
