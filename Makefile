# One command each; the first to run makes .venv from requirements-dev.txt.  PYTHON=python3.12 chooses another Python.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint bench clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## Real data from end to end, checked, in under three minutes
	@$(BIN)/python examples/demo.py

test: $(READY) ## Every test; the kernels run on a GPU, or in Triton's interpreter where there is none
	@$(BIN)/python -m pytest -n auto -q

lint: $(READY) ## Style and types: ruff and mypy
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

bench: $(READY) ## The table of shapes, times and GB/s on this machine
	@$(BIN)/onlinesoftmax bench

clean: ## Remove the environment, caches and builds
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find src tests examples benchmarks -name __pycache__ -type d -exec rm -rf {} +

$(READY): requirements-dev.txt pyproject.toml
	@set -e; \
	python='$(PYTHON)'; \
	for candidate in python3.11 python3 python3.12 python3.13 python3.14; do \
		test -n "$$python" && break; \
		if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$candidate; fi; \
	done; \
	test -n "$$python" || { echo "No Python 3.11 or newer found; name one: make PYTHON=/path/to/python" >&2; exit 1; }; \
	echo "Installing the pinned environment into $(VENV) with $$($$python --version): a minute or two, once"; \
	$$python -m venv $(VENV)
	@# Python compiles what it imports; compiling all of it now would double the time.
	@$(PIP) install --no-compile -r requirements-dev.txt
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@
