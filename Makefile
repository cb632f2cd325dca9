# `make demo` and `make test` work on a fresh clone with nothing but python3: the first target that needs it makes .venv.
# `make demo` installs only what the demo needs; the other targets add the tools of the tests.

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin
DEMO_INSTALLED := $(VENV)/.demo-installed
INSTALLED := $(VENV)/.installed

# `make test-oldest`: the oldest versions that pyproject.toml admits, in an environment of their own.
OLDEST_PYTHON ?= python3.10
OLDEST_PACKAGES := torch==2.4.0 safetensors==0.4.3
OLDEST_VENV := .venv-oldest

# What `make diff` compares with: a commit, or a folder with the source of hookline.
BASE ?= HEAD

# What `make bench` runs, one file for each question.
BENCHMARKS := $(patsubst %,benchmarks/%.py,overhead setup compile gradients memory growth generation compat harvest store watch sweep compare)

# N: how many random cases `make fuzz` or `make diff` runs. JOBS: how many tests run side by side (0: in one process).
# TESTS: which ones.
N ?= 20000
JOBS ?= logical
TESTS ?= tests
# A file's tests run in one process, slow files first (tests/conftest.py). A crashed process fails the run: with another in
# its place, xdist would wait for its tests forever.
PYTEST = python -m pytest -n $(JOBS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# The models in the tests are tiny: more than one thread for each of their operations only costs.
export OMP_NUM_THREADS ?= 1
# Let Python keep the bytecode it compiles, even if the environment forbids it: each process would compile torch again.
export PYTHONDONTWRITEBYTECODE :=
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo quick test test-oldest check format page bench bench-peers fuzz diff clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(INSTALLED)  ## Make .venv and install hookline with everything in it (once)

# pip installs torch, since pip's settings may name a CPU build, and uv does not read them. uv installs the rest, several
# times faster. Where it can't, as with a package index that only pip's settings name, pip does.
UV = $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint $(CONSTRAINTS)
PIP = $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint $(CONSTRAINTS)

$(DEMO_INSTALLED): pyproject.toml $(CONSTRAINTS)
	@echo "Installing hookline and what its demo needs into $(VENV): once, about a minute"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --no-compile torch uv
	@$(UV) --editable '.[demo]' || $(PIP) --editable '.[demo]'
	@touch $@

$(INSTALLED): $(DEMO_INSTALLED)
	@echo "Installing the tools of the tests into $(VENV): once, about a minute"
	@$(UV) --editable '.[dev,all]' || $(PIP) --editable '.[dev,all]'
	@touch $@

demo: $(DEMO_INSTALLED)  ## Train a small net, look inside it, and write a page to browse (offline, under a minute)
	@$(BIN)/hookline demo

# The kernel, what all results share, odd arguments, and the README; no browser, Ray, kill or other process.
# CLIENT=sweep adds tests/sweep.
README = tests/test_documentation.py::test_every_example_of_the_readme_gives_what_it_shows
QUICK = $(addprefix tests/,values sites engine hooks cache conformance odd_arguments test_option_checks.py) $(README)
CLIENT ?=

quick: $(INSTALLED)  ## Run the tests of the kernel and the README's examples: a minute. CLIENT=sweep adds one client's
	$(BIN)/$(PYTEST) -q -m "not slow and not process" $(QUICK) $(addprefix tests/,$(CLIENT))

test: $(INSTALLED)  ## Run the tests, the examples of the README and the docs among them
	$(BIN)/$(PYTEST) $(TESTS)

# What runs there: the packages of the kernel, and the suites about its promises. Tests of packages that are missing skip.
OLDEST_TESTS ?= $(addprefix tests/,values sites engine cache hooks failure_modes properties)

$(OLDEST_VENV)/.installed: pyproject.toml
	@$(OLDEST_PYTHON) -c '' 2>/dev/null || { echo "$(OLDEST_PYTHON) is not installed; name one: make test-oldest OLDEST_PYTHON=..."; exit 1; }
	@test -x $(OLDEST_VENV)/bin/python || $(OLDEST_PYTHON) -m venv $(OLDEST_VENV)
	@$(OLDEST_VENV)/bin/python -m pip install --disable-pip-version-check --quiet $(OLDEST_PACKAGES) \
	  numpy pytest pytest-xdist hypothesis --editable .
	@touch $@

test-oldest: $(OLDEST_VENV)/.installed  ## Run the tests of the kernel on the oldest Python and torch (downloads CUDA with torch)
	$(OLDEST_VENV)/bin/$(PYTEST) $(OLDEST_TESTS)

check: $(INSTALLED)  ## Lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src

format: $(INSTALLED)  ## Let ruff put right what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

page: explorer/node_modules/.package-lock.json  ## Build the explorer page from explorer/ (needs Node 20 or newer)
	cd explorer && node_modules/.bin/tsc --noEmit && node build.mjs

explorer/node_modules/.package-lock.json: explorer/package-lock.json
	cd explorer && npm ci --ignore-scripts --no-fund --no-audit
	@touch $@

bench: $(INSTALLED)  ## Measure what hooks cost, against raw torch hooks: a few minutes; rewrites benchmarks/*.txt
	for script in $(wildcard $(BENCHMARKS)); do $(BIN)/python $$script || exit 1; done

bench-peers: $(INSTALLED)  ## Install eight other libraries, each by itself, and give all of them the same tasks
	$(BIN)/python benchmarks/peers/run.py

fuzz: $(INSTALLED)  ## Check N random models against an oracle, every architecture of transformers, Ctrl-C at any moment
	$(BIN)/python -m tests.properties.fuzz $(N)
	$(BIN)/python -m tests.failure_modes.every_port
	HOOKLINE_DEEP=1 $(BIN)/$(PYTEST) -q $(TESTS)

diff: N = 2000
diff: $(INSTALLED)  ## Run N random cases (or that of SEED) here and with the source of BASE; show what users would see differ
	$(BIN)/python -m tests.properties.differ $(BASE) $(if $(SEED),--seed $(SEED),$(N))

clean:  ## Remove .venv and everything the tools left
	rm -rf $(VENV) $(OLDEST_VENV) benchmarks/peers/.venvs explorer/node_modules build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
