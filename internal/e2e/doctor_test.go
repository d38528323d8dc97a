//go:build e2e

package e2e

import (
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/internal/devcluster"
	"github.com/kvd-io/kvd/internal/doctor"
)

// TestDoctor: in a sound cluster every way that is there is usable and timed, and the
// fastest is the one in use.
func TestDoctor(t *testing.T) {
	c := sharedNodes(t)
	r := diagnosed(t, c.kvctl(t, "-o", "json", "doctor", "--reads", "200"))
	require.Empty(t, about(r, "cluster"))
	require.Empty(t, about(r, "node"))
	require.NotEmpty(t, r.Host.Kernel)
	require.NotEmpty(t, r.RDMA.Verdict)
	require.Len(t, r.Cluster.Nodes, 3)
	require.False(t, r.Cluster.TLS)
	for i, n := range r.Cluster.Nodes {
		require.Equal(t, uint64(i+1), n.ID)
		require.True(t, n.SameHost)
		require.Equal(t, "shm", n.Transport)
		shm, tcp, grpc := pathBy(t, n, "shm"), pathBy(t, n, "tcp"), pathBy(t, n, "grpc")
		for _, p := range []doctor.Path{shm, tcp, grpc} {
			require.True(t, p.Usable, "%+v", p)
			require.Positive(t, p.P50NS)
		}
		require.Equal(t, 200, shm.Reads)
		require.Equal(t, 200, tcp.Reads)
		require.Less(t, shm.P50NS, tcp.P50NS, "shared memory costs no system call")
		require.True(t, shm.Confidential)
	}

	text := c.kvctl(t, "doctor")
	for _, words := range []string{"THIS HOST", "RDMA DEVICES", "CLUSTER at", "shm (chosen)", "READ P50"} {
		require.Contains(t, text.stdout, words)
	}
}

// TestDoctorWithoutCluster: the local part is there whatever runs elsewhere.
func TestDoctorWithoutCluster(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	nowhere := l.Addr().String()

	r := diagnosed(t, kvctl(t, nil, "--endpoints", nowhere, "--timeout", "2s", "-o", "json", "doctor"))
	require.False(t, r.Healthy)
	require.Len(t, about(r, "cluster"), 1)
	require.Contains(t, about(r, "cluster")[0].What, nowhere)
	require.NotEmpty(t, r.Host.Kernel)
	require.NotEmpty(t, r.RDMA.Verdict)

	text := kvctl(t, nil, "--endpoints", nowhere, "--timeout", "2s", "doctor")
	require.Equal(t, doctorFoundProblems, text.code)
	require.Contains(t, text.stdout, "THIS HOST")
	require.Contains(t, text.stdout, "--endpoints")

	local := diagnosed(t, kvctl(t, nil, "--endpoints", nowhere, "-o", "json", "doctor", "--local"))
	require.Nil(t, local.Cluster)
	require.Empty(t, about(local, "cluster"))

	required := diagnosed(t, kvctl(t, nil, "-o", "json", "doctor", "--local", "--require-rdma", "--rdma-devices", "no_such_device"))
	require.False(t, required.Healthy)
	require.NotEmpty(t, about(required, "devices"))

	kvctl(t, nil, "doctor", "--local", "--reads", "0").failed(t, 2, "--reads")
	kvctl(t, nil, "doctor", "--local", "--arena", "much").failed(t, 2, "--arena")
	kvctl(t, nil, "doctor", "--local", "--rdma-max-mtu", "9000").failed(t, 2, "--rdma-max-mtu")
}

// TestDoctorFindsWhatIsWrong: a node that is gone, and a user who is not admitted to shared
// memory, each with what to do about it.
func TestDoctorFindsWhatIsWrong(t *testing.T) {
	c := newCluster(t, devcluster.Config{})
	for id := range uint64(3) {
		require.Contains(t, c.logOf(t, id+1), "RDMA device", "kvd says what it found")
	}
	if user := nobody(); user != nil {
		args := []string{"--endpoints", strings.Join(c.Endpoints(), ","), "-o", "json", "doctor"}
		r := diagnosed(t, command{bin: kvctlBin, user: user, args: args}.run(t))
		for _, n := range r.Cluster.Nodes {
			require.Equal(t, "tcp", n.Transport)
			require.False(t, pathBy(t, n, "shm").Usable)
			found := about(r, fmt.Sprintf("node %d", n.ID))
			require.Len(t, found, 1)
			require.Equal(t, doctor.Problem, found[0].Level)
			require.Contains(t, found[0].Do, "--shm-uids")
			require.Contains(t, found[0].Do, fmt.Sprint(user.Uid))
		}
	}
	require.NoError(t, c.Node(3).Kill())
	r := diagnosed(t, c.kvctl(t, "-o", "json", "doctor"))
	require.False(t, r.Healthy)
	require.Len(t, about(r, "node"), 1, "%+v", r.Findings)
	gone := about(r, "node 3")
	require.Len(t, gone, 1)
	require.Equal(t, doctor.Problem, gone[0].Level)
	require.Contains(t, gone[0].What, "cannot be reached")
	require.True(t, pathBy(t, r.Cluster.Nodes[0], "shm").Usable)
}

// TestDoctorSecured: with TLS and a token each way to each node is timed; without one of them
// the report says which, and what to do.
func TestDoctorSecured(t *testing.T) {
	s := startSecured(t, devcluster.Config{})
	reads, _ := s.token(t, "reads", "default:read")
	doctor := []string{"-o", "json", "doctor", "--reads", "100"}
	r := diagnosed(t, s.as(t, reads, doctor...))
	require.Empty(t, about(r, "cluster"))
	require.Empty(t, about(r, "node"))
	require.True(t, r.Cluster.TLS)
	require.True(t, r.Cluster.Token)
	require.Len(t, r.Cluster.Nodes, 3)
	for _, n := range r.Cluster.Nodes {
		for _, name := range []string{"shm", "tcp", "grpc"} {
			p := pathBy(t, n, name)
			require.True(t, p.Usable, "%+v", p)
			require.True(t, p.Confidential, "%+v", p)
			require.Positive(t, p.P50NS)
		}
		require.Equal(t, 100, pathBy(t, n, "tcp").Reads)
	}

	for name, tc := range map[string]struct {
		args []string
		what string
		do   string
	}{
		"no token":        {[]string{"--ca", s.ca.file}, "token", "--token-file"},
		"not its right":   {[]string{"--ca", s.ca.file, "--token-file", reads, "-n", "elsewhere"}, "elsewhere", "--token-file"},
		"no TLS":          {nil, "TLS", "--ca"},
		"other authority": {[]string{"--ca", newAuthority(t, s.dir, "others").file, "--token-file", reads}, "unknown authority", "--ca"},
	} {
		t.Run(name, func(t *testing.T) {
			r := diagnosed(t, s.kvctl(t, append(tc.args, doctor...)...))
			require.False(t, r.Healthy)
			require.NotEmpty(t, r.Host.Kernel, "the local part is there")
			found := about(r, "cluster")
			require.Len(t, found, 1)
			require.Contains(t, found[0].What, tc.what)
			require.Contains(t, found[0].Do, tc.do)
		})
	}
}
