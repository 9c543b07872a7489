# make test and make demo each work alone on a fresh clone: they make their own .venv.
# PY=/path/to/python names the Python (3.11 or newer) to make it with.

SHELL := /bin/bash
BIN := .venv/bin
export PY KEEP

.DEFAULT_GOAL := help
.PHONY: help test lint format demo clean

help:  ## list what can be made
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 18

test:  ## all checks: ruff, mypy, then every test (ARGS="-k name" goes to pytest)
	@scripts/environment.sh test
	@$(MAKE) --no-print-directory lint
	@echo; echo "== pytest"
	@$(BIN)/python -m pytest $(ARGS)

lint:  ## ruff and mypy alone, in the environment of make test
	@scripts/environment.sh test
	@echo; echo "== ruff check"
	@$(BIN)/ruff check .
	@echo; echo "== ruff format --check"
	@$(BIN)/ruff format --check .
	@echo; echo "== mypy"
	@$(BIN)/mypy

format:  ## let ruff rewrite what it can
	@scripts/environment.sh test
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

demo:  ## serve a tiny random speech model and make it speak into a .wav (KEEP=1: leave the server up)
	@scripts/environment.sh demo
	@echo
	@$(BIN)/python scripts/demo.py

clean:  ## remove the environment, caches and what demo and builds wrote
	rm -rf .venv dist build demo-out mstar-out .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
