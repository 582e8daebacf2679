# One word per task. `make run` and `make test` are all a newcomer needs.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS ?= dev
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup run stop status test test-all check fix bench proto clean

help: ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 12

setup: $(STAMP) ## create .venv and install everything

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is missing: apt-get install python3 python3-venv"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: Python 3.11 or newer is needed, this is $$($(PYTHON) -V)"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "make: the venv module is missing: apt-get install python3-venv"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "make: installing (once; torch and ray are large, this takes a minute or two) …"
	@$(BIN)/python -m pip install -c constraints.txt -e '.[$(EXTRAS)]' 2>&1 \
	  | $(PYTHON) .ci/pip_progress.py $$(grep -c . constraints.txt); exit $${PIPESTATUS[0]}
	@touch $@

run: setup ## start the embedded cluster, stream one answer, leave the cluster up
	@$(BIN)/headrace model fetch
	@$(BIN)/headrace status >/dev/null 2>&1 && echo "the cluster is up already" || $(BIN)/headrace up --detach
	@echo
	@$(BIN)/headrace chat "In one sentence: why does a water wheel turn?"
	@echo
	@$(BIN)/headrace status
	@echo
	@echo "The cluster is up. Talk to it:"
	@echo "  $(BIN)/headrace chat"
	@echo "  curl -N http://127.0.0.1:8000/v1/chat/completions -d '{\"model\":\"SmolLM2-135M-Instruct\",\"messages\":[{\"role\":\"user\",\"content\":\"Hello\"}],\"stream\":true}'"
	@echo "  make stop     ends it"

stop: setup ## end the cluster that `make run` started
	@$(BIN)/headrace down

status: setup ## workers, free KV, running and waiting requests
	@$(BIN)/headrace status

test: setup ## the tests (under 8 minutes on 2 cores)
	@$(BIN)/headrace model fetch
	@$(BIN)/python -m pytest -q

test-all: setup ## the slow tests too
	@$(BIN)/headrace model fetch
	@$(BIN)/python -m pytest -q -m "slow or not slow"

check: setup ## format, lint, types, import rules, generated code
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/python -m headrace.v1.generate --check

fix: setup ## format and repair what can be repaired by machine
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: setup ## load the running cluster and print TTFT, ITL, throughput
	@$(BIN)/headrace bench

proto: setup ## regenerate the gRPC stubs
	@$(BIN)/python -m headrace.v1.generate

clean: ## remove the virtual environment and caches
	@test ! -x $(BIN)/headrace || $(BIN)/headrace down
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
