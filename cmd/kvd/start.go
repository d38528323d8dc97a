package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/netip"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvd-io/kvd/internal/doctor"
	"github.com/kvd-io/kvd/internal/verbsflags"
	"github.com/kvd-io/kvd/rdma"
	"github.com/kvd-io/kvd/rdma/shm"
	"github.com/kvd-io/kvd/rdma/tcp"
	"github.com/kvd-io/kvd/rdma/verbs"
	"github.com/kvd-io/kvd/server"
	"github.com/kvd-io/kvd/storage/engine"
)

// gcPercent lets the Go heap grow further between collections than Go does by itself:
// values lie outside of it, so it is small beside the node's memory.
const gcPercent = 400

func isEngineError(err error) bool {
	return errors.Is(err, engine.ErrCorrupt) || errors.Is(err, engine.ErrFormat)
}

// defaultTransports: a host without RDMA devices serves the others.
var defaultTransports = []string{"shm", "verbs", "tcp"}

// startSettings is what kvd start can be told.
type startSettings struct {
	server.Config

	file     string
	peers    []string
	maxValue uint64
	// replicationGiven: it was chosen, not the default.
	replicationGiven bool
	cache            uint64
	snapshotRate     uint64
	metricsListen    string
	transports       []string
	shmDir           string
	shmUIDs          []string
	tcpListen        string
	tcpAdvertise     string
	verbs            verbs.Provider
	logLevel         string
	logFormat        string
	stopTimeout      time.Duration
	chaos            chaosSettings
}

