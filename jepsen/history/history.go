package history

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
)

// Kind of an operation.
type Kind string

// The kinds of operations.
const (
	Get  Kind = "get"
	Put  Kind = "put"
	Add  Kind = "add"  // put where the key is absent
	Swap Kind = "swap" // put where the key has the version Expect
	Del  Kind = "del"
	Drop Kind = "drop" // delete where the key has the version Expect
	Many Kind = "many" // gets of several keys by one call
	List Kind = "list"
)

// Writes tells whether the operation can change something.
func (k Kind) Writes() bool { return k == Put || k == Add || k == Swap || k == Del || k == Drop }

// Stores tells whether the operation, when applied, leaves a value.
func (k Kind) Stores() bool { return k == Put || k == Add || k == Swap }

// Outcome of an operation.
type Outcome string

// The outcomes. Whatever the client did not promise to be a definite answer is Unknown.
const (
	OK       Outcome = "ok"
	Absent   Outcome = "absent"   // the key was not there
	Conflict Outcome = "conflict" // the precondition did not hold; Version is what was there, 0: nothing
	Fail     Outcome = "fail"     // a write that was certainly not applied, or a read without an answer
	Unknown  Outcome = "unknown"  // a write that may have been applied, at any later time
)

// Item is one key's answer within a List or a Many.
type Item struct {
	Key     string `json:"key"`
	Got     uint64 `json:"got,omitempty"` // 0: absent (Many only)
	Version uint64 `json:"version,omitempty"`
	Shard   uint32 `json:"shard,omitempty"`
	Failed  bool   `json:"failed,omitempty"` // Many: no answer for this key
	Bad     string `json:"bad,omitempty"`
}

// Op is one operation. Times are nanoseconds of the host's monotonic clock, which all
// processes of a run share.
type Op struct {
	ID      uint64 `json:"id"`
	Process int    `json:"process"`
	Client  string `json:"client"` // which SDK client, the scope of a session
	Via     string `json:"via"`    // the transport that this client was told to use
	Kind    Kind   `json:"kind"`
	Level   string `json:"level,omitempty"` // of a read; empty: linearizable
	MaxLag  *int64 `json:"maxLag,omitempty"`
	Key     string `json:"key,omitempty"` // List: the prefix
	Value   uint64 `json:"value,omitempty"`
	Size    int    `json:"size,omitempty"`
	Expect  uint64 `json:"expect,omitempty"`

	Keys  []string `json:"keys,omitempty"`  // Many
	After string   `json:"after,omitempty"` // List: start behind this key
	Limit int      `json:"limit,omitempty"` // List: at most so many; 0: all
	Page  int      `json:"page,omitempty"`  // List: keys a page

	Call    int64   `json:"call"`
	Return  int64   `json:"return"`
	Outcome Outcome `json:"outcome"`
	Version uint64  `json:"version,omitempty"` // made, found, or in the way
	Got     uint64  `json:"got,omitempty"`     // value found
	Shard   uint32  `json:"shard,omitempty"`
	Items   []Item  `json:"items,omitempty"`
	Bad     string  `json:"bad,omitempty"` // what is wrong with the bytes that were found
	Err     string  `json:"err,omitempty"`
}

// Header says which run this is.
type Header struct {
	Workload string            `json:"workload"`
	Nemesis  string            `json:"nemesis"`
	LeftOut  []string          `json:"leftOut,omitempty"` // kinds of faults that Nemesis names and the place of the run can not have
	Seed     uint64            `json:"seed"`
	Settings map[string]string `json:"settings"`
	Schedule []json.RawMessage `json:"schedule,omitempty"` // the faults that were planned
}

// Fault is one fault as it happened.
type Fault struct {
	Kind   string   `json:"kind"`
	Nodes  []uint64 `json:"nodes,omitempty"`
	Start  int64    `json:"start"`
	End    int64    `json:"end"`
	Seen   bool     `json:"seen"`            // it was observed to have happened
	Short  bool     `json:"short,omitempty"` // the run's end came before it could be seen
	Detail string   `json:"detail,omitempty"`
}

