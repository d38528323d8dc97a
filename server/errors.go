package server

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
	"github.com/kvd-io/kvd/raft"
	"github.com/kvd-io/kvd/storage/engine"
)

type reason = kvdv1.ErrorDetail_Reason

// codeOf maps each reason to the gRPC code that generic clients understand.
var codeOf = map[reason]codes.Code{
	kvdv1.ErrorDetail_REASON_NOT_LEADER:        codes.Unavailable,
	kvdv1.ErrorDetail_REASON_UNKNOWN_NAMESPACE: codes.NotFound,
	kvdv1.ErrorDetail_REASON_WRONG_CLUSTER:     codes.FailedPrecondition,
	kvdv1.ErrorDetail_REASON_INVALID_KEY:       codes.InvalidArgument,
	kvdv1.ErrorDetail_REASON_VALUE_TOO_LARGE:   codes.InvalidArgument,
	kvdv1.ErrorDetail_REASON_OUTCOME_UNKNOWN:   codes.Unknown,
	kvdv1.ErrorDetail_REASON_EXHAUSTED:         codes.ResourceExhausted,
	kvdv1.ErrorDetail_REASON_DENIED:            codes.PermissionDenied,
	kvdv1.ErrorDetail_REASON_SESSION_GONE:      codes.Unauthenticated,
	kvdv1.ErrorDetail_REASON_LAYOUT_VERSION:    codes.FailedPrecondition,
	kvdv1.ErrorDetail_REASON_NO_REPLICA:        codes.NotFound,
	kvdv1.ErrorDetail_REASON_NOT_READY:         codes.Unavailable,
	kvdv1.ErrorDetail_REASON_CORRUPT:           codes.DataLoss,
	kvdv1.ErrorDetail_REASON_READ_ONLY:         codes.ResourceExhausted,
	kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT:  codes.InvalidArgument,
	kvdv1.ErrorDetail_REASON_ALREADY_EXISTS:    codes.AlreadyExists,
	kvdv1.ErrorDetail_REASON_TWIN:              codes.FailedPrecondition,
	kvdv1.ErrorDetail_REASON_UNAUTHENTICATED:   codes.Unauthenticated,
	kvdv1.ErrorDetail_REASON_UNKNOWN_TOKEN:     codes.NotFound,
	kvdv1.ErrorDetail_REASON_PROTOCOL:          codes.FailedPrecondition,
}

// fail makes a status with a reason that clients can branch on.
func fail(why reason, format string, args ...any) error {
	return failDetail(&kvdv1.ErrorDetail{Reason: why}, format, args...)
}

func failDetail(d *kvdv1.ErrorDetail, format string, args ...any) error {
	st := status.New(codeOf[d.GetReason()], fmt.Sprintf(format, args...))
	with, err := st.WithDetails(d)
	if err != nil { // bug: ErrorDetail is always encodable
		return st.Err()
	}
	return with.Err()
}

// failRaft translates what a group answered.
func failRaft(err error, shard uint32, g *raft.Group) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, raft.ErrNotLeader):
		return failNotLeader(shard, g)
	case errors.Is(err, raft.ErrOutcomeUnknown):
		return fail(kvdv1.ErrorDetail_REASON_OUTCOME_UNKNOWN, "shard %d: the write was proposed, and whether it is applied is not known: %v", shard, err)
	case errors.Is(err, raft.ErrOverloaded):
		return failDetail(&kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_EXHAUSTED, RetryAfterMs: 50},
			"shard %d: too many writes are waiting: try again in a moment", shard)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return status.FromContextError(err).Err()
	case errors.Is(err, engine.ErrCorrupt):
		return fail(kvdv1.ErrorDetail_REASON_CORRUPT, "shard %d: %v", shard, err)
	default:
		return failDetail(&kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_NOT_READY, RetryAfterMs: 20}, "shard %d: %v", shard, err)
	}
}

func failNotLeader(shard uint32, g *raft.Group) error {
	leader := uint64(g.Status().Leader)
	where := "no leader is known at the moment"
	if leader != 0 {
		where = fmt.Sprintf("node %d does", leader)
	}
	return failDetail(&kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_NOT_LEADER, LeaderNode: leader, RetryAfterMs: 20},
		"this node does not lead shard %d: %s", shard, where)
}

func failNoReplica(shard uint32) error {
	return fail(kvdv1.ErrorDetail_REASON_NO_REPLICA, "this node has no replica of shard %d", shard)
}

var errStarting = failDetail(&kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_NOT_READY, RetryAfterMs: 100}, "this node is starting: try again in a moment, or another node")

// failShuttingDown refuses what comes after the node began to stop; nothing was done.
func failShuttingDown(nodeID uint64) error {
	return failDetail(&kvdv1.ErrorDetail{Reason: kvdv1.ErrorDetail_REASON_NOT_READY, RetryAfterMs: 50}, "node %d is shutting down: ask another", nodeID)
}
