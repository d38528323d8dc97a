// Package verbsflags are the command-line settings of the verbs transport, the same for
// every program of kvd.
package verbsflags
