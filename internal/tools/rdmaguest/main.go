//go:build linux

package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
)

func main() {
	if inGuest() {
		guestMain()
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	code := 0
	root := &cobra.Command{
		Use:           "rdmaguest",
		Short:         "Run programs in a guest that has RDMA devices in software",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.AddCommand(runCommand(&code), buildCommand(), checkCommand(), tableCommand())
	if err := root.ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "rdmaguest:", strings.TrimPrefix(err.Error(), "rdmaguest: "))
		os.Exit(125) // as env and timeout say that they could not run the program
	}
	os.Exit(code)
}

func runCommand(code *int) *cobra.Command {
	var (
		device, out string
		kernelArgs  string
		mem, cpus   int
		mtu         int
		counted     bool
		timeout     time.Duration
		copies, env []string
	)
	cmd := &cobra.Command{
		Use:   "run [flags] PROGRAM [ARGS...]",
		Short: "Boot a guest, run a program in it and exit with its exit code",
		Long: `Boot a guest, run a program in it and exit with its exit code (128 and the signal's
number where a signal ended it; 125 where the guest itself failed).

PROGRAM is a file of this host, which is copied with its shared libraries, or the name of
a program that the guest has: ip, rdma, ib_read_lat, ib_read_bw, ibv_devinfo, rping, sh
and busybox's others. Several commands in one boot: run sh -c '...', where ip is busybox's
own: say /usr/sbin/ip. The folder testdata
of the present folder is copied as well. So this works:

  go build -o bin/ ./internal/tools/rdmaguest
  go test -tags rdmaguest -exec "$PWD/bin/rdmaguest run" ./rdma/verbs/...

The guest has
  rxe0  Soft-RoCE on roce0 (veth), 10.77.0.1 to 10.77.0.8: a GID for each
  siw0  soft-iWARP on iwarp0 (dummy), 10.78.0.1 to 10.78.0.8
and everything runs as root, with memlock unlimited. The environment says which is there:
KVD_GUEST=1, KVD_GUEST_RXE=rxe0, KVD_GUEST_RXE_NETDEV, KVD_GUEST_RXE_ADDRS (with commas),
and the same with SIW. Variables of this process named KVD_... are passed on, except
KVD_RDMAGUEST_...; KVD_RDMAGUEST_FLAGS holds more flags, separated by spaces.
What the program leaves in the folder $KVD_GUEST_OUT is appended to the files of the same
names in the folder given with --out.`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if more := os.Getenv("KVD_RDMAGUEST_FLAGS"); more != "" {
				if err := cmd.Flags().Parse(strings.Fields(more)); err != nil {
					return fmt.Errorf("KVD_RDMAGUEST_FLAGS=%q: %w", more, err)
				}
			}
			c := guestConfig{MemoryMiB: mem, CPUs: cpus, Out: out, Append: kernelArgs, Counted: counted}
			if counted {
				c.CPUs = 1
				env = append(env, "KVD_GUEST_COUNTED=1")
			}
			c.MTU, c.Timeout = mtu, timeout
			switch device {
			case "both":
				c.RXE, c.SIW = true, true
			case "rxe":
				c.RXE = true
			case "siw":
				c.SIW = true
			case "none":
			default:
				return fmt.Errorf("--device %s: want rxe, siw, both or none", device)
			}
			for _, s := range copies {
				from, to, ok := strings.Cut(s, ":")
				if !ok {
					to = filepath.Join(jobDir, filepath.Base(from))
				}
				c.Copies = append(c.Copies, copySpec{from, to})
			}
			if err := c.program(args); err != nil {
				return err
			}
			c.Env = append(passedOn(os.Environ()), env...)
			var err error
			if c.Kernel, err = hostReady(cmd.Context()); err != nil {
				return err
			}
			*code, err = c.boot(cmd.Context(), os.Stdout, os.Stderr)
			return err
		},
	}
	f := cmd.Flags()
	f.SetInterspersed(false) // flags after PROGRAM are the program's
	f.StringVar(&device, "device", "both", "devices of the guest: rxe, siw, both or none")
	f.IntVar(&mem, "mem", 2048, "memory in MiB")
	f.IntVar(&cpus, "cpus", 2, "processors")
	f.BoolVar(&counted, "counted", false, "let the guest's clock count instructions (2 ns each), on one emulated processor: its times do not depend on the host")
	f.IntVar(&mtu, "mtu", 1500, "MTU of the netdevs in bytes; 1500 gives a path MTU of 1024, 4200 one of 4096")
	f.DurationVar(&timeout, "timeout", 5*time.Minute, "kill the program after this time")
	f.StringVar(&kernelArgs, "append", "", "more of the guest's kernel command line")
	f.StringArrayVar(&copies, "copy", nil, "SRC[:DST]: copy a file or a folder of this host into the guest (default DST "+jobDir+"/NAME), libraries of programs too")
	f.StringArrayVar(&env, "env", nil, "NAME=VALUE for the program")
	f.StringVar(&out, "out", "", "folder for what the program leaves in $KVD_GUEST_OUT")
	return cmd
}

func buildCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "build",
		Short: "Download and build what the guest is made of, where it is not in the cache",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			k, err := hostReady(cmd.Context())
			if err == nil {
				fmt.Println(k.Release, filepath.Dir(k.Image))
			}
			return err
		},
	}
}

func checkCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "check",
		Short: "Say what must be installed on this host",
		Args:  cobra.NoArgs,
		RunE:  func(*cobra.Command, []string) error { return checkPackages() },
	}
}

func checkPackages() error {
	if missing := missingPackages(); len(missing) > 0 {
		list := strings.Join(missing, " ")
		return fmt.Errorf("this host lacks %s: apt-get install --no-install-recommends %s", strings.Join(missing, ", "), list)
	}
	return nil
}

func hostReady(ctx context.Context) (*kernel, error) {
	if err := checkPackages(); err != nil {
		return nil, err
	}
	return ensureKernel(ctx, func(format string, args ...any) {
		fmt.Fprintf(os.Stderr, "rdmaguest: "+format+"\n", args...)
	})
}

// program sets what is run: a file of this host goes with it, and testdata beside it.
func (c *guestConfig) program(args []string) error {
	c.Dir = jobDir
	c.Argv = append([]string{}, args...)
	st, err := os.Stat(args[0])
	if err != nil && strings.Contains(args[0], "/") {
		return err
	}
	if err == nil && st.Mode().IsRegular() {
		c.Argv[0] = filepath.Join(jobDir, filepath.Base(args[0]))
		c.Copies = append(c.Copies, copySpec{args[0], c.Argv[0]})
	}
	if st, err := os.Stat("testdata"); err == nil && st.IsDir() {
		c.Copies = append(c.Copies, copySpec{"testdata", filepath.Join(jobDir, "testdata")})
	}
	return nil
}

// passedOn are the variables of the host's environment that the guest gets.
func passedOn(env []string) []string {
	var pass []string
	for _, kv := range env {
		name, _, _ := strings.Cut(kv, "=")
		if strings.HasPrefix(name, "KVD_") && !strings.HasPrefix(name, "KVD_RDMAGUEST_") && !strings.HasPrefix(name, "KVD_GUEST") {
			pass = append(pass, kv)
		}
	}
	return pass
}
