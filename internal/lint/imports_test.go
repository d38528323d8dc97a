package lint

import (
	"sort"
	"strings"
)

// row is one line of the import table of the architecture: which packages of ours
// a package may import. A pattern "x/*" means any package below x, "*" means any
// but programs. What is not in a row is forbidden.
type row struct {
	pkg string
	may []string
}

// importTable covers every package of the module. Besides its row, each package
// except api may import the base packages of internal/ (see basePackages).
var importTable = []row{
	{"api/kvd/v1", nil},
	{"rdma", nil},
	{"rdma/wire", []string{"rdma"}},
	{"rdma/verbs", []string{"rdma", "rdma/verbs/ibv", "rdma/wire"}},
	{"rdma/verbs/ibv", nil},
	{"rdma/shm", []string{"rdma", "rdma/wire"}},
	// The server-side look-up reads an index bucket, so it knows the bytes of one.
	{"rdma/tcp", []string{"rdma", "storage/layout"}},
	{"rdma/simnic", []string{"rdma"}},
	{"rdma/rdmatest", []string{"rdma"}},
	{"storage/layout", nil},
	{"storage/arena", []string{"rdma", "storage/layout"}},
	{"storage/engine", []string{"api/kvd/v1"}},
	{"raft", []string{"api/kvd/v1"}},
	{"server", []string{"api/kvd/v1", "rdma", "rdma/*", "storage/*", "raft", "internal/gossip", "internal/placement"}},
	{"client", []string{"api/kvd/v1", "rdma", "rdma/*", "storage/layout"}},
	{"client/clientprom", []string{"client"}},
	{"cmd/kvd", []string{"*"}},
	{"cmd/kvctl", []string{"*"}},
	{"jepsen", []string{"client", "api/kvd/v1", "jepsen/*", "internal/faults"}},
	{"bench", []string{"client", "api/kvd/v1", "rdma/*", "internal/devcluster"}},

	// Base packages: everybody's, so they import nothing of ours.
	{"internal/chaos", nil},
	{"internal/clock", nil},
	{"internal/invariants", nil},
	{"internal/testutil", nil},

	// Settings that several programs share.
	{"internal/verbsflags", []string{"rdma/verbs"}},
	// Disk and clock that misbehave on order.
	{"internal/faults", nil},
	// Who seems to live, and where.
	{"internal/gossip", []string{"api/kvd/v1"}},
	// Where replicas belong: a pure function.
	{"internal/placement", nil},
	// The file of kvctl backup.
	{"internal/backup", []string{"api/kvd/v1", "storage/layout"}},
	// The verdict on a cluster: a pure function.
	{"internal/health", []string{"api/kvd/v1", "client"}},
	{"internal/doctor", []string{"client", "rdma", "rdma/*"}},

	// Upper packages of internal/: they run whole nodes.
	{"internal/devcluster", nil},
	{"internal/e2e", []string{"*"}},
	{"internal/sim", []string{"*"}},
	{"internal/lint", nil},
	{"model", nil},
}

// basePackages of internal/ may be imported by every package but api, whose
// generated code needs none.
var basePackages = []string{"internal/chaos", "internal/clock", "internal/invariants", "internal/testutil"}

// internalTools are programs of the build itself. They need no row: they import
// base packages at most, and nobody can import them.
const internalTools = "internal/tools"

// lowerLayers may not reach up even in their tests: a test of theirs that needs a
// whole server belongs to the server or to internal/.
var lowerLayers = []string{"api", "rdma", "storage", "raft"}

// upperLayers are what a test of a lower layer may not import.
var upperLayers = []string{"server", "client", "cmd", "jepsen", "bench", "internal/devcluster", "internal/e2e", "internal/sim"}

func findRow(pkg string) (row, bool) {
	for _, r := range importTable {
		if r.pkg == pkg {
			return r, true
		}
	}
	// Sub-packages of the tools of verification share their parent's row.
	for _, parent := range []string{"jepsen", "bench", "internal/sim", "internal/e2e"} {
		if strings.HasPrefix(pkg, parent+"/") {
			r, ok := findRow(parent)
			r.may = append([]string{parent, parent + "/*"}, r.may...)
			return r, ok
		}
	}
	return row{}, false
}

func (r row) allows(pkg string) bool {
	for _, pattern := range r.may {
		switch {
		case pattern == "*":
			if !within(pkg, "cmd") && !within(pkg, internalTools) {
				return true
			}
		case strings.HasSuffix(pattern, "/*"):
			if strings.HasPrefix(pkg, strings.TrimSuffix(pattern, "*")) {
				return true
			}
		case pattern == pkg:
			return true
		}
	}
	return false
}

