//go:build !chaos

package main

import (
	"github.com/spf13/pflag"

	"github.com/kvd-io/kvd/server"
)

// chaosSettings are of programs that were built with the tag chaos.
type chaosSettings struct{}

func (chaosSettings) define(*pflag.FlagSet) {}

func (chaosSettings) begin(*server.Config) (stop func(), err error) { return func() {}, nil }
