//go:build linux

package main

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// parseArchive is a reader of the format of its own, by its description.
func parseArchive(t *testing.T, b []byte) map[string]string {
	t.Helper()
	got := map[string]string{}
	for at := 0; ; {
		require.GreaterOrEqual(t, len(b), at+110, "header at %d", at)
		h := string(b[at : at+110])
		require.Equal(t, "070701", h[:6], "magic at %d", at)
		field := func(i int) (n int) {
			_, err := fmt.Sscanf(h[6+8*i:14+8*i], "%08x", &n)
			require.NoError(t, err)
			return n
		}
		mode, size, nameSize := field(1), field(6), field(11)
		name := string(b[at+110 : at+110+nameSize-1])
		at = (at + 110 + nameSize + 3) &^ 3
		if name == "TRAILER!!!" {
			return got
		}
		require.NotContains(t, got, name, "each name once")
		if parent := filepath.Dir(name); parent != "." {
			require.Contains(t, got, parent, "%s before its parent", name)
		}
		got[name] = fmt.Sprintf("%o %s", mode, b[at:at+size])
		at = (at + size + 3) &^ 3
	}
}

func TestArchive(t *testing.T) {
	var b bytes.Buffer
	a := newArchive(&b)
	a.text("/usr/bin/prog", 0o755, "code")
	a.text("usr/bin/prog", 0o755, "not again")
	a.symlink("bin", "usr/bin")
	a.char("dev/null", 0o666, 1, 3)
	for n := range 9 { // all paddings of names and contents
		a.text("pad/"+strings.Repeat("n", n+1), 0o644, strings.Repeat("c", n))
	}
	require.NoError(t, a.close())
	require.True(t, a.has("/usr/bin/prog"))
	require.False(t, a.has("/usr/bin/other"))
	got := parseArchive(t, b.Bytes())
	require.Equal(t, "100755 code", got["usr/bin/prog"])
	require.Equal(t, "120777 usr/bin", got["bin"])
	require.Equal(t, "20666 ", got["dev/null"])
	require.Equal(t, "40755 ", got["usr"])
	for n := range 9 {
		require.Equal(t, "100644 "+strings.Repeat("c", n), got["pad/"+strings.Repeat("n", n+1)])
	}
}

func TestArchiveTellsOfAShortFile(t *testing.T) {
	a := newArchive(io.Discard)
	a.file("f", 0o644, 10, strings.NewReader("short"))
	require.ErrorContains(t, a.close(), "5 of 10 bytes")
	a = newArchive(io.Discard)
	a.file("f", 0o644, 1<<32, strings.NewReader(""))
	require.ErrorContains(t, a.close(), "below 4 GiB")
}

func TestParseControl(t *testing.T) {
	c, err := parseControl(`Package: linux-headers-6.1.0-57-amd64
Version: 6.1.192-3
Depends: linux-headers-6.1.0-57-common (= 6.1.192-3), linux-kbuild-6.1 (>= 6.1.192-3), gcc:any | clang (>> 1)
Description: no
 Version: of a description

Package: linux-headers-6.1.0-57-amd64
Version: 6.1.1
`)
	require.NoError(t, err)
	require.Equal(t, control{"linux-headers-6.1.0-57-amd64", "6.1.192-3", []string{"linux-headers-6.1.0-57-common", "linux-kbuild-6.1", "gcc"}}, c)
	for _, bad := range []string{"", "N: no package\n", "Package: x\n"} {
		_, err := parseControl(bad)
		require.Error(t, err)
	}
}

func TestResolveKernel(t *testing.T) {
	known := map[string]control{}
	add := func(name, version string, depends ...string) { known[name] = control{name, version, depends} }
	show := func(pkg string) (control, error) {
		if c, ok := known[pkg]; ok {
			return c, nil
		}
		return control{}, errors.New("no package " + pkg)
	}
	add("linux-image-amd64", "6.1.192-3", "linux-image-6.1.0-57-amd64")
	add("linux-image-6.1.0-57-amd64", "6.1.192-3", "kmod", "initramfs-tools")
	add("linux-source-6.1", "6.1.192-3", "xz-utils")
	add("linux-headers-6.1.0-57-amd64", "6.1.192-3", "linux-headers-6.1.0-57-common", "linux-kbuild-6.1", "linux-compiler-gcc-12-x86")
	add("linux-headers-6.1.0-57-common", "6.1.192-3")
	add("linux-kbuild-6.1", "6.1.192-3", "libelf1")
	k, err := resolveKernel(show)
	require.NoError(t, err)
	require.Equal(t, "6.1.0-57-amd64", k.release)
	require.Equal(t, "6.1", k.series)
	require.Equal(t, map[string]string{
		"linux-image-6.1.0-57-amd64": "6.1.192-3", "linux-source-6.1": "6.1.192-3",
		"linux-headers-6.1.0-57-amd64": "6.1.192-3", "linux-headers-6.1.0-57-common": "6.1.192-3", "linux-kbuild-6.1": "6.1.192-3",
	}, k.deps)
	before := k.key()

	add("linux-image-6.1.0-57-amd64", "6.1.193-1")
	k, err = resolveKernel(show)
	require.NoError(t, err)
	require.NotEqual(t, before, k.key(), "another version is another kernel")

	delete(known, "linux-headers-6.1.0-57-common")
	_, err = resolveKernel(show)
	require.ErrorContains(t, err, "linux-headers-6.1.0-57-common")

	add("linux-image-amd64", "7", "something-else")
	_, err = resolveKernel(show)
	require.ErrorContains(t, err, "something-else")
}

