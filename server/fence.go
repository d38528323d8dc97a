package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvd-io/kvd/rdma/shm"
)

// A process that is killed lets go of the directory's lock while the kernel still tears
// down what else it had. If a queue pair is among that, a READ on it may succeed a moment
// after the next process has the lock: it would be served by a control record that has no
// part any more in what the node votes for. (In a guest with Soft-RoCE such READs were
// seen up to 20 ms after the lock was free, where the device had been opened first.)
// So the lock is taken before any device is opened, which makes the kernel close the
// device first; and after a process that did not stop by itself the next one waits until
// the old one is reaped, and then for the fence delay.

// runningFile says which process uses the directory. It goes when that process stopped
// by itself, with nothing exposed any more.
const runningFile = "RUNNING"

// owner is a process.
type owner struct {
	Host  string `json:"host"` // running kernel, mount and pid namespace
	Name  string `json:"name"` // of the host, for people
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // of the process, in ticks since boot
}

func self() owner {
	name, _ := os.Hostname()
	_, start, _ := processState(os.Getpid())
	return owner{Host: shm.HostID(), Name: name, PID: os.Getpid(), Start: start}
}

// fence waits, where the directory was not left in good order, until nothing of the
// process before can serve its memory; lockedAt is when the lock was taken. Then it
// notes this process as the one that uses the directory.
func (n *Node) fence(ctx context.Context, lockedAt time.Time) error {
	before, err := n.dir.lastOwner()
	if err != nil {
		return err
	}
	me := self()
	if before != nil && *before != me {
		n.log.Warn("the process before did not stop by itself: waiting until it is gone for sure",
			"pid", before.PID, "host", before.Name, "delay", max(n.cfg.FenceDelay, 0))
		if before.Host == me.Host && me.Host != "" {
			if err := n.awaitReaped(ctx, before); err != nil {
				return err
			}
		} else if before.Name != me.Name {
			n.log.Warn("it ran on another host: make sure that it does not run there any more, for from here that can not be seen",
				"host", before.Name, "directory", n.cfg.DataDir)
		}
		if rest := n.cfg.FenceDelay - time.Since(lockedAt); rest > 0 {
			pause(ctx, rest)
		}
		if ctx.Err() != nil {
			return fmt.Errorf("server: stopped while waiting for the end of process %d: %w", before.PID, ctx.Err())
		}
	}
	return n.dir.claim(me)
}

// reapPatience bounds the wait for a process that is dying. One with much memory takes
// seconds.
const reapPatience = 30 * time.Second

func (n *Node) awaitReaped(ctx context.Context, before *owner) error {
	began := time.Now()
	for alive(before) {
		if time.Since(began) > reapPatience {
			return fmt.Errorf("%w: process %d, which last used %s or the directory that it is a copy of, is still there: end it first", ErrLocked, before.PID, n.cfg.DataDir)
		}
		if pause(ctx, 5*time.Millisecond); ctx.Err() != nil {
			return fmt.Errorf("server: stopped while waiting for the end of process %d: %w", before.PID, ctx.Err())
		}
	}
	return nil
}

// alive tells whether any thread of the process may still hold a descriptor. A process
// of which only the entry in the table of processes is left, since its parent does not
// look, holds none.
func alive(o *owner) bool {
	state, start, err := processState(o.PID)
	if err != nil || start != o.Start {
		return false
	}
	if state != 'Z' && state != 'X' {
		return true
	}
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", o.PID))
	return err == nil && len(threads) > 1
}

// processState reads the state of a process and when it was started.
func processState(pid int) (state byte, start uint64, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, 0, err
	}
	// The command, in parentheses, may have anything in it.
	fields := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	const stateField, startField = 0, 19
	if len(fields) <= startField {
		return 0, 0, fmt.Errorf("server: /proc/%d/stat has %d fields: want more than %d", pid, len(fields), startField)
	}
	start, err = strconv.ParseUint(string(fields[startField]), 10, 64)
	return fields[stateField][0], start, err
}

// lastOwner is the process that used the directory and did not leave it in good order;
// nil: there is none.
func (d *dataDir) lastOwner() (*owner, error) {
	path := filepath.Join(d.path, runningFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%w: read %s: %w", ErrDataDir, path, err)
	}
	o := &owner{}
	if err := json.Unmarshal(b, o); err != nil {
		return &owner{}, nil // whoever it was
	}
	return o, nil
}

// claim notes the process that uses the directory from now on.
func (d *dataDir) claim(o owner) error {
	b, err := json.Marshal(o)
	if err != nil {
		return fmt.Errorf("server: encode owner: %w", err)
	}
	if err := writeDurably(d.path, runningFile, append(b, '\n')); err != nil {
		return fmt.Errorf("%w %s: write %s: %w", ErrDataDir, d.path, runningFile, err)
	}
	d.claimed = true
	return nil
}

// leave notes that nothing of this process serves the directory's memory any more.
func (d *dataDir) leave() error {
	if !d.claimed {
		return nil
	}
	if err := os.Remove(filepath.Join(d.path, runningFile)); err != nil {
		return fmt.Errorf("%w %s: %w", ErrDataDir, d.path, err)
	}
	dir, err := os.Open(d.path)
	if err != nil {
		return fmt.Errorf("%w %s: %w", ErrDataDir, d.path, err)
	}
	defer func() { _ = dir.Close() }()
	if err := unix.Fsync(int(dir.Fd())); err != nil {
		return fmt.Errorf("%w %s: %w", ErrDataDir, d.path, err)
	}
	return nil
}
