package simnic

import (
	"encoding/binary"
	"fmt"

	"github.com/kvd-io/kvd/rdma"
)

// Offers, answers and attrs never leave the process, and are still encoded: whoever
// passes them on must be able to treat them as opaque, and tests mangle them.
//
//	offer  "knic" 'O' version  nonce u64
//	answer "knic" 'A' version  nonce u64  boot u64  token u64  target's name
//	attr   "knic" 'R' version  key u64
const (
	magic       = "knic"
	wireVersion = 1
	headerLen   = len(magic) + 2
)

func header(kind byte) []byte { return append([]byte(magic), kind, wireVersion) }

func body(kind byte, msg []byte) ([]byte, error) {
	if len(msg) < headerLen || string(msg[:len(magic)]) != magic || msg[len(magic)] != kind {
		return nil, fmt.Errorf("%w: %d bytes that are no simnic message of kind %c", rdma.ErrHandshake, len(msg), kind)
	}
	if v := msg[len(magic)+1]; v != wireVersion {
		return nil, fmt.Errorf("%w: simnic message of version %d, want %d", rdma.ErrHandshake, v, wireVersion)
	}
	return msg[headerLen:], nil
}

func encodeOffer(nonce uint64) []byte {
	return binary.BigEndian.AppendUint64(header('O'), nonce)
}

func decodeOffer(msg []byte) (nonce uint64, err error) {
	b, err := body('O', msg)
	if err != nil {
		return 0, err
	}
	if len(b) != 8 {
		return 0, fmt.Errorf("%w: simnic offer with a body of %d bytes, want 8", rdma.ErrHandshake, len(b))
	}
	return binary.BigEndian.Uint64(b), nil
}

type answer struct {
	nonce, boot, token uint64
	target             string
}

func (a answer) encode() []byte {
	b := header('A')
	b = binary.BigEndian.AppendUint64(b, a.nonce)
	b = binary.BigEndian.AppendUint64(b, a.boot)
	b = binary.BigEndian.AppendUint64(b, a.token)
	b = append(b, byte(len(a.target)))
	return append(b, a.target...)
}

func decodeAnswer(msg []byte) (answer, error) {
	b, err := body('A', msg)
	if err != nil {
		return answer{}, err
	}
	if len(b) < 25 || len(b) != 25+int(b[24]) {
		return answer{}, fmt.Errorf("%w: simnic answer with a body of %d bytes: cut short, or with more behind it", rdma.ErrHandshake, len(b))
	}
	return answer{
		nonce:  binary.BigEndian.Uint64(b),
		boot:   binary.BigEndian.Uint64(b[8:]),
		token:  binary.BigEndian.Uint64(b[16:]),
		target: string(b[25:]),
	}, nil
}

func encodeAttr(key uint64) []byte {
	return binary.BigEndian.AppendUint64(header('R'), key)
}

func decodeAttr(msg []byte) (key uint64, err error) {
	b, err := body('R', msg)
	if err != nil {
		return 0, err
	}
	if len(b) != 8 {
		return 0, fmt.Errorf("%w: simnic region key of %d bytes, want 8", rdma.ErrHandshake, len(b))
	}
	return binary.BigEndian.Uint64(b), nil
}
