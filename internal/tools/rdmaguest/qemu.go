//go:build linux

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// guestConfig is one boot.
type guestConfig struct {
	job
	MemoryMiB int
	CPUs      int
	Copies    []copySpec
	Out       string // host folder that gets what is in the guest's outDir; "" for none
	Kernel    *kernel
	Append    string // to the kernel's command line
	// Counted makes the guest's clock count instructions, on one emulated processor.
	Counted bool
}

type copySpec struct{ From, To string }

// tools of the host that every guest has, where they are installed; the first ones must be.
var (
	mustTools = []string{"ip", "rdma"}
	mayTools  = []string{
		"ib_read_lat", "ib_read_bw", "ib_write_lat", "ib_write_bw", "ib_atomic_lat",
		"ibv_devinfo", "ibv_devices", "ibv_rc_pingpong", "rping",
	}
	// Opened by name at run time, so no program names them.
	openedLibs = []string{"libibverbs.so.1", "librdmacm.so.1", "libgcc_s.so.1"}
)

// writeRoot writes the guest's root file system.
func (c *guestConfig) writeRoot(w io.Writer) error {
	a := newArchive(w)
	for _, d := range []string{"usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "etc", "proc", "sys", "dev", "tmp", "run", "root", outDir, jobDir, "busybox"} {
		a.dir(d)
	}
	for _, d := range []string{"bin", "sbin", "lib", "lib64"} {
		a.symlink(d, "usr/"+d)
	}
	a.char("dev/console", 0o600, 5, 1)
	a.char("dev/null", 0o666, 1, 3)
	a.text("etc/passwd", 0o644, "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n")
	a.text("etc/group", 0o644, "root:x:0:\nnogroup:x:65534:\n")
	a.text("etc/hosts", 0o644, "127.0.0.1 localhost\n")
	a.text("etc/nsswitch.conf", 0o644, "passwd: files\ngroup: files\nhosts: files\n")

	self, err := os.Executable()
	if err != nil {
		return err
	}
	if err := addWithLibs(a, self, selfFile); err != nil {
		return err
	}
	a.symlink("init", strings.TrimPrefix(selfFile, "/"))
	if err := c.addTools(a); err != nil {
		return err
	}
	for _, m := range c.Kernel.Modules {
		name := "/modules/" + filepath.Base(m)
		if err := addFile(a, m, name); err != nil {
			return err
		}
		c.Modules = append(c.Modules, name)
	}
	for _, cp := range c.Copies {
		if err := addTree(a, cp.From, cp.To); err != nil {
			return fmt.Errorf("copy %s to the guest: %w", cp.From, err)
		}
	}
	b, err := json.Marshal(c.job)
	if err != nil {
		return err
	}
	a.text(jobFile, 0o644, string(b))
	return a.close()
}

func (c *guestConfig) addTools(a *archive) error {
	for _, tool := range mustTools {
		file, err := find(tool)
		if err != nil {
			return err
		}
		if err := addWithLibs(a, file, "/usr/sbin/"+tool); err != nil {
			return err
		}
	}
	for _, tool := range mayTools {
		if file, err := find(tool); err == nil {
			if err := addWithLibs(a, file, "/usr/bin/"+tool); err != nil {
				return err
			}
		}
	}
	for _, lib := range openedLibs {
		if err := addLib(a, lib); err != nil {
			return err
		}
	}
	// The drivers of libibverbs: their names, and the libraries behind them.
	for _, pattern := range []string{"/etc/libibverbs.d/rxe.driver", "/etc/libibverbs.d/siw.driver", guestLibDir + "/libibverbs/librxe-rdmav*.so", guestLibDir + "/libibverbs/libsiw-rdmav*.so"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			return err
		}
		if len(files) == 0 {
			return fmt.Errorf("no file is named %s: install ibverbs-providers", pattern)
		}
		for _, f := range files {
			if err := addWithLibs(a, f, f); err != nil {
				return err
			}
		}
	}
	busybox, err := find("busybox")
	if err != nil {
		return err
	}
	if err := addWithLibs(a, busybox, "/busybox/busybox"); err != nil {
		return err
	}
	list, err := exec.Command(busybox, "--list").Output()
	if err != nil {
		return fmt.Errorf("busybox --list: %w", err)
	}
	for applet := range strings.Lines(string(list)) {
		// In a folder of their own, last in PATH: busybox's ip hides the real one.
		a.symlink("/busybox/"+strings.TrimSpace(applet), "busybox")
	}
	a.symlink("/usr/bin/sh", "/busybox/busybox")
	return a.err
}

// errNoExit says that the guest, not the program in it, failed.
var errNoExit = errors.New("rdmaguest: the guest gave no exit code")

