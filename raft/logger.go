package raft

import (
	"context"
	"fmt"
	"log/slog"

	etcdraft "go.etcd.io/raft/v3"
)

// corePanic is what etcd's raft throws when it finds that it can not go on. It is
// caught where the core was entered and stops the host in order.
type corePanic struct{ msg string }

func (p corePanic) Error() string { return p.msg }

// coreLogger passes the core's words to slog. All below errors is for debugging:
// with hundreds of groups, what the core calls a warning (each proposal over the
// limit, say) would drown what matters; the host says itself who leads.
type coreLogger struct{ l *slog.Logger }

var _ etcdraft.Logger = coreLogger{}

func (c coreLogger) log(level slog.Level, v []any) {
	if c.l.Enabled(context.Background(), level) {
		c.l.Log(context.Background(), level, fmt.Sprint(v...))
	}
}

func (c coreLogger) logf(level slog.Level, format string, v []any) {
	if c.l.Enabled(context.Background(), level) {
		c.l.Log(context.Background(), level, fmt.Sprintf(format, v...))
	}
}

func (c coreLogger) Debug(v ...any)                   { c.log(slog.LevelDebug, v) }
func (c coreLogger) Debugf(format string, v ...any)   { c.logf(slog.LevelDebug, format, v) }
func (c coreLogger) Info(v ...any)                    { c.log(slog.LevelDebug, v) }
func (c coreLogger) Infof(format string, v ...any)    { c.logf(slog.LevelDebug, format, v) }
func (c coreLogger) Warning(v ...any)                 { c.log(slog.LevelDebug, v) }
func (c coreLogger) Warningf(format string, v ...any) { c.logf(slog.LevelDebug, format, v) }
func (c coreLogger) Error(v ...any)                   { c.log(slog.LevelError, v) }
func (c coreLogger) Errorf(format string, v ...any)   { c.logf(slog.LevelError, format, v) }
func (c coreLogger) Fatal(v ...any)                   { panic(corePanic{fmt.Sprint(v...)}) }
func (c coreLogger) Fatalf(format string, v ...any)   { panic(corePanic{fmt.Sprintf(format, v...)}) }
func (c coreLogger) Panic(v ...any)                   { panic(corePanic{fmt.Sprint(v...)}) }
func (c coreLogger) Panicf(format string, v ...any)   { panic(corePanic{fmt.Sprintf(format, v...)}) }
