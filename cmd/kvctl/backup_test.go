package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/internal/backup"
)

// fakeNode leads everything and loses exports and imports when the test wants it.
type fakeNode struct {
	kvdv1.UnimplementedClusterServer
	kvdv1.UnimplementedBackupServer
	addr string

	mu     sync.Mutex
	opens  int                              // exports of shard 2 so far
	lose   int                              // so many exports of shard 2 are lost behind their first page
	refuse int                              // so many imports succeed, then all are refused; 0: none is
	took   map[string]*kvdv1.BackupItem     // imported
	pages  map[uint32][][]*kvdv1.BackupItem // by shard
	read   func()                           // not nil: is called when a page is to be read
	hold   chan struct{}                    // not nil: imports wait until it is closed

	members []*kvdv1.MemberStatus
	silent  bool   // tells of no members
	refuses error  // what nodes are moved with
	left    func() // not nil: is called when a node is to leave
}

func newFakeNode(t *testing.T) *fakeNode {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	n := &fakeNode{addr: l.Addr().String(), took: map[string]*kvdv1.BackupItem{}, pages: map[uint32][][]*kvdv1.BackupItem{}}
	for shard := uint32(1); shard <= 3; shard++ {
		for page := range 3 {
			var items []*kvdv1.BackupItem
			for i := range 5 {
				items = append(items, &kvdv1.BackupItem{NamespaceId: 1, Key: fmt.Appendf(nil, "%d/%d/%d", shard, page, i), Value: bytes.Repeat([]byte("v"), 1000)})
			}
			n.pages[shard] = append(n.pages[shard], items)
		}
	}
	s := grpc.NewServer()
	kvdv1.RegisterClusterServer(s, n)
	kvdv1.RegisterBackupServer(s, n)
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Stop()
		require.NoError(t, <-served)
	})
	return n
}

func (n *fakeNode) Status(context.Context, *kvdv1.StatusRequest) (*kvdv1.StatusResponse, error) {
	return &kvdv1.StatusResponse{NodeId: 1, ClusterId: "fake", Address: n.addr}, nil
}

func fakeDetail(code codes.Code, why kvdv1.ErrorDetail_Reason) error {
	st, err := status.New(code, "as the test wants it").WithDetails(&kvdv1.ErrorDetail{Reason: why})
	if err != nil {
		panic(err)
	}
	return st.Err()
}

func (n *fakeNode) OpenExport(_ context.Context, req *kvdv1.OpenExportRequest) (*kvdv1.OpenExportResponse, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if req.GetShard() == 0 {
		return &kvdv1.OpenExportResponse{Cluster: &kvdv1.BackupCluster{
			ClusterId: "fake", Shards: 3, HashSeed: 5, MaxValueBytes: 1 << 20, Namespaces: []*kvdv1.NamespaceInfo{{Id: 1, Name: "default", OneSided: true}},
		}}, nil
	}
	id := uint64(req.GetShard())
	if req.GetShard() == 2 {
		n.opens++
		id += 10 * uint64(n.opens)
	}
	sh := &kvdv1.BackupShard{Shard: req.GetShard(), Index: 100 + id, Term: 3}
	for _, p := range n.pages[req.GetShard()] {
		for _, it := range p {
			sh.Keys++
			sh.Bytes += backup.ItemBytes(it)
		}
	}
	return &kvdv1.OpenExportResponse{ExportId: id, Shard: sh}, nil
}

