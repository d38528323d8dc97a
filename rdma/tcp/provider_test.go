package tcp

import (
	"crypto/tls"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma"
)

func TestValidate(t *testing.T) {
	require.NoError(t, Provider{}.Validate())
	for want, p := range map[string]Provider{
		"ServerName":       {ServerName: strings.Repeat("n", 256)},
		"ClientCAs":        {ServerTLS: &tls.Config{Certificates: make([]tls.Certificate, 1), ClientAuth: tls.RequireAndVerifyClientCert}},
		"ListenAddr":       {ListenAddr: "nowhere"},
		"MaxConnections":   {MaxConnections: -1},
		"MaxReadBytes":     {MaxReadBytes: 1 << 32},
		"MaxInFlight":      {MaxInFlight: -1},
		"AcceptTimeout":    {AcceptTimeout: -time.Second},
		"HandshakeTimeout": {HandshakeTimeout: -time.Second},
		"ServerTLS":        {ServerTLS: &tls.Config{}},
	} {
		require.ErrorContains(t, p.Validate(), want)
		_, err := p.NewTarget(rdma.TargetConfig{})
		require.ErrorContains(t, err, want)
	}
}

func TestAdvertised(t *testing.T) {
	at := func(ip string) net.Addr { return &net.TCPAddr{IP: net.ParseIP(ip), Port: 7000} }
	for _, c := range []struct{ want, listening, expect string }{
		{"", "127.0.0.1", "127.0.0.1:7000"},
		{"kvd-1.example", "0.0.0.0", "kvd-1.example:7000"},
		{"kvd-1.example:0", "0.0.0.0", "kvd-1.example:7000"},
		{"kvd-1.example:9", "0.0.0.0", "kvd-1.example:9"},
		{"::1", "::", "[::1]:7000"},
	} {
		got, err := advertised(c.want, at(c.listening))
		require.NoError(t, err)
		require.Equal(t, []string{c.expect}, got)
	}
	all, err := advertised("", at("0.0.0.0"))
	require.NoError(t, err)
	require.NotEmpty(t, all)
	require.NotContains(t, all, "0.0.0.0:7000")
}

func FuzzDecodeAnswer(f *testing.F) {
	f.Add((&answer{tls: true, nodeID: 1, bootID: 2, addrs: []string{"a:1", "b:2"}, name: "n"}).encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := decodeAnswer(b)
		if err != nil {
			require.ErrorIs(t, err, rdma.ErrHandshake)
			return
		}
		again, err := decodeAnswer(a.encode())
		require.NoError(t, err)
		require.Equal(t, a, again)
	})
}

// An unreachable address leads to the next one; another node behind it is refused.
func TestAddresses(t *testing.T) {
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	dead := closed.Addr().String()
	require.NoError(t, closed.Close())

	r := newUnconnected(t, Provider{}, 4096)
	r.target.addrs = []string{dead, r.target.ln.Addr().String()}
	r.connect()

	_, err = r.connectVia(dead)
	require.ErrorIs(t, err, rdma.ErrConnLost)
}
