# make serve    serve the default model on http://127.0.0.1:8000      make serve ARGS="--port 9000"
# make test     everything that must hold before a change goes in     make test ARGS="tests/unit -k config"
#               in two processes, or as many as you say                make test JOBS=4
# make help     the rest

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
JOBS   ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile
# What pip would compile in one process, all cores do at once. Some packages carry files that are no valid Python: not an error.
COMPILE := $(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true

# Tests start hundreds of processes: each would compile our modules again if the environment forbids to keep them.
export PYTHONDONTWRITEBYTECODE =

# Installed when these files exist and are newer than pyproject.toml. The second includes the tools for development.
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.PHONY: help serve chat bench test test-long test-browser fuzz chaos ray structured examples model check format clean

help: ## Show this
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

serve: $(INSTALLED) ## Serve a model: make serve ARGS="MODEL --port 9000"
	@$(BIN)/tonle serve $(ARGS)

chat: $(INSTALLED) ## Chat in the terminal
	@$(BIN)/tonle chat $(ARGS)

bench: $(INSTALLED) ## Measure a running server: make bench ARGS="--concurrency 1,4,16"
	@$(BIN)/tonle bench $(ARGS)

# In the order of their names the last files are short ones. By number of tests, as xdist would order them, the last would be the
# longest single tests, and one process would wait for the other.
test: check model ## Checks, then all tests
	@$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-long: check model ## All tests, with every case of long lists
	@$(BIN)/python -m pytest --long --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-browser: model ## The dashboard in a real browser; installs Chromium if there is none
	@$(BIN)/python -m tests.browser.chromium
	@$(BIN)/python -m pytest tests/browser $(ARGS)

fuzz: $(INSTALLED_DEV) ## Random input, the long form: make fuzz ARGS="--cases 20000 --seed 7"
	@$(BIN)/python -m tests.fuzz $(ARGS)

chaos: model ## Faults under load, and a table of what happened: make chaos ARGS="--fault kill-engine"
	@$(BIN)/python -m tests.chaos $(ARGS)

ray: $(INSTALLED_DEV) ## Replicas on a local Ray cluster, some minutes; installs Ray if there is none
	@$(BIN)/python -c 'import ray' 2>/dev/null || $(PIP) -e '.[ray]'
	@$(BIN)/python -m pytest tests/ray -m ray $(ARGS)

structured: model ## Answers bound by schemas, validated: make structured ARGS="--generations 200"
	@$(BIN)/python -m benchmarks.structured --only validity $(ARGS)

examples: $(INSTALLED_DEV) ## Render the documents in deploy/ again
	@$(BIN)/python deploy/render_examples.py

# Tests never touch a network; those that need the default model are skipped where it cannot be fetched.
model: $(INSTALLED_DEV)
	@$(BIN)/tonle pull || echo "The default model cannot be fetched here: tests that need it will be skipped."

check: $(INSTALLED_DEV) ## Format, lint, types, import rules
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(INSTALLED_DEV) ## Format the code and fix what can be fixed
	@$(BIN)/ruff check --fix-only
	@$(BIN)/ruff format

clean: ## Remove the environment and all caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Tonle needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml | $(BIN)/python
	@echo "Installing Tonle into $(VENV). The first time this downloads some hundred megabytes (mostly torch)."
	@$(PIP) -e .
	@$(COMPILE)
	@touch $@

$(INSTALLED_DEV): pyproject.toml | $(BIN)/python
	@echo "Installing Tonle and its development tools into $(VENV). The first time this downloads some hundred megabytes (mostly torch)."
	@$(PIP) -e '.[dev]'
	@$(COMPILE)
	@touch $@ $(INSTALLED)
