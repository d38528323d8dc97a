package tcp

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kvd-io/kvd/rdma"
)

// alpn keeps a TLS session meant for READs from being led to another service with
// the same certificate, gRPC for one, and the other way round.
const alpn = "kvd-read"

// serverTLS is cfg as a target uses it.
func serverTLS(cfg *tls.Config) *tls.Config {
	cfg = hardened(cfg)
	if choose := cfg.GetConfigForClient; choose != nil {
		cfg.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			chosen, err := choose(hello)
			if chosen == nil || err != nil {
				return nil, err
			}
			if chosen.ClientAuth >= tls.VerifyClientCertIfGiven && chosen.ClientCAs == nil {
				return nil, errors.New("the configuration is to verify clients and has no ClientCAs")
			}
			return hardened(chosen), nil
		}
	}
	return cfg
}

// hardened is a copy of cfg. Sessions are not resumed: each connection is judged by
// the certificates and CAs of its own time, and connections are rare. Records are as
// large as they may be from the start: nobody here shows half a page.
func hardened(cfg *tls.Config) *tls.Config {
	cfg = cfg.Clone()
	cfg.MinVersion = max(cfg.MinVersion, tls.VersionTLS13)
	cfg.NextProtos = []string{alpn}
	cfg.SessionTicketsDisabled = true
	cfg.ClientSessionCache = nil
	cfg.DynamicRecordSizingDisabled = true
	return cfg
}

// certificateName is what an answer tells clients to verify. It is asked of the
// certificate of the moment, which may be another than at the start.
func (t *target) certificateName() string {
	if t.p.ServerTLS == nil || t.p.ServerName != "" {
		return t.p.ServerName
	}
	leaf := currentLeaf(t.p.ServerTLS)
	if leaf == nil {
		return ""
	}
	covered := func(addr string) bool {
		host, _, err := net.SplitHostPort(addr)
		return err == nil && leaf.VerifyHostname(host) == nil
	}
	if !slices.ContainsFunc(t.addrs, func(addr string) bool { return !covered(addr) }) {
		return ""
	}
	for _, name := range leaf.DNSNames {
		if !strings.HasPrefix(name, "*") && len(name) <= maxNameLen {
			return name
		}
	}
	if len(leaf.IPAddresses) > 0 {
		return leaf.IPAddresses[0].String()
	}
	return ""
}

// currentLeaf is the certificate that a client would be shown now; nil where cfg does
// not say without a client.
func currentLeaf(cfg *tls.Config) *x509.Certificate {
	hello := &tls.ClientHelloInfo{SupportedVersions: []uint16{tls.VersionTLS13}, SupportedProtos: []string{alpn}}
	if cfg.GetConfigForClient != nil {
		if chosen, err := cfg.GetConfigForClient(hello); err == nil && chosen != nil {
			cfg = chosen
		}
	}
	var cert *tls.Certificate
	if cfg.GetCertificate != nil {
		cert, _ = cfg.GetCertificate(hello)
	}
	if cert == nil && len(cfg.Certificates) > 0 {
		cert = &cfg.Certificates[0]
	}
	if cert == nil || len(cert.Certificate) == 0 {
		return nil
	}
	if cert.Leaf != nil {
		return cert.Leaf
	}
	leaf, err := x509.ParseCertificate(cert.Certificate[0])
	if err != nil {
		return nil
	}
	return leaf
}

// secured is a socket under TLS. Writing is taken apart: seal makes the records and
// sends nothing, so that one write(2) takes all records of a flush, and so that a client
// can try to send them without waiting. A Read takes all records that have come, where
// crypto/tls would stop after one: else what was sent in several flushes would be
// answered in as many, for ever.
//
// One goroutine at a time may read, and one write.
type secured struct {
	tls  *tls.Conn
	sock *net.TCPConn
	rec  *records
}

// records stands between crypto/tls and the socket. Once the handshake is over, what
// TLS writes is kept here until the writer takes it. That may come from the reading
// goroutine too: the reply to a key update. What TLS reads comes from the socket in large
// pieces, and is handed on record by record.
type records struct {
	*net.TCPConn
	mu struct {
		sync.Mutex
		keep bool
		buf  []byte
	}
	spare []byte // the writer's

	// The reader's.
	in     []byte
	r, w   int // in[r:w] has not been handed on
	left   int // bytes that are missing of the record that was begun
	noWait bool
}

// recordHeader: type, version u16, length u16, big-endian.
const recordHeader = 5

// nothingYet is a temporary net.Error, which crypto/tls takes for a deadline: it goes on
// afterwards where it was.
type nothingYet struct{}

func (nothingYet) Error() string   { return "tcp: no more records yet" }
func (nothingYet) Timeout() bool   { return true }
func (nothingYet) Temporary() bool { return true }

var errNothingYet net.Error = nothingYet{}

// Read gives bytes of one record at most, and of all there is with noWait.
func (r *records) Read(b []byte) (int, error) {
	for r.r == r.w || r.left == 0 && r.w-r.r < recordHeader {
		if r.noWait {
			return 0, errNothingYet
		}
		r.w = copy(r.in, r.in[r.r:r.w])
		r.r = 0
		n, err := r.TCPConn.Read(r.in[r.w:])
		r.w += n
		if err != nil {
			if err == io.EOF && r.w > 0 {
				err = io.ErrUnexpectedEOF // within a header
			}
			return 0, err
		}
	}
	if r.left == 0 {
		r.left = r.recordSize()
	}
	n := copy(b, r.in[r.r:min(r.w, r.r+r.left)])
	r.r += n
	r.left -= n
	return n, nil
}

