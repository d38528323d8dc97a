package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/client"
	"github.com/kvd-io/kvd/internal/health"
)

// memberRow is one node as the leader of group 0 knows it.
type memberRow struct {
	Node     uint64 `json:"node"`
	Address  string `json:"address"`
	State    string `json:"state"`
	Live     bool   `json:"live"`
	Voter    bool   `json:"votes_in_group_0"`
	Replicas uint32 `json:"replicas"`
	Leads    uint32 `json:"leads"`
	Bytes    uint64 `json:"bytes"`
	Zone     string `json:"zone,omitempty"`
	Rack     string `json:"rack,omitempty"`
	Host     string `json:"host,omitempty"`
	Version  string `json:"version,omitempty"`
	// Protocol is what that version understands; unset: the node did not answer.
	Protocol *uint32 `json:"protocol,omitempty"`
	Since    string  `json:"since,omitempty"`
	// Gossip is a hint of whether the node lives; unset where no node gossips.
	Gossip *gossipRow `json:"gossip,omitempty"`
}

// gossipRow is what the others hear of a node beside Raft.
type gossipRow struct {
	State    string `json:"state"` // alive, suspect, dead, left, or never heard
	Since    string `json:"since,omitempty"`
	Heard    string `json:"heard,omitempty"` // when it last answered the observer
	Observer uint64 `json:"observer"`        // the node that says so
}

// addGossip asks the nodes that live whom they hear; it tells whether any gossips.
func addGossip(ctx context.Context, a *client.Admin, rows []memberRow) bool {
	ask := map[uint64]string{}
	for _, r := range rows {
		if r.Live && r.Address != "" {
			ask[r.Node] = r.Address
		}
	}
	var views []health.View
	for node, heard := range a.Liveness(ctx, ask) {
		views = append(views, health.View{Observer: node, Heard: heard})
	}
	hints := health.Hints(views...)
	for i, r := range rows {
		if h, ok := hints[r.Node]; ok {
			rows[i].Gossip = &gossipRow{State: h.Word(), Since: timeOrNone(h.Since), Heard: timeOrNone(h.Heard), Observer: h.Observer}
		}
	}
	return len(views) > 0
}

func timeOrNone(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339)
}

// String is for a column.
func (g *gossipRow) String() string {
	switch {
	case g == nil:
		return "-"
	case g.Since == "":
		return g.State
	}
	return g.State + " since " + g.Since
}

func rowOf(m *kvdv1.MemberStatus) memberRow {
	n := m.GetNode()
	r := memberRow{
		Node: n.GetNodeId(), Address: n.GetAddress(), State: nodeState(n), Live: m.GetLive(), Voter: m.GetVoter(),
		Replicas: m.GetReplicas(), Leads: m.GetLeads(), Bytes: m.GetBytes(),
		Zone: n.GetZone(), Rack: n.GetRack(), Host: n.GetHost(), Version: n.GetVersion(), Protocol: m.Protocol,
	}
	if ms := n.GetSinceUnixMs(); ms != 0 {
		r.Since = time.UnixMilli(ms).UTC().Format(time.RFC3339)
	}
	return r
}

func orDash(v *uint32) any {
	if v == nil {
		return "-"
	}
	return *v
}

// commonProtocol says what the cluster as a whole can use.
func commonProtocol(rows []memberRow) string {
	least, silent := uint32(math.MaxUint32), []string{}
	for _, r := range rows {
		switch {
		case r.State == "gone":
		case r.Protocol == nil:
			silent = append(silent, strconv.FormatUint(r.Node, 10))
		default:
			least = min(least, *r.Protocol)
		}
	}
	if len(silent) > 0 {
		return "protocol of all: not known, for there is no answer of node " + strings.Join(silent, ", ")
	}
	return fmt.Sprintf("protocol of all: %d", least)
}

