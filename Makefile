# preheat: `make` or `make help` lists the targets. The first use of one sets up .venv; a stamp in
# .venv keeps later uses from doing it again until a lock or pyproject.toml has changed.

VENV  := .venv
PY    := $(VENV)/bin/python
# Wheels only: a package without one for this machine is an error at once, not a long compilation.
PIP   := $(PY) -m pip --disable-pip-version-check --no-input install --quiet
FETCH := $(PIP) --require-hashes --only-binary :all:
SELF  := $(PIP) --no-deps --no-build-isolation --editable .
ARGS  ?=

# Each is a program: without arguments it writes its generated document, with --check it compares.
DOCUMENTS := preheat.core.spec.document preheat.replica.document preheat.controlplane.document
BENCHES   := start gateway
# Compiled when preheat is installed.
FILTER    := hatch_build.py src/preheat/dataplane/envoy/native/usage.c

SHELL := /bin/sh
MAKEFLAGS += --no-print-directory --no-builtin-rules
.SUFFIXES:
.DEFAULT_GOAL := help
.PHONY: help serve test test-slow check format docs bench lock clean

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

serve: $(VENV)/.serve ## serve a model; ARGS="model.gguf --port 9000" goes to `preheat serve`
	@exec $(VENV)/bin/preheat serve $(ARGS)

test: $(VENV)/.dev ## run the tests that take seconds; ARGS goes to pytest
	@$(PY) -m pytest -m "not slow" $(ARGS)

test-slow: $(VENV)/.dev ## run the tests that take minutes
	@$(PY) -m pytest -m slow -s $(ARGS)

check: $(VENV)/.dev ## lint, format, types, layers, generated documents
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports --no-cache
	@set -e; for module in $(DOCUMENTS); do $(PY) -m $$module --check; done

format: $(VENV)/.dev ## format the code and mend what can be mended by itself
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

docs: $(VENV)/.dev ## write the generated documents anew
	@set -e; for module in $(DOCUMENTS); do $(PY) -m $$module; done

bench: $(VENV)/.dev ## run each benchmark quickly; results in build/bench
	@mkdir -p build/bench
	@set -e; for name in $(BENCHES); do \
	  echo "== bench/$$name.py"; \
	  $(PY) bench/$$name.py --quick --json build/bench/$$name.json; \
	done

lock: ## write both locks anew from pyproject.toml (newest versions that it allows)
	@rm -rf build/lock && python3 -m venv build/lock
	@build/lock/bin/python -m pip --disable-pip-version-check install --quiet 'uv>=0.9'
	@set -e; compile() { build/lock/bin/uv pip compile --no-config --quiet --upgrade --universal \
	    --python-version 3.11 --only-binary :all: --generate-hashes --no-annotate --no-emit-index-url \
	    --no-emit-find-links --custom-compile-command 'make lock' --group pyproject.toml:build \
	    pyproject.toml "$$@"; }; \
	  compile --output-file requirements.lock; \
	  compile --all-extras --constraints requirements.lock --output-file requirements-dev.lock
	@rm -rf build/lock

clean: ## remove .venv and all that tools left; models, records and logs of preheat stay
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@set -e; \
	for python in $(PYTHON) python3.11 python3 python3.13 python3.12; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$${found-}" ]; then \
	  echo 'preheat needs Python 3.11 or newer: apt install python3 python3-venv, or make PYTHON=/path/to/python' >&2; exit 1; \
	fi; \
	if ! $$found -c 'import ensurepip, venv' 2>/dev/null; then \
	  echo "$$found cannot make virtual environments: apt install python3-venv" >&2; exit 1; \
	fi; \
	echo 'preparing $(VENV), once: some 100 MB are fetched' >&2; \
	$$found -m venv --clear $(VENV); \
	touch $@

# Source files are compiled here too, for machines where Python may not do it on its own.
$(VENV)/.serve: $(VENV)/.made requirements.lock pyproject.toml $(FILTER)
	@$(FETCH) -r requirements.lock
	@$(SELF)
	@$(PY) -m compileall -q src
	@touch $@

$(VENV)/.dev: $(VENV)/.made requirements-dev.lock pyproject.toml $(FILTER)
	@$(FETCH) -r requirements-dev.lock
	@$(SELF)
	@touch $@
