package env

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"sort"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Config of a place.
type Config struct {
	Binary     string // kvd
	Earlier    string // an earlier kvd, with which nodes begin until they Switch; empty: none
	Self       string // this program, for its helpers
	DataDir    string // short: unix sockets lie below it
	LogDir     string
	Nodes      int
	Spare      bool // one node more, which joins when it is told to: the last of Env.Nodes
	Shards     int
	Clients    []string // names of the hosts of clients
	Namespaces bool     // network namespaces; needs root
	Addrs      []string // of this host, one for each node; empty: loopback. Not with Namespaces
	// Chaos tells that Binary was built with the tag chaos, so that nodes take orders over
	// Node.Socket. Broken names variants, with commas between, that they run with.
	Chaos  bool
	Broken string
	// Args of every node, and of one.
	Args     []string
	NodeArgs map[uint64][]string
}

// Host is a network namespace, or a name for loopback.
type Host struct {
	Name string
	Addr string

	port      string // its cable's end at the bridge
	thread    *thread
	probe     *net.UDPConn
	probeDone chan struct{}
	arrived   arrivals
}

// Env is the place of one run.
type Env struct {
	cfg     Config
	Nodes   []*Node
	hosts   map[string]*Host
	net     *network // nil: loopback
	shared  *thread  // loopback: what starts processes
	cgroups []*cgroup
	// NoCgroups says why there are no memory cgroups; nil: there are.
	NoCgroups error

	cuts map[string]map[Cut]bool // by who made them
}

// Control is the host of the worker that asks for status; it is never cut off.
const Control = "ctl"

// CanNamespaces tells why this process can not make network namespaces; nil: it can.
func CanNamespaces() error {
	if os.Geteuid() != 0 {
		return errors.New("not root")
	}
	for name, pkg := range map[string]string{"ip": "iproute2", "nft": "nftables"} {
		if _, err := exec.LookPath(name); err != nil {
			return fmt.Errorf("%s is not on this machine (Debian: apt-get install %s)", name, pkg)
		}
	}
	return nil
}

// New makes the hosts. No node runs yet.
func New(cfg Config) (e *Env, err error) {
	e = &Env{cfg: cfg, hosts: map[string]*Host{}, cuts: map[string]map[Cut]bool{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.Close())
		}
	}()
	if cfg.Spare && len(cfg.Addrs) > 0 {
		return nil, errors.New("env: no spare node where the addresses of nodes are given")
	}
	prefix := fmt.Sprintf("kvdj%d", os.Getpid())
	var hosts []*Host
	add := func(name string, last int) *Host {
		h := &Host{Name: name, Addr: fmt.Sprintf("10.77.0.%d", last)}
		hosts = append(hosts, h)
		e.hosts[name] = h
		return h
	}
	for i := range cfg.places() {
		add(fmt.Sprintf("n%d", i+1), i+1)
	}
	for i, name := range cfg.Clients {
		add(name, 100+i)
	}
	add(Control, 200)
	if cfg.Namespaces {
		if e.net, err = newNetwork(prefix, hosts); err != nil {
			return nil, err
		}
	} else {
		if e.shared, err = newThread(""); err != nil {
			return nil, err
		}
		for i, h := range hosts {
			h.Addr, h.thread = "127.0.0.1", e.shared
			if i < len(cfg.Addrs) { // the first hosts are those of the nodes
				h.Addr = cfg.Addrs[i]
			}
		}
	}
	return e, e.makeNodes(prefix)
}

// places for nodes, those that begin the cluster first.
func (c *Config) places() int {
	if c.Spare {
		return c.Nodes + 1
	}
	return c.Nodes
}

