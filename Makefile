PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python

.PHONY: quickstart test slow lint clean

# Trains FLARE and FLARE++ alike on a generated data set and compares them.
quickstart: $(VENV)/.base
	$(PY) -m train.pde configs/pde/elasticity_small.py --model.name flare --run runs/quickstart/flare
	$(PY) -m train.pde configs/pde/elasticity_small.py --model.name flarepp --run runs/quickstart/flarepp
	$(PY) -m train.evaluate runs/quickstart/flare runs/quickstart/flarepp --out runs/quickstart

test: $(VENV)/.dev
	$(PY) -m pytest -n 2

# Tests that take minutes, and those of numbers with fully optimised code.
slow: $(VENV)/.dev
	$(PY) -m pytest -n 2 -m slow
	FLAXMIX_TEST_OPTIMIZED=1 $(PY) -m pytest -n 2 tests/test_attention.py tests/test_latent.py tests/test_slices.py tests/test_surrogate.py

lint: $(VENV)/.dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath $(PY)

$(PY):
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml | $(PY)
	$(PY) -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.dev: pyproject.toml | $(PY)
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@ $(VENV)/.base

clean:
	rm -rf $(VENV) build dist *.egg-info
