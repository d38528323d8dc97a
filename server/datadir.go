package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protojson"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

var (
	// ErrLocked: another process uses the data directory.
	ErrLocked = errors.New("server: data directory in use")
	// ErrDataDir: the data directory can not be used as it is. The text says what to do.
	ErrDataDir = errors.New("server: data directory")
)

const (
	lockFile     = "LOCK"
	identityFile = "cluster.json"
	formatNumber = 1 // of manifests
	// identityFormat is that of the newest identity file: from 2 on a node may belong to a
	// cluster whose manifest does not list it. Where it is listed the file stays as it was.
	identityFormat = 2
	// joinFile holds the incarnation under which a node asks for an id, until it has one.
	joinFile = "joining"
)

// dataDir is a locked data directory. The lock is the first thing a node takes and
// the last it lets go: whatever serves this directory's memory is opened under it.
type dataDir struct {
	path string
	lock *os.File
	// claimed: this process has noted itself in the runningFile.
	claimed bool
}

func openDataDir(path string) (*dataDir, error) {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("%w %s: can not be made: %w", ErrDataDir, path, err)
	}
	lock, err := os.OpenFile(filepath.Join(path, lockFile), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("%w %s: is it writable for this user? %w", ErrDataDir, path, err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		owner, _ := io.ReadAll(io.LimitReader(lock, 64))
		_ = lock.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("%w: %s is locked by process %s: stop it first, or give this node its own directory", ErrLocked, path, strings.TrimSpace(string(owner)))
		}
		return nil, fmt.Errorf("%w %s: lock: %w", ErrDataDir, path, err)
	}
	d := &dataDir{path: path, lock: lock}
	if err := lock.Truncate(0); err == nil {
		_, err = lock.WriteAt([]byte(fmt.Sprintf("%d\n", os.Getpid())), 0)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("%w %s: %w", ErrDataDir, path, err), d.close())
		}
	}
	return d, nil
}

func (d *dataDir) close() error { return d.lock.Close() }

// identity is what a data directory says of its node. It is written before the node
// takes part in anything.
type identity struct {
	manifest *kvdv1.Manifest
	nodeID   uint64
	// joined is the incarnation of a node that came later; 0: the manifest lists it.
	joined uint64
	// format of the file at least. It is raised, for good, when the cluster or this node is no
	// longer what its manifest says: an older kvd would take it for that.
	format int
	// active: every node of the manifest wrote it down, so Adopt is over for good.
	active bool
	// leading: this node drew the manifest and has to see that the others get it.
	leading bool
	// opened: the replicas' hard states were durable once, so a group without one has
	// lost its log.
	opened bool
}

func (id *identity) incarnation() uint64 {
	if id.joined != 0 {
		return id.joined
	}
	return id.recorded(id.nodeID)
}

// recorded is the incarnation that the manifest gives a node; 0: no such node.
func (id *identity) recorded(nodeID uint64) uint64 {
	for _, n := range id.manifest.GetNodes() {
		if n.GetNodeId() == nodeID {
			return n.GetIncarnation()
		}
	}
	return 0
}

// identityJSON is the file. Sum covers the other fields as they are encoded.
type identityJSON struct {
	Format   int             `json:"format"`
	NodeID   uint64          `json:"node_id"`
	Active   bool            `json:"active"`
	Leading  bool            `json:"leading"`
	Opened   bool            `json:"opened"`
	Joined   string          `json:"joined,omitempty"` // incarnation; format 2
	Manifest json.RawMessage `json:"manifest"`
	Sum      string          `json:"sum"`
}

func (j identityJSON) sum() string {
	var compact strings.Builder
	var any any
	if err := json.Unmarshal(j.Manifest, &any); err == nil {
		b, _ := json.Marshal(any) // maps are encoded in key order, so the form is canonical
		compact.Write(b)
	}
	return fmt.Sprintf("%016x", xxh3.HashString(fmt.Sprintf("%d|%d|%t|%t|%t|%s%s", j.Format, j.NodeID, j.Active, j.Leading, j.Opened, j.Joined, compact.String())))
}

