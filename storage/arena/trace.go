package arena

import "github.com/kvd-io/kvd/storage/layout"

type op string

// What a test can see happening, in order. All but free and retire are stores to
// memory that readers see.
const (
	opState  op = "state"
	opSlot   op = "slot"
	opHeader op = "header"
	opGen    op = "layout_gen"
	opTable  op = "table" // Shard.Table answers with another table from here on
	opFree   op = "free"
	opRetire op = "retire"
)

// event is one step of the arena.
type event struct {
	Op     op
	Shard  uint32
	Place  layout.Place // of the object or pages
	State  layout.State
	Bucket uint32
	Index  int // of the slot
	Slot   layout.Slot
	Flags  uint8
	Chain  uint32
	Value  uint64
}

func (n *Namespace) trace(e event) {
	if n.a.hook != nil {
		n.a.hook(e)
	}
}

func (n *Namespace) traceBlock(o op, b block) {
	if n.a.hook != nil {
		n.a.hook(event{Op: o, Place: b.place(), State: b.state()})
	}
}
