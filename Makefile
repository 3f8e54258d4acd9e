# make demo: a lifelong run on embedded real images.  make test: the tests.  Both make .venv first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint clean
.DELETE_ON_ERROR:

demo: .venv/installed
	$(BIN)/python -m nevis_lite.train --config demo_ftd.yaml --resume
	$(BIN)/python -m nevis_lite.report runs/demo_ftd-seed0 --out runs/report.html

test: .venv/installed-dev
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

lint: .venv/installed-dev
	$(BIN)/ruff check

# The stamps make the second call instant and an interrupted installation start again.
.venv/installed: requirements.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -e '.[plots]'
	touch $@

.venv/installed-dev: pyproject.toml .venv/installed
	$(BIN)/pip install -e '.[dev]'
	touch $@

clean:
	rm -rf .venv data/cache
