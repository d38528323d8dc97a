//go:build linux

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"sync"
	"time"
)

// job is what the host wants of a guest: a file in its root file system.
type job struct {
	Argv    []string
	Env     []string
	Dir     string
	Modules []string // in the order of loading
	RXE     bool
	SIW     bool
	MTU     int
	Timeout time.Duration
}

const (
	jobFile   = "/rdmaguest.json"
	selfFile  = "/rdmaguest"
	portName  = "org.kvd.rdmaguest"
	outDir    = "/out"
	jobDir    = "/job"
	guestPath = "/usr/sbin:/usr/bin:/busybox"
)

// frame is one message of the guest, a line of JSON on the virtio port. Kind says which
// of the other fields mean something.
type frame struct {
	Kind string // one of the kinds
	Name string `json:",omitempty"` // of a file, below outDir
	Data []byte `json:",omitempty"`
	Code int    `json:",omitempty"`
}

const (
	kindStdout = "stdout" // Data
	kindStderr = "stderr" // Data
	kindFile   = "file"   // Name and Data: a piece to append
	kindError  = "error"  // Data: the guest could not do its work
	kindExit   = "exit"   // Code; the last one
)

// frames sends from several goroutines.
type frames struct {
	mu sync.Mutex
	w  io.Writer
}

func (f *frames) send(fr frame) error {
	b, err := json.Marshal(fr)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	_, err = f.w.Write(append(b, '\n'))
	return err
}

// stream is a writer whose bytes become frames of one kind.
type stream struct {
	f    *frames
	kind string
}

func (s stream) Write(p []byte) (int, error) {
	if err := s.f.send(frame{Kind: s.kind, Data: p}); err != nil {
		return 0, err
	}
	return len(p), nil
}

// receiver handles what a guest sends.
type receiver struct {
	stdout, stderr io.Writer
	file           func(name string, piece []byte) error
}

// errGuest is what the guest itself reports: not the program in it.
type errGuest struct{ text string }

func (e errGuest) Error() string { return "the guest: " + e.text }

// receive handles frames until the exit code. The error says that there was none.
func (r receiver) receive(from io.Reader) (code int, err error) {
	dec := json.NewDecoder(from)
	for {
		var f frame
		if err := dec.Decode(&f); err != nil {
			return 0, fmt.Errorf("the guest ended without an exit code: %w", err)
		}
		switch f.Kind {
		case kindStdout:
			_, err = r.stdout.Write(f.Data)
		case kindStderr:
			_, err = r.stderr.Write(f.Data)
		case kindFile:
			err = r.file(f.Name, f.Data)
		case kindError:
			err = errGuest{string(f.Data)}
		case kindExit:
			return f.Code, nil
		default:
			err = fmt.Errorf("the guest sent a frame of the unknown kind %q", f.Kind)
		}
		if err != nil {
			return 0, err
		}
	}
}
