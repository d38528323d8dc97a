//go:build !linux

package main

import (
	"fmt"
	"os"
)

func main() {
	fmt.Fprintln(os.Stderr, "rdmaguest: this program makes its guest of Debian's packages: run it on Debian")
	os.Exit(125)
}
