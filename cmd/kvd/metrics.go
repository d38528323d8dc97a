package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"sync/atomic"
	"time"

	"github.com/kvd-io/kvd/server"
)

// metricsServer serves /metrics, from when the node is there, and /debug/pprof from the
// start: a start that hangs is worth looking at. nil serves nothing.
type metricsServer struct {
	http *http.Server
	node atomic.Pointer[server.Node]
}

// listenMetrics begins to serve on addr; "" means nowhere.
func listenMetrics(addr string, log *slog.Logger) (*metricsServer, error) {
	if addr == "" {
		return nil, nil
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, usageError{fmt.Errorf("metrics-listen %s: %w", addr, err)}
	}
	m := &metricsServer{}
	mux := http.NewServeMux()
	mux.HandleFunc("/metrics", func(w http.ResponseWriter, r *http.Request) {
		node := m.node.Load()
		if node == nil {
			http.Error(w, "the node is starting", http.StatusServiceUnavailable)
			return
		}
		node.MetricsHandler().ServeHTTP(w, r)
	})
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	m.http = &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	go func() {
		if err := m.http.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			log.Error("metrics are not served any more", "err", err)
		}
	}()
	return m, nil
}

// of has it serve the node's metrics from now on.
func (m *metricsServer) of(n *server.Node) {
	if m != nil {
		m.node.Store(n)
	}
}

// stop finishes the requests that are in progress.
func (m *metricsServer) stop(ctx context.Context) error {
	if m == nil {
		return nil
	}
	return m.http.Shutdown(ctx)
}

// close ends it at once, if it was not stopped.
func (m *metricsServer) close() {
	if m != nil {
		_ = m.http.Close()
	}
}
