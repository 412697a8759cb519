# Headrace: everything that is built, started and tested. `make` alone lists what there is.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:

VENV := .venv
PY := $(VENV)/bin/python
# One line per target below; `python3` unless that is too old.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
CARGO ?= cargo
PORT ?= 8000
MODEL ?=
ARGS ?=
# Extra arguments for pytest, such as TESTS="tests/engine -k sampler", or TESTS="-n 0 --pdb" for one process.
TESTS ?=
# Processes of pytest: half as many again as cores, since tests wait for servers a good part of their time.
TEST_PROCESSES ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); n=$$(( n + (n + 1) / 2 )); echo $$(( n > 6 ? 6 : n )))
# Of bench-routing: files, names with commas, numbers, a file; what is left out is its default.
TRACES ?=
POLICIES ?=
WORKERS ?=
BLOCKS ?=
OUT ?=
# Of gpu: 1 for everything small, on the CPU.
DRY ?=
# Of chaos, soak and fuzz: how long, and which plan.
SECONDS ?= 600
SEED ?= 1

RUST_SOURCES := $(shell find router/src bindings/src kernels/native/src bench/src -name '*.rs' 2>/dev/null) \
	bindings/build.rs router/build.rs .cargo/config.toml Cargo.lock Cargo.toml router/Cargo.toml bindings/Cargo.toml kernels/native/Cargo.toml \
	bench/Cargo.toml $(wildcard bench/presets/*)
# Where make can, what runs side by side prints one after the other.
SYNC := $(if $(filter output-sync,$(.FEATURES)),--output-sync)
# A make that runs jobs side by side already shares them with those that it starts.
TWO_JOBS = $(if $(findstring jobserver,$(MAKEFLAGS)),,-j2)
# cargo has jobs of its own, and would ask for make's in vain.
CARGO_ALONE = MAKEFLAGS= $(CARGO)
PIP := $(PY) -m pip --disable-pip-version-check --quiet
# How Rust is built for .venv: `dev` takes a quarter of the time of `release`, which is for what is measured and for GPUs.
RUST_PROFILE ?= dev
MATURIN := VIRTUAL_ENV=$(CURDIR)/$(VENV) $(VENV)/bin/maturin develop --profile $(RUST_PROFILE) --locked
# .venv holds the module of one profile; what serves for `release` serves for `dev`.
ifeq ($(RUST_PROFILE),release)
BUILT := touch $(VENV)/.core-dev $(VENV)/.core-release
else
BUILT := rm -f $(VENV)/.core-* && touch $(VENV)/.core-$(RUST_PROFILE)
endif
# What `pip install .[EXTRAS]` would install, without building the package first; the extras are arguments.
DEPENDENCIES := import sys, tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
	e = p['optional-dependencies']; \
	print(*p['dependencies'], *(d for name in sys.argv[1:] for d in e[name] if not d.startswith('headrace[')), sep='\n')

export PIP_NO_INPUT := 1

##@ Use

.PHONY: help
help: ## list the targets
	@awk 'BEGIN {FS = ":.*## "} \
		/^##@/ {printf "\n%s\n", substr($$0, 5)} \
		/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile
	@echo
	@echo '  make serve PORT=8000 MODEL=HuggingFaceTB/SmolLM2-135M-Instruct ARGS="--workers 2"'

.PHONY: setup
setup: tools ## build and install everything into .venv (a second run is quick)
	@$(MAKE) -s --no-print-directory $(VENV)/.maturin
	@$(MAKE) -s --no-print-directory $(TWO_JOBS) $(VENV)/.dependencies $(VENV)/.core-$(RUST_PROFILE)
	@$(MAKE) -s --no-print-directory $(VENV)/.installed

# What figures are of: everything as it is shipped.
.PHONY: measured
measured:
	@$(MAKE) -s --no-print-directory setup RUST_PROFILE=release
	@$(CARGO) build --release --locked --quiet --package headrace-router --package headrace-bench

.PHONY: setup-cpu
setup-cpu: tools ## build and install what serves without a GPU: no torch, a tenth of the download
	@$(MAKE) -s --no-print-directory $(VENV)/.maturin
	@$(MAKE) -s --no-print-directory $(TWO_JOBS) $(VENV)/.dependencies-cpu $(VENV)/.core-$(RUST_PROFILE)
	@$(MAKE) -s --no-print-directory $(VENV)/.installed-cpu

# As `headrace serve` looks for one: whatever may be a GPU gets the packages for it.
GPU = $(PYTHON) -c 'import ctypes, os; os.path.exists("/dev/kfd") or ctypes.CDLL("libcuda.so.1")' 2>/dev/null

.PHONY: serve
serve: tools ## start router and workers, and print the URL (PORT, MODEL, ARGS); without a GPU it needs no torch
	@if $(GPU); then $(MAKE) -s --no-print-directory setup RUST_PROFILE=release; else $(MAKE) -s --no-print-directory setup-cpu; fi
	@exec $(VENV)/bin/headrace serve $(MODEL) --port $(PORT) $(ARGS)

##@ Develop

# Clippy and the Rust tests share one build folder, so one follows the other; ruff and pyright run beside them.
.PHONY: test
test: setup ## lint, then all Rust, Python and end-to-end tests (TESTS="..." for pytest)
	@echo 'make test: clippy and the Rust tests; beside them ruff and pyright'
	@$(MAKE) -s --no-print-directory $(TWO_JOBS) $(SYNC) rust lint-python
	@$(MAKE) -s --no-print-directory test-python
	@echo 'make test: everything passed'

.PHONY: test-all
test-all: setup ## the same without slices: every case of every matrix, long random runs (TESTS, as above)
	@$(MAKE) -s --no-print-directory test TESTS='--all $(TESTS)'
	@$(MAKE) -s --no-print-directory soak

.PHONY: rust
rust: lint-rust
	@$(MAKE) -s --no-print-directory test-rust

.PHONY: test-rust
test-rust: tools ## Rust tests alone
	@if $(CARGO_ALONE) nextest --version >/dev/null 2>&1; then \
		$(CARGO_ALONE) nextest run --workspace --locked --no-tests pass && \
		$(CARGO_ALONE) test --workspace --locked --doc --quiet; \
	else \
		$(CARGO_ALONE) test --workspace --locked --quiet; \
	fi

.PHONY: test-python
test-python: setup ## Python and end-to-end tests alone
	@$(PY) -m pytest --numprocesses $(TEST_PROCESSES) --dist worksteal $(TESTS)

# A worker as `pip install "headrace[cpu]"` gives it, from the wheel; and the tests that ask for no more than it has.
WITHOUT_TORCH := target/without-torch
NEED_NO_TORCH := tests/without_torch tests/bindings tests/planner tests/routing tests/settings tests/wire

.PHONY: test-without-torch
test-without-torch: setup ## the tests that need no torch, in an environment that has none, with the wheel (TESTS)
	@test -x $(WITHOUT_TORCH)/bin/python || $(PY) -m venv $(WITHOUT_TORCH)
	@rm -rf $(WITHOUT_TORCH)/wheel
	@VIRTUAL_ENV=$(CURDIR)/$(VENV) $(VENV)/bin/maturin build --profile $(RUST_PROFILE) --locked --quiet --out $(WITHOUT_TORCH)/wheel
	@$(WITHOUT_TORCH)/bin/python -m pip --disable-pip-version-check --quiet install --force-reinstall --no-deps \
		$(WITHOUT_TORCH)/wheel/*.whl
	@$(PY) -c "$(DEPENDENCIES)" cpu test > $(WITHOUT_TORCH)/requirements.txt
	@$(WITHOUT_TORCH)/bin/python -m pip --disable-pip-version-check --quiet install -r $(WITHOUT_TORCH)/requirements.txt
	@HEADRACE_REQUIRE=no-torch $(WITHOUT_TORCH)/bin/python -m pytest --numprocesses $(TEST_PROCESSES) --dist worksteal \
		$(or $(TESTS),$(NEED_NO_TORCH))

.PHONY: test-clients
test-clients: setup ## real clients, each in an environment of its own; the table of docs/api.md (ARGS="--only 'openai 3'")
	@cd tests && PYTHONPATH=.. ../$(PY) -m clients --write $(ARGS)

.PHONY: chaos
chaos: setup ## faults by a seeded plan under 200 clients; every stream must be as if undisturbed (SECONDS, SEED, OUT)
	@PYTHONPATH=tests $(PY) -m chaos --seconds $(SECONDS) --seed $(SEED) $(if $(OUT),--out $(OUT)) $(ARGS)

.PHONY: attack
attack: measured ## one request, stranger or log against a router that serves others; prints what each cost (OUT, ARGS)
	@PYTHONPATH=tests $(PY) -m attack $(if $(OUT),--out $(OUT)) $(ARGS)

.PHONY: fuzz
fuzz: setup ## bytes of strangers, workers and files at every parser, 60 s a target (SECONDS, SEED, ARGS="--only frames")
	@PYTHONPATH=tests $(PY) -m fuzz --seconds $(if $(filter file,$(origin SECONDS)),60,$(SECONDS)) --seed $(SEED) $(ARGS)

.PHONY: soak
soak: setup ## minutes of load with churn; memory, descriptors, tasks and bookings must stay flat (SECONDS, SEED, OUT, ARGS)
	@$(CARGO) test --package headrace-router --test index_memory --locked --quiet -- --ignored
	@echo 'make soak: the block index stayed flat over ten million blocks'
	@PYTHONPATH=tests $(PY) -m soak --seconds $(SECONDS) --seed $(SEED) $(if $(OUT),--out $(OUT)) $(ARGS)

# Proptest stores failures in files, and finds its folder by the clock and the environment: so no isolation.
.PHONY: miri
miri: tools ## copies of shared memory, the block index and stop strings in Miri (nightly Rust, 5 to 10 minutes)
	@$(CARGO) +nightly miri --version >/dev/null 2>&1 || { \
		echo "make: Miri is needed and was not found; install it: rustup toolchain install nightly --component miri,rust-src" >&2; exit 1; }
	@MIRIFLAGS=-Zmiri-disable-isolation PROPTEST_CASES=4 CARGO_PROFILE_TEST_DEBUG_ASSERTIONS=true $(CARGO_ALONE) +nightly miri test --quiet --locked \
		--package headrace-router --lib --test shared_memory -- core::index prompt::stop shared_memory

.PHONY: lint
lint: lint-rust lint-python ## formatting, clippy, ruff, pyright; with cargo-deny installed, that too

.PHONY: lint-rust
lint-rust: setup
	@$(CARGO_ALONE) fmt --all --check
	@$(CARGO_ALONE) fmt --manifest-path fuzz/Cargo.toml --check
	@$(CARGO_ALONE) metadata --locked --format-version 1 --manifest-path fuzz/Cargo.toml >/dev/null
	@$(CARGO_ALONE) clippy --workspace --all-targets --locked --quiet -- -D warnings
	@if $(CARGO_ALONE) deny --version >/dev/null 2>&1; then \
		$(CARGO_ALONE) deny --log-level error check licenses bans sources; fi

.PHONY: lint-python
lint-python: setup
	@$(PY) -m ruff check --quiet .
	@$(PY) -m ruff format --quiet --check .
	@$(PY) -m pyright --pythonpath $(PY)

.PHONY: format
format: setup ## rewrite Rust and Python in the project's format
	@$(CARGO) fmt --all
	@$(CARGO) fmt --manifest-path fuzz/Cargo.toml
	@$(PY) -m ruff check --quiet --fix .
	@$(PY) -m ruff format --quiet .

.PHONY: bench
bench: measured ## measure the router and the engine (minutes); figures go to target/bench
	@$(PY) -m bench.router.overhead --runs 1 --out target/bench/router_overhead.json
	@OMP_NUM_THREADS=1 $(PY) -m bench.engine.forward --rounds 1 --out target/bench/engine_forward.json

.PHONY: bench-step
bench-step: measured ## CPU time of an engine's step beside the model, frames included (OUT)
	@OMP_NUM_THREADS=1 $(PY) -m bench.engine.step_overhead --out $(or $(OUT),target/bench/step_overhead.json) $(ARGS)

# Other routers come into target/peers, each with its own environment. More descriptors are as many streams.
.PHONY: bench-peers
bench-peers: measured ## Headrace beside other routers, an hour on a machine without other work (OUT, ARGS="--cases A,B --rounds 1")
	@$(PY) -m bench.peers --out $(or $(OUT),target/bench/peers.json) $(ARGS)

.PHONY: bench-budget
bench-budget: measured ## instructions, allocations and system calls of a token and of requests, held to budgets (ARGS=--write)
	@$(PY) -m bench.budget $(ARGS)

.PHONY: schemas
schemas: setup ## 1,000 random JSON schemas: what is refused, and whether every finished answer is valid (OUT)
	@$(PY) -m bench.engine.random_schemas --out $(or $(OUT),target/bench/random_schemas.json) $(ARGS)

# The oldest Triton that the kernels must compile with, beside that of .venv and never in it.
OLDEST_TRITON := target/triton-3.6

.PHONY: compile-table
compile-table: setup ## registers, spills and shared memory of all Triton kernels for sm_90 and sm_100, with two Tritons
	@test -d $(OLDEST_TRITON) || { mkdir -p target && rm -rf $(OLDEST_TRITON).part && \
		echo 'compile-table: Triton 3.6 into $(OLDEST_TRITON)' && \
		$(PIP) install --no-deps --target $(OLDEST_TRITON).part 'triton==3.6.*' && \
		mv $(OLDEST_TRITON).part $(OLDEST_TRITON); }
	@OMP_NUM_THREADS=1 PYTHONPATH=tests $(PY) -W ignore -m compile_table

.PHONY: bench-routing
bench-routing: measured ## routing policies on traces, live and simulated (TRACES, POLICIES, WORKERS, BLOCKS, OUT)
	@$(PY) -m bench.routing.run $(TRACES) $(if $(POLICIES),--policies $(POLICIES)) \
		$(if $(WORKERS),--workers $(WORKERS)) $(if $(BLOCKS),--blocks $(BLOCKS)) $(if $(OUT),--out $(OUT)) $(ARGS)

# A GPU machine has no .venv: there the Python that has torch is used, and what `gpu-wheel` left.
.PHONY: gpu
gpu: ## all that a GPU can tell, under 10 minutes: tests, kernels, R1-shaped steps (OUT; DRY=1: small, on the CPU)
	@$(or $(wildcard $(PY)),$(PYTHON)) -m bench.gpu $(if $(OUT),--out $(OUT)) $(if $(filter-out 0,$(DRY)),--dry) \
		$(if $(ONLY),--only '$(ONLY)')

.PHONY: gpu-wheel
gpu-wheel: measured ## what `make gpu` needs on a machine without Rust, into dist/gpu (ARGS=--model: weights too)
	@rm -rf dist/gpu
	@VIRTUAL_ENV=$(CURDIR)/$(VENV) $(VENV)/bin/maturin build --release --locked --quiet --out dist/gpu
	@$(PY) -m bench.gpu.carry $(ARGS)

.PHONY: release
release: measured ## wheels, source archive, stripped router, inventories and sums, into dist/release
	@$(PY) -m deploy.release.build

.PHONY: try-container
try-container: ## the steps of the Dockerfile in a chroot, then the router as its user on a read-only root (root, debootstrap)
	@$(or $(wildcard $(PY)),$(PYTHON)) deploy/docker/try_in_chroot.py $(ARGS)

.PHONY: dashboard
dashboard: setup ## write deploy/grafana/headrace.json from its tables
	@$(PY) -m deploy.grafana.build

.PHONY: screenshots
screenshots: setup ## docs/dashboard.png, and the text of headrace top in docs/operations.md, of mock workers under load (Chromium)
	@PYTHONPATH=tests $(PY) -m screenshots

.PHONY: clean
clean: ## remove everything that was built
	rm -rf $(VENV) target dist pyworkers/headrace/_core*.so \
		.pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The steps of `setup`. Each leaves a stamp in .venv that is newer than what the step read.

.PHONY: tools
tools:
	@test -n "$(PYTHON)" || { \
		echo "make: Python 3.11 or newer is needed and was not found; install it, or name it: make PYTHON=/path/to/python" >&2; exit 1; }
	@command -v $(CARGO) >/dev/null || { \
		echo "make: cargo is needed and was not found; install Rust 1.89 or newer from https://rustup.rs" >&2; exit 1; }
	@command -v $${CC:-cc} >/dev/null || { \
		echo "make: a C compiler is needed and was not found; install gcc or clang (Debian: apt install gcc)" >&2; exit 1; }

$(VENV)/bin/python:
	@echo "setup: $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV) || { \
		echo "make: $(PYTHON) cannot make a virtual environment (Debian: apt install python3-venv)" >&2; \
		rm -rf $(VENV); exit 1; }

$(VENV)/.maturin: | $(VENV)/bin/python
	@$(PIP) install 'maturin>=1.12,<2'
	@touch $@

$(VENV)/.dependencies: pyproject.toml $(VENV)/.maturin
	@echo 'setup: Python packages (torch is large: the first time takes minutes)'
	@$(PY) -c "$(DEPENDENCIES)" cpu worker hub bench nixl test dev > $(VENV)/requirements.txt
	@$(PIP) install -r $(VENV)/requirements.txt
	@touch $@ $(VENV)/.dependencies-cpu

$(VENV)/.dependencies-cpu: pyproject.toml $(VENV)/.maturin
	@echo 'setup: Python packages'
	@$(PY) -c "$(DEPENDENCIES)" cpu hub > $(VENV)/requirements-cpu.txt
	@$(PIP) install -r $(VENV)/requirements-cpu.txt
	@touch $@

$(VENV)/.core-$(RUST_PROFILE): $(RUST_SOURCES) $(VENV)/.maturin
	@echo 'setup: headrace._core (Rust, $(RUST_PROFILE))$(if $(filter dev,$(RUST_PROFILE)),: quick to build; RUST_PROFILE=release is what fleets run)'
	@$(MATURIN) --skip-install > $(VENV)/core.log 2>&1 || { cat $(VENV)/core.log >&2; exit 1; }
	@$(BUILT)

$(VENV)/.installed: pyproject.toml $(VENV)/.dependencies $(VENV)/.core-$(RUST_PROFILE)
	@$(MATURIN) > $(VENV)/install.log 2>&1 || { cat $(VENV)/install.log >&2; exit 1; }
	@$(BUILT)
	@touch $@ $(VENV)/.installed-cpu
	@echo 'setup: done; the CLI is $(VENV)/bin/headrace'

$(VENV)/.installed-cpu: pyproject.toml $(VENV)/.dependencies-cpu $(VENV)/.core-$(RUST_PROFILE)
	@$(MATURIN) > $(VENV)/install.log 2>&1 || { cat $(VENV)/install.log >&2; exit 1; }
	@$(BUILT)
	@touch $@
	@echo 'setup: done; the CLI is $(VENV)/bin/headrace'
