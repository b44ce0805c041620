# Two commands for a newcomer: `make train` and `make test`. Each sets up .venv on its first use. On a machine with a GPU
# also `make gpu-test`.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: train test gpu-test lint style types suite docs clean

train: $(VENV)/.ready   ## train a small language model on 4 ranks (dp 2 x tp 2, ZeRO-1)
	$(BIN)/shoal train examples/quickstart.toml

test: style             ## all checks and the full suite; mypy, which takes one core for a minute, runs beside the tests
	$(MAKE) --jobs=2 types suite

suite: $(VENV)/.ready   ## three files of tests at a time: on two cores, tests that wait leave time to others
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit; done; \
		echo "There is no Chromium on PATH: tests of pages in a browser are skipped."
	$(BIN)/python -m compileall -q shoal
	$(BIN)/python -m pytest -n 3 --dist loadfile

gpu-test: $(VENV)/.ready ## correctness on this machine's GPU: smoke test, equality with the CPU, many ranks on one GPU
	for part in 1 2 3; do $(BIN)/shoal bench gpu --part $$part --device cuda --out gpu-test || exit; done

lint: style types       ## style, the import rules, and types

style: $(VENV)/.ready
	$(BIN)/ruff check shoal tests
	$(BIN)/lint-imports

types: $(VENV)/.ready
	$(BIN)/mypy

docs: $(VENV)/.ready     ## the documentation as a site: build/site/index.html
	$(BIN)/python -m tests.docs.pages
	$(BIN)/python -m mkdocs build --quiet

# torch comes first and from the constraint: an open range may pick another build. On Linux the default index has the CUDA
# build, of several GB; TORCH_INDEX names another index, such as PyTorch's of CPU builds ("Install" in README.md).
TORCH_INDEX ?=
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("shoal needs Python 3.11 or newer; this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(TORCH_INDEX:%=--extra-index-url %) torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