func (e *Env) makeNodes(prefix string) error {
	ports := make([]int, 3*e.cfg.places())
	for i := range ports {
		ports[i] = 7400 + i%3
	}
	if e.net == nil {
		var err error
		if ports, err = freePorts(len(ports)); err != nil {
			return err
		}
	}
	var peers, addrs []string
	for i := range e.cfg.places() {
		addrs = append(addrs, fmt.Sprintf("%s:%d", e.hosts[fmt.Sprintf("n%d", i+1)].Addr, ports[3*i]))
		if i < e.cfg.Nodes {
			peers = append(peers, fmt.Sprintf("%d=%s", i+1, addrs[i]))
		}
	}
	for i := range e.cfg.places() {
		id := uint64(i + 1)
		h := e.hosts[fmt.Sprintf("n%d", id)]
		at := func(k int) string { return net.JoinHostPort(h.Addr, strconv.Itoa(ports[3*i+k])) }
		n := &Node{ID: id, Host: h, Address: at(0), bin: cmp.Or(e.cfg.Earlier, e.cfg.Binary), other: e.cfg.Binary, LogFile: filepath.Join(e.cfg.LogDir, fmt.Sprintf("node%d.log", id))}
		n.dataDir = filepath.Join(e.cfg.DataDir, h.Name)
		n.args = append([]string{
			"--data-dir", n.dataDir, "--listen", at(0), "--metrics-listen", at(1), "--tcp-listen", at(2),
			"--shm-dir", filepath.Join(e.cfg.DataDir, "shm"),
		}, e.cfg.Args...)
		n.args = append(n.args, e.cfg.NodeArgs[id]...)
		others := slices.Delete(slices.Clone(addrs), i, i+1)
		n.join = []string{"--join", strings.Join(others, ",")}
		n.mu.comes = n.join
		if i < e.cfg.Nodes {
			n.mu.comes = []string{
				"--node-id", strconv.FormatUint(id, 10), "--peers", strings.Join(peers, ","), "--shards", strconv.Itoa(e.cfg.Shards),
				"--bootstrap=" + strconv.FormatBool(id == 1),
			}
			n.mu.member, n.mu.inUse = id, true
		}
		if e.cfg.Chaos {
			n.Socket = filepath.Join(e.cfg.DataDir, h.Name+".chaos")
			n.args = append(n.args, "--chaos-socket", n.Socket)
			n.environ = []string{"KVD_CHAOS_BREAK=" + e.cfg.Broken}
		}
		if e.NoCgroups == nil && os.Geteuid() == 0 {
			n.cg, e.NoCgroups = newCgroup(fmt.Sprintf("%s-n%d", prefix, id))
			if n.cg != nil {
				e.cgroups = append(e.cgroups, n.cg)
			}
		} else if e.NoCgroups == nil {
			e.NoCgroups = errors.New("not root")
		}
		e.Nodes = append(e.Nodes, n)
	}
	return nil
}

// freePorts asks the kernel for ports that nobody uses now.
func freePorts(n int) ([]int, error) {
	ports := make([]int, n)
	for i := range ports {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer func() { _ = l.Close() }() // open until all are drawn, else one could come twice
		ports[i] = l.Addr().(*net.TCPAddr).Port
	}
	return ports, nil
}

// Node by id, from 1.
func (e *Env) Node(id uint64) *Node { return e.Nodes[id-1] }

// InUse are the nodes of the cluster, those that join included: not a spare one that waits.
func (e *Env) InUse() []*Node {
	return slices.DeleteFunc(slices.Clone(e.Nodes), func(n *Node) bool { return !n.InUse() })
}

// ByMember is the node that the cluster knows under an id; nil: none that was told so.
func (e *Env) ByMember(member uint64) *Node {
	i := slices.IndexFunc(e.Nodes, func(n *Node) bool { return member != 0 && n.Member() == member })
	if i < 0 {
		return nil
	}
	return e.Nodes[i]
}

// Founders are the places of the nodes with which the cluster begins.
func (e *Env) Founders() []*Node { return e.Nodes[:e.cfg.Nodes] }

// Endpoints of the nodes with which the cluster begins.
func (e *Env) Endpoints() []string {
	var out []string
	for _, n := range e.Founders() {
		out = append(out, n.Address)
	}
	return out
}

