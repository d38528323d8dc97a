package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvdv1 "github.com/kvd-io/kvd/api/kvd/v1"
)

// rpcError is a failed call, sorted. It unwraps to the class and, where the
// caller's context ended, to the context's error.
type rpcError struct {
	class  error
	detail *kvdv1.ErrorDetail // nil: the node attached none
	text   string
	unsure bool // the call may have taken effect
}

func (e *rpcError) Error() string { return e.text }
func (e *rpcError) Unwrap() error { return e.class }

// reasonOf is the node's own word for what went wrong.
func reasonOf(err error) kvdv1.ErrorDetail_Reason {
	var e *rpcError
	if errors.As(err, &e) {
		return e.detail.GetReason()
	}
	return kvdv1.ErrorDetail_REASON_UNSPECIFIED
}

// leaderHint is the node id that a NOT_LEADER named, or 0.
func leaderHint(err error) uint64 {
	var e *rpcError
	if errors.As(err, &e) && e.detail.GetReason() == kvdv1.ErrorDetail_REASON_NOT_LEADER {
		return e.detail.GetLeaderNode()
	}
	return 0
}

func retryAfter(err error) time.Duration {
	var e *rpcError
	if errors.As(err, &e) {
		return time.Duration(e.detail.GetRetryAfterMs()) * time.Millisecond
	}
	return 0
}

// classes of the reasons that nodes give.
var classes = map[kvdv1.ErrorDetail_Reason]error{
	kvdv1.ErrorDetail_REASON_NOT_LEADER:        ErrUnavailable,
	kvdv1.ErrorDetail_REASON_UNKNOWN_NAMESPACE: ErrUnknownNamespace,
	kvdv1.ErrorDetail_REASON_WRONG_CLUSTER:     ErrWrongCluster,
	kvdv1.ErrorDetail_REASON_INVALID_KEY:       ErrInvalid,
	kvdv1.ErrorDetail_REASON_VALUE_TOO_LARGE:   ErrInvalid,
	kvdv1.ErrorDetail_REASON_OUTCOME_UNKNOWN:   ErrOutcomeUnknown,
	kvdv1.ErrorDetail_REASON_EXHAUSTED:         ErrExhausted,
	kvdv1.ErrorDetail_REASON_DENIED:            ErrDenied,
	kvdv1.ErrorDetail_REASON_SESSION_GONE:      ErrUnavailable,
	kvdv1.ErrorDetail_REASON_LAYOUT_VERSION:    ErrIncompatible,
	kvdv1.ErrorDetail_REASON_NO_REPLICA:        ErrUnavailable,
	kvdv1.ErrorDetail_REASON_NOT_READY:         ErrUnavailable,
	kvdv1.ErrorDetail_REASON_CORRUPT:           ErrCorrupt,
	kvdv1.ErrorDetail_REASON_READ_ONLY:         ErrReadOnly,
	kvdv1.ErrorDetail_REASON_INVALID_ARGUMENT:  ErrInvalid,
	kvdv1.ErrorDetail_REASON_ALREADY_EXISTS:    ErrAlreadyExists,
	kvdv1.ErrorDetail_REASON_TWIN:              ErrUnavailable,
	kvdv1.ErrorDetail_REASON_UNAUTHENTICATED:   ErrDenied,
	kvdv1.ErrorDetail_REASON_UNKNOWN_TOKEN:     ErrNotFound,
	kvdv1.ErrorDetail_REASON_PROTOCOL:          ErrIncompatible,
}

// rpcFailed sorts the error of a call to the node at addr.
func rpcFailed(addr string, err error) error {
	if err == nil {
		return nil
	}
	st, ok := status.FromError(err)
	if !ok {
		return &rpcError{class: ErrUnavailable, text: fmt.Sprintf("node at %s: %v", addr, err), unsure: true}
	}
	for _, d := range st.Details() {
		if detail, ok := d.(*kvdv1.ErrorDetail); ok {
			class := classes[detail.GetReason()]
			if class == nil {
				class = ErrUnavailable
			}
			return &rpcError{
				class: class, detail: detail, text: fmt.Sprintf("node at %s: %s", addr, st.Message()),
				unsure: errors.Is(class, ErrOutcomeUnknown),
			}
		}
	}
	return rpcFailedByCode(addr, st)
}