// importDirections: the import table is law.
func importDirections(m *module) []finding {
	var out []finding
	noRow := map[string]bool{}
	for _, f := range m.files {
		tool := within(f.pkg, internalTools)
		r, ok := findRow(f.pkg)
		if !ok && !tool {
			if !noRow[f.pkg] {
				noRow[f.pkg] = true
				out = append(out, m.inFile(f.name, "package %s is not in the import table: give it a row in internal/lint and in docs/ARCHITECTURE.md", f.pkg))
			}
			continue
		}
		for imp, pos := range f.imports() {
			pkg, ours := strings.CutPrefix(imp, modulePath+"/")
			if !ours || pkg == f.pkg {
				continue
			}
			switch {
			case f.test:
				if withinAny(f.pkg, lowerLayers...) && withinAny(pkg, upperLayers...) {
					out = append(out, m.at(pos, "a test of %s imports %s, a layer above it: move the test up", f.pkg, pkg))
				}
			case isBase(pkg) && f.pkg != "api/kvd/v1":
			case tool || !r.allows(pkg):
				out = append(out, m.at(pos, "%s must not import %s: the import table does not allow it", f.pkg, pkg))
			}
		}
	}
	return out
}

func isBase(pkg string) bool {
	for _, b := range basePackages {
		if b == pkg {
			return true
		}
	}
	return false
}

// testOnly: packages that import testing stay out of what is shipped.
func testOnly(m *module) []finding {
	forTests := map[string]bool{}
	for _, f := range m.files {
		if _, ok := f.imports()["testing"]; ok && !f.test {
			forTests[f.pkg] = true
		}
	}
	var out []finding
	for _, f := range m.files {
		if f.test || forTests[f.pkg] {
			continue
		}
		for imp, pos := range f.imports() {
			if pkg, ok := strings.CutPrefix(imp, modulePath+"/"); ok && forTests[pkg] {
				out = append(out, m.at(pos, "%s imports %s, which imports testing: only tests may", f.pkg, pkg))
			}
		}
	}
	return out
}

// thirdParty names, for the layers that must stay small, all that they may import
// from other modules outside tests. The longest matching row counts.
var thirdParty = []row{
	{"raft", []string{"go.etcd.io/raft/v3", "google.golang.org/protobuf"}},
	{"storage", []string{"golang.org/x/sys", "github.com/zeebo/xxh3"}},
	{"storage/engine", []string{
		"github.com/cockroachdb/pebble/v2",
		"go.etcd.io/raft/v3/raftpb",
		"google.golang.org/protobuf",
		"github.com/zeebo/xxh3",
		"golang.org/x/sys",
	}},
	{"rdma", []string{"golang.org/x/sys", "github.com/zeebo/xxh3"}},
	{"rdma/rdmatest", []string{"golang.org/x/sys", "github.com/zeebo/xxh3", "github.com/stretchr/testify", "go.uber.org/goleak"}},
	{"api", []string{"google.golang.org/grpc", "google.golang.org/protobuf"}},
}

// fewModules: the lower layers use the standard library, their one engine, and
// what is listed above.
func fewModules(m *module) []finding {
	var out []finding
	for _, f := range m.files {
		if f.test {
			continue
		}
		var allowed *row
		for i, r := range thirdParty {
			if within(f.pkg, r.pkg) && (allowed == nil || len(r.pkg) > len(allowed.pkg)) {
				allowed = &thirdParty[i]
			}
		}
		if allowed == nil {
			continue
		}
		for imp, pos := range f.imports() {
			first, _, _ := strings.Cut(imp, "/")
			if !strings.Contains(first, ".") || within(imp, modulePath) {
				continue
			}
			if !withinAny(imp, allowed.may...) {
				out = append(out, m.at(pos, "%s must not import %s: outside tests it uses the standard library and %s",
					f.pkg, imp, strings.Join(allowed.may, ", ")))
			}
		}
	}
	return out
}

// cgoInVerbs: cgo is quarantined, so that everything else builds without a C
// compiler and can be audited as Go.
func cgoInVerbs(m *module) []finding {
	var out []finding
	for _, f := range m.files {
		if pos, ok := f.imports()["C"]; ok && f.pkg != "rdma/verbs/ibv" {
			out = append(out, m.at(pos, `import "C" is for rdma/verbs/ibv alone`))
		}
	}
	return out
}

func sorted(fs []finding) []finding {
	sort.Slice(fs, func(i, j int) bool { return fs[i] < fs[j] })
	return fs
}