// ClientHosts are the names of the hosts of clients.
func (e *Env) ClientHosts() []string { return e.cfg.Clients }

// CanCut tells whether there is a network that can be cut.
func (e *Env) CanCut() bool { return e.net != nil }

// Starter starts a process on a host.
func (e *Env) Starter(host string) func(*exec.Cmd) error { return e.hosts[host].thread.start }

// Cut makes the cuts of one cause, beside those of others, and looks whether exactly the
// ways that shall be closed are closed. An empty list ends that cause's cuts.
func (e *Env) Cut(cause string, cuts []Cut) error {
	if e.net == nil {
		return errors.New("env: loopback can not be cut")
	}
	e.cuts[cause] = map[Cut]bool{}
	for _, c := range cuts {
		e.cuts[cause][c] = true
	}
	want := map[Cut]bool{}
	for _, cs := range e.cuts {
		for c := range cs {
			want[c] = true
		}
	}
	return e.net.set(want)
}

// verifyTimeout: a host that was alone asks for its neighbours again once a second.
const verifyTimeout = 5 * time.Second

// VerifyCuts probes every direction: what is cut must be closed, and all else open, but for
// the hosts whose link is being played with.
func (e *Env) VerifyCuts(except ...string) error {
	if e.net == nil {
		return nil
	}
	skip := map[string]bool{}
	for _, name := range except {
		skip[name] = true
	}
	var wrong []string
	for end := time.Now().Add(verifyTimeout); ; {
		open := e.net.reach(80 * time.Millisecond)
		e.net.mu.Lock()
		wrong = wrong[:0]
		for _, from := range e.net.hosts {
			for _, to := range e.net.hosts {
				c := Cut{from.Name, to.Name}
				switch {
				case from == to || skip[from.Name] || skip[to.Name]:
				case open[c] && e.net.cuts[c]:
					wrong = append(wrong, c.From+"->"+c.To+" is open")
				case !open[c] && !e.net.cuts[c]:
					wrong = append(wrong, c.From+"->"+c.To+" is closed")
				}
			}
		}
		e.net.mu.Unlock()
		if len(wrong) == 0 {
			return nil
		}
		if time.Now().After(end) {
			sort.Strings(wrong)
			return fmt.Errorf("env: the network is not as ordered: %s", strings.Join(wrong, ", "))
		}
	}
}

// Dropped is how many packets the cuts have dropped so far.
func (e *Env) Dropped() (uint64, error) {
	if e.net == nil {
		return 0, nil
	}
	return e.net.totalDropped()
}

// Link takes a host's cable out, or plugs it in.
func (e *Env) Link(host string, up bool) error {
	if e.net == nil {
		return errors.New("env: loopback has no cable")
	}
	return e.net.link(e.hosts[host], up)
}

// Reachable tells whether a datagram gets from one host to the other.
func (e *Env) Reachable(from, to string) bool {
	return e.net != nil && e.net.reach(60 * time.Millisecond)[Cut{from, to}]
}

// OOM makes the kernel kill a node for lack of memory: its cgroup gets a limit little above
// what it uses, a helper in there takes the rest, and the kernel is told whom to prefer. It
// tells how many kills the kernel counted.
func (e *Env) OOM(ctx context.Context, n *Node) (int, error) {
	if n.cg == nil {
		return 0, fmt.Errorf("env: node %d has no memory cgroup: %w", n.ID, e.NoCgroups)
	}
	done := n.Doom()
	if done == nil {
		return 0, fmt.Errorf("env: node %d does not run", n.ID)
	}
	before, err := n.cg.kills()
	if err != nil {
		return 0, err
	}
	used, err := n.cg.usage()
	if err != nil {
		return 0, err
	}
	const room = 16 << 20
	if err := n.cg.limit(used + room); err != nil {
		return 0, err
	}
	defer func() { _ = n.cg.limit(0) }()
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", n.PID()), []byte("1000"), 0); err != nil {
		return 0, err
	}
	cmd := exec.Command(e.cfg.Self, "ballast", filepath.Join(n.cg.dir, "cgroup.procs"), strconv.Itoa(ballastBytes(used, room)))
	if err := n.Host.thread.start(cmd); err != nil {
		return 0, err
	}
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(ended)
	}()
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	select {
	case <-done:
	case <-ctx.Done():
		n.Spare()
		err = fmt.Errorf("env: the kernel did not kill node %d: %w", n.ID, ctx.Err())
	}
	_ = cmd.Process.Kill()
	<-ended
	after, kerr := n.cg.kills()
	return after - before, errors.Join(err, kerr)
}

