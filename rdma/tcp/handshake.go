package tcp

import (
	"encoding/binary"
	"fmt"

	"github.com/kvd-io/kvd/rdma"
)

// tokenSize in bytes. A token is drawn for each Accept, works once, and is
// forgotten when the accept timeout has passed.
const tokenSize = 32

type token [tokenSize]byte

// The offer and the answer travel over the authorized channel; hello and welcome
// open the TCP connection. All four begin with a magic of their own, so that a
// mix-up is told from damage.
var (
	offerMagic   = [4]byte{'k', 't', 'c', 'O'}
	answerMagic  = [4]byte{'k', 't', 'c', 'A'}
	helloMagic   = [8]byte{'k', 'v', 'd', '-', 't', 'c', 'p', '\n'}
	welcomeMagic = [8]byte{'k', 'v', 'd', '-', 'o', 'k', '\r', '\n'}
)

const (
	offerSize       = 8
	answerFixedSize = 57
	helloSize       = 48
	welcomeSize     = 40
	maxAddrs        = 16
	maxAddrLen      = 255
	maxNameLen      = 255

	flagTLS = 0x01
)

// offer is what the client says before it is let in.
func encodeOffer() []byte {
	b := make([]byte, 0, offerSize)
	b = append(b, offerMagic[:]...)
	b = binary.LittleEndian.AppendUint16(b, protocolVersion)
	return binary.LittleEndian.AppendUint16(b, 0)
}

func checkOffer(b []byte) error {
	if len(b) != offerSize || [4]byte(b) != offerMagic {
		return fmt.Errorf("%w: tcp: the offer (%d bytes) is not one of this provider", rdma.ErrHandshake, len(b))
	}
	if v := binary.LittleEndian.Uint16(b[4:]); v != protocolVersion {
		return fmt.Errorf("%w: tcp: the client speaks version %d, this target %d: upgrade the older one", rdma.ErrHandshake, v, protocolVersion)
	}
	return nil
}

// answer tells the client where to connect, with which token, and whom to find
// there.
type answer struct {
	tls    bool
	nodeID uint64
	bootID uint64
	token  token
	addrs  []string // in the order in which to try them
	name   string   // TLS: in the target's certificate; empty: the dialled host is
}

func (a *answer) encode() []byte {
	b := make([]byte, 0, answerFixedSize+32*len(a.addrs))
	b = append(b, answerMagic[:]...)
	b = binary.LittleEndian.AppendUint16(b, protocolVersion)
	var flags uint16
	if a.tls {
		flags |= flagTLS
	}
	b = binary.LittleEndian.AppendUint16(b, flags)
	b = binary.LittleEndian.AppendUint64(b, a.nodeID)
	b = binary.LittleEndian.AppendUint64(b, a.bootID)
	b = append(b, a.token[:]...)
	b = append(b, byte(len(a.addrs)))
	for _, addr := range a.addrs {
		b = append(b, byte(len(addr)))
		b = append(b, addr...)
	}
	b = append(b, byte(len(a.name)))
	return append(b, a.name...)
}

func decodeAnswer(b []byte) (*answer, error) {
	if len(b) < answerFixedSize || [4]byte(b) != answerMagic {
		return nil, fmt.Errorf("%w: tcp: the answer (%d bytes) is not one of this provider", rdma.ErrHandshake, len(b))
	}
	if v := binary.LittleEndian.Uint16(b[4:]); v != protocolVersion {
		return nil, fmt.Errorf("%w: tcp: the target speaks version %d, this client %d: upgrade the older one", rdma.ErrHandshake, v, protocolVersion)
	}
	flags := binary.LittleEndian.Uint16(b[6:])
	if flags&^flagTLS != 0 {
		return nil, fmt.Errorf("%w: tcp: the answer's flags are %#x, want at most %#x", rdma.ErrHandshake, flags, flagTLS)
	}
	a := &answer{
		tls:    flags&flagTLS != 0,
		nodeID: binary.LittleEndian.Uint64(b[8:]),
		bootID: binary.LittleEndian.Uint64(b[16:]),
		token:  token(b[24:]),
	}
	count, rest := int(b[56]), b[answerFixedSize:]
	if count == 0 || count > maxAddrs {
		return nil, fmt.Errorf("%w: tcp: the answer names %d addresses, want 1 to %d", rdma.ErrHandshake, count, maxAddrs)
	}
	for range count + 1 {
		if len(rest) == 0 || len(rest) < 1+int(rest[0]) {
			return nil, fmt.Errorf("%w: tcp: the answer ends within its addresses or its name", rdma.ErrHandshake)
		}
		n := 1 + int(rest[0])
		a.addrs, rest = append(a.addrs, string(rest[1:n])), rest[n:]
	}
	a.addrs, a.name = a.addrs[:count], a.addrs[count]
	if len(rest) != 0 {
		return nil, fmt.Errorf("%w: tcp: %d bytes after the answer's end", rdma.ErrHandshake, len(rest))
	}
	return a, nil
}

