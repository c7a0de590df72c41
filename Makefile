# Development commands.  The first command that runs makes .venv from requirements-dev.txt.
# PYTHON=python3.12 selects another Python.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

# Python keeps compiled modules.  Otherwise every process, and the tests start dozens, compiles torch and JAX again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all lint docs tables records bench hub release-check clean

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## Run an end-to-end demo on real data and check its results, in under three minutes
	@$(BIN)/python examples/demo.py

test: $(READY) ## Run the tests, with a part of the combinations; without a GPU, the kernels run in interpreters
	@$(BIN)/python -m pytest -n auto --dist worksteal -q -m 'gpu or not exhaustive'

test-all: $(READY) ## Run the tests with all combinations
	@$(BIN)/python -m pytest -n auto --dist worksteal -q

lint: $(READY) ## Check style and types with ruff and mypy
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

docs: $(READY) ## Build the documentation site in build/docs; a warning is an error
	@$(BIN)/python -m sphinx -b html -W --keep-going -q docs build/docs

tables: $(READY) ## Write the tables, figures and measured numbers of the pages from benchmarks/results
	@$(BIN)/python benchmarks/tables.py

records: $(READY) ## Measure benchmarks/results again on this machine's GPU, beside the libraries that are installed
	@$(BIN)/python benchmarks/measure.py

bench: $(READY) ## Measure times and GB/s for a table of shapes on this machine
	@$(BIN)/onlinesoftmax bench

hub: $(READY) ## Write a repository for the Hugging Face hub into build/hub
	@$(BIN)/python hub/build.py build/hub

release-check: $(READY) ## Run .ci/run, build the package into dist, check it, and try it in empty environments
	@.ci/run
	@.ci/release-check

clean: ## Remove the environment, caches and build outputs
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist docs/reference
	find src tests examples benchmarks -name __pycache__ -type d -exec rm -rf {} +

$(READY): requirements-dev.txt pyproject.toml
	@set -e; \
	python='$(PYTHON)'; \
	for candidate in python3.11 python3 python3.12 python3.13 python3.14; do \
		test -n "$$python" && break; \
		if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$candidate; fi; \
	done; \
	test -n "$$python" || { echo "No Python 3.11 or newer was found. Name one: make PYTHON=/path/to/python" >&2; exit 1; }; \
	echo "Installing the pinned environment into $(VENV) with $$($$python --version). This takes about a minute, once."; \
	$$python -m venv $(VENV)
	@# The pip of an old Python takes twice as long.
	@$(PIP) install --no-compile "$$(grep '^pip==' requirements-dev.txt)"
	@# A process downloads and unpacks with one processor, so two take one half each; the last install takes what is left.
	@# Python compiles a module when it first imports it; compiling every module here would double the time.  But torch is
	@# compiled while the last install uses one processor: each process that runs tests would compile it at once.
	@for half in 0 1; do \
		awk "NR % 2 == $$half" requirements-dev.txt >$(VENV)/half$$half.txt; \
		$(PIP) install --no-compile --no-deps -r $(VENV)/half$$half.txt & \
	done; wait
	@$(BIN)/python -m compileall -qq $(VENV)/lib/python*/site-packages/torch & \
	$(PIP) install --no-compile -r requirements-dev.txt && wait
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@