func rpcFailedByCode(addr string, st *status.Status) error {
	fail := func(class error, format string, args ...any) error {
		return &rpcError{class: class, text: fmt.Sprintf(format, args...), unsure: unsure(st)}
	}
	msg := st.Message()
	switch st.Code() {
	case codes.Canceled:
		return fail(context.Canceled, "node at %s: cancelled", addr)
	case codes.DeadlineExceeded:
		return fail(ErrUnavailable, "node at %s did not answer in time", addr)
	case codes.Unavailable:
		if _, alert, ok := strings.Cut(msg, "remote error: tls: "); ok {
			return fail(ErrDenied, "node at %s refuses the TLS connection: %s", addr, strings.Trim(alert, `"`))
		}
		switch beginningOf(msg) {
		case beganSilent:
			return fail(ErrUnavailable, "node at %s did not answer in time: is it the gRPC port of a kvd node?", addr)
		case beganForeign:
			return fail(ErrIncompatible, "what listens at %s does not speak gRPC: is it the right port of a kvd node?", addr)
		case beganClosed, brokeOff:
			return fail(ErrUnavailable, "node at %s closed the connection before it answered: it stops or starts, speaks TLS where you do not (or the other way round), or this is not the gRPC port of a kvd node", addr)
		}
		return fail(ErrUnavailable, "node at %s cannot be reached: %s", addr, shortDialError(msg))
	case codes.Unimplemented:
		return fail(ErrIncompatible, "what listens at %s is not a kvd node, or of a version without this call (%s)", addr, msg)
	case codes.Unauthenticated, codes.PermissionDenied:
		return fail(ErrDenied, "node at %s: %s", addr, msg)
	case codes.ResourceExhausted:
		return fail(ErrExhausted, "node at %s: %s", addr, msg)
	case codes.InvalidArgument, codes.OutOfRange:
		return fail(ErrInvalid, "node at %s: %s", addr, msg)
	case codes.DataLoss:
		return fail(ErrCorrupt, "node at %s: %s", addr, msg)
	case codes.Internal, codes.Unknown:
		if strings.Contains(msg, "HTTP status code") || strings.Contains(msg, "content-type") {
			return fail(ErrIncompatible, "what listens at %s is not a kvd node (%s)", addr, msg)
		}
		return fail(ErrUnavailable, "node at %s: %s", addr, msg)
	default:
		return fail(ErrUnavailable, "node at %s: %s: %s", addr, st.Code(), msg)
	}
}

// beginning is how a connection failed whose peer was reached, but sent no sound
// beginning of HTTP/2.
type beginning uint8

const (
	beganWell    beginning = iota // or was not reached
	beganSilent                   // nothing came in time
	beganClosed                   // it ended: so does that of a node which is killed or stops
	beganForeign                  // something else came
	brokeOff                      // it ended, at its beginning or later
)

// foreignBytes are gRPC's words for bytes that no HTTP/2 server begins with.
var foreignBytes = []string{
	"frame too large", "looked like an HTTP/1.1 header", "PROTOCOL_ERROR", "FRAME_SIZE_ERROR", "not a settings frame",
}

// beginningOf reads the text of a failed connection, as gRPC tells it nowhere else.
// What it does not know is taken for a connection that ended: to try that again costs
// time, to give up a node that is starting costs an answer.
func beginningOf(msg string) beginning {
	contains := func(words string) bool { return strings.Contains(msg, words) }
	switch {
	case contains("Error while dialing"):
		return beganWell
	case !contains("server preface") && !contains("client preface") && !contains("not a settings frame"):
		if contains("write: broken pipe") || contains("connection reset by peer") {
			return brokeOff
		}
		return beganWell
	case slices.ContainsFunc(foreignBytes, contains):
		return beganForeign
	case contains("deadline exceeded") || contains("timeout") || contains("use of closed network connection"):
		return beganSilent // the last: gRPC closed it itself, because the time was up
	}
	return beganClosed
}

// unsure tells whether a call that failed without a word from the node may have
// taken effect there.
func unsure(st *status.Status) bool {
	switch st.Code() {
	case codes.Unimplemented, codes.Unauthenticated, codes.PermissionDenied, codes.ResourceExhausted,
		codes.InvalidArgument, codes.OutOfRange, codes.FailedPrecondition:
		return false
	case codes.Unavailable:
		// Only the text tells that nothing was sent. Should it change, such a failure
		// counts as unsure, which is the safe side.
		b := beginningOf(st.Message())
		if strings.Contains(st.Message(), "authentication handshake failed") || strings.Contains(st.Message(), "remote error: tls: ") {
			return false
		}
		return !strings.Contains(st.Message(), "Error while dialing") && (b == beganWell || b == brokeOff)
	}
	return true
}

// mayHaveApplied tells whether the failed call may have taken effect.
func mayHaveApplied(err error) bool {
	var e *rpcError
	return errors.As(err, &e) && e.unsure
}

// shortDialError takes gRPC's wrapping off, which repeats the address.
func shortDialError(msg string) string {
	msg = strings.TrimPrefix(msg, "connection error: desc = ")
	msg = strings.Trim(msg, `"`)
	msg = strings.TrimPrefix(msg, "transport: ")
	return strings.TrimPrefix(msg, "Error while dialing: ")
}

// permanent tells whether asking another node, or the same one later, is useless.
func permanent(err error) bool {
	for _, class := range []error{
		ErrInvalid, ErrDenied, ErrUnknownNamespace, ErrWrongCluster, ErrIncompatible, ErrCorrupt, ErrAlreadyExists,
	} {
		if errors.Is(err, class) {
			return true
		}
	}
	return false
}