func (s *startSettings) define(fs *pflag.FlagSet) {
	fs.StringVar(&s.file, "config", "", "YAML file with any of these settings, one name: value a line")
	fs.Uint64Var(&s.NodeID, "node-id", 0, "number of this node, from 1, among the peers (default: what the data directory says, or the cluster gives)")
	fs.StringVar(&s.DataDir, "data-dir", "", "directory of this node's data")
	fs.StringVar(&s.ListenAddr, "listen", "127.0.0.1:7400", "host:port for gRPC")
	fs.StringVar(&s.AdvertiseAddr, "advertise", "", "host:port under which others reach this node's gRPC (default: what it listens on)")
	fs.StringSliceVar(&s.peers, "peers", nil, "all nodes with which a cluster begins, this one included, as ID=HOST:PORT,... (default: this node alone)")
	fs.BoolVar(&s.Bootstrap, "bootstrap", false, "make a new cluster if the data directory is empty; on one node of a cluster, for its very first start only")
	fs.StringSliceVar(&s.Join, "join", nil, "members of a cluster, as HOST[:PORT],..., of which one is to let this node in; a name may stand for several. It may stay once the node has joined")
	fs.StringVar(&s.Zone, "zone", "", "failure domain of this node; replicas of a shard are kept apart by zone, rack and host")
	fs.StringVar(&s.Rack, "rack", "", "failure domain within the zone")
	fs.StringVar(&s.Host, "host", "", "failure domain within the rack (default: this host's name)")
	fs.DurationVar(&s.ReplaceAfter, "replace-after", 10*time.Minute, "how long a node may be silent until its replicas are made anew on others")
	fs.DurationVar(&s.BootstrapTimeout, "bootstrap-timeout", 2*time.Minute, "how long to wait at the first start for all peers, or to be let in")
	fs.Uint32Var(&s.Shards, "shards", 128, "number of shards; fixed when the cluster is made")
	fs.Uint32Var(&s.Replication, "replication", 3, "replicas of a shard, odd; fixed when the cluster is made, and reached when there are nodes enough")

	fs.Var(newBytes(&s.ArenaBytes, 1<<30), "arena", "cap of the memory that clients read")
	fs.Var(newBytes(&s.MaxChunkBytes, 64<<20), "max-chunk", "largest piece in which that memory is registered")
	fs.BoolVar(&s.HugePages, "huge-pages", false, "ask for huge pages; without any, plain ones are used")
	fs.DurationVar(&s.Quarantine, "quarantine", 10*time.Second, "before memory serves another purpose; longer than any client's READ takes")
	fs.Var(newBytes(&s.cache, 64<<20), "cache", "block cache of the durable store")
	fs.Var(newBytes(&s.maxValue, 1<<20), "max-value-bytes", "largest value; the same on every node")
	fs.DurationVar(&s.WriterTTL, "writer-ttl", time.Hour, "how long an idle writer's results are remembered")
	fs.Var(newBytes(&s.snapshotRate, 32<<20), noLimitAtZero, "bytes of snapshots a second that this node sends to others; 0: no limit")
	fs.Var(newBytes(&s.MinFreeDisk, 256<<20), "min-free-disk", "free space below which writes are refused")

	fs.DurationVar(&s.TickInterval, "tick", 100*time.Millisecond, "Raft's unit of time: a heartbeat is sent every tick")
	fs.IntVar(&s.ElectionTicks, "election-ticks", 10, "ticks without a leader before an election")
	fs.IntVar(&s.QuiesceTicks, "quiesce-ticks", 0, "ticks without anything to do before a shard stops its own heartbeats, for which those between the nodes stand then; 0: as many as election-ticks, below: never")

	fs.DurationVar(&s.FenceDelay, "fence-delay", 250*time.Millisecond, "wait before anything is served when the process before did not stop by itself: what the kernel tears down for it may answer READs a moment longer")

	fs.StringSliceVar(&s.transports, "transports", defaultTransports, "how clients may read memory, most preferred first: shm, verbs (RDMA devices), tcp")
	fs.BoolVar(&s.RequireRDMA, "require-rdma", false, "refuse to start where no RDMA device can serve the whole arena")
	fs.StringVar(&s.shmDir, "shm-dir", "", "directory of the unix socket for clients on this host (default: below the temporary directory)")
	fs.StringSliceVar(&s.shmUIDs, "shm-uids", nil, "user ids that may map this node's memory (default: the node's own)")
	fs.StringVar(&s.tcpListen, "tcp-listen", "127.0.0.1:0", "host:port for READs over TCP")
	fs.StringVar(&s.tcpAdvertise, "tcp-advertise", "", "host or host:port under which clients reach that (default: what it listens on)")

	fs.StringVar(&s.TLS.CertFile, "tls-cert", "", "PEM certificate for clients and peers, of the host by which they know this node (default: no TLS)")
	fs.StringVar(&s.TLS.KeyFile, "tls-key", "", "its PEM key")
	fs.StringVar(&s.TLS.ClientCAFile, "tls-client-ca", "", "PEM file with the CAs of clients' certificates (default: clients need none)")
	fs.StringVar(&s.TLS.ClientCerts, "tls-client-certs", "", "with tls-client-ca: required or optional (default: required)")
	fs.StringVar(&s.TLS.PeerCAFile, "tls-peer-ca", "", "PEM file with the CAs of the nodes' certificates; a cluster of several nodes with TLS needs it")
	fs.StringVar((*string)(&s.Auth.Mode), "auth", string(server.AuthOff), "who may do what: off (everyone everything) or tokens")
	fs.StringVar(&s.Auth.RootTokenFile, "auth-root-token-file", "", "file of mode 0600 with the first operator's token, from kvctl token generate")
	fs.StringVar(&s.Auth.PeerSecretFile, "auth-peer-secret-file", "", "file of mode 0600 with at least 32 random bytes, the same on every node, by which nodes without TLS know each other")
	fs.BoolVar(&s.Auth.AllowPlaintext, "auth-allow-plaintext", false, "take tokens and the peers' secret from other hosts without TLS too, where others may read them")

	fs.StringVar(&s.Gossip.Listen, "gossip-listen", "", "IP:PORT for gossip among the nodes by UDP and TCP: who seems to live, and where nodes moved to; a hint that decides nothing (default: none)")
	fs.StringVar(&s.Gossip.KeyFile, "gossip-key-file", "", "file of mode 0600 with the key of gossip, the same on every node: 32 bytes in base64 or hexadecimal (default: derived from auth-peer-secret-file; without that no secret)")

	fs.StringVar(&s.metricsListen, "metrics-listen", "", "host:port for Prometheus' /metrics and Go's /debug/pprof (default: none)")
	verbsflags.Define(fs, &s.verbs)

	fs.StringVar(&s.logLevel, "log-level", "info", "debug, info, warn or error")
	fs.StringVar(&s.logFormat, "log-format", "text", "text or json")
	s.chaos.define(fs)
	fs.DurationVar(&s.stopTimeout, "stop-timeout", 15*time.Second, "how long SIGTERM waits for work in progress")
}

func newStart() *cobra.Command {
	s := &startSettings{}
	cmd := &cobra.Command{
		Use:   "start",
		Short: "Run one node",
		Long: `Runs one node until SIGTERM or an interrupt: it then hands leadership over, finishes what is
in progress and leaves.

Every flag may also stand in the file given by --config (without the dashes in front) or in the
environment (--node-id is KVD_NODE_ID). A flag wins over the environment, that over the file.`,
		Example: `  # a node alone, and another one that comes to it, on another host
  kvd start --data-dir /var/lib/kvd --listen 10.0.0.1:7400 --tcp-listen 10.0.0.1:0 --bootstrap
  kvd start --data-dir /var/lib/kvd --listen 10.0.0.2:7400 --tcp-listen 10.0.0.2:0 --join 10.0.0.1

  # three nodes at once; the first has --bootstrap, and may keep it
  kvd start --node-id 1 --data-dir /var/lib/kvd --listen 10.0.0.1:7400 --tcp-listen 10.0.0.1:0 \
    --peers 1=10.0.0.1:7400,2=10.0.0.2:7400,3=10.0.0.3:7400 --bootstrap

  # the same from a file
  kvd start --config /etc/kvd.yaml`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return s.run(cmd.Context(), cmd.Flags()) },
	}
	s.define(cmd.Flags())
	cmd.Flags().SortFlags = false
	return cmd
}

