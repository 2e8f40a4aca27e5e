# `make run` and `make test` do all the set-up. Needs Python 3.11 or newer, and nothing else.

VENV := .venv
BIN := $(VENV)/bin
QUICKSTART := notebooks/00_quickstart.ipynb
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))

# The first Python here that is new enough. Another one: make run PYTHON=/path/to/python3.12
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$python" -c '$(NEW_ENOUGH)' 2>/dev/null && { echo "$$python"; break; }; done)

.PHONY: help run test test-all lint lab doctor clean

help:
	@echo "make run       set up once, then execute $(QUICKSTART)"
	@echo "make lab       JupyterLab and the MLflow UI on this machine"
	@echo "make test      lint, types and tests;  make test-all adds the slow ones"
	@echo "make doctor    is everything here that labkit needs?"
	@echo "make lint      lint, format check and types alone"
	@echo "make clean     remove $(VENV) and caches; never runs/"

run: $(VENV)/ready
	@$(BIN)/python -m labkit run $(QUICKSTART)
	@echo
	@echo "Next:"
	@echo "  make lab                          open the notebooks and the MLflow UI"
	@echo "  $(BIN)/python -m labkit status    the runs so far"
	@echo "  $(BIN)/python -m labkit run --help"

lab: $(VENV)/ready
	@$(BIN)/python -m labkit lab

doctor: $(VENV)/ready
	@$(BIN)/python -m labkit doctor

lint: $(VENV)/ready-for-tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-all: lint
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find labkit tests notebooks -type d \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +

# Stamps: nothing is installed again until one of these lists changes.
$(VENV)/ready: requirements.txt pyproject.toml $(BIN)/python
	@echo "Installing requirements.txt into $(VENV): once, and it takes minutes because torch is large."
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.txt
	@touch $@

$(VENV)/ready-for-tests: tests/requirements.txt $(VENV)/ready
	$(BIN)/python -m pip install --disable-pip-version-check -q -r tests/requirements.txt
	@touch $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { \
		echo "labkit needs Python 3.11 or newer, and found $$(python3 --version 2>&1 || echo none)." \
			"Install one, or name it: make run PYTHON=/path/to/python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c '$(NEW_ENOUGH)' || { \
		echo "labkit needs Python 3.11 or newer, got PYTHON=$(PYTHON) ($$("$(PYTHON)" --version 2>&1))." \
			"Name a newer one: make run PYTHON=/path/to/python3.12" >&2; exit 1; }
	@"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); \
		echo "$(PYTHON) could not make $(VENV). On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
