package raft

// Steps takes the work of a Host that is not started, one piece at a time and in the
// caller's goroutine: what ticker, log writer, appliers and the others would do. So a
// simulation decides what happens next, and equal steps give equal results. The Host
// must not be started before or after. Each method returns false where there was
// nothing to do; none waits, but for the disk.
type Steps struct{ h *Host }

// Steps of the host.
func (h *Host) Steps() Steps { return Steps{h} }

// Tick lets all groups know that a tick has passed.
func (s Steps) Tick() { s.h.tick() }

// Write makes durable what the groups have queued, by one batch, and delivers the
// answers of it.
func (s Steps) Write() bool { return s.h.writer.step() }

// Apply brings one group's next entries, or its snapshot, to the state machine.
func (s Steps) Apply() bool { return s.h.applyStep(false) }

// Work finishes the turn of one group.
func (s Steps) Work() bool { return s.h.workStep(false) }

// Truncate cuts one group's log, if it is long enough.
func (s Steps) Truncate() bool { return s.h.truncateStep(false) }

// SendLate sends what was put off and what is held back.
func (s Steps) SendLate() bool {
	held := s.h.holdStep()
	return s.h.lateStep() || held
}
