package server

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/kvd-io/kvd/rdma/shm"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction(shm.DeathWordGoroutine))
}
