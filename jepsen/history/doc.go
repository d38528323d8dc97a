// Package history is what a run of jepsen leaves behind to be judged: a header, one line
// for each operation, and one for each fault. It is JSON lines, so that it can be read by
// eye, cut down by hand and judged again.
package history
