package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"

	"github.com/kvd-io/kvd/client"
)

// A backup that is interrupted says so, and leaves nothing.
func TestBackupInterrupted(t *testing.T) {
	for _, to := range []string{"file", "-"} {
		n := newFakeNode(t)
		ctx, interrupt := context.WithCancel(t.Context())
		n.read = interrupt
		file, words := "-", "what went to standard output is no whole backup"
		if to != "-" {
			file = filepath.Join(t.TempDir(), "b")
			words = file + " was not written, and " + file + ".partial is removed"
		}
		_, _, err := n.runFrom(ctx, nil, "backup", file)
		require.EqualError(t, err, "backup: interrupted: "+words)
		require.Equal(t, exitFailed, exitCode(err))
		left, err := filepath.Glob(file + "*")
		require.NoError(t, err)
		require.Empty(t, left)
	}
}

// stalling gives what it has, and then nothing more and no end, but when it is closed.
type stalling struct {
	io.Reader
	stalled func() // is called when it has given all
	closed  chan struct{}
}

func newStalling(t *testing.T, data []byte, stalled func()) *stalling {
	s := &stalling{bytes.NewReader(data), stalled, make(chan struct{})}
	t.Cleanup(func() { close(s.closed) })
	return s
}

func (s *stalling) Read(b []byte) (int, error) {
	if n, _ := s.Reader.Read(b); n > 0 {
		return n, nil
	}
	s.stalled()
	<-s.closed
	return 0, io.EOF
}

// A restore that waits for standard input ends when it is interrupted, and says what is left.
func TestRestoreInterrupted(t *testing.T) {
	n := newFakeNode(t)
	dump, _, err := n.run(t, nil, "backup", "-")
	require.NoError(t, err)

	// Nothing comes at all.
	ctx, interrupt := context.WithCancel(t.Context())
	_, _, err = n.runFrom(ctx, newStalling(t, nil, interrupt), "restore", "--continue", "-")
	require.EqualError(t, err, "restore: interrupted; nothing was changed")
	require.Equal(t, exitFailed, exitCode(err))

	// A part comes, and then nothing more.
	ctx, interrupt = context.WithCancel(t.Context())
	_, _, err = n.runFrom(ctx, newStalling(t, dump[:len(dump)-1], interrupt), "restore", "--continue", "-")
	require.ErrorIs(t, err, errInterrupted)
	require.ErrorContains(t, err, "restore: interrupted; the cluster is left with a part of the backup")
	require.ErrorContains(t, err, "--continue goes on")
	require.NotContains(t, err.Error(), "context canceled")

	// Of a file nothing is put before all of it is verified.
	file := filepath.Join(t.TempDir(), "b")
	require.NoError(t, os.WriteFile(file, dump, 0o600))
	_, _, err = n.runFrom(ctx, nil, "restore", file)
	require.EqualError(t, err, "restore: "+file+": interrupted; nothing was changed")
}

// What was there already is not said to have been put.
func TestRestoreCountsApart(t *testing.T) {
	n := newFakeNode(t)
	dump, _, err := n.run(t, nil, "backup", "-")
	require.NoError(t, err)
	_, _, err = n.run(t, dump, "restore", "--continue", "-")
	require.NoError(t, err)
	_, _, err = n.run(t, dump[:len(dump)-1], "restore", "--continue", "-")
	require.ErrorContains(t, err, "and 0 keys put (45 were there already)")
}

// A put that fails ends a restore although nothing more comes from standard input.
func TestRestoreFailsWhileInputWaits(t *testing.T) {
	n := newFakeNode(t)
	dump, _, err := n.run(t, nil, "backup", "-")
	require.NoError(t, err)
	n.mu.Lock()
	n.refuse, n.hold = 1, make(chan struct{})
	n.mu.Unlock()
	in := newStalling(t, dump[:len(dump)-1], func() { close(n.hold) })
	_, _, err = n.runFrom(t.Context(), in, "restore", "--continue", "-", "--parallel", "64")
	require.ErrorIs(t, err, client.ErrInvalid)
	require.NotErrorIs(t, err, context.Canceled)
}

// Where no node answers, a backup and a restore fail as soon as any other command.
func TestBackupWithoutNodes(t *testing.T) {
	n := newFakeNode(t)
	dump, _, err := n.run(t, nil, "backup", "-")
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	gone := &fakeNode{addr: l.Addr().String()}
	for _, args := range [][]string{{"backup", "-"}, {"restore", "-"}} {
		// With an hour for each step it does not come back in time if it waits.
		_, _, err = gone.run(t, dump, append(args, "--timeout", "1h")...)
		require.ErrorContains(t, err, "connection refused")
		require.Equal(t, exitUnavailable, exitCode(err))
	}
}

// A folder is no file to write a backup to, and that is told before anything is read.
func TestBackupToFolder(t *testing.T) {
	n := newFakeNode(t)
	dir := t.TempDir()
	for _, args := range [][]string{{"backup", dir}, {"backup", "--overwrite", dir}, {"backup", "--overwrite", "/dev/null"}} {
		_, _, err := n.run(t, nil, args...)
		require.ErrorContains(t, err, "is a directory or a device: want the name of a file")
		require.Equal(t, exitUsage, exitCode(err))
	}
	require.Zero(t, n.opens)
	require.NoFileExists(t, dir+".partial")
}

// endingReader gives what the reader below gives, whole, with its error.
func TestEndingReader(t *testing.T) {
	data := bytes.Repeat([]byte("0123456789"), 300_000)
	broken := errors.New("broken")
	for name, below := range map[string]io.Reader{
		"at once":       bytes.NewReader(data),
		"error at data": iotest.DataErrReader(bytes.NewReader(data)),
		"halves":        iotest.HalfReader(bytes.NewReader(data)),
	} {
		got, err := io.ReadAll(&endingReader{ctx: t.Context(), r: below})
		require.NoError(t, err, name)
		require.True(t, bytes.Equal(data, got), name)
	}
	got, err := io.ReadAll(&endingReader{ctx: t.Context(), r: io.MultiReader(bytes.NewReader(data[:5]), iotest.ErrReader(broken))})
	require.ErrorIs(t, err, broken)
	require.Equal(t, data[:5], got)

	// A Read that was given up is the next one's.
	in, w := io.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	e := &endingReader{ctx: ctx, r: in}
	cancel()
	_, err = e.Read(make([]byte, 1))
	require.ErrorIs(t, err, context.Canceled)
	e.ctx = t.Context()
	go func() {
		_, err := w.Write([]byte("late"))
		_ = w.CloseWithError(err)
	}()
	got, err = io.ReadAll(e)
	require.NoError(t, err)
	require.Equal(t, "late", string(got))
}
