package main

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
)

func load(t *testing.T, args []string, env []string, yaml string) (*startSettings, []string, error) {
	s := &startSettings{}
	fs := pflag.NewFlagSet("start", pflag.ContinueOnError)
	s.define(fs)
	require.NoError(t, fs.Parse(args))
	file := ""
	if yaml != "" {
		file = filepath.Join(t.TempDir(), "kvd.yaml")
		require.NoError(t, os.WriteFile(file, []byte(yaml), 0o600))
	}
	strange, err := loadSettings(fs, file, env)
	return s, strange, err
}

// TestPrecedence: a flag wins over the environment, that over the file, that over the
// default.
func TestPrecedence(t *testing.T) {
	yaml := "node-id: 1\narena: 1MiB\ntick: 1s\nshards: 5\n"
	env := []string{"KVD_ARENA=2MiB", "KVD_TICK=2s", "HOME=/x"}
	s, strange, err := load(t, []string{"--tick", "3s"}, env, yaml)
	require.NoError(t, err)
	require.Empty(t, strange)
	require.Equal(t, uint64(1), s.NodeID)
	require.Equal(t, uint32(5), s.Shards)
	require.Equal(t, uint64(2<<20), s.ArenaBytes)
	require.Equal(t, 3*time.Second, s.TickInterval)
	require.Equal(t, uint32(3), s.Replication)
}

func TestLists(t *testing.T) {
	yaml := "peers:\n  - 1=a:1\n  - 2=b:1\ntransports: tcp\nbootstrap: true\n"
	s, _, err := load(t, nil, nil, yaml)
	require.NoError(t, err)
	require.Equal(t, []string{"1=a:1", "2=b:1"}, s.peers)
	require.Equal(t, []string{"tcp"}, s.transports)
	require.True(t, s.Bootstrap)
}

// TestSections: what begins alike may stand together; the names, and the lines of
// complaints, are the same.
func TestSections(t *testing.T) {
	s, _, err := load(t, []string{"--tcp-advertise", "host"}, nil, "tcp:\n  listen: 10.0.0.1:7401\n  advertise: other\nshm:\n  uids: [1, 2]\n")
	require.NoError(t, err)
	require.Equal(t, "10.0.0.1:7401", s.tcpListen)
	require.Equal(t, "host", s.tcpAdvertise, "a flag wins")
	require.Equal(t, []string{"1", "2"}, s.shmUIDs)
	for yaml, want := range map[string]string{
		"tcp:\n  listne: a\n":              `kvd.yaml:2: unknown setting "tcp-listne"`,
		"tcp-listen: a\ntcp:\n  listen: b": "kvd.yaml:3: tcp-listen was set in line 1 already",
		"tcp:\n  listen:\n    a: b\n":      "want a plain value or a list of them",
		"tcp: 7\n":                         `unknown setting "tcp"`,
		"arena:\n  a: b\n":                 "want a plain value or a list of them",
	} {
		_, _, err := load(t, nil, nil, yaml)
		require.ErrorContains(t, err, want, yaml)
	}
}

func TestEmptyFileIsFine(t *testing.T) {
	for _, yaml := range []string{"\n", "# nothing\n", "---\n", "{}\n"} {
		_, _, err := load(t, nil, nil, yaml)
		require.NoError(t, err, "%q", yaml)
	}
}

func TestStrangeEnvironmentIsNamed(t *testing.T) {
	_, strange, err := load(t, nil, []string{"KVD_SERVICE_HOST=10.0.0.1", "KVD_CONFIG=/x", "KVD_NODE_ID=3"}, "")
	require.NoError(t, err)
	require.Equal(t, []string{"KVD_SERVICE_HOST"}, strange)
}

