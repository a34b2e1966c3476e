# vmmd. `make` alone lists what there is.

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

CARGO ?= cargo
# Tools that .ci/setup installs come first.
export PATH := $(CURDIR)/target/tools/bin:$(PATH)
JOBS ?= $(shell nproc)
export CARGO_BUILD_JOBS = $(JOBS)

include tests/node.mk

.PHONY: help
help: ## List the targets
	@echo "make demo shows vmmd with a guest; make test runs the tests. All targets:"
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | sed -E 's/^([a-z-]+):.*## /\1|/' \
		| awk -F'|' '{ printf "  %-12s %s\n", $$1, $$2 }'

# --- building ---

.PHONY: build
build: ## Build all programs for development (target/debug)
	$(CARGO) build -p vmmd -p vmmd-network -p vmmctl
	$(CARGO) build -p vmm-core -p vmm-image --bin vmm --bin vmm-image

.PHONY: deb
deb: ## Build the Debian package (target/deb/)
	vmmd/package/build-deb.sh

.PHONY: rpm
rpm: tools ## Build the RPM, with the same files (target/rpm/)
	vmmd/package/build-rpm.sh

# The newest package, and an RPM of the same programs.
.PHONY: lint-deb
lint-deb: tools
	deb=$$(find target/deb -name 'vmmd_*.deb' -printf '%T@ %p\n' | sort -n | tail -n 1 | cut -d' ' -f2); \
	case $$deb in */dev/*) export PROFILE=dev ;; *) export PROFILE=release ;; esac; \
	lintian --allow-root --fail-on error,warning "$$deb"; \
	.ci/check-packages "$$deb" "$$(vmmd/package/build-rpm.sh | tail -n 1)"

.PHONY: docs
docs: ## Build the book (target/book/) when mdbook is installed
	@if command -v mdbook >/dev/null; then mdbook build docs; \
	else echo "mdbook is not installed: cargo install --locked mdbook"; fi

# --- trying ---

# The demonstration has programs of its own: a build without optimization, of what it shows. They are compiled while the images are built, and
# the package that it installs is the one that was built here.
.PHONY: demo demo-shell
demo: ## Show vmmd with a guest: import, run, console, SSH, screen, hot-plug, snapshot, migration, stop
demo-shell: ## Boot the guest of the demonstration, and leave you on its console
demo demo-shell:
	@tests/setup-host.sh demo
	@$(CARGO) build -q --locked --profile demo -p vmmd-tests --bin demo
	@target/demo/demo --prepare & images=$$!; package=$$(PROFILE=demo vmmd/package/build-deb.sh) || { wait $$images; exit 1; }; \
		wait $$images; exec target/demo/demo --package "$$package" $(if $(filter demo-shell,$@),--shell)

# --- testing ---

.PHONY: tools
tools:
	@.ci/setup

# The daemon gives its VMs users of their own; tests of whole programs of vmm use KVM.
ROOTLESS = -E 'not (binary(daemon) or binary(serve) or binary(run))'

.PHONY: unit
unit: tools ## Run the tests that need no node: units, properties, and as root the daemon with a mock vmm
	$(CARGO) nextest run --locked --workspace --exclude vmmd-tests --test-threads $$((2 * $(JOBS))) $(if $(filter 0,$(shell id -u)),,$(ROOTLESS))

# The package has the programs that the tests were built with (PROFILE=release: optimized ones). All is built before the node comes
# up, since an emulated node shares the processors with the compiler; the node's images wait for downloads and disks as much as for a
# processor, and are made beside. Many tests of the first levels wait more than they compute: two for each processor. They leave the
# node its processors: what waits for it is what takes longest, and a guest that gets none for seconds fails its test. The package is checked
# while the node boots.
.PHONY: test
test: export PROFILE ?= dev
test: tools ## Run the tests, also those in the test node; installs what is missing (PROFILE=release: with an optimized build)
	@mkdir -p target; date +%s >target/began; rm -f target/nextest/ci/junit.xml
	$(MAKE) node-tool
	$(NODE) build & images=$$!; $(CARGO) nextest run --locked --workspace $(FEATURES) --no-run && vmmd/package/build-deb.sh \
		|| { wait $$images; exit 1; }; wait $$images
	$(MAKE) lint-deb >target/lint-deb.log 2>&1 & lint=$$!; code=0; $(NODE) --name test with -- nice -n 5 \
		$(CARGO) nextest run --locked --workspace $(FEATURES) --profile ci --test-threads $$((2 * $(JOBS))) $(TESTS) || code=$$?; \
		wait $$lint || { code=1; cat target/lint-deb.log; }; .ci/report $$(($$(date +%s) - $$(cat target/began))) || code=1; exit $$code

.PHONY: long
long: export VMMD_LONG = 1
long: export VMMD_CHAOS = long
long: ## Run all tests in their long form, with an optimized build, and those that boot a guest for minutes
	$(MAKE) test PROFILE=release FEATURES="--features vmmd-tests/nightly" TESTS="--ignore-default-filter -E 'not (package(vmmd-kubernetes-tests) or binary(mutations) or binary(previous))'"

.PHONY: fleet
fleet: tools node-tool deb ## Run the test of many idle guests while vmmd is killed, with 50 of them also where the node is emulated
	VMMD_LONG=1 VMMD_FLEET=50 $(NODE) --name fleet with -- $(CARGO) nextest run --locked -p vmmd-tests --success-output immediate -E 'binary(fleet)'

.PHONY: mutations
mutations: tools node-tool deb ## Build deliberate faults in, and see that a test notices each
	$(NODE) --name mutations with -- $(CARGO) nextest run --locked --workspace --features vmmd-tests/nightly \
		-E 'binary(mutations) or test(a_deliberate_fault)'

.PHONY: previous
previous: tools node-tool deb ## Run the programs of the release before with those of today
	$(NODE) --name previous with -- $(CARGO) nextest run --locked --workspace --features vmmd-tests/nightly -E 'binary(previous)'

# VMs are the mock's, and the control plane is Debian's: no node.
.PHONY: kubernetes
kubernetes: tools ## Run vmmd-kube under a real Kubernetes control plane, which is built first (minutes, once)
	tests/kubernetes/build.sh
	$(CARGO) build --locked --workspace --bin vmmd --bin mock-vmm --bin mock-vmm-image --bin vmmd-netd --bin vmmd-kube
	RUSTFLAGS="-C target-feature=+crt-static" $(CARGO) build --locked --target x86_64-unknown-linux-gnu -p vmmd-pod --bin vmmd-pod
	$(CARGO) nextest run --locked --workspace --ignore-default-filter --test kubernetes

.PHONY: nightly
nightly: lint deny mutations previous fleet kubernetes long ## Run what make test is too short for, and what takes minutes to compile
	@command -v mdbook >/dev/null || $(CARGO) install --locked mdbook
	mdbook build docs
	for part in $(FUZZ_TARGETS); do $(MAKE) fuzz FUZZ=$$part FUZZ_SECONDS=100; done

FUZZ ?= blk_queue
FUZZ_SECONDS ?= 60
FUZZ_FILES = $(wildcard */fuzz/fuzz_targets/*.rs */*/fuzz/fuzz_targets/*.rs)
FUZZ_CRATE = $(or $(patsubst %/fuzz/fuzz_targets/$(FUZZ).rs,%,$(filter %/$(FUZZ).rs,$(FUZZ_FILES))),$(error there is no $(FUZZ): $(FUZZ_TARGETS)))
FUZZ_TARGETS = $(sort $(basename $(notdir $(FUZZ_FILES))))
FOUND = $(CURDIR)/target/fuzz/corpus/$(FUZZ)

# What libFuzzer finds stays in target/; the seeds in the tree are what the tests go through. The compiler is told to take
# flags that are not stable yet.
.PHONY: fuzz
fuzz: ## Fuzz a part with libFuzzer (FUZZ=blk_queue, snapshot, dns_query, … as in devices/fuzz, vmm-core/fuzz and vmmd/fuzz; FUZZ_SECONDS=60)
	@command -v cargo-fuzz >/dev/null || $(CARGO) install --locked cargo-fuzz
	mkdir -p $(FOUND)
	cd $(FUZZ_CRATE) && RUSTC_BOOTSTRAP=1 $(CARGO) fuzz run --target-dir $(CURDIR)/target/fuzz $(FUZZ) $(FOUND) fuzz/corpus/$(FUZZ) -- -max_total_time=$(FUZZ_SECONDS)

# Parts that need no node run while there is none.
PARTS_HERE = rings daemon image
PARTS_NODE = start memory disk fs migrate net screen ends
comma := ,
PARTS = $(or $(subst $(comma), ,$(ONLY)),$(PARTS_HERE) $(PARTS_NODE))
BENCH_HERE = $(filter $(PARTS),$(PARTS_HERE))
BENCH_NODE = $(filter $(PARTS),$(PARTS_NODE))
NO_PARTS = $(filter-out $(PARTS_HERE) $(PARTS_NODE),$(PARTS))
list = $(subst $() ,$(comma),$(strip $(1)))
BENCH = target/debug/bench $(if $(PUBLISH),--publish) --only

# A screen's part has a desktop, which only the node of the nightly tests has.
.PHONY: bench
bench: FEATURES ?= $(if $(filter screen,$(BENCH_NODE)),--features vmmd-tests/nightly)
bench: $(if $(BENCH_NODE),node-tool deb) ## Measure vmmd, beside QEMU in the test node and without guests (ONLY=start, memory, disk, fs, migrate, net, screen, ends, rings, daemon or image: parts, with commas)
	$(if $(NO_PARTS),$(error there is no part $(NO_PARTS): $(PARTS_HERE) $(PARTS_NODE)))
	$(CARGO) build -q -p vmmd-tests $(FEATURES) --bin bench
	$(if $(BENCH_HERE),$(BENCH) $(call list,$(BENCH_HERE)))
	$(if $(BENCH_NODE),$(NODE) --name bench with -- $(BENCH) $(call list,$(BENCH_NODE)))

.PHONY: lint
lint: tools ## Check formatting, lints, documentation, what depends on what, scripts, spelling, links and the API's compatibility
	$(CARGO) fmt --all --check
	.ci/check-tree
	.ci/check-tests
	.ci/lint-text
	vmmd/package/notices.py --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings -A rustdoc::private-intra-doc-links" $(CARGO) doc --quiet --locked --workspace --no-deps --document-private-items

.PHONY: deny
deny: ## Check licences and banned crates; installs cargo-deny when it is missing, which takes minutes
	@command -v cargo-deny >/dev/null || $(CARGO) install --locked cargo-deny
	$(CARGO) deny --all-features check bans licenses sources

.PHONY: clean
clean: ## Take the node down and remove everything that was built
	if [ -x $(NODE) ]; then $(NODE) down; fi
	$(CARGO) clean
