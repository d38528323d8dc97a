package main

import (
	"context"
	"fmt"
	"sort"
	"strings"
)

// key in the two forms that clients want, so that no loop converts.
type key struct {
	index uint64
	text  string
	bytes []byte
}

// conn is what one worker drives; it is used by that worker alone. Whether workers
// share a connection below it is each client's usual way.
type conn interface {
	// get returns the value, which is borrowed until the next call.
	get(ctx context.Context, k key) ([]byte, error)
	// put stores the value, which is borrowed until put returns.
	put(ctx context.Context, k key, value []byte) error
}

// system is one thing to measure. start runs its processes on loopback with data
// below dir and returns when it answers; stop ends what start began, and may be
// called after a failed start.
type system interface {
	name() string
	start(ctx context.Context, dir string, w workload) error
	conn() (conn, error)
	// describe is asked after start.
	describe() description
	// pids of the processes that serve the load.
	pids() []int
	stop() error
}

// description of a system under test, for the report.
type description struct {
	Version string `json:"version"`
	// Settings that matter to the figures.
	Settings map[string]string `json:"settings"`
}

// noter is a system that has more to say after its measurements.
type noter interface{ notes() []string }

// options of systems that have some.
type options struct {
	transport string // of kvd's gets: auto, shm, tcp
	level     string // of kvd's gets
	kvdBinary string // "": built from this source tree
}

// makers of all systems, by name. The first of the run's systems is measured first.
var makers = map[string]func(options) system{
	"kvd":       func(o options) system { return &kvdSystem{opt: o} },
	"memcached": func(options) system { return &memcachedSystem{} },
	"redis":     func(options) system { return &redisSystem{} },
	"etcd":      func(options) system { return &etcdSystem{} },
}

// makeSystems from a list such as "kvd,memcached".
func makeSystems(list string, o options) ([]system, error) {
	var out []system
	seen := map[string]bool{}
	for _, name := range strings.Split(list, ",") {
		name = strings.TrimSpace(name)
		mk, ok := makers[name]
		if !ok {
			var known []string
			for n := range makers {
				known = append(known, n)
			}
			sort.Strings(known)
			return nil, fmt.Errorf("system %q is not known: want some of %s", name, strings.Join(known, ", "))
		}
		if seen[name] {
			return nil, fmt.Errorf("system %q is named twice", name)
		}
		seen[name] = true
		out = append(out, mk(o))
	}
	return out, nil
}
