package tcp

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"io"
	"math/big"
	mrand "math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma"
)

// authority signs the certificates of a test.
type authority struct {
	tb   testing.TB
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
	pool *x509.CertPool
}

func newAuthority(tb testing.TB) *authority {
	tb.Helper()
	a := &authority{tb: tb, pool: x509.NewCertPool()}
	var err error
	a.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(tb, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test CA"}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &a.key.PublicKey, a.key)
	require.NoError(tb, err)
	a.cert, err = x509.ParseCertificate(der)
	require.NoError(tb, err)
	a.pool.AddCert(a.cert)
	return a
}

// issue signs a certificate for the given names, and for 127.0.0.1 where there are none.
func (a *authority) issue(serial int64, notAfter time.Time, names ...string) tls.Certificate {
	a.tb.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(a.tb, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(serial), NotAfter: notAfter, DNSNames: names, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	if len(names) == 0 {
		template.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, a.key)
	require.NoError(a.tb, err)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func (a *authority) certificate(names ...string) tls.Certificate {
	a.tb.Helper()
	return a.issue(2, time.Now().Add(time.Hour), names...)
}

func serving(certs ...tls.Certificate) *tls.Config { return &tls.Config{Certificates: certs} }

func (a *authority) trusting() *tls.Config { return &tls.Config{RootCAs: a.pool} }

// mutualTLS is a provider of which both sides show a certificate.
func mutualTLS(tb testing.TB) Provider {
	tb.Helper()
	a := newAuthority(tb)
	server, client := serving(a.certificate()), a.trusting()
	server.ClientAuth, server.ClientCAs = tls.RequireAndVerifyClientCert, a.pool
	client.Certificates = []tls.Certificate{a.certificate()}
	return Provider{ServerTLS: server, ClientTLS: client}
}

// inBothModes runs a case in plain text and under TLS.
func inBothModes(t *testing.T, run func(t *testing.T, p Provider)) {
	t.Run("plain", func(t *testing.T) { run(t, Provider{}) })
	t.Run("tls", func(t *testing.T) { run(t, mutualTLS(t)) })
}

// tryConnect connects as p's client. The endpoint is closed where it fails.
func (r *rig) tryConnect(p Provider) (rdma.Conn, error) {
	r.tb.Helper()
	in, err := p.NewInitiator(rdma.InitiatorConfig{ConnectTimeout: patience})
	require.NoError(r.tb, err)
	r.tb.Cleanup(func() { require.NoError(r.tb, in.Close()) })
	d, err := in.Prepare(context.Background())
	require.NoError(r.tb, err)
	answer, ep, err := r.domain.Accept(context.Background(), rdma.Peer{Name: r.tb.Name()}, d.Offer())
	require.NoError(r.tb, err)
	c, err := d.Connect(context.Background(), answer)
	if err != nil {
		require.NoError(r.tb, ep.Close())
		return nil, err
	}
	require.NoError(r.tb, c.AddRegion(1, r.memory.Size(), r.attr))
	return c, nil
}

// mustRead reads 64 bytes and compares them.
func (r *rig) mustRead(c rdma.Conn) {
	r.tb.Helper()
	b := newBatch(rdma.Read{Region: 1, Offset: 64, Dst: make([]byte, 64)})
	c.Post(b)
	require.NoError(r.tb, await(r.tb, b))
	require.Equal(r.tb, r.memory.Bytes()[64:128], b.Reads[0].Dst)
}

// Who may connect to whom, and what the other is told. After each refusal the target
// has let nobody in.
func TestTLSWho(t *testing.T) {
	ours, theirs := newAuthority(t), newAuthority(t)
	mutual := func() *tls.Config {
		cfg := serving(ours.certificate())
		cfg.ClientAuth, cfg.ClientCAs = tls.RequireAndVerifyClientCert, ours.pool
		return cfg
	}
	with := func(cfg *tls.Config, change func(*tls.Config)) *tls.Config {
		change(cfg)
		return cfg
	}
	for name, c := range map[string]struct {
		server  *tls.Config
		told    string // Provider.ServerName
		client  *tls.Config
		refusal string // empty: connects
	}{
		"address in certificate": {server: serving(ours.certificate()), client: ours.trusting()},
		"name in answer":         {server: serving(ours.certificate("kvd-1.test")), told: "kvd-1.test", client: ours.trusting()},
		"name from certificate":  {server: serving(ours.certificate("*.test", "kvd-1.test")), client: ours.trusting()},
		"no name that fits all":  {server: serving(ours.certificate("*.test")), client: ours.trusting(), refusal: "doesn't contain any IP SANs"},
		"other name in answer":   {server: serving(ours.certificate("kvd-1.test")), told: "kvd-2.test", client: ours.trusting(), refusal: "kvd-1.test, not kvd-2.test"},
		"client insists on a name": {
			server: serving(ours.certificate("kvd-1.test")), told: "kvd-1.test",
			client:  with(ours.trusting(), func(c *tls.Config) { c.ServerName = "kvd-9.test" }),
			refusal: "not kvd-9.test",
		},
		"other CA": {server: serving(ours.certificate()), client: theirs.trusting(), refusal: "unknown authority"},
		"expired": {
			server: serving(ours.issue(3, time.Now().Add(-time.Minute))), client: ours.trusting(), refusal: "expired",
		},
		"plain listener, TLS client": {client: ours.trusting(), refusal: "plain text"},
		"TLS listener, plain client": {server: serving(ours.certificate()), refusal: "speaks TLS"},
		"mutual": {
			server: mutual(), client: with(ours.trusting(), func(c *tls.Config) { c.Certificates = []tls.Certificate{ours.certificate("a client")} }),
		},
		"mutual, no certificate": {server: mutual(), client: ours.trusting(), refusal: "certificate required"},
		"mutual, other CA's certificate": {
			server: mutual(),
			// Forced: crypto/tls shows none that the server's list of CAs does not name.
			client: with(ours.trusting(), func(c *tls.Config) {
				cert := theirs.certificate("a client")
				c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &cert, nil }
			}),
			refusal: "remote error",
		},
		"old TLS": {server: serving(ours.certificate()), client: with(ours.trusting(), func(c *tls.Config) { c.MaxVersion = tls.VersionTLS12 }), refusal: "no supported versions"},
		"chosen for each client": {
			server: &tls.Config{GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return serving(ours.certificate("kvd-1.test")), nil }},
			client: ours.trusting(),
		},
		"got for each client": {
			server: &tls.Config{GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
				cert := ours.certificate("kvd-1.test")
				return &cert, nil
			}},
			client: ours.trusting(),
		},
		"chosen, verifies with no CA": {
			server: &tls.Config{GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
				return with(serving(ours.certificate()), func(c *tls.Config) { c.ClientAuth = tls.RequireAndVerifyClientCert }), nil
			}},
			client: ours.trusting(), refusal: "remote error",
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newUnconnected(t, Provider{ServerTLS: c.server, ServerName: c.told}, 4096)
			conn, err := r.tryConnect(Provider{ClientTLS: c.client})
			if c.refusal != "" {
				require.ErrorIs(t, err, rdma.ErrHandshake)
				require.ErrorContains(t, err, c.refusal)
				require.Zero(t, r.target.Stats().Accepted)
				return
			}
			require.NoError(t, err)
			r.mustRead(conn)
		})
	}
}

