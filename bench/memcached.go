package main

import (
	"context"
	"fmt"
	"os/user"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	"github.com/bradfitz/gomemcache/memcache"
)

// memcachedSystem is one memcached: the yardstick for gets over TCP. It keeps
// nothing over a restart, so its puts are compared with nobody's.
type memcachedSystem struct {
	binary string
	procs  []*process
	client *memcache.Client
}

const memcachedMiB = 2048

func (s *memcachedSystem) name() string { return "memcached" }

func (s *memcachedSystem) start(ctx context.Context, dir string, w workload) (err error) {
	if s.binary, err = findBinary("memcached", "memcached"); err != nil {
		return err
	}
	if need := len(w.keys) * (w.size + 128) >> 20; need > memcachedMiB/2 {
		return fmt.Errorf("memcached: %d keys of %d bytes need about %d MiB, and it gets %d: choose fewer keys", len(w.keys), w.size, need, memcachedMiB)
	}
	ports, err := freePorts(1)
	if err != nil {
		return err
	}
	args := []string{"-l", "127.0.0.1", "-p", strconv.Itoa(ports[0]), "-U", "0",
		"-m", strconv.Itoa(memcachedMiB), "-t", strconv.Itoa(s.threads()), "-c", "4096"}
	// As root it insists on being told whom to become.
	if u, err := user.Current(); err == nil && u.Uid == "0" {
		args = append(args, "-u", u.Username)
	}
	p, err := startProcess(filepath.Join(dir, "memcached"), "memcached", s.binary, args...)
	if err != nil {
		return err
	}
	s.procs = []*process{p}
	s.client = memcache.New(loopback(ports[0]))
	s.client.MaxIdleConns = w.clients
	s.client.Timeout = 5 * time.Second
	return waitReady(ctx, s.name(), s.procs, func(context.Context) error { return s.client.Ping() })
}

// threads: its default of four, or one a core where there are more.
func (s *memcachedSystem) threads() int { return max(4, runtime.NumCPU()) }

func (s *memcachedSystem) conn() (conn, error) { return memcachedConn{s.client}, nil }

func (s *memcachedSystem) describe() description {
	return description{
		Version: versionOf(s.binary, "-V"),
		Settings: map[string]string{
			"processes": "1, not replicated",
			"durable":   "no",
			"memory":    fmt.Sprintf("%d MiB", memcachedMiB),
			"threads":   strconv.Itoa(s.threads()),
			"client":    "gomemcache, a connection a worker",
		},
	}
}

func (s *memcachedSystem) pids() []int { return pidsOf(s.procs) }

func (s *memcachedSystem) stop() error {
	if s.client != nil {
		_ = s.client.Close()
	}
	return stopAll(s.procs)
}

type memcachedConn struct{ client *memcache.Client }

func (c memcachedConn) get(_ context.Context, k key) ([]byte, error) {
	item, err := c.client.Get(k.text)
	if err != nil {
		return nil, err
	}
	return item.Value, nil
}

func (c memcachedConn) put(_ context.Context, k key, value []byte) error {
	return c.client.Set(&memcache.Item{Key: k.text, Value: value})
}