func TestLoadOrder(t *testing.T) {
	deps := map[string][]string{"rxe.ko": {"uverbs", "tunnel"}, "uverbs.ko": {"core"}, "core.ko": nil, "tunnel.ko": nil, "siw-x.ko": {"core", "crc"}}
	index := map[string]string{"rxe": "rxe.ko", "uverbs": "uverbs.ko", "core": "core.ko", "tunnel": "tunnel.ko", "siw_x": "siw-x.ko"}
	builtin := parseBuiltin("kernel/lib/crc.ko\nkernel/x/some-thing.ko\n")
	require.True(t, builtin["some_thing"])
	read := func(f string) ([]string, error) { return deps[f], nil }
	order, err := loadOrder([]string{"rxe", "siw-x"}, index, builtin, read)
	require.NoError(t, err)
	require.Equal(t, []string{"core.ko", "uverbs.ko", "tunnel.ko", "rxe.ko", "siw-x.ko"}, order)

	_, err = loadOrder([]string{"siw-x"}, index, nil, read)
	require.ErrorContains(t, err, "module crc, needed by siw_x")
	deps["core.ko"] = []string{"rxe"}
	_, err = loadOrder([]string{"rxe"}, index, builtin, read)
	require.ErrorContains(t, err, "circle")
}

func TestParseDepends(t *testing.T) {
	require.Equal(t, []string{"a", "b_c"}, parseDepends([]byte("license=GPL\x00depends=a,b_c\x00name=x\x00")))
	require.Empty(t, parseDepends([]byte("license=GPL\x00depends=\x00")))
	require.Empty(t, parseDepends(nil))
}

func TestKernelPayload(t *testing.T) {
	image := func(change func(b []byte)) []byte {
		b := make([]byte, 4096)
		b[setupSectors] = 1
		copy(b[bootMagic:], "HdrS")
		binary.LittleEndian.PutUint16(b[bootProtocol:], 0x20f)
		binary.LittleEndian.PutUint32(b[payloadOffset:], 0x10)
		binary.LittleEndian.PutUint32(b[payloadLength:], 100)
		copy(b[1024+0x10:], "\xfd7zXZ\x00rest")
		if change != nil {
			change(b)
		}
		return b
	}
	got, err := kernelPayload(image(nil))
	require.NoError(t, err)
	require.Len(t, got, 100)
	require.True(t, bytes.HasPrefix(got, []byte("\xfd7zXZ\x00rest")))
	for want, change := range map[string]func([]byte){
		"HdrS":            func(b []byte) { b[bootMagic] = 0 },
		"0x207":           func(b []byte) { b[bootProtocol] = 7; b[bootProtocol+1] = 2 },
		"of an image":     func(b []byte) { binary.LittleEndian.PutUint32(b[payloadLength:], 1<<31) },
		errNotXZ.Error():  func(b []byte) { b[1024+0x10] = 'x' },
		"not packed by x": func(b []byte) { binary.LittleEndian.PutUint32(b[payloadLength:], 2) },
	} {
		_, err := kernelPayload(image(change))
		require.ErrorContains(t, err, want)
	}
	_, err = kernelPayload(nil)
	require.Error(t, err)
}

// What the guest's half sends is what the host's half hands on.
func TestFrames(t *testing.T) {
	var wire, stdout, stderr bytes.Buffer
	f := &frames{w: &wire}
	dir := t.TempDir()
	big := bytes.Repeat([]byte("0123456789"), 100_000)
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "sub"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "sub", "big"), big, 0o644))
	_, err := io.WriteString(stream{f, kindStdout}, "out\n\x00\xff")
	require.NoError(t, err)
	_, err = io.WriteString(stream{f, kindStderr}, "err")
	require.NoError(t, err)
	require.NoError(t, sendFiles(f, dir))
	require.NoError(t, f.send(frame{Kind: kindExit, Code: 3}))

	c := guestConfig{Out: t.TempDir()}
	code, err := receiver{&stdout, &stderr, c.saveFile}.receive(&wire)
	require.NoError(t, err)
	require.Equal(t, 3, code)
	require.Equal(t, "out\n\x00\xff", stdout.String())
	require.Equal(t, "err", stderr.String())
	got, err := os.ReadFile(filepath.Join(c.Out, "sub", "big"))
	require.NoError(t, err)
	require.Equal(t, big, got)
}

