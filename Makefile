# `make demo` and `make test` need nothing but Python 3.11 or newer, git and make.
PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test oracle lint format clean

demo: $(VENV)/installed-demo
	@$(BIN)/python -m examples.demo

test: $(VENV)/installed-test
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not oracle"

# Live comparison with torch, transformers and peft. `make oracle ARGS=--rewrite-golden` rewrites the
# small golden files that `make test` uses.
oracle: $(VENV)/installed-oracle
	$(BIN)/python -m examples.smollm2
	$(BIN)/python -m pytest -n 2 --dist loadfile -m oracle $(ARGS)

lint: $(VENV)/installed-lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/installed-lint
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed-demo: $(BIN)/python pyproject.toml
	@echo "Setting up $(VENV): this takes a minute or two the first time."
	$(INSTALL) --editable '.[demo]'
	@touch $@

$(VENV)/installed-test: $(BIN)/python pyproject.toml
	$(INSTALL) --editable '.[demo,test]'
	@touch $@

$(VENV)/installed-oracle: $(BIN)/python pyproject.toml
	$(INSTALL) 'torch==2.13.0'
	$(INSTALL) --editable '.[demo,test,oracle]'
	@touch $@

$(VENV)/installed-lint: $(BIN)/python pyproject.toml
	$(INSTALL) --editable '.[demo,test,lint]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info
