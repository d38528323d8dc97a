//go:build e2e || rdmaguest

package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"go.uber.org/goleak"
)

const (
	module     = "github.com/kvd-io/kvd"
	moduleRoot = "../.."
)

// The programs under test, built once by TestMain.
var kvdBin, kvctlBin string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "kvd-e2e-bin-")
	if err == nil {
		defer func() { _ = os.RemoveAll(dir) }()
		err = build(dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		return 1
	}
	code := m.Run()
	if err := shared.stop(); err != nil {
		fmt.Fprintln(os.Stderr, "e2e: the shared cluster:", err)
		code = 1
	}
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		code = 1
	}
	return code
}

func build(dir string) error {
	if inGuest() { // which has no Go: make test-rdma built them
		kvdBin, kvctlBin = "/usr/bin/kvd", "/usr/bin/kvctl"
		return nil
	}
	// Another user (nobody) runs the program in the test of the read-only directory.
	if err := os.Chmod(dir, 0o755); err != nil {
		return err
	}
	args := []string{"build", "-buildvcs=false", "-ldflags", "-X main.version=e2e -X main.commit=0123456789ab", "-o", dir + string(filepath.Separator)}
	if os.Getenv("KVD_E2E_RACE") == "1" {
		args = append(args, "-race")
	}
	cmd := exec.Command("go", append(args, module+"/cmd/kvd", module+"/cmd/kvctl")...)
	cmd.Dir = moduleRoot
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build: %w\n%s", err, out)
	}
	kvdBin, kvctlBin = filepath.Join(dir, "kvd"), filepath.Join(dir, "kvctl")
	return nil
}

// shared is the cluster of the tests that harm nothing. It is started by the first of
// them.
var shared sharedCluster

type sharedCluster struct {
	once sync.Once
	c    *cluster
	dir  string
	err  error
}

func (s *sharedCluster) stop() error {
	if s.c == nil {
		return nil
	}
	defer func() { _ = os.RemoveAll(s.dir) }()
	ctx, cancel := within(stopTimeout)
	defer cancel()
	if err := s.c.Stop(ctx); err != nil {
		return err
	}
	return s.c.inspectLogs()
}
