package lint

import (
	"testing"

	"github.com/stretchr/testify/require"
)

const root = "../.."

var rules = []struct {
	name  string
	check func(*module) []finding
}{
	{"import directions", importDirections},
	{"test helpers stay in tests", testOnly},
	{"few modules below", fewModules},
	{"cgo in rdma/verbs/ibv only", cgoInVerbs},
	{"one package comment", packageComments},
	{"no sleep in tests", noSleepInTests},
	{"typed atomics", typedAtomics},
	{"panics are bugs", panicsAreBugs},
	{"exit and log in main only", exitInMain},
	{"sentinel errors", sentinels},
	{"file size", fileSize},
	{"no machine paths", noMachinePaths},
}

func TestHouseRules(t *testing.T) {
	m, err := load(root)
	require.NoError(t, err)
	require.NotEmpty(t, m.files)
	for _, r := range rules {
		t.Run(r.name, func(t *testing.T) {
			for _, f := range sorted(r.check(m)) {
				t.Error(f)
			}
		})
	}
	t.Run("dependencies have a reason", func(t *testing.T) {
		mod, err := readGoMod(root)
		require.NoError(t, err)
		require.NotEmpty(t, mod.Require)
		for _, f := range sorted(dependencies(m, mod)) {
			t.Error(f)
		}
	})
}

