// Package ibv is a thin layer over libibverbs and librdmacm. It makes the objects of
// verbs (contexts, protection domains, completion queues, memory regions, queue pairs,
// connection ids) usable from Go and decides nothing: which device, which GID, who may
// read what is for package verbs above it.
//
// The libraries are opened by dlopen at the first use, so one binary runs on hosts with
// and without them. Built without cgo, on another system than Linux or without the
// headers, every function that needs them returns an error that says so; see Status.
//
// # Rules of use
//
// Close is idempotent for every object. An object with live children (a domain with
// regions, a queue with queue pairs) refuses to close with ErrBusy and stays usable, so
// that a wrong order is seen. Use of a closed object is a bug of the caller and panics;
// the caller must keep Close apart from other calls in flight on the same object, except
// those that wait for events: these return ErrClosed.
//
// Nothing here may be given Go heap memory to register: a device writes to a physical
// page, and the collector neither knows nor waits. Descriptors and completions, which the
// library copies during the call, may be ordinary Go slices.
//
// # Data path
//
// QP.PostAndPoll crosses into C once: it posts a chain and then looks at the completion
// queue for a bounded time. Where that was not enough: CQ.Arm, one more CQ.Poll (a
// completion between the last look and Arm raises no event), then CQ.WaitEvent, which
// parks the goroutine in Go's network poller. The completion queue must have room for
// every request posted, signalled or not: after an error each one completes.
package ibv
