# kvd: everything a developer or a user runs. `make` lists the targets.
#
# A machine with Go (and make) is enough for help, build, demo, test and nocgo.
# race needs a C compiler, model spin beside it, bench the systems that it compares with,
# test-rdma Debian's packages of QEMU and of RDMA's user space (bin/rdmaguest check names them).

SHELL := /bin/bash
.DEFAULT_GOAL := help

GO      ?= go
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
COMMIT  ?= $(shell git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
LDFLAGS  = -X main.version=$(VERSION) -X main.commit=$(COMMIT)

# Without a C compiler there is no cgo; nothing but rdma/verbs would use it.
ifeq ($(shell command -v "$$($(GO) env CC 2>/dev/null | cut -d' ' -f1)" 2>/dev/null),)
export CGO_ENABLED := 0
endif

# More flags for `kvd dev --once`; see `bin/kvd dev --help`.
DEMO_ARGS ?=
# What test, race and nocgo test, with which more flags.
PKGS ?= ./...
TEST_FLAGS ?=
# How long each fuzz function runs.
FUZZ_TIME ?= 5s
# Where it matters whether there is cgo: rdma/verbs/ibv, those who choose transports, and rdma/shm (libc has a list of robust futexes, too).
NOCGO_PKGS ?= ./rdma/shm ./rdma/verbs/... ./client ./internal/doctor ./internal/verbsflags
# Tests with real processes; they carry the build tag e2e.
E2E_PKGS ?= ./internal/e2e/... ./jepsen/...
# Tests that need RDMA devices run in a guest; they carry the build tag rdmaguest.
RDMA_PKGS ?= ./rdma/verbs/... ./internal/doctor ./internal/e2e
# More flags for each comparison, e.g. --seconds 10.
BENCH_ARGS ?=
# How long jepsen runs each of its 21 combinations of workload and transport, and more
# flags for it, e.g. --seed 100. With its rate an hour is a million operations.
JEPSEN_TIME ?= 160s
JEPSEN_ARGS ?=
# The faults of jepsen-smoke: those that happen within seconds.
SMOKE_FAULTS ?= kill,stop,transfer,halves,one-way,isolate-leader
# From this seed on the seven runs have each of them (a test looks).
SMOKE_SEED ?= 134
# The broken variants that chaos has the simulator catch: those that take a few seeds.
CHAOS_VARIANTS ?= engine-ahead,retry-twice,forget-term,term-after-message,evict-unmarked,checksum-ignored,no-confirmation,served-early
# How test results are summed up; CI adds -skips=fail and -totals.
TESTSUM_FLAGS ?=
TESTSUM = $(GO) run ./internal/tools/testsum $(TESTSUM_FLAGS)

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

.PHONY: build
build: ## bin/kvd and bin/kvctl
	$(GO) build -trimpath -buildvcs=false -ldflags '$(LDFLAGS)' -o bin/ ./cmd/kvd ./cmd/kvctl

.PHONY: demo
demo: build ## three kvd processes, a real tree, one killed node: every byte compared
	GOROOT="$$($(GO) env GOROOT)" bin/kvd dev --once $(DEMO_ARGS)

.PHONY: test
test: ## all tests that need nothing but Go
	@$(TESTSUM) -label test -- -timeout 30m $(TEST_FLAGS) $(PKGS)
	@if command -v qemu-system-x86_64 >/dev/null; then echo "READs by verbs were not tested here: make test-rdma does that, in a guest."; \
	else echo "READs by verbs were not tested: make test-rdma does that, and needs QEMU (Debian: qemu-system-x86)."; fi

.PHONY: race
race: ## the same under the race detector (needs a C compiler)
	@CGO_ENABLED=1 $(TESTSUM) -label race -- -race -timeout 30m $(TEST_FLAGS) $(PKGS)

.PHONY: nocgo
nocgo: ## build and test without cgo
	CGO_ENABLED=0 $(GO) build ./...
	@CGO_ENABLED=0 $(TESTSUM) -label nocgo -- -timeout 30m $(TEST_FLAGS) $(NOCGO_PKGS)

.PHONY: lint
lint: ## format, vet, staticcheck, go.mod, house rules
	@unformatted=$$(gofmt -l $$(git ls-files '*.go' 2>/dev/null || find . -name '*.go')) || exit 1; \
	if [ -n "$$unformatted" ]; then echo "not formatted (run gofmt -w):"; echo "$$unformatted"; exit 1; fi
	$(GO) vet -tags e2e,rdmaguest,spin ./...
	$(GO) vet -tags e2e,chaos ./...
	$(GO) tool staticcheck -tags e2e,rdmaguest,spin ./...
	$(GO) mod verify
	$(GO) mod tidy -diff
	@$(TESTSUM) -label house-rules -- -count=1 ./internal/lint ./internal/tools/genproto

.PHONY: fuzz-smoke
fuzz-smoke: ## every fuzz function for a few seconds
	@$(GO) run ./internal/tools/fuzzsmoke -time $(FUZZ_TIME) $(FUZZ_FLAGS)

.PHONY: e2e
e2e: build ## real processes: kill, stop, restart, bad input
	@$(TESTSUM) -label e2e -- -tags e2e -count=1 -timeout 30m $(TEST_FLAGS) $(E2E_PKGS)

.PHONY: chaos
chaos: ## what builds with the tag chaos have: faults on order, and broken variants that are caught
	@$(TESTSUM) -label chaos -- -tags chaos -count=1 -timeout 10m $(TEST_FLAGS) ./internal/chaos ./internal/faults ./jepsen/...
	@$(TESTSUM) -label chaos-server -- -tags chaos -count=1 -timeout 10m $(TEST_FLAGS) -run '^(TestFailingSync|TestDiskFills|TestHangingSync)' ./server
	@$(TESTSUM) -label chaos-sim -- -tags chaos -count=1 -timeout 10m $(TEST_FLAGS) -run '^TestControl$$' ./internal/sim -variant $(CHAOS_VARIANTS)

.PHONY: test-rdma
test-rdma: build ## READs by verbs on software RDMA devices, in a guest (Debian, QEMU)
	$(GO) build -o bin/ ./internal/tools/rdmaguest ./jepsen
	@bin/rdmaguest build
	cc -O2 -Wall -Wextra -Werror -o bin/threereads internal/tools/rdmaguest/testdata/threereads.c -libverbs
	@out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT && rc=0 && \
	export KVD_RDMAGUEST_FLAGS="--out $$out --timeout 13m --mem 3072 --copy $(CURDIR)/bin/kvd:/usr/bin/kvd --copy $(CURDIR)/bin/kvctl:/usr/bin/kvctl --copy $(CURDIR)/bin/jepsen:/usr/bin/jepsen --copy $(CURDIR)/bin/threereads:/usr/bin/threereads --copy $$($(GO) env GOROOT)/src/encoding:/tree" && \
	in_guest='$(TESTSUM) -skips=fail -results '"$$out"'/results.jsonl -label' && guest="$(CURDIR)/bin/rdmaguest run" && \
	{ $$in_guest rdma -- -tags rdmaguest -count=1 -p 1 -timeout 12m -exec "$$guest" -skip '^TestRDMASpeed' $(TEST_FLAGS) $(RDMA_PKGS) || rc=$$?; \
	  $$in_guest rdma-speed -- -tags rdmaguest -count=1 -timeout 8m -exec "$$guest --counted" -run '^TestRDMASpeed' $(TEST_FLAGS) ./internal/e2e || rc=$$?; \
	  bin/rdmaguest table "$$out"; exit $$rc; }

.PHONY: bench
bench: ## compare with memcached, etcd and Redis on this machine (see bench/README.md)
	$(GO) run ./bench --op get --clients 64 --size 1024 --transport tcp --systems kvd,memcached,redis,etcd $(BENCH_ARGS)
	$(GO) run ./bench --op put --clients 1 --size 1024 --systems kvd,etcd,redis $(BENCH_ARGS)
	$(GO) run ./bench --op get --clients 1 --size 1024 --transport shm --systems kvd,memcached,redis $(BENCH_ARGS)

.PHONY: bench-smoke
bench-smoke: ## every system and operation of bench, a second each
	$(GO) run ./bench --op get --clients 4 --keys 500 --seconds 1 --warmup 0.2 --rounds 1 $(BENCH_ARGS)
	$(GO) run ./bench --op put --clients 4 --keys 500 --seconds 1 --warmup 0.2 --rounds 1 $(BENCH_ARGS)

.PHONY: bench-life
bench-life: ## what users notice while nodes die, restart, leave and join; fails where a bound is missed
	$(GO) run ./bench failover --kills 50 --clients 64 $(BENCH_ARGS)
	$(GO) run ./bench rolling --clients 64 $(BENCH_ARGS)
	$(GO) run ./bench join --bytes 2GiB --clients 64 $(BENCH_ARGS)

.PHONY: jepsen
jepsen: ## an hour of faults on real processes, judged (see jepsen/README.md; better as root)
	$(GO) run ./jepsen --workload all --transport all --nemesis all --rate 2500 --concurrency 24 --time $(JEPSEN_TIME) $(JEPSEN_ARGS)

.PHONY: jepsen-smoke
jepsen-smoke: build ## the same for seconds: every workload, with readers over shm, tcp and gRPC
	$(GO) run ./jepsen --workload all --transport mixed --nemesis $(SMOKE_FAULTS) --seed $(SMOKE_SEED) --time 5s --tempo 4 --kvd-bin bin/kvd $(JEPSEN_ARGS)

.PHONY: model-check
model-check: ## the model of the confirmed read: small bounds, every state, every broken variant
	@$(TESTSUM) -label model -- -tags spin -count=1 -timeout 10m $(TEST_FLAGS) ./model

.PHONY: model
model: ## the same and larger bounds, half an hour (see model/README.md)
	$(GO) run ./model -full

.PHONY: check
check: ## everything that CI runs; installs nothing
	KVD_CI_INSTALL=0 .ci/run

.PHONY: clean
clean: ## remove what was built
	rm -rf bin artifacts