// Each rule sees what it forbids, at the right place, and lets the rest pass.
func TestRulesSeeWhatTheyForbid(t *testing.T) {
	long := "// Package raft.\npackage raft\n"
	for range maxLines {
		long += "\n"
	}
	for _, c := range []struct {
		rule  string
		files map[string]string
		want  []string // a part of each finding, in order; none: it must pass
	}{
		{"import directions", map[string]string{"rdma/a.go": imports("rdma", "github.com/kvd-io/kvd/api/kvd/v1")},
			[]string{"rdma must not import api/kvd/v1"}},
		{"import directions", map[string]string{"rdma/tcp/a.go": imports("tcp", "github.com/kvd-io/kvd/storage/layout")}, nil},
		{"import directions", map[string]string{"rdma/shm/a.go": imports("shm", "github.com/kvd-io/kvd/storage/layout")},
			[]string{"rdma/shm must not import storage/layout"}},
		{"import directions", map[string]string{"raft/a.go": imports("raft", "github.com/kvd-io/kvd/internal/clock")}, nil},
		{"import directions", map[string]string{"api/kvd/v1/a.go": imports("kvdv1", "github.com/kvd-io/kvd/internal/clock")},
			[]string{"must not import internal/clock"}},
		{"import directions", map[string]string{"internal/clock/a.go": imports("clock", "github.com/kvd-io/kvd/rdma")},
			[]string{"internal/clock must not import rdma"}},
		{"import directions", map[string]string{"newthing/a.go": "package newthing"},
			[]string{"newthing is not in the import table"}},
		{"import directions", map[string]string{"raft/a_test.go": imports("raft", "github.com/kvd-io/kvd/server")},
			[]string{"a layer above it"}},
		{"import directions", map[string]string{"raft/a_test.go": imports("raft", "github.com/kvd-io/kvd/storage/engine")}, nil},
		{"import directions", map[string]string{"client/a_test.go": imports("client", "github.com/kvd-io/kvd/server")}, nil},
		{"import directions", map[string]string{"cmd/kvd/a.go": imports("main", "github.com/kvd-io/kvd/server")}, nil},
		{"import directions", map[string]string{"cmd/kvd/a.go": imports("main", "github.com/kvd-io/kvd/cmd/kvctl")},
			[]string{"must not import cmd/kvctl"}},
		{"import directions", map[string]string{"internal/tools/x/a.go": imports("main", "github.com/kvd-io/kvd/server")},
			[]string{"must not import server"}},
		{"test helpers stay in tests", map[string]string{
			"internal/testutil/a.go": imports("testutil", "testing"),
			"server/a.go":            imports("server", "github.com/kvd-io/kvd/internal/testutil"),
			"server/a_test.go":       imports("server", "github.com/kvd-io/kvd/internal/testutil"),
		}, []string{"server/a.go:3: server imports internal/testutil"}},
		{"few modules below", map[string]string{"raft/a.go": imports("raft", "github.com/spf13/cobra")},
			[]string{"raft must not import github.com/spf13/cobra"}},
		{"few modules below", map[string]string{"storage/engine/a.go": imports("engine", "github.com/cockroachdb/pebble/v2/vfs")}, nil},
		{"few modules below", map[string]string{"storage/arena/a.go": imports("arena", "github.com/cockroachdb/pebble/v2")},
			[]string{"storage/arena must not import"}},
		{"few modules below", map[string]string{"raft/a_test.go": imports("raft", "github.com/stretchr/testify/require")}, nil},
		{"cgo in rdma/verbs/ibv only", map[string]string{"rdma/shm/a.go": imports("shm", "C"), "rdma/verbs/ibv/a.go": imports("ibv", "C")},
			[]string{"rdma/shm/a.go:3"}},
		{"one package comment", map[string]string{"raft/a.go": "package raft"}, []string{"no package comment"}},
		{"one package comment", map[string]string{"raft/a.go": "// Package raft.\npackage raft", "raft/b.go": "// Again.\npackage raft", "raft/a_test.go": "// Not counted.\npackage raft"},
			[]string{"2 package comments (a.go, b.go)"}},
		{"one package comment", map[string]string{"raft/a.go": "// Package raft.\npackage raft", "raft/b.go": "// A notice.\n\npackage raft"}, nil},
		{"no sleep in tests", map[string]string{
			"raft/a_test.go":           "package raft\nimport \"time\"\nfunc f() { time.Sleep(1) }",
			"storage/engine/a_test.go": "package engine\nimport zeit \"time\"\nfunc f() { zeit.Sleep(1) }",
			"raft/a.go":                "package raft\nimport \"time\"\nfunc f() { time.Sleep(1) }",
			"bench/a_test.go":          "package main\nimport \"time\"\nfunc f() { time.Sleep(1) }",
		}, []string{"raft/a_test.go:3", "storage/engine/a_test.go:3"}},
		{"typed atomics", map[string]string{
			"raft/a.go":           "package raft\nimport \"sync/atomic\"\nvar n uint64\nfunc f() { atomic.AddUint64(&n, 1) }",
			"client/a.go":         "package client\nimport \"sync/atomic\"\nvar n atomic.Uint64\nfunc f() { n.Add(1) }",
			"storage/layout/a.go": "package layout\nimport \"sync/atomic\"\nvar n uint64\nfunc f() { atomic.AddUint64(&n, 1) }",
		}, []string{"raft/a.go:4: atomic.AddUint64"}},
		{"panics are bugs", map[string]string{
			"raft/a.go":      "package raft\nfunc f() {\n\tpanic(\"disk\")\n}",
			"raft/b.go":      "package raft\nfunc g() {\n\t// bug: released twice\n\tpanic(1)\n}\nfunc h() {\n\tpanic(2) // bug: no\n}",
			"raft/c.go":      "package raft\nimport \"fmt\"\nfunc k() { panic(fmt.Sprintf(\"raft: group %d stopped twice\", 1)) }",
			"raft/d.go":      "package raft\nimport \"fmt\"\nfunc l(err error) {\n\tpanic(err)\n\tpanic(fmt.Sprintf(\"raft: %v\", err))\n}",
			"raft/a_test.go": "package raft\nfunc t() { panic(1) }",
		}, []string{"raft/a.go:3", "raft/d.go:4", "raft/d.go:5"}},
		{"exit and log in main only", map[string]string{
			"server/a.go":  "package server\nimport (\"os\"; \"log\"; \"log/slog\")\nfunc f() {\n\tos.Exit(1)\n\tlog.Print()\n\tslog.Info(\"\")\n}",
			"cmd/kvd/a.go": "package main\nimport \"os\"\nfunc main() { os.Exit(1) }",
		}, []string{"server/a.go:2: package log", "server/a.go:4: os.Exit", "server/a.go:6: slog.Info"}},
		{"sentinel errors", map[string]string{
			"raft/a.go": "package raft\nimport \"errors\"\n// Gone: it is gone.\nvar Gone = errors.New(\"gone\")\nvar ErrBare = errors.New(\"bare\")\n" +
				"// ErrGood: fine.\nvar ErrGood = errors.New(\"good\")\nvar (\n\t// ErrA: fine.\n\tErrA = errors.New(\"a\")\n\tErrB = errors.New(\"b\") // fine\n\terrOwn = errors.New(\"own\")\n)",
		}, []string{"raft/a.go:4: exported error Gone", "raft/a.go:5: ErrBare has no comment"}},
		{"file size", map[string]string{"raft/a.go": long, "raft/gen.go": "// Code generated by x. DO NOT EDIT.\n\n" + long},
			[]string{"raft/a.go: 802 lines"}},
		{"no machine paths", map[string]string{
			"README.md":  "see " + machinePaths[0] + "x\nand net" + machinePaths[0] + "x or https://host" + machinePaths[0] + "\n",
			"Makefile":   "x = " + machinePaths[1] + "y\n",
			"raft/a.bin": "\x00" + machinePaths[0],
		}, []string{"Makefile: line 1", "README.md: line 1"}},
	} {
		t.Run(c.rule, func(t *testing.T) {
			got := sorted(check(t, c.rule, c.files))
			require.Len(t, got, len(c.want), "%v", got)
			for i, want := range c.want {
				require.Contains(t, string(got[i]), want)
			}
		})
	}
}

