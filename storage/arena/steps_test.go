package arena

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/kvd-io/kvd/storage/layout"
)

// Scripts in testdata print every store that readers can see, in order. The order is
// the contract: a change there is a change of what readers may conclude.
//
//	new shards=N limit=BYTES chunk=BYTES
//	put KEY VERSION [size=BYTES]   delete KEY   expire KEY   touch KEY
//	load KEY VERSION ... then commit   drop shard=N   advance SECONDS
//
// With quiet only a summary is printed, with pages only what concerns tables and
// pages.
func TestSteps(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		var s *script
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			if d.Cmd == "new" {
				s = newScript(t, d)
				return ""
			}
			return s.run(d)
		})
	})
}

type script struct {
	*rig
	log   strings.Builder
	count map[string]int
	pages bool // log only what concerns tables and pages
	load  *Load
}

func newScript(t *testing.T, d *datadriven.TestData) *script {
	shards, limit, chunk := 1, 1<<20, 64<<10
	d.MaybeScanArgs(t, "shards", &shards)
	d.MaybeScanArgs(t, "limit", &limit)
	d.MaybeScanArgs(t, "chunk", &chunk)
	s := &script{rig: newRig(t, Config{Shards: uint32(shards), LimitBytes: uint64(limit), MinChunkBytes: uint64(chunk)})}
	s.a.hook = s.record
	return s
}

var stateNames = [...]string{"none", "pending", "live", "superseded", "deleted", "expired", "evicted", "moved", "dropped"}

func (s *script) record(e event) {
	at := func() string { return fmt.Sprintf("%d:%#x", e.Place.Chunk, e.Place.Offset) }
	var line string
	s.count[string(e.Op)]++
	if s.pages && e.Op != opGen && e.Op != opTable && e.Op != opRetire {
		return
	}
	switch e.Op {
	case opState:
		line = fmt.Sprintf("state      %s %s", at(), stateNames[e.State])
	case opSlot:
		line = fmt.Sprintf("slot       %d.%d = %s", e.Bucket, e.Index, at())
		if e.Slot == 0 {
			line = fmt.Sprintf("slot       %d.%d = empty", e.Bucket, e.Index)
		}
	case opHeader:
		line = fmt.Sprintf("header     %d flags=%d chain=%d", e.Bucket, e.Flags, e.Chain)
	case opGen:
		line = fmt.Sprintf("layout_gen shard=%d %d", e.Shard, e.Value)
	case opTable:
		line = fmt.Sprintf("table      shard=%d buckets=%d", e.Shard, e.Value)
	case opFree:
		line = fmt.Sprintf("free       %s (%s)", at(), stateNames[e.State])
	case opRetire:
		line = fmt.Sprintf("retire     %s pages=%d", at(), e.Value)
	}
	s.log.WriteString(line + "\n")
}

func (s *script) run(d *datadriven.TestData) string {
	s.log.Reset()
	s.count = map[string]int{}
	s.pages = d.HasArg("pages")
	arg := func(i int) string { return d.CmdArgs[i].Key }
	version := func(i int) (v uint64) {
		fmt.Sscan(arg(i), &v)
		return v
	}
	size, repeat, shard := 8, 1, 1
	d.MaybeScanArgs(s.t.(*testing.T), "size", &size)
	d.MaybeScanArgs(s.t.(*testing.T), "repeat", &repeat)
	d.MaybeScanArgs(s.t.(*testing.T), "shard", &shard)
	value := strings.Repeat("v", size)
	switch d.Cmd {
	case "put":
		for i := range repeat {
			key := arg(0)
			if repeat > 1 {
				key = fmt.Sprintf("%s-%06d", key, i)
			}
			if !s.put(key, value, version(1)) {
				s.log.WriteString("not resident\n")
			}
		}
	case "delete":
		s.rig.shard(arg(0)).Delete([]byte(arg(0)), layout.StateDeleted)
	case "expire":
		s.rig.shard(arg(0)).Delete([]byte(arg(0)), layout.StateExpired)
	case "touch":
		s.rig.shard(arg(0)).Touch([]byte(arg(0)))
	case "load":
		if s.load == nil {
			s.load = s.shards[0].StartLoad()
		}
		if !s.load.Put(Item{Key: []byte(arg(0)), Value: []byte(value), Version: version(1)}) {
			s.log.WriteString("not resident\n")
		}
	case "commit":
		s.load.Commit()
		s.load = nil
	case "abort":
		s.load.Abort()
		s.load = nil
	case "drop":
		s.shards[shard-1].Drop()
	case "tick":
		s.a.Tick()
	case "advance":
		s.clock.Advance(time.Duration(version(0)) * time.Second)
	default:
		s.t.Fatalf("unknown command %s", d.Cmd)
	}
	if d.HasArg("quiet") {
		return fmt.Sprintln(s.count)
	}
	return s.log.String()
}
