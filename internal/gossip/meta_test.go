package gossip

import (
	"encoding/base64"
	"encoding/hex"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

func fullMeta() Meta {
	return Meta{
		NodeID: 1 << 63, Incarnation: 1<<64 - 1, Generation: 1<<64 - 1, Address: "kvd-12.kvd.some-namespace.svc.cluster.local:7400",
		Zone: "europe-west1-b", Rack: "row 12, rack 7", Host: "ip-10-20-30-40.internal", Version: "v1.2.3-45-gabcdef012345-dirty",
		Transports: []string{"shm", "verbs", "tcp"}, Leaving: true,
	}
}

func TestMetaThereAndBack(t *testing.T) {
	for _, m := range []Meta{{NodeID: 1, Incarnation: 2, Generation: 3}, fullMeta()} {
		b, err := m.encode()
		require.NoError(t, err)
		require.LessOrEqual(t, len(b), maxMeta)
		got, err := decodeMeta(b)
		require.NoError(t, err)
		require.Equal(t, m, got)
		require.True(t, m.equal(got))
	}
}

// TestMetaOfLaterVersions: fields that this version does not know are ignored, a format
// that it does not know is not.
func TestMetaOfLaterVersions(t *testing.T) {
	b, err := fullMeta().encode()
	require.NoError(t, err)
	later := append(b, 0xfa, 0x07, 3, 'n', 'e', 'w') // field 127
	got, err := decodeMeta(later)
	require.NoError(t, err)
	require.Equal(t, fullMeta(), got)

	b, err = proto.Marshal(&kvdv1.GossipMeta{Format: 2, NodeId: 1, Incarnation: 1, Generation: 1})
	require.NoError(t, err)
	_, err = decodeMeta(b)
	require.EqualError(t, err, "metadata of format 2: this version knows 1")
}

func TestMetaRefused(t *testing.T) {
	enc := func(p *kvdv1.GossipMeta) []byte {
		b, err := proto.Marshal(p)
		require.NoError(t, err)
		return b
	}
	for name, test := range map[string]struct {
		b    []byte
		want string
	}{
		"empty":      {nil, "metadata of format 0"},
		"garbage":    {[]byte{0xff}, "can not be decoded"},
		"no id":      {enc(&kvdv1.GossipMeta{Format: 1, Incarnation: 1, Generation: 1}), "want all of them above 0"},
		"no start":   {enc(&kvdv1.GossipMeta{Format: 1, NodeId: 1, Incarnation: 1}), "want all of them above 0"},
		"no port":    {enc(&kvdv1.GossipMeta{Format: 1, NodeId: 1, Incarnation: 1, Generation: 1, Address: "host"}), "want HOST:PORT"},
		"too large":  {make([]byte, maxMeta+1), "metadata of 513 bytes: want at most 512"},
		"wrong type": {[]byte{0x0a, 0x01, 'x'}, "metadata of format 0"}, // format as a string
	} {
		t.Run(name, func(t *testing.T) {
			_, err := decodeMeta(test.b)
			require.ErrorContains(t, err, test.want)
		})
	}
}

func FuzzDecodeMeta(f *testing.F) {
	for _, m := range []Meta{{NodeID: 1, Incarnation: 2, Generation: 3}, fullMeta()} {
		b, err := m.encode()
		require.NoError(f, err)
		f.Add(b)
		f.Add(b[:len(b)-1])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decodeMeta(b)
		if err != nil {
			return
		}
		require.NotZero(t, m.NodeID)
		require.NotZero(t, m.Generation)
		again, err := m.encode()
		if err != nil { // only what is longer in our own encoding
			require.Greater(t, len(b), maxMeta-64)
			return
		}
		same, err := decodeMeta(again)
		require.NoError(t, err)
		require.True(t, m.equal(same), "%+v and %+v", m, same)
	})
}

func TestKey(t *testing.T) {
	raw := make([]byte, 32)
	for i := range raw {
		raw[i] = byte(i)
	}
	for _, text := range []string{base64.StdEncoding.EncodeToString(raw) + "\n", hex.EncodeToString(raw), "  " + strings.ToUpper(hex.EncodeToString(raw)) + "\r\n"} {
		k, err := ParseKey([]byte(text))
		require.NoError(t, err)
		require.Equal(t, raw, k[:])
	}
	for _, text := range []string{"", "secret-word", hex.EncodeToString(raw[:31]), base64.StdEncoding.EncodeToString(append(raw, 1)), strings.Repeat("0", 64)} {
		_, err := ParseKey([]byte(text))
		require.ErrorIs(t, err, ErrConfig)
		if text != "" {
			require.NotContains(t, err.Error(), text)
		}
	}
	a, b := DeriveKey(raw, clusterA), DeriveKey(raw, clusterB)
	require.NotEqual(t, a, b, "one secret, two clusters")
	require.NotEqual(t, a, DeriveKey(raw[1:], clusterA))
	require.Equal(t, a, DeriveKey(raw, clusterA))
}

func TestValidate(t *testing.T) {
	require.NoError(t, config(1).Validate())
	for _, test := range []struct {
		edit func(*Config)
		want string
	}{
		{func(c *Config) { c.ClusterID = "" }, "cluster id of 0 bytes"},
		{func(c *Config) { c.ClusterID = strings.Repeat("x", 256) }, "cluster id of 256 bytes"},
		{func(c *Config) { c.NodeID = 0 }, "want all of them above 0"},
		{func(c *Config) { c.Generation = 0 }, "want all of them above 0"},
		{func(c *Config) { c.Key = Key{} }, "the key is all zero"},
		{func(c *Config) { c.ListenAddr = "localhost:1" }, "want IP:PORT"},
		{func(c *Config) { c.ListenAddr = "0.0.0.0:7946" }, "give the one that the others are to use"},
		{func(c *Config) { c.AdvertiseAddr = "0.0.0.0:7946" }, "want the IP:PORT at which the others reach this node"},
		{func(c *Config) { c.AdvertiseAddr = "10.0.0.1:0" }, "want the IP:PORT at which the others reach this node"},
		{func(c *Config) { c.Timing.ProbeTimeout = c.Timing.ProbeInterval + 1 }, "the time-out not above the pause"},
		{func(c *Config) { c.Timing.RejoinInterval = 0 }, "want all of it above 0"},
		{func(c *Config) { c.Meta.Host = strings.Repeat("h", 500) }, "shorten its address, zone, rack, host or version"},
	} {
		c := config(1)
		test.edit(&c)
		err := c.Validate()
		require.ErrorIs(t, err, ErrConfig)
		require.ErrorContains(t, err, test.want)
	}
}