// ballastBytes is how much the helper takes at most: all of it must be less than what would
// hurt the machine.
func ballastBytes(used, room int64) int { return int(used + 4*room) }

// Ballast is the helper of OOM: it joins the cgroup and takes memory until it is killed or
// has so many bytes.
func Ballast(procs string, bytes int64) error {
	if err := os.WriteFile(procs, []byte(strconv.Itoa(os.Getpid())), 0); err != nil {
		return err
	}
	const piece = 1 << 20
	for taken := int64(0); taken < bytes; taken += piece {
		b, err := syscall.Mmap(-1, 0, piece, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
		if err != nil {
			return err
		}
		for i := 0; i < piece; i += 4096 {
			b[i] = 1
		}
	}
	select {} // until the parent ends it
}

// Heal undoes everything: cuts, cables, stopped processes. Dead nodes are started again.
func (e *Env) Heal() error {
	var errs []error
	if e.net != nil {
		e.cuts = map[string]map[Cut]bool{}
		errs = append(errs, e.net.set(nil))
		for _, h := range e.net.hosts {
			errs = append(errs, e.net.link(h, true))
		}
	}
	for _, n := range e.Nodes {
		if n.cg != nil {
			errs = append(errs, n.cg.limit(0))
		}
		errs = append(errs, n.Signal(syscall.SIGCONT))
		if n.PID() == 0 && n.InUse() {
			errs = append(errs, n.Start())
		}
	}
	return errors.Join(errs...)
}

// Close kills what still runs and removes what was made, but for files.
func (e *Env) Close() error {
	var errs []error
	for _, n := range e.Nodes {
		if _, err := n.Kill(); err != nil {
			errs = append(errs, err)
		}
	}
	if e.net != nil {
		errs = append(errs, e.net.remove())
	}
	if e.shared != nil {
		e.shared.close()
	}
	for _, c := range e.cgroups {
		errs = append(errs, c.remove())
	}
	return errors.Join(errs...)
}

var ours = regexp.MustCompile(`^kvdj(\d+)-\w+$`)

// RemoveLeftovers takes down what runs that were killed have left: namespaces, cgroups, and
// data below the folder given. A run that lives is let alone: the name holds its process id.
func RemoveLeftovers(dataDir string) {
	dead := func(name string) bool {
		m := ours.FindStringSubmatch(name)
		if m == nil {
			return false
		}
		pid, err := strconv.Atoi(m[1])
		return err == nil && pid != os.Getpid() && errors.Is(syscall.Kill(pid, 0), syscall.ESRCH)
	}
	if names, err := os.ReadDir("/run/netns"); err == nil {
		for _, d := range names {
			if dead(d.Name()) {
				_, _ = tool(nil, "", "ip", "netns", "del", d.Name())
			}
		}
	}
	if names, err := os.ReadDir(dataDir); err == nil {
		for _, d := range names {
			if d.IsDir() && dead(d.Name()) {
				_ = os.RemoveAll(filepath.Join(dataDir, d.Name()))
			}
		}
	}
	if root, _, err := memoryRoot(); err == nil {
		if names, err := os.ReadDir(root); err == nil {
			for _, d := range names {
				if d.IsDir() && dead(d.Name()) {
					_ = os.Remove(filepath.Join(root, d.Name()))
				}
			}
		}
	}
}
