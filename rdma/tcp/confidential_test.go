package tcp

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Plain text may be called confidential only where no client can be sent off this
// host for it.
func TestStaysHere(t *testing.T) {
	for _, c := range []struct {
		listening string
		addrs     []string
		want      bool
	}{
		{"127.0.0.1:7000", []string{"127.0.0.1:7000"}, true},
		{"[::1]:7000", []string{"[::1]:7000"}, true},
		{"0.0.0.0:7000", []string{"127.0.0.1:7000"}, false},
		{"[::]:7000", []string{"[::1]:7000"}, false},
		{"10.0.0.1:7000", []string{"10.0.0.1:7000"}, false},
		{"127.0.0.1:7000", []string{"10.0.0.1:7000"}, false}, // a forwarded port
		{"127.0.0.1:7000", []string{"127.0.0.1:7000", "10.0.0.1:7000"}, false},
		{"127.0.0.1:7000", []string{"kvd-1.example:7000"}, false},
	} {
		require.Equal(t, c.want, staysHere(c.listening, c.addrs), "%+v", c)
	}
}

func TestConfidential(t *testing.T) {
	server := serving(newAuthority(t).certificate())
	for _, c := range []struct {
		p    Provider
		want bool
	}{
		{Provider{}, true},
		{Provider{AdvertiseAddr: "192.0.2.1"}, false},
		{Provider{AdvertiseAddr: "192.0.2.1", ServerTLS: server}, true},
	} {
		r := newUnconnected(t, c.p, 4096)
		require.Equal(t, c.want, r.target.Confidential(), "%+v", c.p.AdvertiseAddr)
	}
}
