package shm

import (
	"bytes"
	"slices"
	"strconv"
	"strings"
)

// Holder is a process that has memory of a server mapped.
type Holder struct {
	PID     int
	Command string
	Bytes   uint64   // of address space; a mapping made twice counts twice
	Names   []string // of the memory, as given to rdma.AllocMemory, each once
}

// Holders is the outcome of a scan.
type Holders struct {
	Processes []Holder
	// Unreadable counts the processes that this user may not look into: they may
	// hold memory too.
	Unreadable int
}

// holderIn adds up the lines of a maps file that name matching memory, such as
//
//	7f00c0000000-7f00c0200000 r--s 00000000 00:01 1042   /memfd:kvd-1-boot-chunk (deleted)
func holderIn(maps []byte, prefix, current string) (h Holder) {
	mark := []byte("/memfd:" + prefix)
	for {
		at := bytes.Index(maps, mark)
		if at < 0 {
			return h
		}
		start := bytes.LastIndexByte(maps[:at], '\n') + 1
		end := len(maps)
		if n := bytes.IndexByte(maps[at:], '\n'); n >= 0 {
			end = at + n
		}
		name := strings.TrimSuffix(string(maps[at+len("/memfd:"):end]), " (deleted)")
		if current == "" || !strings.HasPrefix(name, current) {
			h.Bytes += rangeSize(maps[start:at])
			if !slices.Contains(h.Names, name) {
				h.Names = append(h.Names, name)
			}
		}
		maps = maps[end:]
	}
}

// rangeSize reads FROM-TO, hexadecimal, at the start of a line; 0 if it is not there.
func rangeSize(line []byte) uint64 {
	span, _, _ := strings.Cut(string(line), " ")
	from, to, _ := strings.Cut(span, "-")
	a, err1 := strconv.ParseUint(from, 16, 64)
	b, err2 := strconv.ParseUint(to, 16, 64)
	if err1 != nil || err2 != nil || b < a {
		return 0
	}
	return b - a
}