func nodeState(n *kvdv1.NodeRecord) string {
	s := strings.ToLower(strings.TrimPrefix(n.GetState().String(), "NODE_STATE_"))
	if n.GetLeadersOnly() {
		s += " (leaders)"
	}
	return s
}

func newMembers(s *settings) *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "members",
		Short: "Show the nodes of the cluster",
		Long: `Shows the nodes as the leader of the cluster's own group knows them: state, whether it hears them, how
many replicas they hold and lead, and their failure domains. A node is joining until it has what the
cluster knows, then active; draining or decommissioned while its replicas are moved away; gone when
it has left. Where nodes gossip (kvd start --gossip-listen) a column shows what they hear of each other
beside that: alive, suspect, dead, left (it said that it stops) or never heard. That is a hint; nothing
is decided by it. The protocol is what a node's version understands; what is new in one is used only
when all nodes are known to understand it. Wants an operator's token.`,
		Example: `  kvctl members
  kvctl members --all -o json`,
		Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return s.withAdmin(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
				list, err := a.Members(ctx)
				if err != nil {
					return err
				}
				rows := []memberRow{}
				for _, m := range list {
					if all || m.GetNode().GetState() != kvdv1.NodeState_NODE_STATE_GONE {
						rows = append(rows, rowOf(m))
					}
				}
				gossips := addGossip(ctx, a, rows)
				if s.output == "json" {
					return printJSON(cmd.OutOrStdout(), rows)
				}
				header := []any{"node", "address", "state", "live", "group 0", "replicas", "leads", "bytes", "zone", "rack", "host", "version", "protocol"}
				if gossips {
					header = append(header, "gossip")
				}
				t := newTable(cmd.OutOrStdout(), header...)
				for _, r := range rows {
					part := "learns"
					if r.Voter {
						part = "votes"
					}
					row := []any{r.Node, r.Address, r.State, r.Live, part, r.Replicas, r.Leads, humanize.IBytes(r.Bytes), r.Zone, r.Rack, r.Host, r.Version, orDash(r.Protocol)}
					if gossips {
						row = append(row, r.Gossip)
					}
					t.AppendRow(row)
				}
				t.Render()
				fmt.Fprintln(cmd.OutOrStdout(), commonProtocol(rows))
				return nil
			})
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "also those that have left")
	return cmd
}

func parseNode(s string) (uint64, error) {
	node, err := strconv.ParseUint(s, 10, 64)
	if err != nil || node == 0 {
		return 0, usagef("node %q: want the number of a node; kvctl members lists them", s)
	}
	return node, nil
}

// agree asks a person before something dangerous. Without one to ask it wants --yes.
func agree(cmd *cobra.Command, yes bool, question string) error {
	if yes {
		return nil
	}
	in, ok := cmd.InOrStdin().(*os.File)
	if !ok || !term.IsTerminal(int(in.Fd())) {
		return usagef("%s: nobody is there to ask, so give --yes", question)
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "%s? [y/N] ", question)
	line, err := bufio.NewReader(in).ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if a := strings.ToLower(strings.TrimSpace(line)); a != "y" && a != "yes" {
		return errors.New("nothing was done")
	}
	return nil
}

// errNotSafe: what can be moved was moved, and the node must not stop all the same.
var errNotSafe = errors.New("it is not safe")

// leaving is how a node gives away what it has.
type leaving struct {
	s       *settings
	node    uint64
	noWait  bool
	wait    time.Duration
	yes     bool
	leaders bool // only those count
	end     kvdv1.NodeState
}

func (l *leaving) define(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&l.noWait, "no-wait", false, "return when it is decided; kvctl members tells how far it is")
	cmd.Flags().DurationVar(&l.wait, "wait", time.Hour, "how long to wait until nothing is left")
	cmd.Flags().BoolVarP(&l.yes, "yes", "y", false, "do not ask")
}

