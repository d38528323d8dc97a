//go:build linux

package main

import (
	"fmt"
	"io"
	"path"
	"strings"
)

// archive writes the "newc" form of cpio, which the kernel unpacks as its first root
// file system. Parents are added as they are needed, and each name once.
type archive struct {
	w     io.Writer
	names map[string]bool
	ino   int
	err   error
}

const (
	modeDir     = 0o040000
	modeFile    = 0o100000
	modeSymlink = 0o120000
	modeChar    = 0o020000
)

func newArchive(w io.Writer) *archive { return &archive{w: w, names: map[string]bool{}} }

// has tells whether the name, an absolute path in the guest, is in the archive.
func (a *archive) has(name string) bool { return a.names[strings.Trim(path.Clean(name), "/")] }

func (a *archive) dir(name string) { a.entry(name, modeDir|0o755, 0, nil, 0, 0) }

func (a *archive) symlink(name, target string) {
	a.entry(name, modeSymlink|0o777, int64(len(target)), strings.NewReader(target), 0, 0)
}

// file takes size bytes from r.
func (a *archive) file(name string, perm uint32, size int64, r io.Reader) {
	a.entry(name, modeFile|perm&0o777, size, r, 0, 0)
}

func (a *archive) text(name string, perm uint32, text string) {
	a.file(name, perm, int64(len(text)), strings.NewReader(text))
}

func (a *archive) char(name string, perm, major, minor uint32) {
	a.entry(name, modeChar|perm, 0, nil, major, minor)
}

func (a *archive) entry(name string, mode uint32, size int64, r io.Reader, major, minor uint32) {
	name = strings.Trim(path.Clean(name), "/")
	if name == "" || name == "." || a.names[name] {
		return
	}
	if parent := path.Dir(name); parent != "." {
		a.dir(parent)
	}
	a.names[name] = true
	a.ino++
	a.write(name, a.ino, mode, size, r, major, minor)
}

// write is one entry: a header of hexadecimal numbers, the name and the content, both
// padded to four bytes.
func (a *archive) write(name string, ino int, mode uint32, size int64, r io.Reader, major, minor uint32) {
	if a.err != nil {
		return
	}
	if size < 0 || size > 0xffffffff {
		a.err = fmt.Errorf("%s: %d bytes: a cpio archive holds files below 4 GiB", name, size)
		return
	}
	header := fmt.Sprintf("070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x",
		ino, mode, 0, 0, 1, 0, size, 0, 0, major, minor, len(name)+1, 0)
	a.put(header, name, "\x00", pad(int64(len(header)+len(name)+1)))
	if size > 0 && a.err == nil {
		n, err := io.CopyN(a.w, r, size)
		if err != nil {
			a.err = fmt.Errorf("%s: %d of %d bytes: %w", name, n, size, err)
			return
		}
	}
	a.put(pad(size))
}

func (a *archive) put(parts ...string) {
	for _, p := range parts {
		if a.err == nil {
			_, a.err = io.WriteString(a.w, p)
		}
	}
}

// close ends the archive; it does not close the writer.
func (a *archive) close() error {
	a.write("TRAILER!!!", 0, 0, 0, nil, 0, 0)
	return a.err
}

func pad(n int64) string { return "\x00\x00\x00"[:(4-n%4)%4] }
