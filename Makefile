# Every target works on a machine that has only Python 3.11, make and git: what it needs is installed into .venv once.
#
#   make demo    measure, plan and train a small GPT on a process per core, and write a report
#   make test    run the tests; the planning packages must be covered to 95 %
#   make test-all   the full products of which `make test` runs a selection
#   make lint    ruff, and mypy --strict on the planning packages
#   make bench   run the benchmarks of README's table, write benchmarks/results.json, and list missed targets
#   make soak    inject a fault every 10 seconds for 10 minutes, and compare with an undisturbed run
#   make survey  run models of timm, torchvision, diffusers and others, and write docs/architectures.md
#   make docs    write docs/llms.txt and build the documentation, warnings are errors
#   make clean   remove .venv and everything built

# The first of python3.11 and python3 that runs and is new enough; `make PYTHON=...` overrides.
PYTHON ?= $(shell for python in python3.11 python3; do \
    $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
# Installed first and by its exact version, so that no later requirement picks another build.
TORCH ?= torch==2.13.0
# One more than cores: tests of several processes and of deadlines wait most of their time.
WORKERS ?= 3

VENV := .venv
BIN := $(VENV)/bin
# Only what is imported is compiled, when it is: to compile all installed files takes a minute.
PIP := $(BIN)/python -m pip install --quiet --quiet --no-compile
comma := ,

# The packages that never import torch.
PLANNING := penstock/errors.py penstock/ir penstock/partitioners penstock/schedules penstock/passes penstock/views penstock/simulate penstock/planner

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Compiled modules are kept, whatever the environment says: every process of a test run would compile them again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-all lint bench soak survey docs clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   make/make/p' Makefile

# A stamp is written last, and only when everything before it has succeeded.
$(VENV)/.torch:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer was found; try: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "creating $(VENV) with $(TORCH) (once)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) "$(TORCH)"
	@touch $@

# An install that was cut off may leave half a package that pip takes for a whole one: then begin with an empty .venv.
define install
	@if test -e $(VENV)/.unfinished; then rm -rf $(VENV); $(MAKE) --no-print-directory $(VENV)/.torch; fi
	@rm -f $(VENV)/.demo $(VENV)/.dev
	@touch $(VENV)/.unfinished
	@echo "installing penstock[$(1)]"
	@$(PIP) --editable ".[$(1)]"
	@rm $(VENV)/.unfinished
endef

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	$(call install,plot)
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	$(call install,plot$(comma)dev)
	@touch $(VENV)/.demo $@

demo: $(VENV)/.demo
	$(BIN)/penstock demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --cov --cov-report=term

test-all: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --whole

lint: $(VENV)/.dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy $(PLANNING)

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks --write

soak: $(VENV)/.dev
	$(BIN)/python -m benchmarks.soak

# Beside the packages of the tests, which must not find them. Without dependencies: some would replace torch.
$(VENV)/survey/.ready: tests/survey/requirements.txt $(VENV)/.dev
	@echo "installing the libraries of the survey"
	@rm -rf $(VENV)/survey
	@$(PIP) --no-deps --target $(VENV)/survey --requirement tests/survey/requirements.txt
	@touch $@

survey: $(VENV)/survey/.ready
	PYTHONPATH=$(VENV)/survey $(BIN)/python -m tests.survey

docs: $(VENV)/.dev
	$(BIN)/python docs/describe.py
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

clean:
	rm -rf $(VENV) docs/_build build dist .coverage .coverage.* htmlcov .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