// find is what the cluster knows of the node. It lets a learn where the others are, too:
// the one that was asked may be the one that leaves.
func (l *leaving) find(ctx context.Context, a *client.Admin) (*kvdv1.NodeRecord, error) {
	list, err := a.Members(ctx)
	if err != nil {
		return nil, err
	}
	for _, m := range list {
		if m.GetNode().GetNodeId() == l.node {
			return m.GetNode(), nil
		}
	}
	return nil, fmt.Errorf("%w: there never was a node %d: kvctl members lists them", client.ErrNotFound, l.node)
}

// awaitEmpty shows the progress until the node has nothing any more.
func (l *leaving) awaitEmpty(parent context.Context, cmd *cobra.Command, a *client.Admin) error {
	ctx, cancel := context.WithTimeout(parent, l.wait)
	defer cancel()
	out := cmd.ErrOrStderr()
	var bar *progressbar.ProgressBar
	most, said, failed := -1, time.Time{}, time.Time{}
	for {
		left, problem, err := l.look(ctx, a)
		if errors.Is(err, errNotSafe) {
			return err
		}
		if err == nil && left == 0 {
			if bar != nil {
				_ = bar.Finish()
			}
			return nil
		}
		if err == nil {
			most = max(most, left)
			if f, ok := out.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
				if bar == nil {
					bar = progressbar.NewOptions(most, progressbar.OptionSetWriter(out), progressbar.OptionSetDescription(fmt.Sprintf("node %d", l.node)), progressbar.OptionClearOnFinish())
				}
				_ = bar.Set(most - left) // a bar that can not be drawn is no reason to stop
			} else if time.Since(said) >= sayEvery {
				said = time.Now()
				fmt.Fprintf(out, "node %d: %d of %d left%s\n", l.node, left, most, problem)
			}
		} else if ctx.Err() == nil && time.Since(failed) >= sayEvery {
			failed = time.Now()
			if bar != nil {
				_ = bar.Clear()
			}
			fmt.Fprintf(out, "node %d: how far it is, is not known now: %v\n", l.node, err)
		}
		select {
		case <-time.After(300 * time.Millisecond):
		case <-ctx.Done():
			if parent.Err() != nil {
				return fmt.Errorf("%w: what was begun with node %d goes on, and kvctl members tells how far it is", errInterrupted, l.node)
			}
			if err != nil {
				return fmt.Errorf("whether node %d is empty is not known: %w", l.node, err)
			}
			return fmt.Errorf("%w: node %d still has %d%s; it goes on, and kvctl members tells how far it is", client.ErrUnavailable, l.node, left, problem)
		}
	}
}

func (l *leaving) notSafe(why string) error {
	return fmt.Errorf("%w: node %d leads nothing, but %w to stop: %s", client.ErrUnavailable, l.node, errNotSafe, why)
}

// look counts what the node still has: replicas, or leaders.
func (l *leaving) look(ctx context.Context, a *client.Admin) (left int, problem string, err error) {
	call, cancel := context.WithTimeout(ctx, l.s.timeout)
	defer cancel()
	list, err := a.Members(call)
	if err != nil {
		return 0, "", err
	}
	for _, m := range list {
		if m.GetNode().GetNodeId() != l.node {
			continue
		}
		left = int(m.GetReplicas() + m.GetLeads())
		if l.leaders {
			left = int(m.GetLeads())
		}
		if l.end != 0 && m.GetNode().GetState() != l.end {
			left++ // the node itself
		}
	}
	if lacks := quorumWithout(list, l.node); lacks != "" && l.end == 0 {
		if l.leaders && left == 0 {
			// It keeps its vote: nothing is to be waited for.
			return 0, "", l.notSafe(lacks)
		}
		if !l.leaders {
			left++ // its vote
			problem = ": " + lacks
		}
	}
	if left == 0 && l.leaders {
		survey, err := a.Survey(call)
		if err != nil {
			return 0, "", err
		}
		if lost := health.LostWithout(survey, l.node); len(lost) > 0 {
			return 0, "", l.notSafe(fmt.Sprintf("too few of those that vote in %s would be left: see that the other nodes run (kvctl cluster health)", health.NameShards(lost)))
		}
	}
	if left == 0 {
		return 0, "", nil
	}
	if r, err := a.Rebalance(call, true); err == nil && len(r.GetProblems()) > 0 {
		problem += ": " + strings.Join(r.GetProblems(), "; ")
	}
	return left, problem, nil
}