// boot runs the job in a guest and returns the program's exit code. All that lies on the
// host meanwhile is in one temporary folder.
func (c *guestConfig) boot(ctx context.Context, stdout, stderr io.Writer) (int, error) {
	dir, err := os.MkdirTemp("", "rdmaguest-")
	if err != nil {
		return 0, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	initrd := filepath.Join(dir, "initrd")
	if err := c.writeRootFile(initrd); err != nil {
		return 0, err
	}
	st, err := os.Stat(initrd)
	if err != nil {
		return 0, err
	}
	// The root file system takes its size twice while the kernel unpacks it.
	if need := int(2*st.Size()>>20) + 256; need > c.MemoryMiB {
		return 0, fmt.Errorf("a guest of %d MiB is too small for the %d MiB that are copied into it: want --mem %d or more", c.MemoryMiB, st.Size()>>20, need)
	}
	socket := filepath.Join(dir, "port")
	l, err := net.Listen("unix", socket)
	if err != nil {
		return 0, err
	}
	defer func() { _ = l.Close() }()

	// The guest ends its program itself after Timeout, and says so; this bound is for a
	// guest that does not answer.
	ctx, cancel := context.WithTimeout(ctx, c.Timeout+time.Minute)
	defer cancel()
	console := filepath.Join(dir, "console")
	qemu := exec.CommandContext(ctx, "qemu-system-x86_64", c.qemuArgs(initrd, socket, console)...)
	var qemuOut bytes.Buffer
	qemu.Stdout, qemu.Stderr = &qemuOut, &qemuOut
	qemu.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := qemu.Start(); err != nil {
		return 0, err
	}
	ended := make(chan error, 1)
	go func() {
		ended <- qemu.Wait()
		_ = l.Close() // wakes Accept where QEMU never connected
	}()
	code, err := c.talk(l, stdout, stderr)
	if err != nil {
		_ = qemu.Process.Kill()
	}
	<-ended
	var fromGuest errGuest
	if err != nil && !errors.As(err, &fromGuest) {
		text, _ := os.ReadFile(console)
		err = fmt.Errorf("%w: %w (%v)\n--- QEMU:\n%s--- end of the guest's console:\n%s", errNoExit, err, ctx.Err(), qemuOut.String(), tail(string(text), 40))
	}
	return code, err
}

func (c *guestConfig) writeRootFile(name string) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	w := bufio.NewWriterSize(f, 1<<20)
	if err := c.writeRoot(w); err != nil {
		return errors.Join(err, f.Close())
	}
	return errors.Join(w.Flush(), f.Close())
}

func (c *guestConfig) qemuArgs(initrd, socket, console string) []string {
	accel, cpu, counted := accel(), "max", []string(nil)
	if c.Counted {
		// sleep=off: with nothing to run the clock jumps to the next timer.
		accel, counted = "tcg,thread=single", []string{"-icount", "shift=1,sleep=off,align=off"}
	}
	if accel != "kvm" {
		// These make kernel and libraries copy and clear memory by one instruction for all
		// bytes, which the emulator runs byte by byte.
		cpu += ",-erms,-fsrm"
	}
	return append([]string{
		"-machine", "q35", "-accel", accel, "-cpu", cpu,
		"-smp", strconv.Itoa(c.CPUs), "-m", strconv.Itoa(c.MemoryMiB),
		"-nodefaults", "-display", "none", "-no-reboot",
		"-kernel", c.Kernel.Image, "-initrd", initrd,
		"-append", "console=ttyS0 quiet panic=-1 mitigations=off " + clock() + c.Append,
		"-serial", "file:" + console,
		"-device", "virtio-serial-pci",
		"-chardev", "socket,id=port,path=" + socket,
		"-device", "virtserialport,chardev=port,name=" + portName,
	}, counted...)
}

// accel is the host's virtualisation where it may be used, else software emulation.
func accel() string {
	cpuinfo, err := os.ReadFile("/proc/cpuinfo")
	if err != nil || !virtualizes(cpuinfo) {
		return "tcg,thread=multi"
	}
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return "tcg,thread=multi"
	}
	_ = f.Close()
	return "kvm"
}

// virtualizes says whether the processor has what KVM needs. A small virtual machine may
// have /dev/kvm without it: a guest started there dies or never gets to its first line.
func virtualizes(cpuinfo []byte) bool {
	for line := range bytes.Lines(cpuinfo) {
		if name, flags, ok := bytes.Cut(line, []byte(":")); ok && string(bytes.TrimSpace(name)) == "flags" {
			for f := range bytes.FieldsSeq(flags) {
				if string(f) == "vmx" || string(f) == "svm" {
					return true
				}
			}
			return false
		}
	}
	return false
}

// clock makes the guest read the time from the processor where the host's own counter is
// steady: the emulated one is the host's. The guest would else find it unreliable under
// emulation, and ask an emulated device, which costs microseconds a time.
func clock() string {
	b, err := os.ReadFile("/proc/cpuinfo")
	if err != nil || !bytes.Contains(b, []byte(" constant_tsc")) || !bytes.Contains(b, []byte(" nonstop_tsc")) {
		return ""
	}
	return "tsc=reliable clocksource=tsc "
}

func (c *guestConfig) talk(l net.Listener, stdout, stderr io.Writer) (int, error) {
	conn, err := l.Accept()
	if err != nil {
		return 0, errors.New("QEMU ended before it started the guest")
	}
	defer func() { _ = conn.Close() }()
	r := receiver{stdout: stdout, stderr: stderr, file: c.saveFile}
	return r.receive(conn)
}

// saveFile appends to a file below Out. The guest's names stay below it.
func (c *guestConfig) saveFile(name string, piece []byte) error {
	if c.Out == "" {
		return nil
	}
	if !filepath.IsLocal(name) {
		return fmt.Errorf("the guest sent a file named %q", name)
	}
	to := filepath.Join(c.Out, name)
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(to, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(piece)
	return errors.Join(err, f.Close())
}
