//go:build linux

package shm

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/rdma"
)

// The test binary starts itself as another process, in a role named by this
// variable. It is then driven by lines on stdin and answers by lines on stdout.
const (
	roleEnv = "KVD_SHM_TEST_ROLE"
	argsEnv = "KVD_SHM_TEST_ARGS" // fields separated by spaces

	childNode, childBoot = 11, 0xb001
	patience             = 20 * time.Second
)

func runRole(role string) {
	args := strings.Fields(os.Getenv(argsEnv))
	var err error
	switch role {
	case "server":
		err = serverRole(args[0], args[1])
	case "holder":
		err = holderRole(args[0])
	case "client":
		err = clientRole(args[0])
	default:
		err = fmt.Errorf("unknown role %q", role)
	}
	if err != nil {
		fmt.Println("error", err)
		os.Exit(3)
	}
}

// serverRole serves one region, filled with 0x5a, and holds a lock on a file.
func serverRole(socket, lock string) error {
	f, err := os.OpenFile(lock, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return err
	}
	heldLock = f
	p := &Provider{SocketPath: socket}
	target, err := p.NewTarget(rdma.TargetConfig{NodeID: childNode, BootID: childBoot})
	if err != nil {
		return err
	}
	domain, err := target.NewDomain("child")
	if err != nil {
		return err
	}
	m, err := rdma.AllocMemory("kvd-shm-test", 1<<20, rdma.MemoryOptions{Shareable: true})
	if err != nil {
		return err
	}
	copy(m.Bytes(), bytes.Repeat([]byte{0x5a}, len(m.Bytes())))
	attr, err := domain.Register(1, m)
	if err != nil {
		return err
	}
	fmt.Println("attr", hex.EncodeToString(attr))
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		word, rest, _ := strings.Cut(in.Text(), " ")
		switch word {
		case "offer":
			offer, err := hex.DecodeString(rest)
			if err != nil {
				return err
			}
			answer, _, err := domain.Accept(context.Background(), rdma.Peer{Name: "parent"}, offer)
			if err != nil {
				return err
			}
			fmt.Println("answer", hex.EncodeToString(answer))
		case "panic":
			panic("as the test asked")
		case "exit":
			os.Exit(7)
		case "close":
			return target.Close()
		case "oom":
			for hoard := [][]byte{}; ; {
				b := make([]byte, 1<<20)
				for i := 0; i < len(b); i += 4096 {
					b[i] = 1
				}
				hoard = append(hoard, b)
			}
		}
	}
	return nil
}

// heldLock keeps the lock's file reachable: collected, it would be closed.
var heldLock *os.File

// holderRole keeps memory of a given name mapped.
func holderRole(name string) error {
	m, err := rdma.AllocMemory(name, 3<<20, rdma.MemoryOptions{Shareable: true})
	if err != nil {
		return err
	}
	fmt.Println("mapped", m.Size())
	_, err = io.ReadAll(os.Stdin)
	return err
}

// clientRole becomes another user and tries to connect.
func clientRole(answer string) error {
	if err := syscall.Setresuid(54321, 54321, 54321); err != nil {
		return err
	}
	b, err := hex.DecodeString(answer)
	if err != nil {
		return err
	}
	in, err := (&Provider{}).NewInitiator(rdma.InitiatorConfig{})
	if err != nil {
		return err
	}
	dial, err := in.Prepare(context.Background())
	if err != nil {
		return err
	}
	conn, err := dial.Connect(context.Background(), b)
	if err != nil {
		return err
	}
	fmt.Println("connected")
	return conn.Close()
}

// child is a process in a role.
type child struct {
	t   testing.TB
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
	err bytes.Buffer
}

func startChild(t testing.TB, role string, args ...string) *child {
	exe, err := os.Executable()
	require.NoError(t, err)
	c := &child{t: t, cmd: exec.Command(exe)}
	c.cmd.Env = append(os.Environ(), roleEnv+"="+role, argsEnv+"="+strings.Join(args, " "))
	c.cmd.Stderr = &c.err
	c.in, err = c.cmd.StdinPipe()
	require.NoError(t, err)
	out, err := c.cmd.StdoutPipe()
	require.NoError(t, err)
	c.out = bufio.NewScanner(out)
	require.NoError(t, c.cmd.Start())
	t.Cleanup(func() {
		_ = c.in.Close()
		_ = c.cmd.Process.Kill()
		_ = c.cmd.Wait()
	})
	return c
}

func (c *child) say(format string, args ...any) {
	c.t.Helper()
	_, err := fmt.Fprintf(c.in, format+"\n", args...)
	require.NoError(c.t, err)
}

// expect reads a line that begins with word and returns the rest of it.
func (c *child) expect(word string) string {
	c.t.Helper()
	require.True(c.t, c.out.Scan(), "child ended early: %s", &c.err)
	rest, ok := strings.CutPrefix(c.out.Text(), word)
	require.True(c.t, ok, "child said %q, want %q", c.out.Text(), word)
	return strings.TrimSpace(rest)
}

func (c *child) expectHex(word string) []byte {
	c.t.Helper()
	b, err := hex.DecodeString(c.expect(word))
	require.NoError(c.t, err)
	return b
}

// eventually waits for a condition; the interval only bounds how often it looks.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(patience)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", patience, what)
		}
		<-tick.C
	}
}

// ended waits for a Done channel.
func ended(t testing.TB, what string, done <-chan struct{}) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatalf("not within %v: %s", patience, what)
	}
}