func (r *records) recordSize() int {
	return recordHeader + int(binary.BigEndian.Uint16(r.in[r.r+3:]))
}

// whole tells whether the next record is here as a whole.
func (r *records) whole() bool {
	return r.left == 0 && r.w-r.r >= recordHeader && r.w-r.r >= r.recordSize()
}

func (r *records) Write(b []byte) (int, error) {
	r.mu.Lock()
	if !r.mu.keep {
		r.mu.Unlock()
		return r.TCPConn.Write(b)
	}
	defer r.mu.Unlock()
	r.mu.buf = append(r.mu.buf, b...)
	return len(b), nil
}

// SetWriteDeadline: TLS sets one when it says goodbye, which would hit whoever writes.
func (r *records) SetWriteDeadline(t time.Time) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.keep {
		return nil
	}
	return r.TCPConn.SetWriteDeadline(t)
}

func (r *records) keep() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.keep = true
}

// take is what was kept; the writer's until it takes again.
func (r *records) take() []byte {
	if cap(r.spare) > keepBuffer {
		r.spare = nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	full := r.mu.buf
	r.mu.buf, r.spare = r.spare[:0], full
	return full
}

// secureServer runs the target's half of the handshake. The socket's deadline bounds it.
func secureServer(sock *net.TCPConn, cfg *tls.Config) (*secured, error) {
	return secure(sock, inputSize, func(under net.Conn) *tls.Conn { return tls.Server(under, cfg) })
}

// secureClient runs the client's.
func secureClient(sock *net.TCPConn, cfg *tls.Config) (*secured, error) {
	return secure(sock, receiveSize, func(under net.Conn) *tls.Conn { return tls.Client(under, cfg) })
}

func secure(sock *net.TCPConn, bufferBytes int, over func(net.Conn) *tls.Conn) (*secured, error) {
	rec := &records{TCPConn: sock, in: make([]byte, bufferBytes)}
	s := &secured{tls: over(rec), sock: sock, rec: rec}
	if err := s.tls.Handshake(); err != nil {
		return nil, tlsError(err)
	}
	if got := s.tls.ConnectionState().NegotiatedProtocol; got != alpn {
		// A peer without ALPN at all gets through the handshake.
		return nil, fmt.Errorf("%w: tcp: TLS: the peer's protocol (ALPN) is %q, want %q: it is not kvd's port for READs, or no client of it", rdma.ErrHandshake, got, alpn)
	}
	rec.keep()
	return s, nil
}

// tlsError puts into words what a handshake failed of, seen from either side.
func tlsError(err error) error {
	var (
		plain   tls.RecordHeaderError
		refused *tls.CertificateVerificationError
	)
	switch {
	case errors.As(err, &plain):
		return fmt.Errorf("%w: tcp: the peer speaks plain text (it sent %q) where TLS is wanted", rdma.ErrHandshake, plain.RecordHeader[:])
	case errors.As(err, &refused):
		return fmt.Errorf("%w: tcp: TLS: the peer's certificate is refused: %w: check the CA that is trusted here, and the names in that certificate", rdma.ErrHandshake, refused.Err)
	case isAlert(err):
		return fmt.Errorf("%w: tcp: the peer refuses TLS with this side (%w): its log says why; most often it does not trust, or misses, this side's certificate", rdma.ErrHandshake, err)
	case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET):
		return fmt.Errorf("%w: tcp: the peer hung up during the TLS handshake: does it speak TLS?", rdma.ErrHandshake)
	}
	return fmt.Errorf("%w: tcp: TLS: %w", rdma.ErrHandshake, err)
}

// isAlert tells whether the peer said itself that something is wrong.
func isAlert(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "remote error"
}

// seal encrypts b. The records are the caller's until the next call.
func (s *secured) seal(b []byte) ([]byte, error) {
	if _, err := s.tls.Write(b); err != nil {
		return nil, err
	}
	return s.rec.take(), nil
}

// Read decrypts what has come. A deadline that passes loses nothing.
func (s *secured) Read(b []byte) (int, error) {
	n, err := s.tls.Read(b)
	s.rec.noWait = true
	for err == nil && n < len(b) && s.rec.whole() {
		var more int
		more, err = s.tls.Read(b[n:])
		n += more
	}
	s.rec.noWait = false
	if err == errNothingYet {
		err = nil // a record without data: a change of keys
	}
	return n, err
}

// Write seals b and sends it. The count is of b where all was sent, else of what may
// have been.
func (s *secured) Write(b []byte) (int, error) {
	sealed, err := s.seal(b)
	if err != nil {
		return 0, err
	}
	if n, err := s.sock.Write(sealed); err != nil {
		return min(n, len(b)), err
	}
	return len(b), nil
}

// Close closes the socket at once. TLS's own Close would wait to send an alert, and
// behind a writer that is stuck; frames say goodbye by themselves.
func (s *secured) Close() error { return s.sock.Close() }

// CloseWrite says that nothing follows.
func (s *secured) CloseWrite() error {
	if err := s.tls.CloseWrite(); err != nil {
		return err
	}
	if _, err := s.sock.Write(s.rec.take()); err != nil {
		return err
	}
	return s.sock.CloseWrite()
}

func (s *secured) LocalAddr() net.Addr                { return s.sock.LocalAddr() }
func (s *secured) RemoteAddr() net.Addr               { return s.sock.RemoteAddr() }
func (s *secured) SetDeadline(t time.Time) error      { return s.sock.SetDeadline(t) }
func (s *secured) SetReadDeadline(t time.Time) error  { return s.sock.SetReadDeadline(t) }
func (s *secured) SetWriteDeadline(t time.Time) error { return s.sock.SetWriteDeadline(t) }