// Certificates, and the CA of clients, change while the target runs: the next
// connection is judged by the new ones, however often that client came before, and
// those that stand go on.
func TestTLSReload(t *testing.T) {
	old, renewed := newAuthority(t), newAuthority(t)
	config := func(a *authority) *tls.Config {
		cfg := serving(a.certificate())
		cfg.ClientAuth, cfg.ClientCAs = tls.RequireAndVerifyClientCert, a.pool
		return cfg
	}
	var now atomic.Pointer[tls.Config]
	now.Store(config(old))
	r := newUnconnected(t, Provider{ServerTLS: &tls.Config{
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return now.Load(), nil },
	}}, 4096)
	client := func(a *authority) Provider {
		cert := a.certificate()
		cfg := &tls.Config{RootCAs: x509.NewCertPool(), ClientSessionCache: tls.NewLRUClientSessionCache(8)}
		cfg.RootCAs.AddCert(old.cert)
		cfg.RootCAs.AddCert(renewed.cert)
		cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &cert, nil }
		return Provider{ClientTLS: cfg}
	}
	ofOld, ofNew := client(old), client(renewed)
	before, err := r.tryConnect(ofOld)
	require.NoError(t, err)
	_, err = r.tryConnect(ofNew)
	require.ErrorIs(t, err, rdma.ErrHandshake)

	now.Store(config(renewed))
	_, err = r.tryConnect(ofOld)
	require.ErrorIs(t, err, rdma.ErrHandshake)
	after, err := r.tryConnect(ofNew)
	require.NoError(t, err)
	r.mustRead(after)
	r.mustRead(before)
}

