package simnic

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/cockroachdb/datadriven"
	"github.com/kvd-io/kvd/internal/clock"
	"github.com/kvd-io/kvd/rdma"
	"github.com/stretchr/testify/require"
)

// TestScripts tells the fabric's stories, one file each. Time is a manual clock that
// starts at 0; nothing happens but by the script's commands:
//
//	new seed=N delay=D ...      a fabric of hosts s (target; region 1 of 8 KiB) and c
//	connect NAME                from c to s; accept NAME only accepts
//	store OFFSET VALUE          8 bytes of the region
//	post CONN BATCH OFF+LEN ... a chain of READs
//	run D                       lets D pass, prints what completed and ended, when
//	partition, heal, freeze, thaw, kill, boot, lose, hold, release, deregister
//	revoke NAME, close NAME     the target's half, the client's half
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata/stories", func(t *testing.T, path string) {
		s := &script{t: t}
		defer s.end()
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string { return s.do(d) })
	})
}

type script struct {
	t         *testing.T
	clock     *clock.Manual
	f         *Fabric
	target    rdma.Target
	ini       rdma.Initiator
	domain    rdma.Domain
	mem       *rdma.Memory
	attr      []byte
	boots     uint64
	release   func()
	names     []string // of connections, in order
	conns     map[string]rdma.Conn
	endpoints map[string]rdma.Endpoint
	batches   []*named
	told      map[string]bool
	out       strings.Builder
}

type named struct {
	name string
	b    *rdma.Batch
	told bool
}

var epoch = time.Unix(0, 0)

func (s *script) end() {
	if s.f != nil {
		s.f.Close()
	}
	if s.mem != nil {
		require.NoError(s.t, s.mem.Free())
	}
}

func (s *script) do(d *datadriven.TestData) string {
	s.out.Reset()
	arg := func(i int) string { return d.CmdArgs[i].Key }
	switch d.Cmd {
	case "new":
		s.new(d)
	case "boot":
		s.boot()
	case "accept":
		s.accept(arg(0))
	case "connect":
		s.connect(arg(0))
	case "store":
		var off, val uint64
		_, err := fmt.Sscan(arg(0)+" "+arg(1), &off, &val)
		require.NoError(s.t, err)
		atomic.StoreUint64((*uint64)(unsafe.Pointer(&s.mem.Bytes()[off])), val)
	case "post":
		s.post(arg(0), arg(1), d.CmdArgs[2:])
	case "run":
		limit, err := time.ParseDuration(arg(0))
		require.NoError(s.t, err)
		s.run(limit)
	case "partition":
		s.f.Partition("c", "s")
	case "heal":
		s.f.Heal("s", "c")
	case "freeze":
		s.f.Freeze("s")
	case "thaw":
		s.f.Thaw("s")
	case "kill":
		s.f.Kill("s")
	case "lose":
		s.f.Lose("c", "s")
	case "hold":
		s.release = s.f.Hold("s")
	case "release":
		s.release()
	case "deregister":
		require.NoError(s.t, s.domain.Deregister(1))
	case "revoke":
		require.NoError(s.t, s.endpoints[arg(0)].Close())
	case "close":
		require.NoError(s.t, s.conns[arg(0)].Close())
	default:
		d.Fatalf(s.t, "unknown command %q", d.Cmd)
	}
	s.tell()
	if s.out.Len() == 0 {
		return "ok\n"
	}
	return s.out.String()
}

func (s *script) new(d *datadriven.TestData) {
	s.end()
	*s = script{t: s.t, clock: clock.NewManual(epoch), conns: map[string]rdma.Conn{}, endpoints: map[string]rdma.Endpoint{}, told: map[string]bool{}}
	cfg := Config{Clock: s.clock, Stepped: true}
	span := func(name string, r *Range) {
		var v string
		if d.HasArg(name) {
			d.ScanArgs(s.t, name, &v)
			least, most, both := strings.Cut(v, "-")
			r.Min, _ = time.ParseDuration(least)
			if r.Max = r.Min; both {
				r.Max, _ = time.ParseDuration(most)
			}
		}
	}
	d.MaybeScanArgs(s.t, "seed", &cfg.Seed)
	d.MaybeScanArgs(s.t, "tear", &cfg.TearOneIn)
	d.MaybeScanArgs(s.t, "lose", &cfg.LoseOneIn)
	d.MaybeScanArgs(s.t, "revoke", &cfg.RevokeOneIn)
	d.MaybeScanArgs(s.t, "depth", &cfg.QueueDepth)
	span("delay", &cfg.Delay)
	span("gap", &cfg.Gap)
	span("return", &cfg.Return)
	span("pause", &cfg.Pause)
	var timeout, accept Range
	span("timeout", &timeout)
	span("accept", &accept)
	cfg.Timeout, cfg.AcceptTimeout = timeout.Min, accept.Min
	var err error
	s.f, err = New(cfg)
	require.NoError(s.t, err)
	s.ini, err = s.f.Host("c").NewInitiator(rdma.InitiatorConfig{})
	require.NoError(s.t, err)
	s.mem, err = rdma.AllocMemory("script", 8192, rdma.MemoryOptions{})
	require.NoError(s.t, err)
	s.boot()
}

