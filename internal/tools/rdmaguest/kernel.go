//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// recipe is part of the cache's key: a change of what is kept there needs a new number.
const recipe = "3"

// kernel is a guest's kernel in the cache.
type kernel struct {
	Release string
	Image   string   // path of vmlinux, or of vmlinuz
	Modules []string // paths, in the order in which they are to be loaded
}

// cacheDir is where kernels are kept between runs.
func cacheDir() (string, error) {
	if dir := os.Getenv("KVD_RDMAGUEST_CACHE"); dir != "" {
		return filepath.Abs(dir)
	}
	dir, err := os.UserCacheDir()
	return filepath.Join(dir, "kvd-rdmaguest"), err
}

// ensureKernel returns the kernel from the cache, or makes it: packages are downloaded
// and unpacked, never installed, and siw is compiled. Processes that want the same one
// at the same time wait for the first.
func ensureKernel(ctx context.Context, say func(format string, args ...any)) (*kernel, error) {
	base, err := cacheDir()
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(base, 0o755); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(filepath.Join(base, "lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	defer func() { _ = lock.Close() }() // which unlocks
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return nil, fmt.Errorf("%s: %w", lock.Name(), err)
	}
	packages, err := resolveKernel(aptShow(ctx))
	if err != nil {
		// The package lists are gone; an older kernel does as well.
		if k := anyKernel(base); k != nil {
			return k, nil
		}
		return nil, err
	}
	dir := filepath.Join(base, packages.key())
	if k, err := loadKernel(dir); err == nil {
		return k, nil
	} else if !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	say("building the guest's kernel modules from Debian's %s (%s): once, about a minute", packages.release, packages.deps["linux-image-"+packages.release])
	work, err := os.MkdirTemp(base, "building-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(work) }()
	if err := packages.download(ctx, work); err != nil {
		return nil, err
	}
	out := filepath.Join(work, "kernel")
	if err := buildKernel(ctx, packages, work, out); err != nil {
		return nil, err
	}
	// What an older kernel left is of no more use.
	old, err := filepath.Glob(filepath.Join(base, "kernel-*"))
	if err != nil {
		return nil, err
	}
	for _, o := range old {
		if err := os.RemoveAll(o); err != nil {
			return nil, err
		}
	}
	if err := os.Rename(out, dir); err != nil {
		return nil, err
	}
	return loadKernel(dir)
}

// anyKernel is one of the cache that is whole, or nil.
func anyKernel(base string) *kernel {
	dirs, err := filepath.Glob(filepath.Join(base, "kernel-"+recipe+"-*"))
	if err != nil {
		return nil
	}
	for _, dir := range dirs {
		if k, err := loadKernel(dir); err == nil {
			return k
		}
	}
	return nil
}

func (k kernelPackages) key() string {
	return "kernel-" + recipe + "-" + k.release + "-" + strings.ReplaceAll(k.deps["linux-image-"+k.release], "/", "_")
}

// loadKernel reads what buildKernel left. Its files have names relative to dir.
func loadKernel(dir string) (*kernel, error) {
	b, err := os.ReadFile(filepath.Join(dir, "kernel.json"))
	if err != nil {
		return nil, err
	}
	var k kernel
	if err := json.Unmarshal(b, &k); err != nil {
		return nil, fmt.Errorf("%s: %w: remove the folder", filepath.Join(dir, "kernel.json"), err)
	}
	k.Image = filepath.Join(dir, k.Image)
	for i, m := range k.Modules {
		k.Modules[i] = filepath.Join(dir, m)
		if _, err := os.Stat(k.Modules[i]); err != nil {
			return nil, fmt.Errorf("the cache is damaged: %w: remove %s", os.ErrInvalid, dir)
		}
	}
	return &k, nil
}

// buildKernel takes from the unpacked packages what a guest needs.
func buildKernel(ctx context.Context, p kernelPackages, work, out string) error {
	root := filepath.Join(work, "root")
	siw, err := buildSIW(ctx, p, work)
	if err != nil {
		return fmt.Errorf("building siw: %w", err)
	}
	modules := filepath.Join(root, "lib/modules", p.release)
	if _, err := os.Stat(modules); err != nil {
		modules = filepath.Join(root, "usr/lib/modules", p.release)
	}
	index, err := moduleIndex(filepath.Join(modules, "kernel"))
	if err != nil {
		return err
	}
	index["siw"] = siw
	text, err := os.ReadFile(filepath.Join(modules, "modules.builtin"))
	if err != nil {
		return err
	}
	order, err := loadOrder(wantModules, index, parseBuiltin(string(text)), moduleDepends)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	k := kernel{Release: p.release, Image: "vmlinux"}
	image := filepath.Join(root, "boot/vmlinuz-"+p.release)
	err = unpackKernel(ctx, image, filepath.Join(out, k.Image))
	if errors.Is(err, errNotXZ) {
		k.Image = "vmlinuz"
		err = copyFile(image, filepath.Join(out, k.Image))
	}
	if err != nil {
		return err
	}
	for _, file := range order {
		name := filepath.Base(file)
		// Without debug information, and without the signature: the guest would check it,
		// which takes the emulated processor a quarter of a second for each.
		if err := runIn(ctx, work, nil, "strip", "--strip-debug", "-o", filepath.Join(out, name), file); err != nil {
			return err
		}
		k.Modules = append(k.Modules, name)
	}
	b, err := json.MarshalIndent(k, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(out, "kernel.json"), b, 0o644)
}

// buildSIW compiles soft-iWARP, which Debian's kernel leaves out, against the headers of
// the same kernel.
func buildSIW(ctx context.Context, p kernelPackages, work string) (string, error) {
	const siwDir = "drivers/infiniband/sw/siw"
	tree := "linux-source-" + p.series
	tarball := filepath.Join(work, "source/usr/src", tree+".tar.xz")
	if err := runIn(ctx, work, nil, "tar", "-xJf", tarball, tree+"/"+siwDir); err != nil {
		return "", err
	}
	// The headers' Makefile includes another by its path on a host where they are
	// installed.
	headers := filepath.Join(work, "root/usr/src/linux-headers-"+p.release)
	makefile := filepath.Join(headers, "Makefile")
	text, err := os.ReadFile(makefile)
	if err != nil {
		return "", err
	}
	text = installedInclude.ReplaceAll(text, []byte("include "+filepath.Join(work, "root")+"/usr/src/"))
	if err := os.WriteFile(makefile, text, 0o644); err != nil {
		return "", err
	}
	dir := filepath.Join(work, tree, siwDir)
	if err := runIn(ctx, headers, nil, "make", "-j"+strconv.Itoa(runtime.NumCPU()), "M="+dir, "CONFIG_RDMA_SIW=m", "modules"); err != nil {
		return "", err
	}
	return filepath.Join(dir, "siw.ko"), nil
}

var installedInclude = regexp.MustCompile(`(?m)^include /usr/src/`)

func copyFile(from, to string) error {
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, b, 0o644)
}
