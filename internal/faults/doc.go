// Package faults makes the disk and the clock of one kvd process misbehave as it is told
// over a unix socket. Only programs that were built with the tag chaos listen; Send, for
// whoever gives the orders, is in all.
//
// The disk is a wrapper of Pebble's file system: slow, hanging, failing or full. A
// wrapper does not lose what was written without a sync; crash copies of an in-memory
// file system do that, in the engine's own tests. The clock is shifted against the
// host's, in what Now returns: timers go on.
//
// The protocol is a line of JSON each way, Order and State, as often as one likes on a
// connection.
package faults

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"time"
)

// Order is how disk and clock behave from now on; the zero value: well. What hangs goes
// on as soon as an order no longer says so.
type Order struct {
	// Slow is what each write, sync and read takes longer.
	Slow time.Duration `json:"slow,omitempty"`
	// StallSync lets syncs hang, FailSync lets them fail.
	StallSync bool `json:"stall_sync,omitempty"`
	FailSync  bool `json:"fail_sync,omitempty"`
	// Full tells that files can grow by Left bytes more, all together.
	Full bool  `json:"full,omitempty"`
	Left int64 `json:"left,omitempty"`
	// Shift of the clock.
	Shift time.Duration `json:"shift,omitempty"`
}

// State is what orders have done so far, counted since the process began.
type State struct {
	Slowed  uint64 `json:"slowed"`  // operations that took longer
	Stalled uint64 `json:"stalled"` // syncs that were made to hang
	Failed  uint64 `json:"failed"`  // syncs that failed
	Refused uint64 `json:"refused"` // operations for which there was no room
	Shifted uint64 `json:"shifted"` // times that somebody was told a shifted time
	// Now is the process's clock.
	Now time.Time `json:"now"`
	// Err is why the order was not carried out.
	Err string `json:"err,omitempty"`
}

// Send gives an order to the process that listens on the socket, and returns what is then
// so.
func Send(ctx context.Context, socket string, o Order) (State, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		return State{}, fmt.Errorf("faults: %w: was this kvd built with the tag chaos and given a socket?", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	defer func() { _ = conn.Close() }() // twice is no harm
	var st State
	if err := json.NewEncoder(conn).Encode(o); err != nil {
		return st, fmt.Errorf("faults: %w", err)
	}
	if err := json.NewDecoder(bufio.NewReader(conn)).Decode(&st); err != nil {
		return st, fmt.Errorf("faults: %w", err)
	}
	if st.Err != "" {
		return st, fmt.Errorf("faults: the process refused: %s", st.Err)
	}
	return st, nil
}
