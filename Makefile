# Two commands on a fresh machine: `make demo` and `make test`. Both set up .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check

.PHONY: demo docs test lint types clean

$(VENV)/ready: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/ready-dev: $(VENV)/ready
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev,docs]'
	@touch $@

demo: $(VENV)/ready
	$(BIN)/crosel demo --out demo-run

lint: $(VENV)/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/ready-dev
	$(BIN)/mypy

docs: $(VENV)/ready-dev
	$(BIN)/python -m sphinx -W --keep-going --quiet --fresh-env --builder html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

test: lint types
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --cov --cov-report=term --cov-fail-under=90

clean:
	rm -rf $(VENV) demo-run .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage*
