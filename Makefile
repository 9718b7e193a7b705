# Two commands do everything on a machine that has only Python, pip and make: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
# Processes that run the tests; each takes one thread.
WORKERS ?= 2
# Whole files go to a worker, the longest first (tests/conftest.py).
PYTEST := pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Some virtual CPUs advertise AMX and fault on it: half-precision matmuls then die with SIGILL.
# Capping oneDNN below AMX is safe everywhere and must happen before torch loads.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

.PHONY: help demo test test-all lint types quick unit coverage docs format bench release clean

help:
	@echo "make demo    train a small transformer with three faults, unguarded and guarded (a minute)"
	@echo "make test    lint, types, architecture, tests, the documentation built strictly (ten minutes)"
	@echo "make test-all  the same, with every case of every corpus and framework (twenty minutes)"
	@echo "make coverage  the tests, with a report of the lines that they run in build/coverage/html"
	@echo "make docs    the documentation as a site, in site/"
	@echo "make release  the wheel and the source archive in dist/, checked as the registry checks them"
	@echo "make bench   every benchmark of this machine (an hour)"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m steadygrad demo

test: lint types quick

test-all: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# Without further cases of what a quick test shows, and without whole frameworks: tests/slow.py has the list.
quick: $(STAMP)
	$(BIN)/$(PYTEST) -m "not slow"

unit: $(STAMP)
	$(BIN)/$(PYTEST)

coverage: $(STAMP)
	$(BIN)/coverage erase
	$(BIN)/coverage run -m $(PYTEST)
	$(BIN)/coverage combine --quiet
	@rm -f build/coverage/data.*  # cut short: of programs that a test has killed
	$(BIN)/coverage html --quiet
	$(BIN)/coverage report
	@echo "Open build/coverage/html/index.html"

# Strict: a warning is an error. `make test` builds it too, into a folder of its own (tests/test_site.py).
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open site/index.html"

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python -m steadygrad bench

# Builds and checks; nothing leaves this machine.
release: $(STAMP)
	rm -rf dist
	$(BIN)/python -m hatchling build
	$(BIN)/twine check --strict dist/*
	$(BIN)/python -m pip install --dry-run --no-deps --ignore-installed --quiet dist/*.whl
	@echo "Checked. To publish: twine upload dist/*"

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache
