package shm

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma"
)

// messages has an example of each, and its decoder followed by its encoder.
var messages = []struct {
	name   string
	sample []byte
	again  func([]byte) ([]byte, error)
}{
	{"offer", offer{host: "boot/mnt:[1]/pid:[2]"}.encode(), func(b []byte) ([]byte, error) {
		m, err := decodeOffer(b)
		return m.encode(), err
	}},
	{"answer", answer{node: 1, boot: 2, token: token{3}, proof: [proofSize]byte{4}, path: "/run/kvd/s", host: "h", expiry: 5}.encode(),
		func(b []byte) ([]byte, error) {
			m, err := decodeAnswer(b)
			return m.encode(), err
		}},
	{"attr", attr{id: 1, size: 2, boot: 3}.encode(), func(b []byte) ([]byte, error) {
		m, err := decodeAttr(b)
		return m.encode(), err
	}},
	{"hello", hello{token: token{1, 2}}.encode(), func(b []byte) ([]byte, error) {
		m, err := decodeHello(b)
		return m.encode(), err
	}},
	{"welcome", welcome{proof: [proofSize]byte{1}, tid: 7}.encode(), func(b []byte) ([]byte, error) {
		m, err := decodeWelcome(b)
		return m.encode(), err
	}},
	{"refusal", refusal{code: refuseToken, text: "no"}.encode(), func(b []byte) ([]byte, error) {
		m, err := decodeRefusal(b)
		return m.encode(), err
	}},
	{"get region", encodeGetRegion(9), func(b []byte) ([]byte, error) {
		id, err := decodeGetRegion(b)
		return encodeGetRegion(id), err
	}},
	{"region", regionReply{id: 1, known: true, size: 4096}.encode(), func(b []byte) ([]byte, error) {
		m, err := decodeRegionReply(b)
		return m.encode(), err
	}},
	{"drop", drop{id: 1, count: 2}.encode(), func(b []byte) ([]byte, error) {
		m, err := decodeDrop(b)
		return m.encode(), err
	}},
}

func TestMessages(t *testing.T) {
	for _, m := range messages {
		t.Run(m.name, func(t *testing.T) {
			require.LessOrEqual(t, len(m.sample), maxMessage)
			got, err := m.again(m.sample)
			require.NoError(t, err)
			require.Equal(t, m.sample, got)
			for n := range m.sample {
				_, err := m.again(m.sample[:n])
				require.ErrorIs(t, err, rdma.ErrHandshake, "the first %d bytes", n)
			}
			_, err = m.again(append(bytes.Clone(m.sample), 0))
			require.ErrorIs(t, err, rdma.ErrHandshake, "one byte more")
		})
	}
	long := refusal{text: string(bytes.Repeat([]byte("x"), 1000))}.encode()
	require.LessOrEqual(t, len(long), maxMessage)
	_, err := decodeRefusal(long)
	require.NoError(t, err)
	for _, path := range []string{"relative", "", "@abstract", "/zero\x00", "/" + string(bytes.Repeat([]byte("x"), MaxSocketPath))} {
		_, err := decodeAnswer(answer{path: path}.encode())
		require.ErrorIs(t, err, rdma.ErrHandshake, "%q", path)
	}
}

// FuzzMessages: no input makes a decoder panic, and what is accepted means what it
// says.
func FuzzMessages(f *testing.F) {
	for i, m := range messages {
		f.Add(byte(i), m.sample)
	}
	f.Fuzz(func(t *testing.T, which byte, b []byte) {
		m := messages[int(which)%len(messages)]
		again, err := m.again(b)
		if err != nil {
			require.ErrorIs(t, err, rdma.ErrHandshake)
			return
		}
		// A reply of status other than 1 is read as unknown, and written as 0.
		if m.name != "region" {
			require.Equal(t, b, again)
		}
	})
}