// Whoever is at the port without TLS, or with another, gets nowhere within the
// deadline; a good token in plain text is not taken, and still good afterwards.
func TestTLSStrangers(t *testing.T) {
	a := newAuthority(t)
	hello := clientHello(t, a.trusting())
	secureThen := func(cfg *tls.Config, say []byte) func(*testing.T, net.Conn) {
		return func(t *testing.T, nc net.Conn) {
			tc := tls.Client(nc, cfg)
			if err := tc.Handshake(); err == nil {
				_, err = tc.Write(say)
				require.NoError(t, err)
			}
		}
	}
	say := func(b []byte) func(*testing.T, net.Conn) {
		return func(_ *testing.T, nc net.Conn) { _, _ = nc.Write(b) }
	}
	insecure := func(change func(*tls.Config)) *tls.Config {
		cfg := &tls.Config{RootCAs: a.pool, ServerName: "127.0.0.1", NextProtos: []string{alpn}}
		change(cfg)
		return cfg
	}
	for name, act := range map[string]func(t *testing.T, nc net.Conn){
		"nothing":                 say(nil),
		"http":                    say([]byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n")),
		"half a hello":            say(hello[:len(hello)/2]),
		"hello and silence":       say(hello),
		"hello, damaged":          say(append(bytes.Clone(hello[:40]), bytes.Repeat([]byte{0xff}, len(hello)-40)...)),
		"a record too long":       say([]byte{0x16, 3, 1, 0xff, 0xff, 1, 2, 3}),
		"TLS and silence":         secureThen(insecure(func(*tls.Config) {}), nil),
		"TLS and http":            secureThen(insecure(func(*tls.Config) {}), bytes.Repeat([]byte("GET /"), 20)),
		"TLS and no token":        secureThen(insecure(func(*tls.Config) {}), encodeHello(token{9})),
		"TLS 1.2":                 secureThen(insecure(func(c *tls.Config) { c.MaxVersion = tls.VersionTLS12 }), encodeHello(token{9})),
		"another protocol's TLS":  secureThen(insecure(func(c *tls.Config) { c.NextProtos = []string{"h2"} }), encodeHello(token{9})),
		"TLS without any of ours": secureThen(insecure(func(c *tls.Config) { c.NextProtos = nil }), encodeHello(token{9})),
	} {
		t.Run(name, func(t *testing.T) {
			r := newUnconnected(t, Provider{ServerTLS: serving(a.certificate()), HandshakeTimeout: 200 * time.Millisecond}, 4096)
			nc, err := net.Dial("tcp", r.target.ln.Addr().String())
			require.NoError(t, err)
			defer nc.Close()
			require.NoError(t, nc.SetDeadline(time.Now().Add(patience)))
			act(t, nc)
			_, err = io.Copy(io.Discard, nc)
			require.False(t, err != nil && isTimeout(err), "the target did not hang up")
			require.Zero(t, r.target.Stats().Accepted)
		})
	}
	t.Run("a good token in plain text", func(t *testing.T) {
		r := newUnconnected(t, Provider{ServerTLS: serving(a.certificate())}, 4096)
		encoded, ep, err := r.domain.Accept(context.Background(), rdma.Peer{}, encodeOffer())
		require.NoError(t, err)
		good, err := decodeAnswer(encoded)
		require.NoError(t, err)
		nc, err := net.Dial("tcp", r.target.ln.Addr().String())
		require.NoError(t, err)
		defer nc.Close()
		require.NoError(t, nc.SetDeadline(time.Now().Add(patience)))
		_, err = nc.Write(encodeHello(good.token))
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, nc)
		require.False(t, err != nil && isTimeout(err), "the target did not hang up")
		require.Zero(t, r.target.Stats().Accepted)

		in, err := Provider{ClientTLS: a.trusting()}.NewInitiator(rdma.InitiatorConfig{})
		require.NoError(t, err)
		d, err := in.Prepare(context.Background())
		require.NoError(t, err)
		_, err = d.Connect(context.Background(), encoded)
		require.NoError(t, err)
		require.NoError(t, in.Close())
		<-ep.Done()
	})
}