// hello is the first thing on the socket, from the client.
func encodeHello(t token) []byte {
	b := make([]byte, 0, helloSize)
	b = append(b, helloMagic[:]...)
	b = binary.LittleEndian.AppendUint16(b, protocolVersion)
	b = append(b, make([]byte, 6)...)
	return append(b, t[:]...)
}

// decodeHello gives the token. The version is returned whenever the magic was
// right, so that another one can be answered.
func decodeHello(b []byte) (t token, version uint16, err error) {
	if len(b) == helloSize && b[0] == 0x16 && b[1] == 3 {
		return token{}, 0, fmt.Errorf("%w: tcp: the peer speaks TLS, and this target does not", rdma.ErrHandshake)
	}
	if len(b) != helloSize || [8]byte(b) != helloMagic {
		return token{}, 0, fmt.Errorf("%w: tcp: the peer's first bytes are %q, not a kvd greeting", rdma.ErrHandshake, b[:min(len(b), 8)])
	}
	version = binary.LittleEndian.Uint16(b[8:])
	if version != protocolVersion {
		return token{}, version, fmt.Errorf("%w: tcp: the peer speaks version %d, this target %d: upgrade the older one", rdma.ErrHandshake, version, protocolVersion)
	}
	return token(b[16:]), version, nil
}

// Verdicts in a welcome.
const (
	welcomeOK      = 0
	welcomeVersion = 1
	welcomeToken   = 2
)

// welcome is the target's reply to hello.
type welcome struct {
	verdict      uint16
	nodeID       uint64
	bootID       uint64
	maxReadBytes uint64
}

func (w welcome) encode() []byte {
	b := make([]byte, 0, welcomeSize)
	b = append(b, welcomeMagic[:]...)
	b = binary.LittleEndian.AppendUint16(b, protocolVersion)
	b = binary.LittleEndian.AppendUint16(b, w.verdict)
	b = binary.LittleEndian.AppendUint32(b, 0)
	b = binary.LittleEndian.AppendUint64(b, w.nodeID)
	b = binary.LittleEndian.AppendUint64(b, w.bootID)
	return binary.LittleEndian.AppendUint64(b, w.maxReadBytes)
}

func decodeWelcome(b []byte) (welcome, error) {
	if len(b) != welcomeSize || [8]byte(b) != welcomeMagic {
		return welcome{}, fmt.Errorf("%w: tcp: the peer's first bytes are %q: no kvd node listens there", rdma.ErrHandshake, b[:min(len(b), 8)])
	}
	w := welcome{
		verdict:      binary.LittleEndian.Uint16(b[10:]),
		nodeID:       binary.LittleEndian.Uint64(b[16:]),
		bootID:       binary.LittleEndian.Uint64(b[24:]),
		maxReadBytes: binary.LittleEndian.Uint64(b[32:]),
	}
	version := binary.LittleEndian.Uint16(b[8:])
	switch {
	case version != protocolVersion || w.verdict == welcomeVersion:
		return welcome{}, fmt.Errorf("%w: tcp: the target speaks version %d, this client %d: upgrade the older one", rdma.ErrHandshake, version, protocolVersion)
	case w.verdict == welcomeToken:
		return welcome{}, fmt.Errorf("%w: tcp: the target does not know the token (used, expired, or of an earlier boot)", rdma.ErrRevoked)
	case w.verdict != welcomeOK:
		return welcome{}, fmt.Errorf("%w: tcp: the target's verdict is %d, want %d", rdma.ErrHandshake, w.verdict, welcomeOK)
	}
	return w, nil
}

// A region's attr proves nothing: the connection is already bound to its domain.
// It guards against a mix-up of providers or regions.
const attrSize = 16

var attrMagic = [4]byte{'k', 't', 'c', 'R'}

func encodeAttr(id rdma.RegionID, length uint64) []byte {
	b := make([]byte, 0, attrSize)
	b = append(b, attrMagic[:]...)
	b = binary.LittleEndian.AppendUint32(b, uint32(id))
	return binary.LittleEndian.AppendUint64(b, length)
}

func checkAttr(b []byte, id rdma.RegionID) error {
	if len(b) != attrSize || [4]byte(b) != attrMagic {
		return fmt.Errorf("%w: tcp: region %d: its description (%d bytes) is not one of this provider", rdma.ErrAccess, id, len(b))
	}
	if got := rdma.RegionID(binary.LittleEndian.Uint32(b[4:])); got != id {
		return fmt.Errorf("%w: tcp: region %d: its description is region %d's", rdma.ErrAccess, id, got)
	}
	return nil
}
