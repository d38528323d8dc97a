package gossip

import (
	"fmt"
	"net"
	"slices"

	"google.golang.org/protobuf/proto"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

const (
	// metaFormat is the one that this version writes. Fields are added without raising it,
	// and ignored by who does not know them.
	metaFormat = 1
	// maxMeta is memberlist's bound on metadata, in bytes.
	maxMeta = 512
)

// Meta is what a node tells the others of itself, as kvd.v1.GossipMeta.
type Meta struct {
	NodeID, Incarnation, Generation uint64
	Address                         string // gRPC host:port
	Zone, Rack, Host, Version       string
	Transports                      []string
	Leaving                         bool
}

func (m Meta) equal(o Meta) bool {
	t := m.Transports
	m.Transports = nil
	same := slices.Equal(t, o.Transports)
	o.Transports = nil
	return same && fmt.Sprint(m) == fmt.Sprint(o)
}

// name by which memberlist knows the node. The id leads, for people who read logs.
func (m Meta) name() string { return fmt.Sprintf("%d-%016x", m.NodeID, m.Incarnation) }

// encode returns ErrConfig where the result would be too large.
func (m Meta) encode() ([]byte, error) {
	b, err := proto.Marshal(&kvdv1.GossipMeta{
		Format: metaFormat, NodeId: m.NodeID, Incarnation: m.Incarnation, Generation: m.Generation,
		Address: m.Address, Zone: m.Zone, Rack: m.Rack, Host: m.Host, Version: m.Version, Transports: m.Transports, Leaving: m.Leaving,
	})
	if err != nil {
		return nil, fmt.Errorf("%w: what the node tells of itself can not be encoded: %w", ErrConfig, err)
	}
	const spare = 4 // for Leaving, and a generation that grows
	if len(b)+spare > maxMeta {
		return nil, fmt.Errorf("%w: what the node tells of itself has %d bytes, and %d is the limit: shorten its address, zone, rack, host or version", ErrConfig, len(b), maxMeta-spare)
	}
	return b, nil
}

// decodeMeta refuses what no node of ours writes. b is not kept.
func decodeMeta(b []byte) (Meta, error) {
	if len(b) > maxMeta {
		return Meta{}, fmt.Errorf("metadata of %d bytes: want at most %d", len(b), maxMeta)
	}
	var p kvdv1.GossipMeta
	if err := proto.Unmarshal(b, &p); err != nil {
		return Meta{}, fmt.Errorf("metadata can not be decoded: %w", err)
	}
	m := Meta{
		NodeID: p.GetNodeId(), Incarnation: p.GetIncarnation(), Generation: p.GetGeneration(),
		Address: p.GetAddress(), Zone: p.GetZone(), Rack: p.GetRack(), Host: p.GetHost(), Version: p.GetVersion(), Transports: p.GetTransports(), Leaving: p.GetLeaving(),
	}
	switch {
	case p.GetFormat() != metaFormat:
		return Meta{}, fmt.Errorf("metadata of format %d: this version knows %d", p.GetFormat(), metaFormat)
	case m.NodeID == 0 || m.Incarnation == 0 || m.Generation == 0:
		return Meta{}, fmt.Errorf("metadata of node %d with incarnation %016x and generation %d: want all of them above 0", m.NodeID, m.Incarnation, m.Generation)
	}
	if host, port, err := net.SplitHostPort(m.Address); m.Address != "" && (err != nil || host == "" || port == "") {
		return Meta{}, fmt.Errorf("metadata of node %d with the address %q: want HOST:PORT", m.NodeID, m.Address)
	}
	return m, nil
}
