PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: run test check bench clean

run: $(STAMP)  ## all figures at their quick preset, and results/index.html
	$(BIN)/tacit reproduce --preset quick --out results

test: $(STAMP)  ## all tests, and every code block of README and docs
	$(BIN)/python -m pytest -q

check: $(STAMP)  ## format, lint, types, then the tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(MAKE) test

bench: $(STAMP)  ## ratios against stated baselines, measured in one run
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf .venv results/quick results/index.html .pytest_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[experiments,dev]'
	touch $(STAMP)
