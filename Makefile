PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Two workers, each with whole files, so that a fixture of a file is made once.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: run test test-fast docs check format-check lint imports types wheel-test bench soak clean

run: $(STAMP)  ## all figures at their quick preset, and results/index.html
	$(BIN)/tacit reproduce --preset quick --out results

test: $(STAMP)  ## all tests, and every code block and command of README and docs
	$(BIN)/python -m pytest -q $(PARALLEL)

test-fast: $(STAMP)  ## the library in a minute: no figures, long trainings, commands or benchmarks
	$(BIN)/python -m pytest -q $(PARALLEL) -m "not slow" --ignore tests/paper

docs: $(STAMP)  ## the documentation site, docs/_build/html/index.html; a warning is an error
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html

check: format-check lint imports types test  ## everything that a change must pass, in this order

format-check: $(STAMP)
	$(BIN)/ruff format --check .

lint: $(STAMP)
	$(BIN)/ruff check .

imports: $(STAMP)  ## modules import only from the layers below them
	$(BIN)/lint-imports --no-logo

types: $(STAMP)
	$(BIN)/basedpyright

wheel-test: $(STAMP)  ## the README's first examples from the built wheel, in a clean environment
	bash .ci/wheel-test

soak: $(STAMP)  ## 200 random edits of each saved file, and 50 kills of a sweep at random moments
	TACIT_SOAK=1 $(BIN)/python -m pytest -q tests/paper/test_soak.py

bench: $(STAMP)  ## ratios against stated baselines, measured in one run
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf .venv build docs/_build results/quick results/index.html
	rm -rf .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[paper,dev]'
	touch $(STAMP)