// clientHello is what a client of cfg sends first.
func clientHello(t *testing.T, cfg *tls.Config) []byte {
	here, there := net.Pipe()
	defer there.Close()
	go func() {
		defer here.Close()
		cfg := hardened(cfg)
		cfg.ServerName = "127.0.0.1"
		_ = tls.Client(here, cfg).Handshake()
	}()
	buf := make([]byte, 4096)
	n, err := there.Read(buf)
	require.NoError(t, err)
	require.Equal(t, n, 5+int(buf[3])<<8+int(buf[4]), "not one record")
	return buf[:n]
}

// A peer that trickles its handshake byte by byte is not given more time for it.
func TestTLSTrickle(t *testing.T) {
	a := newAuthority(t)
	hello := clientHello(t, a.trusting())
	r := newUnconnected(t, Provider{ServerTLS: serving(a.certificate()), HandshakeTimeout: 300 * time.Millisecond}, 4096)
	nc, err := net.Dial("tcp", r.target.ln.Addr().String())
	require.NoError(t, err)
	defer nc.Close()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = io.Copy(io.Discard, nc)
	}()
	beat := time.NewTicker(20 * time.Millisecond)
	defer beat.Stop()
	late := time.After(patience)
	for sent := 0; ; {
		select {
		case <-ended:
			require.Less(t, sent, len(hello), "the whole hello went through before the deadline: the test proves nothing")
			return
		case <-late:
			t.Fatal("the target waits on")
		case <-beat.C:
			if sent < len(hello) {
				_, _ = nc.Write(hello[sent : sent+1])
				sent++
			}
		}
	}
}

// Whoever sits between a TLS client and its target and speaks plain text, or TLS with
// a certificate of another CA, sees no token.
func TestTLSTokenStaysHidden(t *testing.T) {
	ours, theirs := newAuthority(t), newAuthority(t)
	for name, attack := range map[string]func(net.Conn) net.Conn{
		"plain text": func(nc net.Conn) net.Conn { return nc },
		"own TLS": func(nc net.Conn) net.Conn {
			return tls.Server(nc, hardened(serving(theirs.certificate())))
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newUnconnected(t, Provider{ServerTLS: serving(ours.certificate()), ClientTLS: ours.trusting()}, 4096)
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			defer ln.Close()
			seen := make(chan []byte, 1)
			go func() {
				nc, err := ln.Accept()
				if err != nil {
					seen <- nil
					return
				}
				defer nc.Close()
				stream := attack(nc)
				// A greeting of the target's, in case that draws something out.
				_, _ = stream.Write(welcome{nodeID: 7, bootID: 0xb007, maxReadBytes: 1 << 20}.encode())
				got, _ := io.ReadAll(stream)
				seen <- got
			}()
			_, err = r.connectVia(ln.Addr().String())
			require.ErrorIs(t, err, rdma.ErrHandshake)
			got := <-seen
			r.target.mu.Lock()
			defer r.target.mu.Unlock()
			require.Len(t, r.target.mu.waiting, 1)
			for tok := range r.target.mu.waiting {
				require.NotContains(t, string(got), string(tok[:8]))
			}
			require.NotContains(t, string(got), string(helloMagic[:]))
		})
	}
}

