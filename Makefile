# `make demo` and `make test` set up everything they need in .venv first; a machine with Python 3.11-3.13 and make is enough.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
SOURCES := producer worker engine kernels tests benchmarks examples

.PHONY: help demo test check format setup clean drills soak

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP)  ## create .venv with the pinned versions

$(STAMP): pyproject.toml constraints.txt
	@echo "== set-up: $$($(PYTHON) --version) environment in $(VENV), exact versions from constraints.txt (a minute or two the first time)"
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else "Python 3.11, 3.12 or 3.13 is needed, this is %d.%d: run make PYTHON=python3.11" % v)'
	@$(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP)  ## a screenshot, its answers on a real queue, an agent in a browser (half a minute after set-up)
	@$(RUN) -m examples.demo

test: $(STAMP) check  ## set up, then the whole gate

check: $(STAMP)  ## format, lint, types, tests
	@echo "== format"; $(RUN) -m ruff format --check $(SOURCES)
	@echo "== lint"; $(RUN) -m ruff check $(SOURCES)
	@echo "== types"; $(RUN) -m mypy
	@echo "== tests"; $(RUN) -m pytest -n 2 --dist loadgroup

drills: $(STAMP)  ## every fault for real, hundreds of times; writes docs/drills.md (ten minutes)
	@$(RUN) -m tests.faults.drills

soak: $(STAMP)  ## 20,000 jobs and 1,000 real ones through one worker each: does anything grow? Writes docs/drills.md
	@$(RUN) -m tests.faults.soak

format: $(STAMP)  ## rewrite the sources in the project's format
	@$(RUN) -m ruff format $(SOURCES); $(RUN) -m ruff check --fix $(SOURCES)

clean:  ## remove .venv and what the demo and the tests wrote
	@rm -rf $(VENV) .demo .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
