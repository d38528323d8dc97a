package gossip

import (
	"bytes"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"fmt"
)

// Key encrypts packets (AES-256-GCM). All nodes of a cluster have the same.
type Key [32]byte

// ParseKey reads the content of a key's file: 32 bytes in base64 or hexadecimal, as
// `openssl rand -base64 32` and `openssl rand -hex 32` write them; white space around
// them does not count. The error does not show the content.
func ParseKey(content []byte) (k Key, err error) {
	text := string(bytes.TrimSpace(content))
	raw, err := hex.DecodeString(text)
	if err != nil || len(raw) != len(k) {
		raw, err = base64.StdEncoding.DecodeString(text)
	}
	if err != nil || len(raw) != len(k) {
		return Key{}, fmt.Errorf("%w: the gossip key is not %d bytes in base64 or hexadecimal: openssl rand -base64 32 makes one", ErrConfig, len(k))
	}
	copy(k[:], raw)
	if k == (Key{}) {
		return Key{}, fmt.Errorf("%w: the gossip key is all zero", ErrConfig)
	}
	return k, nil
}

// DeriveKey makes the key of one cluster out of something that its nodes share. It is as
// secret as that is. Two clusters with the same secret have different keys.
func DeriveKey(secret []byte, clusterID string) (k Key) {
	b, err := hkdf.Key(sha256.New, secret, nil, "kvd gossip key v1 "+clusterID, len(k))
	if err != nil {
		panic(fmt.Sprintf("gossip: derive key: %v", err)) // bug: HKDF fails for lengths above 8160 only
	}
	copy(k[:], b)
	return k
}

// Proof shows to another holder of the key that this one has it too. It says nothing of
// the key to anybody else; of a nonce, such as the incarnation of a node, there is one.
func (k Key) Proof(nonce uint64) []byte {
	b, err := hkdf.Key(sha256.New, k[:], binary.BigEndian.AppendUint64(nil, nonce), "kvd gossip key proof v1", sha256.Size)
	if err != nil {
		panic(fmt.Sprintf("gossip: proof of key: %v", err)) // bug: as above
	}
	return b
}