// loadIdentity returns nil where the directory has none yet.
func (d *dataDir) loadIdentity() (*identity, error) {
	path := filepath.Join(d.path, identityFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, d.checkEmpty()
	}
	if err != nil {
		return nil, fmt.Errorf("%w: read %s: %w", ErrDataDir, path, err)
	}
	damaged := func(what string, err error) error {
		return fmt.Errorf("%w: %s is damaged (%s: %v): put the file back as it was (it changes at the first start only), or leave this node out", ErrDataDir, path, what, err)
	}
	if err := checkFormat(path, b, identityFormat); err != nil {
		return nil, err
	}
	var j identityJSON
	if err := json.Unmarshal(b, &j); err != nil {
		return nil, damaged("not JSON", err)
	}
	if got := j.sum(); got != j.Sum {
		return nil, damaged("check sum", fmt.Errorf("have %s, want %s", got, j.Sum))
	}
	m := &kvdv1.Manifest{}
	if err := protojson.Unmarshal(j.Manifest, m); err != nil {
		return nil, damaged("manifest", err)
	}
	if f := m.GetFormat(); f != formatNumber {
		return nil, fmt.Errorf("%w: the manifest in %s has format %d, this kvd knows %d: start the kvd that wrote it", ErrDataDir, path, f, formatNumber)
	}
	if err := checkManifest(m); err != nil {
		return nil, damaged("manifest", err)
	}
	id := &identity{manifest: m, nodeID: j.NodeID, active: j.Active, leading: j.Leading, opened: j.Opened, format: j.Format}
	if j.Joined != "" {
		if id.joined, err = strconv.ParseUint(j.Joined, 16, 64); err != nil {
			return nil, damaged("incarnation", err)
		}
	}
	if id.incarnation() == 0 {
		return nil, damaged("manifest", fmt.Errorf("node %d is not in it", j.NodeID))
	}
	return id, nil
}

// checkFormat refuses a file of a newer version by its format alone: nothing else of it
// need look as this version knows it.
func checkFormat(path string, b []byte, known int) error {
	var j struct {
		Format int `json:"format"`
	}
	if err := json.Unmarshal(b, &j); err != nil || j.Format <= known {
		return nil // what is damaged is found by who reads it
	}
	return fmt.Errorf("%w: %s has format %d, this kvd knows %d: start the newer kvd that wrote it", ErrDataDir, path, j.Format, known)
}

// checkEmpty refuses a directory that has stores but no identity: it lost the file
// which says whose they are.
func (d *dataDir) checkEmpty() error {
	for _, name := range []string{"log", "state"} {
		if _, err := os.Stat(filepath.Join(d.path, name)); err == nil {
			return fmt.Errorf("%w: %s has a %s store but no %s, so it is not known whose it is: restore the file, or use an empty directory", ErrDataDir, d.path, name, identityFile)
		}
	}
	return nil
}

// saveIdentity replaces the file durably: old or new, never half.
func (d *dataDir) saveIdentity(id *identity) error {
	m, err := protojson.Marshal(id.manifest)
	if err != nil {
		return fmt.Errorf("server: encode manifest: %w", err)
	}
	j := identityJSON{Format: max(1, id.format), NodeID: id.nodeID, Active: id.active, Leading: id.leading, Opened: id.opened, Manifest: m}
	if id.joined != 0 {
		j.Format, j.Joined = identityFormat, fmt.Sprintf("%016x", id.joined)
	}
	if id.manifest.GetWantedReplication() != 0 {
		j.Format = identityFormat // an older kvd does not know the field
	}
	j.Sum = j.sum()
	b, err := json.MarshalIndent(j, "", "  ")
	if err != nil {
		return fmt.Errorf("server: encode identity: %w", err)
	}
	if err := writeDurably(d.path, identityFile, append(b, '\n')); err != nil {
		return fmt.Errorf("%w %s: write %s: %w", ErrDataDir, d.path, identityFile, err)
	}
	return nil
}

func writeDurably(dir, name string, content []byte) (err error) {
	tmp, err := os.CreateTemp(dir, name+".*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(tmp.Name())
		}
	}()
	_, err = tmp.Write(content)
	if err == nil {
		err = tmp.Sync()
	}
	if err = errors.Join(err, tmp.Close()); err != nil {
		return err
	}
	if err = os.Rename(tmp.Name(), filepath.Join(dir, name)); err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// joiningAs returns the incarnation under which this directory asks for its id: the same
// one until it has it, so that a start that was cut off costs no id.
func (d *dataDir) joiningAs() (uint64, error) {
	path := filepath.Join(d.path, joinFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		inc := randomID()
		if err := writeDurably(d.path, joinFile, fmt.Appendf(nil, "%016x\n", inc)); err != nil {
			return 0, fmt.Errorf("%w %s: write %s: %w", ErrDataDir, d.path, joinFile, err)
		}
		return inc, nil
	}
	if err != nil {
		return 0, fmt.Errorf("%w: read %s: %w", ErrDataDir, path, err)
	}
	inc, err := strconv.ParseUint(strings.TrimSpace(string(b)), 16, 64)
	if err != nil || inc == 0 {
		return 0, fmt.Errorf("%w: %s is damaged: this node has no id yet, so empty the directory and join again", ErrDataDir, path)
	}
	return inc, nil
}

// joinedNow forgets it; a file that stays means nothing.
func (d *dataDir) joinedNow() { _ = os.Remove(filepath.Join(d.path, joinFile)) }