func TestSleepExceptions(t *testing.T) {
	m, err := parse(map[string][]byte{
		"raft/disk_test.go": []byte("package raft\nimport \"time\"\nfunc f() { time.Sleep(1) }"),
		"raft/old_test.go":  []byte("package raft"),
	})
	require.NoError(t, err)
	require.Len(t, sleepsIn(m, nil), 1)
	require.Empty(t, sleepsIn(m, map[string]string{"raft/disk_test.go": "plays a slow disk"}))
	got := sorted(sleepsIn(m, map[string]string{"raft/disk_test.go": "plays a slow disk", "raft/old_test.go": "did once"}))
	require.Len(t, got, 1)
	require.Contains(t, string(got[0]), "raft/old_test.go: listed in sleepExceptions")
}

func TestDependenciesSeesMissingAndStaleReasons(t *testing.T) {
	m := &module{texts: map[string][]byte{
		"docs/adr/0001-dependencies.md": []byte("| `example.org/known` | why |\n| `example.org/gone` | why |\n| `example.org/tools` | why |\n"),
	}}
	var mod goMod
	add := func(path string, indirect bool) {
		mod.Require = append(mod.Require, struct {
			Path     string
			Indirect bool
		}{path, indirect})
	}
	add("example.org/known", false)
	add("example.org/unknown", false)
	add("example.org/deep", true)
	mod.Tool = append(mod.Tool, struct{ Path string }{"example.org/tools/cmd/x"})
	mod.Tool = append(mod.Tool, struct{ Path string }{"example.org/other/cmd/y"})
	got := sorted(dependencies(m, mod))
	require.Len(t, got, 3, "%v", got)
	require.Contains(t, string(got[0]), "example.org/gone")
	require.Contains(t, string(got[1]), "module example.org/unknown")
	require.Contains(t, string(got[2]), "tool example.org/other/cmd/y")
}

// The table names every package once, and its base packages import nothing of ours.
func TestImportTableIsSound(t *testing.T) {
	seen := map[string]bool{}
	for _, r := range importTable {
		require.False(t, seen[r.pkg], "%s has two rows", r.pkg)
		seen[r.pkg] = true
		if isBase(r.pkg) {
			require.Empty(t, r.may, "%s is a base package", r.pkg)
		}
	}
	for _, b := range basePackages {
		require.True(t, seen[b], "%s is a base package without a row", b)
	}
}

func check(t *testing.T, rule string, files map[string]string) []finding {
	t.Helper()
	texts := map[string][]byte{}
	for name, text := range files {
		texts[name] = []byte(text)
	}
	m, err := parse(texts)
	require.NoError(t, err)
	for _, r := range rules {
		if r.name == rule {
			return r.check(m)
		}
	}
	t.Fatalf("no rule is called %q", rule)
	return nil
}

func imports(pkg, path string) string {
	return "package " + pkg + "\n\nimport _ \"" + path + "\"\n"
}