func TestReceiveTellsWhatIsWrong(t *testing.T) {
	for _, tc := range []struct{ wire, want string }{
		{"", "without an exit code"},
		{`{"Kind":"stdout","Data":"b3V0"}`, "without an exit code"},
		{`{"Kind":"error","Data":"bm8gZGV2aWNl"}`, "no device"},
		{`{"Kind":"news"}`, "unknown kind"},
		{"\x00\x00", "without an exit code"},
		{`{"Kind":"file","Name":"../up","Data":"eA=="}`, "../up"},
	} {
		c := guestConfig{Out: t.TempDir()}
		_, err := receiver{io.Discard, io.Discard, c.saveFile}.receive(strings.NewReader(tc.wire))
		require.ErrorContains(t, err, tc.want, tc.wire)
	}
}

func TestPassedOn(t *testing.T) {
	got := passedOn([]string{"KVD_SEED=7", "HOME=/x", "KVD_RDMAGUEST_FLAGS=--mem 1", "KVD_GUEST=1", "AKVD_X=1"})
	require.Equal(t, []string{"KVD_SEED=7"}, got)
}

// A program and its libraries, as this host's own tools name them.
func TestProgramsGetTheirLibraries(t *testing.T) {
	sh, err := exec.LookPath("sh")
	require.NoError(t, err)
	elf, err := isELF(sh)
	require.NoError(t, err)
	if !elf {
		require.Fail(t, "sh is no ELF file on this host")
	}
	libs, loader, err := needs(sh)
	require.NoError(t, err)
	var b bytes.Buffer
	a := newArchive(&b)
	require.NoError(t, addWithLibs(a, sh, "/usr/bin/sh"))
	require.NoError(t, a.close())
	require.True(t, a.has("/usr/bin/sh"))
	for _, l := range libs {
		require.True(t, a.has(filepath.Join(guestLibDir, l)), l)
	}
	require.True(t, loader == "" || a.has("/usr"+strings.TrimPrefix(loader, "/usr")), loader)
	require.ErrorContains(t, addLib(a, "libnothing.so.9"), "libnothing.so.9")

	text := filepath.Join(t.TempDir(), "text")
	require.NoError(t, os.WriteFile(text, []byte("x"), 0o644))
	elf, err = isELF(text)
	require.NoError(t, err)
	require.False(t, elf)
}

func TestFindNamesWhatIsMissing(t *testing.T) {
	_, err := find("no-such-program-here")
	require.ErrorContains(t, err, "no-such-program-here")
	p, err := find("sh")
	require.NoError(t, err)
	require.True(t, executable(p))
	_, err = find("/no/such/header.h")
	require.Error(t, err)
}

// A kernel of the cache is used as it lies there; one that is not whole never is.
func TestCachedKernel(t *testing.T) {
	base := t.TempDir()
	require.Nil(t, anyKernel(base))
	dir := filepath.Join(base, "kernel-"+recipe+"-6.1-x")
	require.NoError(t, os.Mkdir(dir, 0o755))
	require.Nil(t, anyKernel(base), "still being made")
	for name, text := range map[string]string{"kernel.json": `{"Release":"6.1-x","Image":"vmlinux","Modules":["a.ko","b.ko"]}`, "vmlinux": "k", "a.ko": "a"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	_, err := loadKernel(dir)
	require.ErrorContains(t, err, "damaged")
	require.NotErrorIs(t, err, os.ErrNotExist, "a damaged cache is no empty one")
	require.Nil(t, anyKernel(base))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "b.ko"), []byte("b"), 0o644))
	require.Equal(t, &kernel{Release: "6.1-x", Image: filepath.Join(dir, "vmlinux"), Modules: []string{filepath.Join(dir, "a.ko"), filepath.Join(dir, "b.ko")}}, anyKernel(base))
}

func TestProgram(t *testing.T) {
	t.Chdir(t.TempDir())
	require.NoError(t, os.WriteFile("prog", []byte("x"), 0o755))
	var c guestConfig
	require.NoError(t, c.program([]string{"./prog", "-v"}))
	require.Equal(t, []string{"/job/prog", "-v"}, c.Argv)
	require.Equal(t, []copySpec{{"./prog", "/job/prog"}}, c.Copies)

	require.NoError(t, os.Mkdir("testdata", 0o755))
	c = guestConfig{}
	require.NoError(t, c.program([]string{"sh", "-c", "true"}))
	require.Equal(t, []string{"sh", "-c", "true"}, c.Argv, "the guest's own")
	require.Equal(t, []copySpec{{"testdata", "/job/testdata"}}, c.Copies)
	require.ErrorIs(t, c.program([]string{"./none"}), os.ErrNotExist)
}