// Under TLS a proxy that changes bytes makes errors and never other bytes, in objects
// too, which plain TCP does not guard.
func TestTLSSpoiledStream(t *testing.T) {
	p := mutualTLS(t)
	p.HandshakeTimeout = time.Second
	r := newUnconnected(t, p, 1<<20)
	seed := uint64(time.Now().UnixNano())
	rnd := mrand.New(mrand.NewPCG(seed, 0))
	t.Logf("seed %d", seed)
	failed := 0
	for range 40 {
		up, down := spoiler(rnd)
		via := newProxy(t, r.target.ln.Addr().String(), up, down)
		c, err := r.connectVia(via.ln.Addr().String())
		if err != nil {
			failed++
			via.ln.Close()
			continue
		}
		for range 30 {
			n := 1 + rnd.IntN(3000)
			offset := uint64(rnd.IntN(1 << 19))
			b := newBatch(rdma.Read{Region: 1, Offset: offset, Dst: make([]byte, n)})
			c.Post(b)
			if err := await(t, b); err != nil {
				require.ErrorIs(t, err, rdma.ErrConnLost)
				failed++
				break
			}
			require.True(t, bytes.Equal(r.memory.Bytes()[offset:][:n], b.Reads[0].Dst), "other bytes")
		}
		require.NoError(t, c.Close())
		via.ln.Close()
	}
	require.Positive(t, failed, "the proxy spoiled nothing: the test proves nothing")
}

// A flush is sealed into records of full size, which one write takes; what TLS sends by
// itself meanwhile waits for the next.
func TestSealedAtOnce(t *testing.T) {
	r := newRig(t, mutualTLS(t), 4096)
	release := stall(r.conn)
	s := r.conn.send.tls
	const size = 128 << 10
	sealed, err := s.seal(make([]byte, size))
	require.NoError(t, err)
	const fullRecord, overhead = 16 << 10, 22 // header 5, type 1, tag 16
	require.Len(t, sealed, size+size/fullRecord*overhead)

	_, err = s.rec.Write([]byte("by the reader")) // as a reply to a key update is
	require.NoError(t, err)
	sealed, err = s.seal([]byte("x"))
	require.NoError(t, err)
	require.True(t, bytes.HasPrefix(sealed, []byte("by the reader")))
	require.Empty(t, s.rec.take())
	require.NoError(t, r.conn.Close()) // its stream is out of step
	release()
}

func TestTLSRevoked(t *testing.T) {
	r := newRig(t, mutualTLS(t), 4<<20)
	var wg sync.WaitGroup
	for caller := range 8 {
		wg.Go(func() {
			for i := range 50 {
				at := uint64(caller*4096 + i*8)
				b := newBatch(rdma.Read{Region: 1, Offset: at, Dst: make([]byte, 1+i*1000)})
				r.conn.Post(b)
				if b.Wait(context.Background(), time.Duration(i%3)*100*time.Microsecond); !b.Completed() {
					b.Wait(context.Background(), patience)
				}
				if !b.Completed() || b.Err() != nil {
					t.Errorf("READ: complete %v, %v", b.Completed(), b.Err())
					return
				}
				if string(b.Reads[0].Dst) != string(r.memory.Bytes()[at:][:1+i*1000]) {
					t.Error("other bytes")
				}
			}
		})
	}
	wg.Wait()
	require.NoError(t, r.ep.Close())
	<-r.conn.Done()
	require.ErrorIs(t, r.conn.Err(), rdma.ErrRevoked)
}

// securedPair is both ends of a socket under TLS.
func securedPair(t *testing.T, keys io.Writer) (server, client *secured) {
	p := mutualTLS(t)
	p.ServerTLS.KeyLogWriter = keys
	p.ClientTLS.ServerName = "127.0.0.1"
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	dialled := make(chan *net.TCPConn, 1)
	go func() {
		nc, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			close(dialled)
			return
		}
		dialled <- nc.(*net.TCPConn)
	}()
	accepted, err := ln.Accept()
	require.NoError(t, err)
	under := <-dialled
	require.NotNil(t, under)
	done := make(chan error, 1)
	go func() {
		var err error
		server, err = secureServer(accepted.(*net.TCPConn), serverTLS(p.ServerTLS))
		done <- err
	}()
	client, err = secureClient(under, hardened(p.ClientTLS))
	require.NoError(t, err)
	require.NoError(t, <-done)
	t.Cleanup(func() {
		server.Close()
		client.Close()
	})
	return server, client
}

