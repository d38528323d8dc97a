package history

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
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
	// Gets answered while a process was stopped, by what answered them.
	Gets map[string]uint64 `json:"gets,omitempty"`
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

// Read reads what a Recorder wrote. Anything else is an error, so that what is judged was
// recorded and is whole. Only the last line may be torn, as a run that was killed leaves
// it: that line is dropped, and the history has no End.
func Read(from io.Reader) (*History, error) {
	h := &History{}
	dec := json.NewDecoder(from)
	dec.DisallowUnknownFields()
	ids := map[uint64]bool{}
	for n := 1; ; n++ {
		var l line
		err := dec.Decode(&l)
		ended := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) && h.End == nil
		if ended && n > 1 {
			return h, nil
		}
		if err == nil {
			err = h.take(l, n == 1, ids)
		}
		if err != nil {
			return nil, fmt.Errorf("history: entry %d: %w", n, err)
		}
	}
}

// take adds one line.
func (h *History) take(l line, first bool, ids map[uint64]bool) error {
	fields := 0
	for _, set := range []bool{l.Run != nil, l.Op != nil, l.Fault != nil, l.End != nil} {
		if set {
			fields++
		}
	}
	switch {
	case fields != 1:
		return fmt.Errorf("holds %d of run, op, fault and end: want exactly one", fields)
	case (l.Run != nil) != first:
		return errors.New("want the run's header first, once")
	case h.End != nil:
		return errors.New("stands behind the end: want nothing there")
	case l.Run != nil:
		h.Header = *l.Run
	case l.Op != nil:
		if ids[l.Op.ID] {
			return fmt.Errorf("there is an operation %d already", l.Op.ID)
		}
		if err := l.Op.valid(); err != nil {
			return fmt.Errorf("operation %d: %w", l.Op.ID, err)
		}
		ids[l.Op.ID] = true
		h.Ops = append(h.Ops, l.Op)
	case l.Fault != nil:
		if l.Fault.End < l.Fault.Start {
			return fmt.Errorf("fault %s ends at %d, before it starts at %d", l.Fault.Kind, l.Fault.End, l.Fault.Start)
		}
		h.Faults = append(h.Faults, *l.Fault)
	default:
		h.End = l.End
	}
	return nil
}

var (
	kinds    = []Kind{Get, Put, Add, Swap, Del, Drop, Many, List}
	outcomes = []Outcome{OK, Absent, Conflict, Fail, Unknown}
	levels   = []string{"", "session", "stale"} // beside linearizable, which is the empty one
)

// valid tells why no run records such an operation. What a wrong client or a wrong node
// could show is the judge's matter.
func (op *Op) valid() error {
	answered := op.Outcome == OK || op.Outcome == Absent || op.Outcome == Conflict
	switch {
	case !slices.Contains(kinds, op.Kind):
		return fmt.Errorf("kind %q: want one of %q", op.Kind, kinds)
	case !slices.Contains(outcomes, op.Outcome):
		return fmt.Errorf("outcome %q: want one of %q", op.Outcome, outcomes)
	case !slices.Contains(levels, op.Level):
		return fmt.Errorf("level %q: want one of %q", op.Level, levels)
	case !op.Kind.Writes() && (op.Outcome == Conflict || op.Outcome == Unknown):
		return fmt.Errorf("%s of outcome %q: want that of writes only", op.Kind, op.Outcome)
	case op.Level != "" && op.Kind != Get:
		return fmt.Errorf("%s of level %q: want levels of gets only", op.Kind, op.Level)
	case op.MaxLag != nil && (op.Level != "stale" || *op.MaxLag < 0):
		return fmt.Errorf("maxLag %d at level %q: want at least 0, and the level stale", *op.MaxLag, op.Level)
	case op.Return < op.Call:
		return fmt.Errorf("returns at %d, before it is called at %d", op.Return, op.Call)
	case answered && op.Kind != Many && op.Kind != List && (op.Key == "" || op.Shard == 0):
		return fmt.Errorf("answered %q for key %q of shard %d: want both", op.Outcome, op.Key, op.Shard)
	case len(op.Items) > 0 && op.Kind != Many && op.Kind != List:
		return fmt.Errorf("%s of %d items: want those of many and list only", op.Kind, len(op.Items))
	}
	for i, it := range op.Items {
		if it.Key == "" || it.Shard == 0 {
			return fmt.Errorf("item %d has key %q of shard %d: want both", i, it.Key, it.Shard)
		}
	}
	return nil
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