// End closes a run: what the judge cannot see in the operations.
type End struct {
	Call     int64             `json:"call"`
	Progress string            `json:"progress"`          // empty: the healed cluster made progress
	Crashes  []string          `json:"crashes,omitempty"` // processes that ended by themselves
	Gets     map[string]uint64 `json:"gets"`              // answered, by what answered
	Counts   map[string]uint64 `json:"counts,omitempty"`
	Stopped  bool              `json:"stopped,omitempty"` // by the user, early
}

// History of a run.
type History struct {
	Header Header
	Ops    []*Op
	Faults []Fault
	End    *End // nil: the run did not come to its end
}

// line is one line of the file: exactly one field is set.
type line struct {
	Run   *Header `json:"run,omitempty"`
	Op    *Op     `json:"op,omitempty"`
	Fault *Fault  `json:"fault,omitempty"`
	End   *End    `json:"end,omitempty"`
}

// Recorder writes a history while the run goes on. Its methods may be called from
// several goroutines. It keeps everything in memory too.
type Recorder struct {
	mu struct {
		sync.Mutex
		h   History
		w   *bufio.Writer
		f   io.Closer
		err error
	}
}

// Create makes the file and writes the header.
func Create(path string, header Header) (*Recorder, error) {
	f, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	r := &Recorder{}
	r.mu.w, r.mu.f = bufio.NewWriterSize(f, 1<<16), f
	r.mu.h.Header = header
	r.mu.Lock()
	defer r.mu.Unlock()
	r.writeLocked(line{Run: &header})
	return r, r.mu.err
}

func (r *Recorder) writeLocked(l line) {
	b, err := json.Marshal(l)
	if err == nil {
		_, err = r.mu.w.Write(append(b, '\n'))
	}
	if err != nil && r.mu.err == nil {
		r.mu.err = fmt.Errorf("history: %w", err)
	}
}

// Op adds an operation that has ended. The Op is the history's from now on.
func (r *Recorder) Op(op *Op) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.h.Ops = append(r.mu.h.Ops, op)
	r.writeLocked(line{Op: op})
}

// Fault adds a fault that has ended.
func (r *Recorder) Fault(f Fault) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.h.Faults = append(r.mu.h.Faults, f)
	r.writeLocked(line{Fault: &f})
}

// Close ends the history and returns it. Nothing may be added afterwards.
func (r *Recorder) Close(end *End) (*History, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if end != nil {
		r.mu.h.End = end
		r.writeLocked(line{End: end})
	}
	err := errors.Join(r.mu.err, r.mu.w.Flush(), r.mu.f.Close())
	return &r.mu.h, err
}

// Read reads what a Recorder wrote. A file that ends in the middle of a line is an
// error: who cut it may cut whole lines.
func Read(from io.Reader) (*History, error) {
	h := &History{}
	dec := json.NewDecoder(from)
	dec.DisallowUnknownFields()
	for n := 1; ; n++ {
		var l line
		err := dec.Decode(&l)
		switch {
		case errors.Is(err, io.EOF) && n > 1:
			return h, nil
		case err != nil:
			return nil, fmt.Errorf("history: entry %d: %w", n, err)
		case (l.Run != nil) != (n == 1):
			return nil, fmt.Errorf("history: entry %d: want the run's header first, once", n)
		case l.Run != nil:
			h.Header = *l.Run
		case l.Op != nil:
			h.Ops = append(h.Ops, l.Op)
		case l.Fault != nil:
			h.Faults = append(h.Faults, *l.Fault)
		case l.End != nil:
			h.End = l.End
		default:
			return nil, fmt.Errorf("history: entry %d holds nothing", n)
		}
	}
}

// ReadFile reads a history file.
func ReadFile(path string) (*History, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return Read(bufio.NewReaderSize(f, 1<<16))
}