func newDrain(s *settings) *cobra.Command {
	l := &leaving{s: s}
	var undo bool
	cmd := &cobra.Command{
		Use:   "drain NODE",
		Short: "Move leaders and replicas away from a node",
		Long: `Has the leaders and then the replicas of NODE moved to others, and waits until it has none: then it is
safe to stop, for the cluster's own group too. It stays a member, gets nothing new, and with --undo its
share again. Where the other nodes are too few to hold all replicas this is refused (exit code 4); with
--leaders-only replicas stay, which is
what a restart needs. Clients notice nothing. Wants an operator's token.`,
		Example: `  kvctl drain 3
  kvctl drain 3 --leaders-only --yes && ssh node3 systemctl restart kvd && kvctl drain 3 --undo`,
		Args: exactArgs("NODE"),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if l.node, err = parseNode(args[0]); err != nil {
				return err
			}
			question := fmt.Sprintf("move all leaders and replicas away from node %d", l.node)
			if l.leaders {
				question = fmt.Sprintf("move all leaders away from node %d", l.node)
			}
			if undo && l.leaders {
				return usagef("--undo and --leaders-only: give one of them")
			}
			if !undo {
				if err := agree(cmd, l.yes, question); err != nil {
					return err
				}
			}
			return s.withAdmin(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
				n, err := l.find(ctx, a)
				if err != nil {
					return err
				}
				if n.GetState() == kvdv1.NodeState_NODE_STATE_GONE {
					return fmt.Errorf("%w: node %d has left the cluster, and its id is never used again: with an empty directory and --join it comes back under another", client.ErrConflict, l.node)
				}
				if err := a.Drain(ctx, l.node, client.DrainOptions{LeadersOnly: l.leaders, Undo: undo}); err != nil {
					return err
				}
				if undo || l.noWait {
					return s.sayNode(cmd, l.node, map[bool]string{true: "active", false: "draining"}[undo])
				}
				if err := l.awaitEmpty(cmd.Context(), cmd, a); err != nil {
					return err
				}
				return s.sayNode(cmd, l.node, "drained")
			})
		},
	}
	l.define(cmd)
	cmd.Flags().BoolVar(&l.leaders, "leaders-only", false, "let replicas stay: for a node that is back soon")
	cmd.Flags().BoolVar(&undo, "undo", false, "let the node have its share again")
	return cmd
}

func newDecommission(s *settings) *cobra.Command {
	l := &leaving{s: s, end: kvdv1.NodeState_NODE_STATE_GONE}
	cmd := &cobra.Command{
		Use:   "decommission NODE",
		Short: "Take a node out of the cluster for good",
		Long: `Has everything that NODE holds moved to others, and then has it leave. A node that is lost is taken out
in the same way: what it held is made anew from the other replicas. Its id is never used again; with
an empty directory and --join it comes back under another. It can not be undone, and is refused (exit code 4)
where the nodes that are left are too few to hold all replicas. To repeat it does no harm. Wants an operator's token.`,
		Example: `  kvctl decommission 3 --yes`,
		Args:    exactArgs("NODE"),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if l.node, err = parseNode(args[0]); err != nil {
				return err
			}
			if err := agree(cmd, l.yes, fmt.Sprintf("take node %d out of the cluster for good", l.node)); err != nil {
				return err
			}
			return s.withAdmin(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
				n, err := l.find(ctx, a)
				if err != nil {
					return err
				}
				if n.GetState() == kvdv1.NodeState_NODE_STATE_GONE {
					return s.sayNode(cmd, l.node, "gone already")
				}
				if err := a.Decommission(ctx, l.node); err != nil {
					return err
				}
				if l.noWait {
					return s.sayNode(cmd, l.node, "decommissioned")
				}
				if err := l.awaitEmpty(cmd.Context(), cmd, a); err != nil {
					return err
				}
				return s.sayNode(cmd, l.node, "gone")
			})
		},
	}
	l.define(cmd)
	return cmd
}

