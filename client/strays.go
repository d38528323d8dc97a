package client

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
)

// What one endpoint is of is asked of all, so that those of a second cluster, such as a
// first node that was wiped and bootstrapped anew, are not taken for the one that is
// wanted.

// strayWait is the least that the other endpoints have to say what they are of, after the
// first did. It is longer where the first took long, and never more than a tenth of
// Config.DialTimeout.
const strayWait = 100 * time.Millisecond

// identities are what the endpoints say that they are of.
type identities struct {
	asked chan struct{} // closed when all have answered, or failed
	mu    struct {
		sync.Mutex
		of    map[string]string // cluster ids by endpoint
		first time.Duration     // until the first answer
	}
}

// askIdentities begins to ask the endpoints which cluster they are of; nil where there is
// nothing to compare.
func (c *Client) askIdentities() *identities {
	if c.cfg.ClusterID != "" || len(c.cfg.Endpoints) < 2 {
		return nil // nodes refuse who names another cluster
	}
	ids := &identities{asked: make(chan struct{})}
	ids.mu.of = map[string]string{}
	began := time.Now()
	a := c.admin()
	var wg sync.WaitGroup
	for _, addr := range c.cfg.Endpoints {
		wg.Add(1)
		if !c.tasks.spawn(func() {
			defer wg.Done()
			resp, err := a.statusOf(c.life, addr)
			if err != nil || resp.GetClusterId() == "" {
				return // it is not there, or of none yet
			}
			ids.mu.Lock()
			if len(ids.mu.of) == 0 {
				ids.mu.first = time.Since(began)
			}
			ids.mu.of[addr] = resp.GetClusterId()
			ids.mu.Unlock()
			if k := c.cluster(); k != nil && k.id != resp.GetClusterId() {
				c.stray(addr, resp.GetClusterId())
			}
		}) {
			wg.Done()
		}
	}
	if !c.tasks.spawn(func() { wg.Wait(); close(ids.asked) }) {
		close(ids.asked)
	}
	return ids
}

// decide waits for the endpoints, but not for long, and is an ErrWrongCluster where they
// are of several clusters. ids may be nil.
func (ids *identities) decide(ctx context.Context, cfg *Config) error {
	if ids == nil {
		return nil
	}
	ids.mu.Lock()
	wait := min(max(strayWait, 2*ids.mu.first), cfg.DialTimeout/10)
	ids.mu.Unlock()
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-ids.asked:
	case <-t.C:
	case <-ctx.Done():
	}
	return ids.differ()
}

// differ is nil where all that answered are of one cluster.
func (ids *identities) differ() error {
	ids.mu.Lock()
	defer ids.mu.Unlock()
	by := map[string][]string{}
	for addr, id := range ids.mu.of {
		by[id] = append(by[id], addr)
	}
	if len(by) < 2 {
		return nil
	}
	var parts []string
	for _, id := range slices.SortedFunc(maps.Keys(by), func(a, b string) int {
		return cmp.Or(len(by[b])-len(by[a]), cmp.Compare(a, b))
	}) {
		slices.Sort(by[id])
		parts = append(parts, fmt.Sprintf("cluster %s at %s", id, strings.Join(by[id], ", ")))
	}
	return &rpcError{class: ErrWrongCluster, text: fmt.Sprintf(
		"%v: the endpoints are of %d clusters: %s: give the endpoints of one, or the id of the one that is wanted", ErrWrongCluster, len(by), strings.Join(parts, "; "))}
}

// want is the id of the cluster that an operator means; "": not known.
func (a *Admin) want() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return cmp.Or(a.cfg.ClusterID, a.mu.cluster)
}

// adopt takes what all endpoints that answer are of for the cluster that is meant. It is an
// ErrWrongCluster where they are of several.
func (a *Admin) adopt(ctx context.Context) error {
	if a.want() != "" || len(a.cfg.Endpoints) < 2 {
		return nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	began := time.Now()
	answers := make(chan NodeStatus, len(a.cfg.Endpoints))
	for _, addr := range a.cfg.Endpoints {
		go func() { // ends with ctx, at the latest
			st, err := a.statusOf(ctx, addr)
			answers <- NodeStatus{Address: addr, Status: st, Err: err}
		}()
	}
	ids := &identities{}
	ids.mu.of = map[string]string{}
	enough := time.NewTimer(a.cfg.ConnectTimeout)
	defer enough.Stop()
	for left := len(a.cfg.Endpoints); left > 0; left-- {
		select {
		case s := <-answers:
			if id := s.Status.GetClusterId(); s.Err == nil && id != "" {
				if len(ids.mu.of) == 0 {
					enough.Reset(min(max(strayWait, 2*time.Since(began)), a.cfg.DialTimeout/10))
				}
				ids.mu.of[s.Address] = id
			}
			continue
		case <-enough.C:
		case <-ctx.Done():
		}
		break
	}
	if err := ids.differ(); err != nil {
		return err
	}
	for _, id := range ids.mu.of {
		a.mu.Lock()
		a.mu.cluster = id
		a.mu.Unlock()
	}
	return nil
}

// stray logs, once for each, that a node of another cluster is at an address. It is not
// used.
func (c *Client) stray(addr, id string) {
	if _, known := c.strays.LoadOrStore(addr+" "+id, true); !known {
		c.cfg.Logger.Error("a node of another cluster answers at an address of this one; it is not used: correct the endpoints, or stop it",
			slog.String("address", addr), slog.String("cluster", id), slog.String("want", c.cluster().id))
	}
}