func (s *startSettings) run(ctx context.Context, fs *pflag.FlagSet) error {
	if s.file == "" {
		s.file = os.Getenv(envName("config"))
	}
	strange, err := loadSettings(fs, s.file, os.Environ())
	if err != nil {
		return err
	}
	log, err := s.logger()
	if err != nil {
		return err
	}
	slog.SetDefault(log)
	for _, name := range strange {
		log.Warn("environment variable means nothing here", "name", name)
	}
	if err := refuseZeros(fs); err != nil {
		return err
	}
	s.replicationGiven = changed(fs, "replication")
	s.TransportsByDefault = !changed(fs, "transports", verbsflags.Prefix)
	cfg, err := s.config(log)
	if err != nil {
		return err
	}
	stopChaos, err := s.chaos.begin(&cfg)
	if err != nil {
		return err
	}
	defer stopChaos()
	logEffective(log, fs)
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	// Before the node takes part in anything: what can not be listened on is found first.
	metrics, err := listenMetrics(s.metricsListen, log)
	if err != nil {
		return err
	}
	defer metrics.close()
	node, err := server.Start(ctx, cfg)
	if ctx.Err() == nil && slices.Contains(s.transports, "verbs") {
		// After the start, which takes the directory's lock before it opens any device.
		report := doctor.Here(version, s.verbs, doctor.Wish{RequireRDMA: cfg.RequireRDMA, ArenaBytes: cfg.ArenaBytes, HugePages: cfg.HugePages})
		report.Log(log)
	}
	switch {
	case err != nil && ctx.Err() != nil:
		log.Info("stopped while starting", "err", err)
		return nil
	case err != nil:
		return err
	}
	metrics.of(node)
	return s.serve(ctx, node, metrics, log)
}

// serve runs until ctx ends or the node can not go on.
func (s *startSettings) serve(ctx context.Context, node *server.Node, metrics *metricsServer, log *slog.Logger) (err error) {
	select {
	case err = <-node.Fatal():
	case <-ctx.Done():
		log.Info("stopping")
	}
	stop, cancel := context.WithTimeout(context.Background(), s.stopTimeout)
	defer cancel()
	stopErr := errors.Join(metrics.stop(stop), node.Stop(stop))
	switch {
	case err == nil:
		err = stopErr
	case stopErr != nil:
		// What stopped the node says itself again here; the user gets one sentence.
		log.Warn("stopped badly", "err", stopErr)
	}
	log.Info("stopped")
	return err
}

// logEffective says once what the node was told, wherever it was told.
func logEffective(log *slog.Logger, fs *pflag.FlagSet) {
	var attrs []any
	fs.VisitAll(func(f *pflag.Flag) {
		if f.Name != "help" {
			attrs = append(attrs, f.Name, f.Value.String())
		}
	})
	log.Info("effective configuration", attrs...)
}

func (s *startSettings) logger() (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(s.logLevel)); err != nil {
		return nil, usageError{fmt.Errorf("log-level %q: want debug, info, warn or error", s.logLevel)}
	}
	opts := &slog.HandlerOptions{Level: level, ReplaceAttr: plainErrors}
	switch s.logFormat {
	case "text":
		return slog.New(slog.NewTextHandler(os.Stderr, opts)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(os.Stderr, opts)), nil
	}
	return nil, usageError{fmt.Errorf("log-format %q: want text or json", s.logFormat)}
}

// changed tells whether a setting was made whose name begins with one of these.
func changed(fs *pflag.FlagSet, prefixes ...string) (found bool) {
	fs.Visit(func(f *pflag.Flag) {
		for _, p := range prefixes {
			found = found || strings.HasPrefix(f.Name, p)
		}
	})
	return found
}

// noLimitAtZero is the setting that has another default than 0, and takes it.
const noLimitAtZero = "snapshot-rate"

