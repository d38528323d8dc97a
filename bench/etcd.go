package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// etcdSystem is a cluster of three etcd members, the yardstick for replicated and
// durable puts. The client talks to the leader alone: another member would add a
// hop to every put.
type etcdSystem struct {
	binary string
	procs  []*process
	client *clientv3.Client
}

const etcdMembers = 3

func (s *etcdSystem) name() string { return "etcd" }

func (s *etcdSystem) start(ctx context.Context, dir string, _ workload) (err error) {
	if s.binary, err = findBinary("etcd", "etcd-server"); err != nil {
		return err
	}
	ports, err := freePorts(2 * etcdMembers)
	if err != nil {
		return err
	}
	clientPorts, peerPorts := ports[:etcdMembers], ports[etcdMembers:]
	var members []string
	for i, p := range peerPorts {
		members = append(members, fmt.Sprintf("m%d=http://%s", i+1, loopback(p)))
	}
	if runtime.GOARCH != "amd64" { // Debian's etcd refuses others without it
		if err := os.Setenv("ETCD_UNSUPPORTED_ARCH", runtime.GOARCH); err != nil {
			return err
		}
	}
	var endpoints []string
	for i := range etcdMembers {
		name := fmt.Sprintf("m%d", i+1)
		client, peer := "http://"+loopback(clientPorts[i]), "http://"+loopback(peerPorts[i])
		endpoints = append(endpoints, client)
		p, err := startProcess(filepath.Join(dir, "etcd"), "etcd-"+name, s.binary,
			"--name", name, "--data-dir", filepath.Join(dir, "etcd", name),
			"--listen-client-urls", client, "--advertise-client-urls", client,
			"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
			"--initial-cluster", strings.Join(members, ","), "--initial-cluster-state", "new",
			"--initial-cluster-token", "kvd-bench", "--quota-backend-bytes", "8589934592", "--log-level", "error")
		if err != nil {
			return err
		}
		s.procs = append(s.procs, p)
	}
	var leader string
	if err := waitReady(ctx, s.name(), s.procs, func(ctx context.Context) error {
		leader, err = etcdLeader(ctx, endpoints)
		return err
	}); err != nil {
		return err
	}
	s.client, err = clientv3.New(clientv3.Config{Endpoints: []string{leader}, DialTimeout: 5 * time.Second})
	return err
}

// etcdLeader asks each member whether it leads, once all of them listen: the client
// logs every vain attempt.
func etcdLeader(ctx context.Context, endpoints []string) (string, error) {
	var d net.Dialer
	for _, e := range endpoints {
		c, err := d.DialContext(ctx, "tcp", strings.TrimPrefix(e, "http://"))
		if err != nil {
			return "", err
		}
		_ = c.Close()
	}
	c, err := clientv3.New(clientv3.Config{Endpoints: endpoints, DialTimeout: 2 * time.Second})
	if err != nil {
		return "", err
	}
	defer c.Close()
	for _, e := range endpoints {
		// A member answers once there is a leader.
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		st, err := c.Status(ctx, e)
		cancel()
		if err != nil {
			return "", err
		}
		if st.Leader != 0 && st.Leader == st.Header.MemberId {
			return e, nil
		}
	}
	return "", fmt.Errorf("none of %s leads", strings.Join(endpoints, ", "))
}

func (s *etcdSystem) conn() (conn, error) { return etcdConn{s.client}, nil }

func (s *etcdSystem) describe() description {
	return description{
		Version: versionOf(s.binary, "--version"),
		Settings: map[string]string{
			"processes": "3, replicated by Raft",
			"durable":   "yes: log synced on a quorum",
			"reads":     "linearizable (the default)",
			"client":    "etcd clientv3, connected to the leader, one HTTP/2 connection",
		},
	}
}

func (s *etcdSystem) pids() []int { return pidsOf(s.procs) }

func (s *etcdSystem) stop() error {
	if s.client != nil {
		_ = s.client.Close()
	}
	return stopAll(s.procs)
}

type etcdConn struct{ client *clientv3.Client }

func (c etcdConn) get(ctx context.Context, k key) ([]byte, error) {
	resp, err := c.client.Get(ctx, k.text)
	if err != nil {
		return nil, err
	}
	if len(resp.Kvs) != 1 {
		return nil, fmt.Errorf("key %s: not found", k.text)
	}
	return resp.Kvs[0].Value, nil
}

func (c etcdConn) put(ctx context.Context, k key, value []byte) error {
	// The protobuf message wants a string; it is copied once, by the client.
	_, err := c.client.Put(ctx, k.text, string(value))
	return err
}
