package verbs

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma/verbs/ibv"
)

func gidOf(addr string) ibv.GID { return netip.MustParseAddr(addr).As16() }

func entry(index int, typ ibv.GIDType, addr string) ibv.GIDEntry {
	return ibv.GIDEntry{Index: index, Type: typ, GID: gidOf(addr)}
}

func TestGIDRank(t *testing.T) {
	const v1, v2, ib, unknown = ibv.GIDTypeRoCEv1, ibv.GIDTypeRoCEv2, ibv.GIDTypeIB, ibv.GIDTypeUnknown
	for _, c := range []struct {
		name string
		e    ibv.GIDEntry
		link ibv.LinkLayer
		want int
	}{
		{"RoCE v2 IPv4", entry(1, v2, "::ffff:10.0.0.1"), ibv.LinkEthernet, 1},
		{"RoCE v2 global IPv6", entry(1, v2, "2001:db8::1"), ibv.LinkEthernet, 1},
		{"RoCE v2 private IPv6", entry(1, v2, "fd00::1"), ibv.LinkEthernet, 1},
		{"RoCE v2 link-local IPv6", entry(1, v2, "fe80::1"), ibv.LinkEthernet, 2},
		{"RoCE v2 link-local IPv4", entry(1, v2, "::ffff:169.254.3.4"), ibv.LinkEthernet, 2},
		{"RoCE v1 IPv4", entry(1, v1, "::ffff:10.0.0.1"), ibv.LinkEthernet, 3},
		{"RoCE v1 link-local", entry(1, v1, "fe80::1"), ibv.LinkEthernet, 4},
		{"type unknown", entry(1, unknown, "::ffff:10.0.0.1"), ibv.LinkEthernet, 5},
		{"loopback", entry(1, v2, "::ffff:127.0.0.1"), ibv.LinkEthernet, 6},
		{"loopback IPv6", entry(1, v2, "::1"), ibv.LinkEthernet, 6},
		{"zero", entry(1, v2, "::"), ibv.LinkEthernet, 0},
		{"zero IPv4", entry(1, v2, "::ffff:0.0.0.0"), ibv.LinkEthernet, 0},
		{"multicast", entry(1, v2, "ff02::1"), ibv.LinkEthernet, 0},
		{"InfiniBand", entry(0, ib, "fe80::2:c903:0:1"), ibv.LinkInfiniBand, 1},
		{"InfiniBand zero", entry(0, ib, "::"), ibv.LinkInfiniBand, 0},
	} {
		got, why := gidRank(c.e, c.link)
		require.Equal(t, c.want, got, c.name)
		require.NotEmpty(t, why, c.name)
	}
}

func TestRankGIDs(t *testing.T) {
	all := []ibv.GIDEntry{
		entry(0, ibv.GIDTypeRoCEv1, "fe80::1"), entry(1, ibv.GIDTypeRoCEv2, "fe80::1"), entry(2, ibv.GIDTypeRoCEv1, "::ffff:10.0.0.1"),
		entry(3, ibv.GIDTypeRoCEv2, "::ffff:10.0.0.1"), entry(4, ibv.GIDTypeRoCEv2, "::"), entry(5, ibv.GIDTypeRoCEv2, "2001:db8::1"),
	}
	want := []int{3, 5, 1, 2, 0}
	for range 20 { // whatever the order in which they come
		rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		var got []int
		for _, e := range rankGIDs(all, ibv.LinkEthernet) {
			got = append(got, e.Index)
		}
		require.Equal(t, want, got)
	}
}

// roce is a usable device with one port.
func roce(name string, change ...func(*deviceView)) deviceView {
	v := deviceView{
		info: ibv.DeviceInfo{Name: name, Transport: ibv.TransportIB, NodeType: "channel adapter", NUMANode: -1},
		attr: ibv.DeviceAttr{Ports: 1, MaxQP: 100},
		ports: []portView{{
			number: 1,
			attr:   ibv.PortAttr{State: ibv.PortActive, PhysState: "link up", LinkLayer: ibv.LinkEthernet, ActiveMTU: ibv.MTU1024, GIDTableLen: 16, BitsPerSecond: 100e9},
			gids: []ibv.GIDEntry{entry(0, ibv.GIDTypeRoCEv1, "fe80::1"), entry(1, ibv.GIDTypeRoCEv2, "fe80::1"),
				entry(2, ibv.GIDTypeRoCEv2, "::ffff:10.0.0.1"), entry(3, ibv.GIDTypeRoCEv2, "::ffff:10.0.0.2")},
			pkeys: []uint16{0xffff, 0x8001, 0x0002},
		}},
	}
	for _, c := range change {
		c(&v)
	}
	return v
}