// refuseZeros: in a Config 0 means the default, which is not what a user means who
// writes 0.
func refuseZeros(fs *pflag.FlagSet) (err error) {
	fs.Visit(func(f *pflag.Flag) {
		if v := f.Value.String(); (v == "0" || v == "0s") && f.Name != noLimitAtZero && !verbsflags.MayBeZero(f.Name) {
			err = errors.Join(err, usageError{fmt.Errorf("%s is %s: want more than 0", f.Name, v)})
		}
	})
	return err
}

// plainErrors keeps the stack traces that some errors carry out of the log: slog would
// format errors by %+v.
func plainErrors(_ []string, a slog.Attr) slog.Attr {
	if err, ok := a.Value.Any().(error); ok {
		return slog.String(a.Key, err.Error())
	}
	return a
}

func (s *startSettings) config(log *slog.Logger) (server.Config, error) {
	cfg := s.Config
	cfg.Logger, cfg.Version = log, version
	cfg.CacheBytes, cfg.MaxValueBytes = int64(s.cache), int(s.maxValue)
	if cfg.SnapshotRate = int64(min(s.snapshotRate, math.MaxInt64)); cfg.SnapshotRate == 0 {
		cfg.SnapshotRate = -1 // the default of a Config is another
	}
	for _, p := range s.peers {
		id, addr, ok := strings.Cut(p, "=")
		n, err := strconv.ParseUint(strings.TrimSpace(id), 10, 64)
		if !ok || err != nil {
			return cfg, usageError{fmt.Errorf("peer %q: want ID=HOST:PORT", p)}
		}
		cfg.Peers = append(cfg.Peers, server.PeerConfig{NodeID: n, Address: strings.TrimSpace(addr)})
	}
	if n := len(s.peers); n > 0 && s.replicationGiven && int(cfg.Replication) > n {
		return cfg, usageError{fmt.Errorf("replication %d over %d peers: want at most as many replicas of a shard as nodes", cfg.Replication, n)}
	}
	if cfg.Host == "" {
		cfg.Host, _ = os.Hostname() // without a name it is no domain
	}
	secure, err := server.LoadTLS(cfg.TLS, log)
	if err != nil {
		return cfg, err
	}
	providers, err := s.providers(secure)
	if err != nil {
		return cfg, err
	}
	cfg.Providers, cfg.HostID = providers, shm.HostID()
	if err := cfg.Validate(); err != nil {
		return cfg, usageError{err}
	}
	return cfg, nil
}

// providers of the configured transports; secure may be nil.
func (s *startSettings) providers(secure *server.TLS) ([]rdma.Provider, error) {
	var out []rdma.Provider
	for _, name := range s.transports {
		switch name {
		case "shm":
			p := &shm.Provider{SocketDir: s.shmDir}
			for _, u := range s.shmUIDs {
				uid, err := strconv.ParseUint(u, 10, 32)
				if err != nil {
					return nil, usageError{fmt.Errorf("shm-uids: %q is not a user id", u)}
				}
				p.AllowedUIDs = append(p.AllowedUIDs, uint32(uid))
			}
			out = append(out, p)
		case "tcp":
			p := &tcp.Provider{ListenAddr: s.tcpListen, AdvertiseAddr: s.tcpAdvertise}
			if secure != nil {
				p.ServerTLS = secure.ServerConfig()
			}
			out = append(out, p)
		case "verbs":
			p := s.verbs
			p.PreferAddress = s.ownAddress()
			if err := verbsflags.Validate(p); err != nil {
				return nil, usageError{err}
			}
			out = append(out, p)
		default:
			return nil, usageError{fmt.Errorf("transports: %q: want shm, verbs or tcp", name)}
		}
	}
	isVerbs := func(p rdma.Provider) bool { return p.Name() == "verbs" }
	if s.RequireRDMA && !slices.ContainsFunc(out, isVerbs) {
		return nil, usageError{fmt.Errorf("RDMA is required, and transports (%s) has no verbs", strings.Join(s.transports, ","))}
	}
	return out, nil
}

// ownAddress is the IP address at which others reach this node, as far as the settings
// tell: of a device's GIDs the one with that address is the likeliest to reach them too.
func (s *startSettings) ownAddress() netip.Addr {
	candidates := []string{s.AdvertiseAddr}
	for _, p := range s.peers {
		if id, addr, ok := strings.Cut(p, "="); ok && strings.TrimSpace(id) == strconv.FormatUint(s.NodeID, 10) {
			candidates = append(candidates, strings.TrimSpace(addr))
		}
	}
	for _, hostPort := range append(candidates, s.ListenAddr) {
		host, _, _ := net.SplitHostPort(hostPort)
		if addr, err := netip.ParseAddr(host); err == nil && !addr.IsUnspecified() {
			return addr.Unmap()
		}
	}
	return netip.Addr{}
}
