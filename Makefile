# Every target installs what it needs into .venv, once; `make help` lists them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
TORCH_CPU := torch==2.13.0
WORKERS ?= 3
BIN := .venv/bin
PIP := $(BIN)/python -m pip
VENV := .venv/.created
RUNS := .venv/.runs
TESTS := .venv/.tests

.PHONY: help install run test lint format bench-pool bench-serve bench-cpu soak clean programs

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' Makefile

install: $(RUNS) $(TESTS) ## Make .venv with all that running and testing needs.

run: $(RUNS) ## Fetch the demo model, start the daemon and print how to talk to it.
	@exec $(BIN)/memd up

# One torch thread for each of the workers: more only get into each other's way. A worker more than
# the two cores that it is meant for computes while others wait for a daemon.
test: lint programs ## Lint, then run every test; leaves nothing running.
	$(BIN)/memd models fetch smollm2-135m
	PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONSAFEPATH=1 OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -rs --durations=30 \
		$(TEST_ARGS)

lint: $(TESTS) ## Check style, types and the direction of imports.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(TESTS) ## Format the code and fix what can be fixed.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-pool: $(RUNS) ## Time the pool's operations from a thousand to a million pages.
	$(BIN)/python benchmarks/pool.py

bench-serve: $(RUNS) ## Time 64 streams over HTTP against the same work without a server.
	$(BIN)/memd models fetch smollm2-135m
	$(BIN)/python benchmarks/serve.py --overhead $(BENCH_ARGS)

bench-cpu: $(TESTS) ## Time prefill and decoding of the demo model on this CPU, beside transformers.
	$(BIN)/memd models fetch smollm2-135m
	$(BIN)/python benchmarks/cpu.py $(BENCH_ARGS)

soak: $(RUNS) ## Ten minutes of load, hang-ups, live changes and killed engines.
	$(BIN)/memd models fetch smollm2-135m
	$(BIN)/python benchmarks/soak.py --kill --set memory.host.limit=1GB $(BENCH_ARGS)

clean: ## Remove .venv, caches and what was built.
	rm -rf .venv build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# pip before 25.1 cannot install dependency groups.
$(VENV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"memd needs Python 3.11 or later, not %d.%d: make PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv .venv
	$(PIP) install --quiet --upgrade 'pip>=25.1'
	@touch $@

# Without an NVIDIA driver the normal torch would bring gigabytes of CUDA for nothing. Naming the release
# first lets a pip that is configured with a CPU index or folder pick the CPU build.
$(RUNS): pyproject.toml $(VENV)
	@if [ ! -e /proc/driver/nvidia ] && ! command -v nvidia-smi >/dev/null; then \
		echo 'no NVIDIA driver: installing $(TORCH_CPU)'; \
		$(PIP) install '$(TORCH_CPU)'; \
	fi
	$(PIP) install --editable '.[dashboard]'
	@echo 'compiling the CPU kernels'; $(BIN)/python -c 'import memd_kernels.cpu'
	@touch $@

$(TESTS): pyproject.toml $(RUNS)
	$(PIP) install --editable '.[dashboard,postgres]' --group test --group lint
	@touch $@

programs: $(VENV)
	@.ci/programs $(BIN)