// arrive puts bytes where the client's next Read finds them, as if all had come at once.
func (s *secured) arrive(b []byte) {
	s.rec.r, s.rec.w = 0, copy(s.rec.in, b)
}

// What was sent in several flushes comes in one Read, and a record of which a part is
// missing waits.
func TestReadTakesAllRecords(t *testing.T) {
	server, client := securedPair(t, nil)
	var wire []byte
	for _, text := range []string{"one ", "two ", "three"} {
		sealed, err := server.seal([]byte(text))
		require.NoError(t, err)
		wire = append(wire, sealed...)
	}
	buf := make([]byte, 100)
	client.arrive(wire[:len(wire)-1])
	n, err := client.Read(buf)
	require.NoError(t, err)
	require.Equal(t, "one two ", string(buf[:n]))
	_, err = server.sock.Write(wire[len(wire)-1:])
	require.NoError(t, err)
	n, err = client.Read(buf)
	require.NoError(t, err)
	require.Equal(t, "three", string(buf[:n]))

	sealed, err := server.seal(bytes.Repeat([]byte("x"), 40_000))
	require.NoError(t, err)
	client.arrive(sealed)
	for got := 0; got < 40_000; { // more than there is room for stays for the next
		n, err := client.Read(buf)
		require.NoError(t, err)
		require.Equal(t, 100, n)
		got += n
	}
}

// The other side may change keys whenever it likes, although crypto/tls never does. A
// Read that has data does not wait behind that, and the reply goes out with the next
// flush, under the old key.
func TestKeyUpdate(t *testing.T) {
	var log bytes.Buffer
	server, client := securedPair(t, &log)
	if suite := server.tls.ConnectionState().CipherSuite; suite != tls.TLS_AES_128_GCM_SHA256 {
		t.Logf("this machine's TLS chose %s: keys were changed for AES-128-GCM only, so not here", tls.CipherSuiteName(suite))
		return
	}
	var secret []byte
	for line := range strings.Lines(log.String()) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "SERVER_TRAFFIC_SECRET_0" {
			var err error
			secret, err = hex.DecodeString(f[2])
			require.NoError(t, err)
		}
	}
	require.NotEmpty(t, secret)
	const handshake, data = 22, 23
	updateRequested := []byte{24, 0, 0, 1, 1}
	next := expandLabel(t, secret, "traffic upd", 32)
	client.arrive(slices.Concat(
		seal13(t, secret, 0, data, []byte("before")),
		seal13(t, secret, 1, handshake, updateRequested),
	))
	buf := make([]byte, 100)
	n, err := client.Read(buf)
	require.NoError(t, err)
	require.Equal(t, "before", string(buf[:n]))
	client.arrive(seal13(t, next, 0, data, []byte("after")))
	n, err = client.Read(buf)
	require.NoError(t, err)
	require.Equal(t, "after", string(buf[:n]))

	_, err = client.Write([]byte("under the new key"))
	require.NoError(t, err)
	n, err = server.Read(buf)
	require.NoError(t, err)
	require.Equal(t, "under the new key", string(buf[:n]))
}

// expandLabel is HKDF-Expand-Label of RFC 8446 without a context.
func expandLabel(t *testing.T, secret []byte, label string, length int) []byte {
	info := []byte{byte(length >> 8), byte(length), byte(len("tls13 ") + len(label))}
	info = append(append(info, "tls13 "+label...), 0)
	out, err := hkdf.Expand(sha256.New, secret, string(info), length)
	require.NoError(t, err)
	return out
}

// seal13 makes a record of TLS 1.3 under TLS_AES_128_GCM_SHA256.
func seal13(t *testing.T, secret []byte, seq byte, kind byte, content []byte) []byte {
	block, err := aes.NewCipher(expandLabel(t, secret, "key", 16))
	require.NoError(t, err)
	aead, err := cipher.NewGCM(block)
	require.NoError(t, err)
	nonce := expandLabel(t, secret, "iv", 12)
	nonce[11] ^= seq
	inner := append(bytes.Clone(content), kind)
	header := []byte{23, 3, 3, 0, byte(len(inner) + aead.Overhead())}
	return aead.Seal(header, nonce, inner, header)
}
