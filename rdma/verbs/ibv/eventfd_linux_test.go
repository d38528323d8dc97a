package ibv

import (
	"errors"
	"os"
	"syscall"
	"testing"
	"time"
)

// The waiting for events works on any descriptor that can be polled.
func TestEventFD(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	e, err := newEventFD(int(r.Fd()), "test")
	if err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 1)
	tryRead := func(uintptr) bool {
		n, _ := syscall.Read(int(r.Fd()), buf)
		return n == 1
	}
	got := make(chan error, 1)
	go func() { got <- e.wait(tryRead) }()
	if _, err := w.Write([]byte{7}); err != nil {
		t.Fatal(err)
	}
	if err := <-got; err != nil || buf[0] != 7 {
		t.Fatalf("%v, read %d", err, buf[0])
	}
	if err := e.setDeadline(time.Now()); err != nil {
		t.Fatal(err)
	}
	if err := e.wait(tryRead); !errors.Is(err, ErrDeadline) {
		t.Errorf("%v, want ErrDeadline", err)
	}
	if err := e.setDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	parked := make(chan struct{})
	go func() {
		first := true
		got <- e.wait(func(uintptr) bool {
			if first {
				first = false
				close(parked)
			}
			return false
		})
	}()
	<-parked
	e.close()
	if err := <-got; !errors.Is(err, ErrClosed) {
		t.Errorf("%v, want ErrClosed", err)
	}
	if err := e.wait(func(uintptr) bool { t.Error("looked at a closed descriptor"); return true }); !errors.Is(err, ErrClosed) {
		t.Errorf("%v, want ErrClosed", err)
	}
}
