package check

import (
	"fmt"
	"math"

	"github.com/anishathalye/porcupine"

	"github.com/kvd-io/kvd/jepsen/history"
)

// state of one key. A write of unknown fate leaves a version that is not known until
// somebody sees it, but is above the one before.
type state struct {
	value   uint64 // 0: absent
	version uint64 // 0: not known (or never written)
	floor   uint64 // Invariant: the version, known or not, is above or equal to floor
}

// is tells whether the present value may have version v, and returns the state in which
// that is known.
func (s state) is(v uint64) (state, bool) {
	if s.value == 0 || v == 0 {
		return s, false
	}
	if s.version != 0 {
		return s, s.version == v
	}
	return state{s.value, v, v}, v > s.floor
}

// input of porcupine: an operation on one key, and which versions have a known value.
type input struct {
	*history.Op
	valueOf map[uint64]uint64 // value by version, of this key
}

// after is the state in which the write has been applied with version v; 0: not known.
func (in input) after(s state, v uint64) (state, bool) {
	value := uint64(0)
	if in.Kind.Stores() {
		value = in.Value
	}
	if v == 0 {
		return state{value, 0, s.floor}, true
	}
	return state{value, v, v}, v > s.floor
}

// shows is state.is, but for a version that is known to belong to another value: without
// that a write of unknown fate could pass for each of the others, and the search would try.
func (in input) shows(s state, v uint64) (state, bool) {
	if known, ok := in.valueOf[v]; ok && known != s.value {
		return s, false
	}
	return s.is(v)
}

// mayMatch tells whether a precondition on version e may hold, where the write's own
// outcome does not say so. A version that is known to belong to another value does not.
func (in input) mayMatch(s state, e uint64) bool {
	if known, ok := in.valueOf[e]; ok {
		return known == s.value && s.value != 0
	}
	_, ok := s.is(e)
	return ok
}

func step(st, inp, _ any) (bool, any) {
	s, in := st.(state), inp.(input)
	next, ok := apply(s, in)
	return ok, next
}

func apply(s state, in input) (state, bool) {
	switch in.Outcome {
	case history.Absent: // of a get, or of a delete that found nothing
		return s, s.value == 0
	case history.Conflict:
		if in.Version == 0 {
			return s, s.value == 0 && in.Kind != history.Add
		}
		if in.Kind != history.Add && in.Version == in.Expect {
			return s, false
		}
		return in.shows(s, in.Version)
	case history.OK:
		switch in.Kind {
		case history.Get:
			next, ok := s.is(in.Version)
			return next, ok && s.value == in.Got
		case history.Add:
			if s.value != 0 {
				return s, false
			}
		case history.Swap, history.Drop:
			if _, ok := in.shows(s, in.Expect); !ok {
				return s, false
			}
			s.floor = max(s.floor, in.Expect)
		case history.Del:
			if s.value == 0 {
				return s, false
			}
		}
		return in.after(s, in.Version)
	case history.Unknown:
		// Applied with a known version: somebody saw the value. Else it may have had
		// no effect, which for a plain put is the same as being applied at the very end.
		applies := true
		switch in.Kind {
		case history.Add:
			applies = s.value == 0
		case history.Del:
			applies = s.value != 0
		case history.Swap, history.Drop:
			applies = in.mayMatch(s, in.Expect)
		}
		if !applies {
			return s, in.Version == 0
		}
		return in.after(s, in.Version)
	}
	return s, false
}

var model = porcupine.Model{
	Init:              func() any { return state{} },
	Step:              step,
	DescribeOperation: func(in, _ any) string { return describe(in.(input).Op) },
	DescribeState: func(st any) string {
		s := st.(state)
		switch {
		case s.value == 0:
			return fmt.Sprintf("absent (above version %d)", s.floor)
		case s.version == 0:
			return fmt.Sprintf("value %d, version unknown above %d", s.value, s.floor)
		}
		return fmt.Sprintf("value %d, version %d", s.value, s.version)
	},
}

// describe is an operation as people read it.
func describe(op *history.Op) string {
	call := string(op.Kind)
	if op.Level != "" {
		call = op.Level + " " + call
		if op.MaxLag != nil {
			call += fmt.Sprintf(" (lag %d)", *op.MaxLag)
		}
	}
	call += "(" + op.Key
	if op.Kind.Stores() {
		call += fmt.Sprintf(", value %d", op.Value)
	}
	if op.Expect != 0 {
		call += fmt.Sprintf(", if version %d", op.Expect)
	}
	call += ")"
	switch {
	case op.Bad != "":
		return call + " -> BAD: " + op.Bad
	case op.Outcome == history.OK && op.Kind == history.Get:
		return fmt.Sprintf("%s -> value %d, version %d", call, op.Got, op.Version)
	case op.Outcome == history.OK && op.Kind.Writes():
		return fmt.Sprintf("%s -> version %d", call, op.Version)
	case op.Outcome == history.Conflict:
		return fmt.Sprintf("%s -> conflict with version %d", call, op.Version)
	}
	return call + " -> " + string(op.Outcome)
}

// operations of one key as porcupine takes them. What certainly had no effect and what
// answered nothing is left out; what is of unknown fate never returns.
func operations(ops []*history.Op, valueOf map[uint64]uint64) []porcupine.Operation {
	var out []porcupine.Operation
	for _, op := range ops {
		if op.Outcome == history.Fail || (op.Outcome == history.Unknown && !op.Kind.Writes()) {
			continue
		}
		o := porcupine.Operation{ClientId: op.Process, Input: input{op, valueOf}, Call: op.Call, Return: op.Return}
		if op.Outcome == history.Unknown && op.Version == 0 {
			o.Return = math.MaxInt64
		}
		out = append(out, o)
	}
	return out
}

// reduce leaves out what follows from the rest. A version is there for one span of time, so
// of all operations that change nothing and saw it, the one that returned first and the one
// that was called last say all that the others do. Else conflicts at the same time, of
// which any may come first, make the search long.
func reduce(ops []porcupine.Operation) []porcupine.Operation {
	type sight struct{ version, value uint64 }
	what := func(op porcupine.Operation) (sight, bool) {
		in := op.Input.(input)
		switch {
		case in.Outcome == history.OK && in.Kind == history.Get:
			return sight{in.Version, in.Got}, true
		case in.Outcome == history.Conflict && in.Version != 0 && (in.Kind == history.Add || in.Version != in.Expect):
			return sight{in.Version, 0}, true
		}
		return sight{}, false
	}
	first, last := map[sight]int{}, map[sight]int{}
	for i, op := range ops {
		s, ok := what(op)
		if !ok {
			continue
		}
		if j, ok := first[s]; !ok || op.Return < ops[j].Return {
			first[s] = i
		}
		if j, ok := last[s]; !ok || op.Call > ops[j].Call {
			last[s] = i
		}
	}
	out := make([]porcupine.Operation, 0, len(ops))
	for i, op := range ops {
		if s, ok := what(op); !ok || first[s] == i || last[s] == i {
			out = append(out, op)
		}
	}
	return out
}