// TestBadSettings: each complaint is a usage error that says where and what.
func TestBadSettings(t *testing.T) {
	for _, c := range []struct{ name, yaml, env, want string }{
		{"unknown key", "node-id: 1\nnode_ids: 2\n", "", `kvd.yaml:2: unknown setting "node_ids"`},
		{"near miss", "node_id: 1\n", "", `did you mean "node-id"?`},
		{"twice", "tick: 1s\n\ntick: 2s\n", "", "kvd.yaml:3: tick was set in line 1 already"},
		{"wrong type", "tick: 1s\nshards: many\n", "", `kvd.yaml:2: shards: "many"`},
		{"size", "arena: lots\n", "", "want a size such as 64MiB"},
		{"a map", "peers:\n  a: b\n", "", "want a plain value or a list of them"},
		{"a list on top", "- a\n", "", "want settings"},
		{"no YAML", "a: b: c\n", "", "kvd.yaml"},
		{"two documents", "tick: 1s\n---\ntick: 2s\n", "", "more than one document"},
		{"config in the file", "config: x\n", "", `unknown setting "config"`},
		{"environment", "", "KVD_SHARDS=many", `KVD_SHARDS="many"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			var env []string
			if c.env != "" {
				env = []string{c.env}
			}
			_, _, err := load(t, nil, env, c.yaml)
			require.ErrorContains(t, err, c.want)
			var usage usageError
			require.True(t, errors.As(err, &usage))
			require.Equal(t, exitUsage, exitCode(err))
		})
	}
}

func TestMissingFile(t *testing.T) {
	fs := pflag.NewFlagSet("start", pflag.ContinueOnError)
	(&startSettings{}).define(fs)
	_, err := loadSettings(fs, "/does/not/exist.yaml", nil)
	require.Equal(t, exitUsage, exitCode(err))
}

// TestZeroIsNoDefault: whoever writes 0 does not mean the default.
func TestZeroIsNoDefault(t *testing.T) {
	for _, args := range [][]string{{"--shards", "0"}, {"--tick", "0s"}, {"--arena", "0"}, {"--election-ticks=0"}} {
		s := &startSettings{}
		fs := pflag.NewFlagSet("start", pflag.ContinueOnError)
		s.define(fs)
		require.NoError(t, fs.Parse(args))
		require.Equal(t, exitUsage, exitCode(refuseZeros(fs)), "%v", args)
	}
	fs := pflag.NewFlagSet("start", pflag.ContinueOnError)
	(&startSettings{}).define(fs)
	require.NoError(t, fs.Parse([]string{"--shards", "1"}))
	require.NoError(t, refuseZeros(fs))
}

// TestNoSnapshotLimit: 0 is a value of this one.
func TestNoSnapshotLimit(t *testing.T) {
	for value, want := range map[string]int64{"": 32 << 20, "0": -1, "1MiB": 1 << 20} {
		s := &startSettings{}
		fs := pflag.NewFlagSet("start", pflag.ContinueOnError)
		s.define(fs)
		args := []string{"--data-dir", t.TempDir(), "--shm-dir", t.TempDir()}
		if value != "" {
			args = append(args, "--snapshot-rate", value)
		}
		require.NoError(t, fs.Parse(args))
		require.NoError(t, refuseZeros(fs))
		cfg, err := s.config(slog.New(slog.DiscardHandler))
		require.NoError(t, err)
		require.Equal(t, want, cfg.SnapshotRate)
	}
}

// traced formats itself with a stack trace when asked for details, as Pebble's errors do.
type traced struct{}

func (traced) Error() string { return "plain" }
func (traced) Format(f fmt.State, verb rune) {
	if f.Flag('+') {
		_, _ = fmt.Fprint(f, "goroutine 1 [running]")
		return
	}
	_, _ = fmt.Fprint(f, "plain")
}

func TestLogHasNoStackTraces(t *testing.T) {
	var out bytes.Buffer
	log := slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{ReplaceAttr: plainErrors}))
	log.Error("x", "err", traced{})
	require.Contains(t, out.String(), "err=plain")
	require.NotContains(t, out.String(), "goroutine")
}