func (s *script) boot() {
	s.boots++
	var err error
	s.target, err = s.f.Host("s").NewTarget(rdma.TargetConfig{BootID: s.boots})
	require.NoError(s.t, err)
	s.domain, err = s.target.NewDomain("d")
	require.NoError(s.t, err)
	s.attr, err = s.domain.Register(1, s.mem)
	require.NoError(s.t, err)
}

func (s *script) accept(name string) (rdma.Dial, []byte) {
	dial, err := s.ini.Prepare(context.Background())
	require.NoError(s.t, err)
	answer, ep, err := s.domain.Accept(context.Background(), rdma.Peer{}, dial.Offer())
	if err != nil {
		fmt.Fprintf(&s.out, "accept: %v\n", err)
		return nil, nil
	}
	s.names = append(s.names, name)
	s.endpoints[name] = ep
	return dial, answer
}

func (s *script) connect(name string) {
	dial, answer := s.accept(name)
	if dial == nil {
		return
	}
	c, err := dial.Connect(context.Background(), answer)
	if err != nil {
		fmt.Fprintf(&s.out, "connect: %v\n", err)
		return
	}
	require.NoError(s.t, c.AddRegion(1, s.mem.Size(), s.attr))
	s.conns[name] = c
}

func (s *script) post(conn, batch string, reads []datadriven.CmdArg) {
	b := &rdma.Batch{}
	for _, r := range reads {
		var off, n int
		_, err := fmt.Sscanf(r.Key, "%d+%d", &off, &n)
		require.NoError(s.t, err)
		b.Reads = append(b.Reads, rdma.Read{Region: 1, Offset: uint64(off), Dst: make([]byte, n)})
	}
	b.Reset()
	s.batches = append(s.batches, &named{name: batch, b: b})
	s.conns[conn].Post(b)
}

// run lets time pass, event by event, telling what each brings.
func (s *script) run(d time.Duration) {
	end := s.clock.Now().Add(d)
	for {
		at, ok := s.f.Next()
		if !ok || at.After(end) {
			break
		}
		if now := s.clock.Now(); at.After(now) {
			s.clock.Advance(at.Sub(now))
		}
		require.True(s.t, s.f.Step())
		s.tell()
	}
	s.clock.Advance(end.Sub(s.clock.Now()))
	require.False(s.t, s.f.Step())
}

// tell prints what is new.
func (s *script) tell() {
	now := s.clock.Now().Sub(epoch)
	for _, n := range s.batches {
		if n.told || !n.b.Completed() {
			continue
		}
		n.told = true
		fmt.Fprintf(&s.out, "%v %s: ", now, n.name)
		if n.b.Err() != nil {
			fmt.Fprintln(&s.out, n.b.Err())
			continue
		}
		for _, r := range n.b.Reads {
			fmt.Fprint(&s.out, "[")
			for i := 0; i+8 <= len(r.Dst); i += 8 {
				fmt.Fprint(&s.out, sep(i), binary.NativeEndian.Uint64(r.Dst[i:]))
			}
			fmt.Fprint(&s.out, "]")
		}
		fmt.Fprintln(&s.out)
	}
	for _, name := range s.names {
		if c := s.conns[name]; c != nil && !s.told["conn "+name] && over(c.Done()) {
			s.told["conn "+name] = true
			fmt.Fprintf(&s.out, "%v conn %s ended: %v\n", now, name, c.Err())
		}
		if !s.told["ep "+name] && over(s.endpoints[name].Done()) {
			s.told["ep "+name] = true
			fmt.Fprintf(&s.out, "%v endpoint %s ended\n", now, name)
		}
	}
}

func sep(i int) string {
	if i == 0 {
		return ""
	}
	return " "
}

func over(done <-chan struct{}) bool {
	select {
	case <-done:
		return true
	default:
		return false
	}
}

func TestMain(m *testing.M) {
	if os.Getenv(misuseEnv) != "" { // see TestMisuseIsARace
		misuse()
		return
	}
	verify(m)
}
