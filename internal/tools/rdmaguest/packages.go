//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// hostPackages are what must be installed: the program looked for, and its package.
var hostPackages = []struct{ file, pkg string }{
	{"qemu-system-x86_64", "qemu-system-x86"},
	{"busybox", "busybox-static"},
	{"ip", "iproute2"},
	{"rdma", "iproute2"},
	{"ib_read_lat", "perftest"},
	{"ib_read_bw", "perftest"},
	{"ibv_devinfo", "ibverbs-utils"},
	{"rping", "rdmacm-utils"},
	{"gcc", "gcc"},
	{"make", "make"},
	{"strip", "binutils"},
	{"xz", "xz-utils"},
	{"dpkg-deb", "dpkg"},
	{"apt-cache", "apt"},
	{"/usr/include/infiniband/verbs.h", "libibverbs-dev"},
	{"/usr/include/rdma/rdma_cma.h", "librdmacm-dev"},
	{"/etc/libibverbs.d/rxe.driver", "ibverbs-providers"},
	{"/usr/include/stdlib.h", "libc6-dev"},
}

// missingPackages names the packages whose files are not on this host, each once.
func missingPackages() []string {
	var missing []string
	seen := map[string]bool{}
	for _, p := range hostPackages {
		if _, err := find(p.file); err != nil && !seen[p.pkg] {
			seen[p.pkg] = true
			missing = append(missing, p.pkg)
		}
	}
	return missing
}

// find looks for a program in PATH and in the folders of programs for root, and takes
// an absolute path as it is.
func find(file string) (string, error) {
	if filepath.IsAbs(file) {
		_, err := os.Stat(file)
		return file, err
	}
	if p, err := exec.LookPath(file); err == nil {
		return p, nil
	}
	for _, dir := range []string{"/usr/sbin", "/sbin", "/usr/bin", "/bin"} {
		if p := filepath.Join(dir, file); executable(p) {
			return p, nil
		}
	}
	return "", fmt.Errorf("%s: %w", file, exec.ErrNotFound)
}

func executable(p string) bool {
	st, err := os.Stat(p)
	return err == nil && st.Mode().IsRegular() && st.Mode().Perm()&0o111 != 0
}

// control is what apt-cache says of a package.
type control struct {
	name, version string
	depends       []string // names only
}

// parseControl reads the first stanza of `apt-cache show`.
func parseControl(text string) (control, error) {
	var c control
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if line == "" && c.name != "" {
			break
		}
		key, value, ok := strings.Cut(line, ": ")
		if !ok || strings.HasPrefix(line, " ") {
			continue
		}
		switch key {
		case "Package":
			c.name = value
		case "Version":
			c.version = value
		case "Depends":
			for _, d := range strings.Split(value, ",") {
				// Of alternatives the first is what apt would take.
				d, _, _ = strings.Cut(d, "|")
				d, _, _ = strings.Cut(strings.TrimSpace(d), " ")
				d, _, _ = strings.Cut(d, ":")
				c.depends = append(c.depends, d)
			}
		}
	}
	if c.name == "" || c.version == "" {
		return c, errors.New("apt-cache shows no package with a version")
	}
	return c, nil
}

// kernelPackages are what the guest's kernel and its modules are made of.
type kernelPackages struct {
	release string            // as uname -r says
	series  string            // "6.1"
	deps    map[string]string // package -> version
}

var kernelName = regexp.MustCompile(`^linux-image-((\d+\.\d+)\S*-amd64)$`)

// resolveKernel asks show, which is apt-cache show, for Debian's present kernel, the
// headers that belong to it and its sources.
func resolveKernel(show func(pkg string) (control, error)) (kernelPackages, error) {
	k := kernelPackages{deps: map[string]string{}}
	meta, err := show("linux-image-amd64")
	if err != nil {
		return k, err
	}
	for _, d := range meta.depends {
		if m := kernelName.FindStringSubmatch(d); m != nil {
			k.release, k.series = m[1], m[2]
		}
	}
	if k.release == "" {
		return k, fmt.Errorf("linux-image-amd64 %s depends on %s: none looks like linux-image-VERSION-amd64", meta.version, strings.Join(meta.depends, ", "))
	}
	image, err := show("linux-image-" + k.release)
	if err != nil {
		return k, err
	}
	k.deps[image.name] = image.version
	source, err := show("linux-source-" + k.series)
	if err != nil {
		return k, err
	}
	// The sources, the headers and the kernel must be of one build: modules compare.
	k.deps[source.name] = image.version
	todo := []string{"linux-headers-" + k.release}
	for len(todo) > 0 {
		pkg := todo[0]
		todo = todo[1:]
		if k.deps[pkg] != "" {
			continue
		}
		c, err := show(pkg)
		if err != nil {
			return k, err
		}
		k.deps[c.name] = c.version
		for _, d := range c.depends {
			if strings.HasPrefix(d, "linux-headers-") || strings.HasPrefix(d, "linux-kbuild-") {
				todo = append(todo, d)
			}
		}
	}
	return k, nil
}

func aptShow(ctx context.Context) func(string) (control, error) {
	return func(pkg string) (control, error) {
		out, err := exec.CommandContext(ctx, "apt-cache", "show", "--no-all-versions", pkg).Output()
		if err != nil {
			return control{}, fmt.Errorf("apt-cache show %s: %w: is it Debian, and are its package lists there (apt-get update)?", pkg, err)
		}
		c, err := parseControl(string(out))
		if err != nil {
			return c, fmt.Errorf("apt-cache show %s: %w", pkg, err)
		}
		return c, nil
	}
}

// download fetches the packages into dir and unpacks each into a folder of its name.
func (k kernelPackages) download(ctx context.Context, dir string) error {
	args := []string{"-o", "Acquire::Retries=3", "-q", "download"}
	for pkg, version := range k.deps {
		args = append(args, pkg+"="+version)
	}
	if err := runIn(ctx, dir, nil, "apt-get", args...); err != nil {
		return fmt.Errorf("%w\nwhere a file was not found, the package lists are old: apt-get update", err)
	}
	debs, err := filepath.Glob(filepath.Join(dir, "*.deb"))
	if err != nil {
		return err
	}
	for _, deb := range debs {
		pkg, _, _ := strings.Cut(filepath.Base(deb), "_")
		to := "root"
		if strings.HasPrefix(pkg, "linux-source-") {
			to = "source"
		}
		if err := runIn(ctx, dir, nil, "dpkg-deb", "-x", deb, to); err != nil {
			return err
		}
		if err := os.Remove(deb); err != nil {
			return err
		}
	}
	return nil
}

// runIn runs a program to its end; the error holds what it wrote.
func runIn(ctx context.Context, dir string, env []string, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, tail(string(out), 30))
	}
	return nil
}

func tail(text string, lines int) string {
	all := strings.Split(strings.TrimRight(text, "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
