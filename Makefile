# Everything a newcomer needs, from a fresh clone. `make` alone lists the targets.
#
# Paths are relative and quoted by the shell, so the clone may be in a folder with spaces in its name.

VENV := .venv
PY := $(VENV)/bin/python

# Nothing here contacts a hub or a tracker.
OFFLINE := HF_HUB_OFFLINE=1 WANDB_MODE=offline WANDB_SILENT=true TOKENIZERS_PARALLELISM=false
ifeq ($(shell command -v nvidia-smi 2>/dev/null),)
OFFLINE += DS_ACCELERATOR=cpu
endif
# The demo and the tests start many processes, and each imports torch. Where writing bytecode is disabled, as in many container
# images, each would compile all of it again; here, the first one (of scripts/setup.sh) keeps it for the others.
BYTECODE := PYTHONDONTWRITEBYTECODE=
# Several test processes whose threads spin on two cores are many times slower than one thread each.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# Each test file runs in one of two processes, so that whatever its tests share is made once.
TWO_PROCESSES := -n 2 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo demo-baseline demo-from-nothing test lint rules format docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' Makefile

setup: ## make or refresh .venv; does nothing if it is up to date
	@sh scripts/setup.sh

demo: setup ## train on the shipped pictures, evaluate on unseen drawings, write one HTML page (resumes)
	@$(OFFLINE) $(BYTECODE) $(PY) scripts/demo.py

demo-baseline: setup ## the same, plus the baseline: a model trained without rationales
	@$(OFFLINE) $(BYTECODE) $(PY) scripts/demo.py baseline=true

demo-from-nothing: setup ## the same, including the base: everything from random weights
	@$(OFFLINE) $(BYTECODE) $(PY) scripts/demo.py from_nothing=true

PYTEST := $(OFFLINE) $(ONE_THREAD) $(BYTECODE) $(PY) -m pytest -m "not gpu and not net"

# Some tests use real clocks, browsers and servers, and on a busy machine, one of four thousand may fail. Failed tests run
# once more, alone; those that then pass are flaky, and are listed.
#
# mypy is one of the tests (tests/repository/test_types.py), beside which the other process goes on.
test: setup rules ## what CI runs: lint, types, all tests that need neither a GPU nor the network
	@$(PYTEST) $(TWO_PROCESSES) --durations=25 --durations-min=10 || { \
		test $$? -eq 1 && echo "Retrying the failures alone. Tests that pass on retry are flaky; please fix them." && \
		$(PYTEST) --last-failed --last-failed-no-failures none -rp; }

lint: rules ## ruff (rules and format) and mypy
	@$(PY) -m mypy

rules: setup
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check --quiet . || { echo "run: make format"; exit 1; }

format: setup ## let ruff rewrite what it can
	@$(PY) -m ruff check --fix --quiet .
	@$(PY) -m ruff format .

docs: setup ## build the pages of docs/ as a site with search: site/index.html
	@$(PY) -m mkdocs build --quiet --strict
	@echo "site/index.html (search needs a server: $(PY) -m http.server 8080 -b 127.0.0.1 -d site)"

clean: ## remove .venv and caches; runs/ stays, since it holds your trainings
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find rge eval data_prep tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
