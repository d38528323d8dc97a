package shm

import (
	"os"
	"strings"
)

// HostID names the running kernel, then the mount and pid namespaces of this
// process. Two processes with the same first part are on one host; whether they can
// reach each other is only known once the socket was connected to, since a socket
// in a shared directory joins namespaces that differ. Empty where /proc is
// missing.
func HostID() string {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	id := strings.TrimSpace(string(boot))
	for _, ns := range []string{"mnt", "pid"} {
		link, err := os.Readlink("/proc/self/ns/" + ns)
		if err != nil {
			link = ns + ":?"
		}
		id += "/" + link
	}
	return id
}

// sameKernel compares what identifies the host in two host ids.
func sameKernel(a, b string) bool {
	a, _, _ = strings.Cut(a, "/")
	b, _, _ = strings.Cut(b, "/")
	return a != "" && a == b
}

// sameMounts tells that both see the same files: a path that is missing for one is
// missing for the other.
func sameMounts(a, b string) bool {
	as, bs := strings.Split(a, "/"), strings.Split(b, "/")
	return len(as) == 3 && len(bs) == 3 && as[1] == bs[1] && !strings.HasSuffix(as[1], "?")
}
