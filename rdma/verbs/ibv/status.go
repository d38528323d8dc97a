package ibv

import (
	"fmt"
	"path/filepath"
	"strings"
)

// LibraryStatus says what of RDMA is in this build and on this host.
type LibraryStatus struct {
	// Built tells that the shim was compiled against the headers. BuildNote says so in
	// a few words, or why not ("built without cgo").
	Built     bool
	BuildNote string
	Verbs     Library // libibverbs: everything
	RDMACM    Library // librdmacm: iWARP
}

// Library is one shared library.
type Library struct {
	Name    string // libibverbs.so.1
	Found   bool
	Path    string // of the file that was loaded
	Version string // from the file's name: 1.14.44.0; "" where it does not tell
	Err     string // why it was not found, or lacks symbols
}

// Status looks for the libraries (once in the life of the process) and tells what there
// is. It needs no device and never fails.
func Status() LibraryStatus { return cStatus() }

// Available is nil where verbs can be used (a device may still be missing), and wraps
// ErrUnavailable with the reason and the remedy otherwise.
func Available() error {
	s := Status()
	if !s.Built {
		return fmt.Errorf("%w: %s: want a build with CGO_ENABLED=1 on Linux with the headers of libibverbs and librdmacm", ErrUnavailable, s.BuildNote)
	}
	return s.Verbs.available("libibverbs (Debian: libibverbs1 and ibverbs-providers, Fedora: libibverbs)")
}

// RDMACMAvailable is Available for connections by rdma_cm, which iWARP needs.
func RDMACMAvailable() error {
	if err := Available(); err != nil {
		return err
	}
	return Status().RDMACM.available("librdmacm (Debian: librdmacm1, Fedora: librdmacm)")
}

func (l Library) available(install string) error {
	if l.Found {
		return nil
	}
	return fmt.Errorf("%w: %s: %s: install %s", ErrUnavailable, l.Name, l.Err, install)
}

// libraryVersion takes the version from a file's name, as distributions name them:
// libibverbs.so.1.14.44.0 is 1.14.44.0. The soname alone tells none.
func libraryVersion(soname, path string) string {
	base := filepath.Base(path)
	stem, _, _ := strings.Cut(soname, ".so.")
	v, ok := strings.CutPrefix(base, stem+".so.")
	if !ok || base == soname {
		return ""
	}
	return v
}