func TestChoose(t *testing.T) {
	down := func(v *deviceView) { v.ports[0].attr.State, v.ports[0].attr.PhysState = ibv.PortDown, "polling" }
	slow := func(v *deviceView) { v.ports[0].attr.BitsPerSecond = 10e9 }
	efa := func(v *deviceView) { v.info.Unusable = "EFA has no reliable connections (RC)" }
	iwarp := func(v *deviceView) { v.info.Transport = ibv.TransportIWARP }
	noGID := func(v *deviceView) { v.ports[0].gids = nil }
	broken := func(v *deviceView) { v.err, v.ports = fmt.Errorf("permission denied"), nil }
	twoPorts := func(v *deviceView) {
		second := v.ports[0]
		second.number = 2
		v.ports = append(v.ports, second)
	}
	for _, c := range []struct {
		name    string
		p       Provider
		views   []deviceView
		noCM    bool
		want    []string // device/port/GID indexes of each rail
		problem string   // part of what is refused at the start; "" for nothing
		verdict string   // part of the first device's words
	}{
		{name: "best GID first", views: []deviceView{roce("mlx5_0")}, want: []string{"mlx5_0/1/2,3,1,0"}},
		{name: "two devices, two rails", views: []deviceView{roce("mlx5_0"), roce("mlx5_1")}, want: []string{"mlx5_0/1/2,3,1,0", "mlx5_1/1/2,3,1,0"}},
		{name: "both ports", views: []deviceView{roce("mlx5_0", twoPorts)}, want: []string{"mlx5_0/1/2,3,1,0", "mlx5_0/2/2,3,1,0"}},
		{name: "one port wanted", p: Provider{Port: 2}, views: []deviceView{roce("mlx5_0", twoPorts)}, want: []string{"mlx5_0/2/2,3,1,0"}},
		{name: "port that is not there", p: Provider{Port: 2}, views: []deviceView{roce("mlx5_0")}, verdict: "has 1 ports, port 2 is wanted"},
		{name: "EFA skipped with a word", views: []deviceView{roce("rdmap0", efa), roce("mlx5_0")}, want: []string{"mlx5_0/1/2,3,1,0"}, verdict: "EFA has no reliable connections"},
		{name: "EFA named", p: Provider{Devices: []string{"rdmap0"}}, views: []deviceView{roce("rdmap0", efa)}, problem: "device rdmap0: skipped: EFA"},
		{name: "denied", p: Provider{DenyDevices: []string{"mlx5_*"}}, views: []deviceView{roce("mlx5_0"), roce("rxe0")}, want: []string{"rxe0/1/2,3,1,0"}, verdict: `denied by "mlx5_*"`},
		{name: "deny wins", p: Provider{Devices: []string{"mlx5_0"}, DenyDevices: []string{"mlx5_0"}}, views: []deviceView{roce("mlx5_0")}, verdict: "denied"},
		{name: "allowed by pattern", p: Provider{Devices: []string{"rxe*"}}, views: []deviceView{roce("mlx5_0"), roce("rxe0")}, want: []string{"rxe0/1/2,3,1,0"}, verdict: "not among the devices to use (rxe*)"},
		{name: "named and missing", p: Provider{Devices: []string{"mlx5_7"}}, views: []deviceView{roce("mlx5_0")}, problem: `device "mlx5_7" does not exist: this host has mlx5_0`},
		{name: "named, no device at all", p: Provider{Devices: []string{"mlx5_7"}}, problem: "this host has no RDMA device"},
		{name: "port down", views: []deviceView{roce("mlx5_0", down), roce("mlx5_1")}, want: []string{"mlx5_1/1/2,3,1,0"}},
		{name: "port down, named", p: Provider{Devices: []string{"mlx5_0"}}, views: []deviceView{roce("mlx5_0", down)}, problem: "device mlx5_0 port 1: it is down (polling): want active"},
		{name: "slow left out", views: []deviceView{roce("mlx5_0"), roce("rxe0", slow)}, want: []string{"mlx5_0/1/2,3,1,0"}},
		{name: "slow but named", p: Provider{Devices: []string{"mlx5_*", "rxe0"}}, views: []deviceView{roce("mlx5_0"), roce("rxe0", slow)}, want: []string{"mlx5_0/1/2,3,1,0", "rxe0/1/2,3,1,0"}},
		{name: "slow and alone", views: []deviceView{roce("rxe0", slow)}, want: []string{"rxe0/1/2,3,1,0"}},
		{name: "a denied device sets no pace", p: Provider{DenyDevices: []string{"mlx5_0"}}, views: []deviceView{roce("mlx5_0"), roce("rxe0", slow)}, want: []string{"rxe0/1/2,3,1,0"}},
		{name: "GID indexes", p: Provider{GIDIndexes: []int{3, 2}}, views: []deviceView{roce("mlx5_0")}, want: []string{"mlx5_0/1/3", "mlx5_0/1/2"}},
		{name: "GID index out of range", p: Provider{GIDIndexes: []int{40}}, views: []deviceView{roce("mlx5_0")}, problem: "GID index 40 is empty, zero or outside of its table of 16: in use are 2 (10.0.0.1, RoCE v2)"},
		{name: "no GID", views: []deviceView{roce("mlx5_0", noGID)}},
		{name: "no GID, named", p: Provider{Devices: []string{"mlx5_0"}}, views: []deviceView{roce("mlx5_0", noGID)}, problem: "no usable GID"},
		{name: "P_Key", p: Provider{PKey: 0x8001}, views: []deviceView{roce("mlx5_0")}, want: []string{"mlx5_0/1/2,3,1,0"}},
		{name: "P_Key absent", p: Provider{PKey: 0x8123}, views: []deviceView{roce("mlx5_0")}, problem: "P_Key 0x8123 is not in its table, which has 0xffff, 0x8001, 0x0002"},
		{name: "cannot be opened", views: []deviceView{roce("mlx5_0", broken)}, verdict: "cannot be opened: permission denied"},
		{name: "iWARP", views: []deviceView{roce("siw0", iwarp)}, want: []string{"siw0/1/0,1,2,3"}},
		{name: "iWARP without rdma_cm", noCM: true, views: []deviceView{roce("siw0", iwarp)}, verdict: "iWARP connects by rdma_cm only: no cm here"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var cm error
			if c.noCM {
				cm = fmt.Errorf("no cm here")
			}
			got := choose(c.p, c.views, cm)
			var rails []string
			for _, r := range got.rails {
				var gids []string
				for _, g := range r.gids {
					gids = append(gids, fmt.Sprint(g.Index))
				}
				rails = append(rails, fmt.Sprintf("%s/%d/%s", r.device, r.port, strings.Join(gids, ",")))
			}
			require.Equal(t, c.want, rails)
			require.Len(t, got.devices, len(c.views))
			problems := strings.Join(got.problems, "; ")
			if c.problem == "" {
				require.Empty(t, problems)
			} else {
				require.Contains(t, problems, c.problem)
				require.ErrorContains(t, got.refusal(), c.problem)
			}
			if c.verdict != "" {
				require.Contains(t, got.devices[0].Verdict, c.verdict)
			}
			if len(c.want) == 0 {
				require.Error(t, got.refusal(), "nothing to work with must be an error")
			}
			for _, d := range got.devices {
				require.NotEmpty(t, d.Verdict, "every device has a verdict")
			}
		})
	}
}

func TestPKeyIndex(t *testing.T) {
	table := []uint16{0xffff, 0x0005, 0x8005, 0}
	for _, c := range []struct {
		want  uint16
		index int
		ok    bool
	}{{0, 0, true}, {0xffff, 0, true}, {0x7fff, 0, true}, {0x8005, 2, true}, {0x0005, 2, true}, {0x8006, -1, false}, {0x8000, -1, false}} {
		i, ok := pkeyIndex(table, c.want)
		require.Equal(t, c.ok, ok, "%#x", c.want)
		require.Equal(t, c.index, i, "%#x", c.want)
	}
	i, ok := pkeyIndex([]uint16{0xffff, 0x0009}, 0x8009)
	require.True(t, ok, "a limited member is better than none")
	require.Equal(t, 1, i)
}
