# Everything a contributor or user needs, on a machine with python3 (3.11 or newer) and make.
# Arguments for the command behind a target go into ARGS: make run ARGS="--port 1884"

PYTHON ?= python3
ARGS ?=
KILLS ?= 2000
MINUTES ?= 20
VENV := .venv
# Tests that measure how long others wait: nothing else runs beside them.
ALONE := $(addprefix tests/heart/,test_bystanders.py test_bystanders_of_attacks.py test_heavy_packets.py)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
WARM_UP = $(BIN)/python -m tidegate.pipeline.warmup >/dev/null 2>&1 || true
RUN_STAMP := $(VENV)/installed-run
DEV_STAMP := $(VENV)/installed-dev

.DEFAULT_GOAL := help
.PHONY: help setup run test test-fast check bench bench-pipeline torture docs lock peers clean soak

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

setup: $(DEV_STAMP) ## make .venv with everything for development

run: $(RUN_STAMP) ## install what running needs, then start broker and pipeline here: tidegate up
	@$(BIN)/tidegate up $(ARGS)

test: $(DEV_STAMP) peers ## run the tests, with real MQTT clients where they can be had
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(patsubst %,--ignore %,$(ALONE)) $(ARGS)
	$(BIN)/python -m pytest $(ALONE)

test-fast: $(DEV_STAMP) ## a quick look, without Spark or foreign clients: what every commit should pass
	$(BIN)/python -m pytest -n 2 -q tests/router tests/session tests/log tests/broker tests/protocol \
		tests/test_import_rules.py --deselect tests/broker/test_session_flows.py $(ARGS)

check: $(DEV_STAMP) ## lint, types, import rules, the table of promises
	$(BIN)/ruff check .
	$(BIN)/mypy --strict
	$(BIN)/python -m pytest -q tests/test_import_rules.py
	$(BIN)/python tools/requirements_table.py --check

bench: $(DEV_STAMP) ## measure this broker beside others
	@mkdir -p docs/images
	$(BIN)/python bench/run.py --picture docs/images/bench.svg $(ARGS)
	$(BIN)/python bench/sessions.py
	$(BIN)/python bench/index.py
	$(BIN)/python bench/report.py

bench-pipeline: $(DEV_STAMP) ## measure the Spark pipeline
	$(BIN)/python bench/pipeline.py $(ARGS)
	$(BIN)/python bench/report.py

torture: $(DEV_STAMP) ## the crash tests with KILLS kills (default 2000), 60 of the pipeline, and a million sessions
	TORTURE=1 TORTURE_KILLS=$(KILLS) $(BIN)/python -m pytest --timeout=0 tests/faults $(ARGS)

soak: $(DEV_STAMP) ## churn clients, sessions, filters, topics, retained, replays and slow readers for MINUTES (default 20) and see that memory stays
	$(BIN)/python bench/soak.py --minutes $(MINUTES) $(ARGS)

docs: $(DEV_STAMP) ## regenerate docs/requirements.md from the tests' marks
	$(BIN)/python tools/requirements_table.py

lock: ## pin the newest versions that pyproject.toml allows, in requirements-dev.lock
	@tools/lock.sh $(PYTHON)

peers: ## install the foreign MQTT clients, and Delta Lake for Spark, that tests use, where possible
	@tools/peers.sh

clean: ## remove what the other targets made, but not data folders
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis tests/interop/node_modules tests/pipeline/jars bench/out
	find src tests tools bench -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: install Python 3.11 or newer."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Tidegate needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] + ". Name another: make PYTHON=python3.12 ...")'
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "Could not make $(VENV); on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }

$(RUN_STAMP): pyproject.toml requirements-dev.lock | $(BIN)/python
	@echo "Installing Tidegate into $(VENV)"
	@$(PIP) install --constraint requirements-dev.lock --editable '.[pipeline]'
	@$(BIN)/python -m tidegate.pipeline.java >/dev/null 2>&1 || $(PIP) install --constraint requirements-dev.lock --editable '.[java]'
	@$(WARM_UP)
	@touch $@

$(DEV_STAMP): pyproject.toml requirements-dev.lock | $(BIN)/python
	@echo "Installing Tidegate and its development tools into $(VENV)"
	@$(PIP) install --requirement requirements-dev.lock
	@$(PIP) install --no-deps --editable .
	@$(WARM_UP)
	@touch $(RUN_STAMP) $@
