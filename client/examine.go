package client

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/storage/layout"
)

// Examination is what Examine found out about one node.
type Examination struct {
	NodeID   uint64
	Address  string
	SameHost bool // on the same kernel, so that shared memory may work
	// Transport is how gets read the node now: a provider's name, or "grpc". Reason says
	// why that one. Both are empty where Err says why there is no session.
	Transport string
	Reason    string
	Err       error
	// Trials of each transport, in order of preference, gRPC last.
	Trials []Trial
}

// Trial is one transport to a node, tried beside what gets use.
type Trial struct {
	Transport string
	// Usable: a connection was made and every READ of the trial was answered.
	Usable bool
	// Reason why not: one of the words of TransportFallback, or not_served, another_host
	// or two_sided, which are no failures. Detail says it for people.
	Reason string
	Detail string
	// Confidential: the bytes of a READ cannot be read along on a network.
	Confidential bool

	Connect time.Duration // until the first READ could be posted
	Reads   int           // measured; of gRPC: calls
	Bytes   int           // of each READ
	P50     time.Duration
	P99     time.Duration
}

// reasonTwoSidedTrial: no transport may be tried.
const reasonTwoSidedTrial = "two_sided"

// Examine tries every transport to every node that is known and has been tried once, and
// times that many READs of a control record by each; gRPC is timed by a tenth as many
// calls. What RequireTLS rules out is not tried. It disturbs no get.
func (c *Client) Examine(ctx context.Context, reads int) []Examination {
	var list []Examination
	for _, n := range c.sortedNodes() {
		select {
		case <-n.tried:
		case <-ctx.Done():
		}
		list = append(list, c.examine(ctx, n, max(reads, 1)))
	}
	return list
}

func (c *Client) examine(ctx context.Context, n *node, reads int) Examination {
	e := Examination{NodeID: n.id, Address: n.addr()}
	s := n.sess.Load()
	if s == nil || s.ended.Load() { // one that has ended stays a moment
		n.mu.Lock()
		defer n.mu.Unlock()
		if e.Err = n.mu.err; e.Err == nil {
			e.Err = fmt.Errorf("%w: node at %s did not answer in time", ErrUnavailable, n.mu.addr)
		}
		return e
	}
	e.Address, e.Transport, e.Reason = s.remote.addr, c.via[s.via], s.note
	e.SameHost = sameHost(c.cfg.HostID, s.stream.opened.GetHostId())
	for i, t := range c.transports {
		e.Trials = append(e.Trials, c.try(ctx, s, i, t, reads))
	}
	e.Trials = append(e.Trials, c.tryGRPC(ctx, s, max(reads/10, 1)))
	return e
}

// try makes a connection of its own over the session's stream, and ends it.
func (c *Client) try(ctx context.Context, now *session, i int, t *transport, reads int) Trial {
	trial := Trial{Transport: t.name, Confidential: !t.plain, Bytes: layout.RecordSize}
	opened := now.stream.opened
	refuse := func(reason, detail string) Trial {
		trial.Reason, trial.Detail = reason, detail
		return trial
	}
	switch {
	case !opened.GetOneSided():
		return refuse(reasonTwoSidedTrial, "the namespace is kept out of one-sided READs")
	case !slices.Contains(opened.GetTransports(), t.name):
		return refuse(pathNotServed.String(), "not served by the node")
	case t.name == shmName && c.cfg.Transport != shmName && !sameHost(c.cfg.HostID, opened.GetHostId()):
		return refuse(pathElsewhere.String(), "another host")
	case t.plain && !c.mayReadPlain():
		return refuse(pathPlain.String(), plainText)
	}
	began := time.Now()
	s := c.newSession(now.remote, now.stream)
	ctx, cancel := context.WithTimeout(ctx, c.cfg.ConnectTimeout)
	defer cancel()
	if err := s.handshake(ctx, i); err != nil {
		return refuse(classifyPath(err).String(), err.Error())
	}
	trial.Connect = time.Since(began)
	var times []time.Duration
	err := func() error {
		b := &rdma.Batch{Reads: []rdma.Read{{Region: rdma.ControlRegion, Dst: make([]byte, layout.RecordSize)}}}
		for range reads + reads/10 {
			b.Reset()
			posted := time.Now()
			s.conn.Post(b)
			if !b.Wait(ctx, c.cfg.StallTimeout) {
				return fmt.Errorf("%w: a READ was not answered", rdma.ErrTimeout)
			}
			if err := b.Err(); err != nil {
				return err
			}
			times = append(times, time.Since(posted))
		}
		return nil
	}()
	s.close()
	if err != nil {
		return refuse(classifyPath(err).String(), err.Error())
	}
	trial.Usable, trial.Reason = true, pathUsable.String()
	trial.measured(times[reads/10:])
	return trial
}

// tryGRPC times calls that answer little.
func (c *Client) tryGRPC(ctx context.Context, now *session, calls int) Trial {
	trial := Trial{Transport: TransportGRPC, Confidential: c.cfg.TLS != nil}
	ctx, cancel := context.WithTimeout(ctx, c.cfg.ConnectTimeout)
	defer cancel()
	s := c.newSession(now.remote, now.stream)
	var times []time.Duration
	for range calls {
		began := time.Now()
		if err := s.fetchRoutes(ctx, []uint32{1}); err != nil {
			trial.Reason, trial.Detail = classifyPath(err).String(), err.Error()
			return trial
		}
		times = append(times, time.Since(began))
	}
	trial.Usable, trial.Reason = true, pathUsable.String()
	trial.measured(times)
	return trial
}

func (t *Trial) measured(times []time.Duration) {
	slices.Sort(times)
	t.Reads = len(times)
	t.P50, t.P99 = times[len(times)/2], times[len(times)*99/100]
}