func (s *settings) sayNode(cmd *cobra.Command, node uint64, state string) error {
	if s.output == "json" {
		return printJSON(cmd.OutOrStdout(), map[string]any{"node": node, "state": strings.TrimSuffix(state, " already")})
	}
	words := map[string]string{
		"drained": "is drained: it is safe to stop", "gone": "has left the cluster; its id is never used again", "gone already": "has left the cluster already; its id is never used again",
		"draining": "is being drained", "decommissioned": "is leaving", "active": "is active again",
	}
	_, err := fmt.Fprintf(cmd.OutOrStdout(), "node %d %s\n", node, words[state])
	return err
}

func newRebalance(s *settings) *cobra.Command {
	var dry bool
	cmd := &cobra.Command{
		Use:   "rebalance",
		Short: "Show what is moved next, and have it moved",
		Long: `Shows the next moves of replicas and leaders, with the reason of each. A cluster that nodes joined moves
them by itself, a few at a time; one whose nodes were all named when it was made only after this was
said once. With --dry-run nothing is changed. Wants an operator's token.`,
		Example: `  kvctl rebalance --dry-run`,
		Args:    exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return s.withAdmin(cmd.Context(), func(ctx context.Context, a *client.Admin) error {
				r, err := a.Rebalance(ctx, dry)
				if err != nil {
					return err
				}
				return s.printPlan(cmd, r)
			})
		},
	}
	cmd.Flags().BoolVar(&dry, "dry-run", false, "only show it")
	return cmd
}

func (s *settings) printPlan(cmd *cobra.Command, r *kvdv1.RebalanceResponse) error {
	type move struct {
		Shard  uint32 `json:"shard"`
		What   string `json:"what"` // replica or leader
		From   uint64 `json:"from"` // 0: none
		To     uint64 `json:"to"`   // 0: none
		Reason string `json:"reason"`
	}
	moves := []move{}
	for _, m := range r.GetMoves() {
		what := "replica"
		if m.GetLeader() {
			what = "leader"
		}
		moves = append(moves, move{m.GetShard(), what, m.GetRemove(), m.GetAdd(), m.GetReason()})
	}
	if s.output == "json" {
		problems := append([]string{}, r.GetProblems()...)
		return printJSON(cmd.OutOrStdout(), map[string]any{"moves": moves, "problems": problems, "moving": r.GetMoving()})
	}
	if len(moves) > 0 {
		t := newTable(cmd.OutOrStdout(), "shard", "what", "from", "to", "reason")
		for _, m := range moves {
			t.AppendRow([]any{m.Shard, m.What, nodeOrNone(m.From), nodeOrNone(m.To), m.Reason})
		}
		t.Render()
	}
	for _, p := range r.GetProblems() {
		fmt.Fprintf(cmd.OutOrStdout(), "problem: %s\n", p)
	}
	if r.GetMoving() > 0 {
		fmt.Fprintf(cmd.OutOrStdout(), "%d shards are on their way\n", r.GetMoving())
	}
	if len(moves) == 0 && r.GetMoving() == 0 {
		fmt.Fprintln(cmd.OutOrStdout(), "everything is where it belongs")
	}
	return nil
}

func nodeOrNone(id uint64) string {
	if id == 0 {
		return "-"
	}
	return strconv.FormatUint(id, 10)
}
