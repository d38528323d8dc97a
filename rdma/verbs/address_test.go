package verbs

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma/verbs/ibv"
)

func indexes(gids []ibv.GIDEntry) []int {
	var all []int
	for _, e := range gids {
		all = append(all, e.Index)
	}
	return all
}

// Several nodes on one device, each with an address of its own, use each its own GID.
func TestGIDByAddress(t *testing.T) {
	entry := func(index int, addr string, typ ibv.GIDType) ibv.GIDEntry {
		return ibv.GIDEntry{Index: index, GID: ibv.GID(netip.MustParseAddr(addr).As16()), Type: typ}
	}
	ranked := rankGIDs([]ibv.GIDEntry{
		entry(0, "fe80::1", ibv.GIDTypeRoCEv2), entry(1, "10.0.0.1", ibv.GIDTypeRoCEv1), entry(2, "10.0.0.1", ibv.GIDTypeRoCEv2),
		entry(3, "10.0.0.2", ibv.GIDTypeRoCEv1), entry(4, "10.0.0.2", ibv.GIDTypeRoCEv2),
	}, ibv.LinkEthernet)
	addr := netip.MustParseAddr
	require.Equal(t, []int{2, 4, 0, 1, 3}, indexes(Provider{}.byAddress(ranked)))
	require.Equal(t, []int{4, 3, 2, 0, 1}, indexes(Provider{PreferAddress: addr("10.0.0.2")}.byAddress(ranked)))
	require.Equal(t, []int{4, 3, 2, 0, 1}, indexes(Provider{PreferAddress: addr("::ffff:10.0.0.2")}.byAddress(ranked)))
	require.Equal(t, []int{2, 4, 0, 1, 3}, indexes(Provider{PreferAddress: addr("192.0.2.1")}.byAddress(ranked)), "of no device: no matter")
	only := Provider{GIDAddresses: []netip.Addr{addr("10.0.0.1")}}
	require.Equal(t, []int{2, 1}, indexes(only.byAddress(ranked)))

	view := deviceView{
		info:  ibv.DeviceInfo{Name: "rxe0", Transport: ibv.TransportIB},
		ports: []portView{{number: 1, attr: ibv.PortAttr{State: ibv.PortActive, LinkLayer: ibv.LinkEthernet, GIDTableLen: 5}, gids: ranked, pkeys: []uint16{0xffff}}},
	}
	chosen := choose(Provider{PreferAddress: addr("10.0.0.2")}, []deviceView{view}, nil)
	require.NoError(t, chosen.refusal())
	require.Equal(t, 4, chosen.rails[0].gids[0].Index)
	chosen = choose(Provider{GIDAddresses: []netip.Addr{addr("10.0.0.2"), addr("192.0.2.1")}}, []deviceView{view}, nil)
	require.ErrorContains(t, chosen.refusal(), "no device has a GID with the address 192.0.2.1")
	other := view
	other.info.Name, other.ports = "rxe1", []portView{view.ports[0]}
	other.ports[0].gids = ranked[:1]
	chosen = choose(Provider{GIDAddresses: []netip.Addr{addr("10.0.0.2")}}, []deviceView{view, other}, nil)
	require.NoError(t, chosen.refusal())
	require.Len(t, chosen.rails, 1)
	require.Contains(t, chosen.devices[1].Ports[0].Verdict, "left out: no GID with an address that is wanted")
}
