//go:build linux

package main

import (
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// libDirs are where this host's loader looks by itself.
var libDirs = []string{"/usr/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu", "/usr/lib64", "/lib64", "/usr/lib", "/lib", "/usr/local/lib"}

// guestLibDir is where the guest's loader looks, without a cache.
const guestLibDir = "/usr/lib/x86_64-linux-gnu"

// isELF tells by the first bytes.
func isELF(file string) (bool, error) {
	f, err := os.Open(file)
	if err != nil {
		return false, err
	}
	defer func() { _ = f.Close() }()
	var magic [4]byte
	_, err = io.ReadFull(f, magic[:])
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return false, nil
	}
	return err == nil && string(magic[:]) == elf.ELFMAG, err
}

// needs lists the shared libraries that the file names, and its loader ("" for none).
func needs(file string) (libs []string, loader string, err error) {
	f, err := elf.Open(file)
	if err != nil {
		return nil, "", fmt.Errorf("%s: %w", file, err)
	}
	defer func() { _ = f.Close() }()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			b, err := io.ReadAll(p.Open())
			if err != nil {
				return nil, "", fmt.Errorf("%s: %w", file, err)
			}
			loader = strings.TrimRight(string(b), "\x00")
		}
	}
	if f.Section(".dynamic") == nil {
		return nil, loader, nil
	}
	libs, err = f.ImportedLibraries()
	if err != nil {
		return nil, "", fmt.Errorf("%s: %w", file, err)
	}
	return libs, loader, nil
}

// addWithLibs puts an ELF file into the archive under the guest's name, and every
// library that it needs.
func addWithLibs(a *archive, file, name string) error {
	if err := addFile(a, file, name); err != nil {
		return err
	}
	ok, err := isELF(file)
	if err != nil || !ok {
		return err
	}
	libs, loader, err := needs(file)
	if err != nil {
		return err
	}
	if loader != "" && !a.has(loader) && !a.has("/usr"+loader) {
		if err := addFile(a, loader, "/usr"+strings.TrimPrefix(loader, "/usr")); err != nil {
			return err
		}
	}
	for _, lib := range libs {
		if err := addLib(a, lib); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	return nil
}

func addLib(a *archive, lib string) error {
	name := filepath.Join(guestLibDir, lib)
	if a.has(name) {
		return nil
	}
	for _, dir := range libDirs {
		file := filepath.Join(dir, lib)
		if _, err := os.Stat(file); err == nil {
			return addWithLibs(a, file, name)
		}
	}
	return fmt.Errorf("library %s is in none of %s", lib, strings.Join(libDirs, ", "))
}

// addFile follows symbolic links on the host: the guest gets the content.
func addFile(a *archive, file, name string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	a.file(name, uint32(st.Mode().Perm()), st.Size(), f)
	return a.err
}

// addTree copies a folder, or a file. Programs in it get their libraries.
func addTree(a *archive, from, to string) error {
	st, err := os.Stat(from)
	if err != nil {
		return err
	}
	if !st.IsDir() {
		return addWithLibs(a, from, to)
	}
	return filepath.WalkDir(from, func(p string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, p)
		if err != nil {
			return err
		}
		name := filepath.Join(to, rel)
		switch {
		case d.IsDir():
			a.dir(name)
			return a.err
		case d.Type()&os.ModeSymlink != 0:
			target, err := os.Readlink(p)
			if err != nil {
				return err
			}
			a.symlink(name, target)
			return a.err
		case d.Type().IsRegular():
			return addWithLibs(a, p, name)
		}
		return nil // a socket or a pipe means nothing in the guest
	})
}
