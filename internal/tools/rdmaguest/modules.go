//go:build linux

package main

import (
	"bytes"
	"debug/elf"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
)

// wantModules is what the guest loads, in this order; what they depend on comes before.
// The two checksums are asked for by name at run time, so no dependency names them.
var wantModules = []string{
	"virtio_pci", "virtio_console", "crc32_generic", "crc32c_generic", "veth", "dummy",
	"ib_uverbs", "rdma_ucm", "rdma_rxe", "siw",
}

// moduleIndex maps the name of each module below the folders to its file.
func moduleIndex(dirs ...string) (map[string]string, error) {
	index := map[string]string{}
	for _, dir := range dirs {
		err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
			if err == nil && !d.IsDir() && strings.HasSuffix(p, ".ko") {
				index[moduleName(strings.TrimSuffix(filepath.Base(p), ".ko"))] = p
			}
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	return index, nil
}

// moduleName: a file's name may have dashes where the module has underscores.
func moduleName(s string) string { return strings.ReplaceAll(s, "-", "_") }

// loadOrder lists the wanted modules and all that they need, each after what it needs.
// A dependency that is in the index neither by name nor as a file is built into the
// kernel; a wanted module must be there unless builtin says so.
func loadOrder(want []string, index map[string]string, builtin map[string]bool, depends func(file string) ([]string, error)) ([]string, error) {
	var order []string
	state := map[string]int{} // 1: being visited, 2: done
	var visit func(name, by string) error
	visit = func(name, by string) error {
		name = moduleName(name)
		if state[name] == 2 || builtin[name] {
			return nil
		}
		if state[name] == 1 {
			return fmt.Errorf("modules depend on each other in a circle: %s and %s", name, by)
		}
		file, ok := index[name]
		if !ok {
			return fmt.Errorf("module %s, needed by %s, is not in the kernel package", name, by)
		}
		state[name] = 1
		deps, err := depends(file)
		if err != nil {
			return err
		}
		for _, d := range deps {
			if err := visit(d, name); err != nil {
				return err
			}
		}
		state[name] = 2
		order = append(order, file)
		return nil
	}
	for _, name := range want {
		if err := visit(name, "the guest"); err != nil {
			return nil, err
		}
	}
	return order, nil
}

// moduleDepends reads the "depends=" line of a module's .modinfo section.
func moduleDepends(file string) ([]string, error) {
	f, err := elf.Open(file)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	defer func() { _ = f.Close() }()
	section := f.Section(".modinfo")
	if section == nil {
		return nil, fmt.Errorf("%s has no .modinfo section: it is no kernel module", file)
	}
	info, err := section.Data()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return parseDepends(info), nil
}

func parseDepends(info []byte) []string {
	for _, line := range bytes.Split(info, []byte{0}) {
		if list, ok := bytes.CutPrefix(line, []byte("depends=")); ok && len(list) > 0 {
			return strings.Split(string(list), ",")
		}
	}
	return nil
}

// parseBuiltin reads a kernel's modules.builtin.
func parseBuiltin(text string) map[string]bool {
	builtin := map[string]bool{}
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != "" {
			builtin[moduleName(strings.TrimSuffix(filepath.Base(line), ".ko"))] = true
		}
	}
	return builtin
}
