package main

import (
	"context"
	"path/filepath"
	"strconv"

	"github.com/redis/go-redis/v9"
)

// redisSystem is one Redis server. With its log synced for each write it keeps what
// it acknowledged, like the others; it replicates nothing.
type redisSystem struct {
	binary string
	procs  []*process
	client *redis.Client
	size   int
}

func (s *redisSystem) name() string { return "redis" }

func (s *redisSystem) start(ctx context.Context, dir string, w workload) (err error) {
	if s.binary, err = findBinary("redis-server", "redis-server"); err != nil {
		return err
	}
	ports, err := freePorts(1)
	if err != nil {
		return err
	}
	dir = filepath.Join(dir, "redis")
	p, err := startProcess(dir, "redis-server", s.binary,
		"--bind", "127.0.0.1", "--port", strconv.Itoa(ports[0]), "--dir", dir,
		"--appendonly", "yes", "--appendfsync", "always", "--save", "", "--daemonize", "no")
	if err != nil {
		return err
	}
	s.procs, s.size = []*process{p}, w.size
	s.client = redis.NewClient(&redis.Options{Addr: loopback(ports[0]), PoolSize: w.clients, MinIdleConns: w.clients, MaxRetries: -1})
	return waitReady(ctx, s.name(), s.procs, func(ctx context.Context) error { return s.client.Ping(ctx).Err() })
}

func (s *redisSystem) conn() (conn, error) {
	// Two spare bytes let the client read a value and its line end at once.
	return redisConn{s.client, make([]byte, s.size+2)}, nil
}

func (s *redisSystem) describe() description {
	return description{
		Version: versionOf(s.binary, "--version"),
		Settings: map[string]string{
			"processes": "1, not replicated",
			"durable":   "appendonly yes, appendfsync always",
			"client":    "go-redis v9, a connection a worker",
		},
	}
}

func (s *redisSystem) pids() []int { return pidsOf(s.procs) }

func (s *redisSystem) stop() error {
	if s.client != nil {
		_ = s.client.Close()
	}
	return stopAll(s.procs)
}

type redisConn struct {
	client *redis.Client
	buf    []byte
}

func (c redisConn) get(ctx context.Context, k key) ([]byte, error) {
	cmd := c.client.GetToBuffer(ctx, k.text, c.buf)
	return cmd.Bytes(), cmd.Err()
}

func (c redisConn) put(ctx context.Context, k key, value []byte) error {
	return c.client.Set(ctx, k.text, value, 0).Err()
}