func (n *fakeNode) ReadExport(_ context.Context, req *kvdv1.ReadExportRequest) (*kvdv1.ReadExportResponse, error) {
	if n.read != nil {
		n.read()
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	shard, page := uint32(req.GetExportId()%10), 0
	if len(req.GetAfterKey()) > 0 {
		page = int(req.GetAfterKey()[2]-'0') + 1
	}
	if shard == 2 && page == 1 && n.lose > 0 {
		n.lose--
		return nil, fakeDetail(codes.Unauthenticated, kvdv1.ErrorDetail_REASON_SESSION_GONE)
	}
	if page == len(n.pages[shard]) {
		return &kvdv1.ReadExportResponse{}, nil
	}
	return &kvdv1.ReadExportResponse{Items: n.pages[shard][page], More: true}, nil
}

func (n *fakeNode) CloseExport(context.Context, *kvdv1.CloseExportRequest) (*kvdv1.CloseExportResponse, error) {
	return &kvdv1.CloseExportResponse{}, nil
}

func (n *fakeNode) ImportCluster(_ context.Context, req *kvdv1.ImportClusterRequest) (*kvdv1.ImportClusterResponse, error) {
	return &kvdv1.ImportClusterResponse{Namespaces: req.GetNamespaces()}, nil
}

func (n *fakeNode) Import(_ context.Context, req *kvdv1.ImportRequest) (*kvdv1.ImportResponse, error) {
	if n.hold != nil {
		<-n.hold
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.refuse == 1 {
		return nil, fakeDetail(codes.InvalidArgument, kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT)
	}
	n.refuse = max(0, n.refuse-1)
	r := &kvdv1.ImportResponse{}
	for _, it := range req.GetItems() {
		if n.took[string(it.GetKey())] != nil {
			r.Same++
			continue
		}
		n.took[string(it.GetKey())] = it
		r.Applied++
	}
	return r, nil
}

func (n *fakeNode) run(t *testing.T, stdin []byte, args ...string) (out, errOut []byte, err error) {
	return n.runFrom(t.Context(), bytes.NewReader(stdin), args...)
}

func (n *fakeNode) runFrom(ctx context.Context, stdin io.Reader, args ...string) (out, errOut []byte, err error) {
	var o, e bytes.Buffer
	root := newRoot()
	root.SetOut(&o)
	root.SetErr(&e)
	root.SetIn(stdin)
	root.SetArgs(append([]string{"--endpoints", n.addr}, args...))
	err = root.ExecuteContext(ctx)
	return o.Bytes(), e.Bytes(), err
}

// A shard whose export is lost on the way is begun anew, and what was written of it is
// taken back; what went to a pipe can not be.
func TestBackupExportLost(t *testing.T) {
	n := newFakeNode(t)
	file := filepath.Join(t.TempDir(), "b")
	n.lose = 2
	_, _, err := n.run(t, nil, "backup", file)
	require.NoError(t, err)
	require.Equal(t, 3, n.opens)
	f, err := os.Open(file)
	require.NoError(t, err)
	s, err := backup.Verify(f, nil)
	require.NoError(t, errors.Join(err, f.Close()))
	require.Equal(t, uint64(45), s.End.GetKeys())
	require.Equal(t, uint64(132), s.Shards[1].GetIndex(), "of the third export")

	n.lose = 1
	_, _, err = n.run(t, nil, "backup", "-")
	require.ErrorContains(t, err, "can not be taken back")
	require.ErrorIs(t, err, client.ErrExportGone)

	n.lose = 100
	file += "2"
	_, _, err = n.run(t, nil, "backup", file)
	require.ErrorIs(t, err, client.ErrExportGone)
	left, err := filepath.Glob(file + "*")
	require.NoError(t, err)
	require.Empty(t, left, "nothing is left of a backup that failed")
}

// What a node exports is not what it announced: the backup fails.
func TestBackupShortExport(t *testing.T) {
	n := newFakeNode(t)
	file := filepath.Join(t.TempDir(), "b")
	n.mu.Lock()
	n.pages[3] = n.pages[3][:2]
	full := n.pages[3]
	n.mu.Unlock()
	_, _, err := n.run(t, nil, "backup", file)
	require.NoError(t, err, "all that was announced")
	n.mu.Lock()
	n.pages[3] = append(full, nil) // an empty page ends it before its time
	n.pages[3][0], n.pages[3][2] = nil, full[0]
	n.mu.Unlock()
	_, _, err = n.run(t, nil, "backup", file+"2")
	require.ErrorContains(t, err, "shard 3: 0 keys")
}

// A restore that fails says what is left, and goes on where it was told to.
func TestRestoreGoesOn(t *testing.T) {
	n := newFakeNode(t)
	dump, errOut, err := n.run(t, nil, "backup", "-")
	require.NoError(t, err)
	require.Contains(t, string(errOut), "3 shards, 45 keys")
	n.mu.Lock()
	n.pages, n.refuse = map[uint32][][]*kvdv1.BackupItem{}, 5
	n.mu.Unlock()
	_, _, err = n.run(t, dump, "restore", "-", "--parallel", "1")
	require.ErrorContains(t, err, "left with a part")
	require.ErrorContains(t, err, "--continue")
	require.ErrorIs(t, err, client.ErrInvalid)
	some := len(n.took)
	require.NotZero(t, some)
	require.Less(t, some, 45)
	n.mu.Lock()
	n.refuse = 0
	n.mu.Unlock()
	out, _, err := n.run(t, dump, "-o", "json", "restore", "-", "--continue")
	require.NoError(t, err)
	require.Len(t, n.took, 45)
	require.Contains(t, string(out), fmt.Sprintf(`"present_same": %d`, some))
}

// A token's file that others can read is used, and told of.
func TestOpenTokenFile(t *testing.T) {
	n := newFakeNode(t)
	file := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(file, []byte("kvd_x"), 0o600))
	_, errOut, err := n.run(t, nil, "--token-file", file, "status")
	require.NoError(t, err)
	require.Empty(t, string(errOut))
	require.NoError(t, os.Chmod(file, 0o640))
	_, errOut, err = n.run(t, nil, "--token-file", file, "status")
	require.NoError(t, err)
	require.Contains(t, string(errOut), "has mode 0640, so others than its owner can read it: chmod 600")
	require.Equal(t, 1, bytes.Count(errOut, []byte("\n")))
}

// A node that is reached and says nothing is given up after --connect-timeout, whatever
// the whole command may take.
func TestConnectTimeout(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0") // the kernel takes connections for it
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, l.Close()) })
	n := &fakeNode{addr: l.Addr().String()}
	_, _, err = n.run(t, nil, "--timeout", "1h", "--connect-timeout", "100ms", "status")
	require.ErrorIs(t, err, client.ErrUnavailable)
	_, _, err = n.run(t, nil, "--connect-timeout", "0s", "status")
	require.ErrorContains(t, err, "want more than 0")
}
