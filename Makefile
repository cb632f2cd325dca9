# `make demo` and `make test` work on a fresh clone with nothing but python3: the first target that needs it makes .venv.

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# What `make bench` runs, one file for each question.
BENCHMARKS := $(patsubst %,benchmarks/%.py,overhead setup compile gradients memory growth compat harvest store watch)

# N: how many random cases `make fuzz` runs. JOBS: how many tests run side by side (0: in one process). TESTS: which ones.
N ?= 20000
JOBS ?= logical
TESTS ?= tests

# The models in the tests are tiny: more than one thread for each of their operations only costs.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format page bench bench-peers fuzz clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Make .venv and install hookline with everything in it (once)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@echo "Installing hookline and its tools into $(VENV): once, a few minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet -c $(CONSTRAINTS) -e '.[dev,all]'
	@touch $@

demo: $(STAMP)  ## Train a small net, look inside it, and write a page to browse (offline, under a minute)
	@$(BIN)/hookline demo

test: $(STAMP)  ## Run the tests, the examples of the README and the docs among them
	$(BIN)/python -m pytest -n $(JOBS) --maxprocesses 8 --dist loadfile $(TESTS)

check: $(STAMP)  ## Lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src

format: $(STAMP)  ## Let ruff put right what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

page: explorer/node_modules/.package-lock.json  ## Build the explorer page from explorer/ (needs Node 20 or newer)
	cd explorer && node_modules/.bin/tsc --noEmit && node build.mjs

explorer/node_modules/.package-lock.json: explorer/package-lock.json
	cd explorer && npm ci --ignore-scripts --no-fund --no-audit
	@touch $@

bench: $(STAMP)  ## Measure what hooks cost, against raw torch hooks: a few minutes; rewrites benchmarks/*.txt
	for script in $(wildcard $(BENCHMARKS)); do $(BIN)/python $$script || exit 1; done

bench-peers: $(STAMP)  ## Install eight other libraries, each by itself, and give all of them the same tasks
	$(BIN)/python benchmarks/peers/run.py

fuzz: $(STAMP)  ## Check N random models against an oracle, every architecture of transformers, Ctrl-C at any moment
	$(BIN)/python -m tests.properties.fuzz $(N)
	$(BIN)/python -m tests.failure_modes.every_port
	HOOKLINE_ALL_MOMENTS=1 $(BIN)/python -m pytest -q tests/failure_modes/test_interrupts.py tests/failure_modes/test_races.py

clean:  ## Remove .venv and everything the tools left
	rm -rf $(VENV) benchmarks/peers/.venvs explorer/node_modules build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
