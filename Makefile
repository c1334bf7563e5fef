# Every target sets up what it needs: a fresh clone, Python 3.11+ and make are enough.
PYTHON ?= python3
BIN := .venv/bin
# Python compiles what is imported when it first is; pip would compile all of torch and transformers, for over a minute.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
OUT ?= demo

.PHONY: demo test test-slow check docs dist matrix format bench clean

demo: .venv/.demo
	$(BIN)/fairhead demo --out $(OUT)

# Two processes: in the first, importing torch fails. The real tier skips what it does not find.
TORCH_FREE := $(addprefix src/fairhead/,errors.py settings.py store.py records stats audit report data cli)
WITH_TORCH := $(addprefix src/fairhead/,bench demo.py discover heads language locate mitigate models train callback.py verbs.py)

# One process a core; the tensors are small, so threads within a process would only get in each other's way.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal

test: .venv/.dev
	$(PYTEST) tests/unit -m "not slow" --doctest-modules $(TORCH_FREE)
	$(PYTEST) tests/models tests/real tests/golden -m "not slow" --doctest-modules $(WITH_TORCH)

# How often intervals cover the truth, commands that are killed, damaged files: some two hours.
test-slow: .venv/.dev
	$(PYTEST) tests/unit -m slow
	$(PYTEST) tests/models tests/real -m slow

check: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site; its tutorials are run. A warning is an error.
docs: .venv/.docs
	PATH="$(CURDIR)/$(BIN):$$PATH" OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going -j auto -b html docs docs/_build/html

# Wheel and sdist, each installed into an environment of its own and run.
dist: .venv/.python
	$(PIP) build twine
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/python -m twine check --strict dist/*
	for file in dist/*; do .ci/installed $(PYTHON) "$$file" || exit 1; done

# The demo from the wheel, on every Python here from 3.11 to 3.14, and with the newest minors of transformers.
matrix: dist
	.ci/matrix dist/*.whl
	.ci/lowest dist/*.whl

# Ratios against Fairlearn, pandas, scikit-learn, plain forward passes and plain training; a quarter of an hour, and a
# quiet machine.
bench: .venv/.dev
	$(BIN)/python benchmarks/audit.py
	$(BIN)/python benchmarks/tap.py
	$(BIN)/python benchmarks/dam.py
	$(BIN)/python benchmarks/locate.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/reduce.py

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/.python:
	$(PYTHON) -m venv .venv
	touch $@

# torch first and pinned: left to the resolver, a newer build would bring gigabytes of CUDA packages.
.venv/.torch: constraints.txt .venv/.python
	$(PIP) "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	touch $@

.venv/.demo: pyproject.toml .venv/.torch
	$(PIP) --editable ".[demo]"
	touch $@

.venv/.dev: pyproject.toml .venv/.torch
	$(PIP) --editable ".[dev]"
	touch $@ .venv/.demo

.venv/.docs: pyproject.toml .venv/.torch
	$(PIP) --editable ".[docs]"
	touch $@
