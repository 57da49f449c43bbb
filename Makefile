# One door. What the gate also does is done by .ci/run, so that the two cannot drift apart.

.DEFAULT_GOAL := help
BIN := .venv/bin
GATE := .ci/run

.PHONY: help venv format lint types layers test test-15 sqlalchemy-20 check wheel ci mutants full bench clean

help: ## print this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | \
		awk -F '\t' '{ printf "  make %-13s %s\n", $$1, $$2 }'

venv: ## make or refresh .venv, with the maintainers' tools
	@$(GATE) install

format: ## rewrite the code in the one format
	$(BIN)/ruff check --select I --fix-only .
	$(BIN)/ruff format .

lint: ## ruff
	@$(GATE) lint

types: ## mypy --strict, and pyright as users see us
	@$(GATE) types

layers: ## the import-linter contracts: who may import whom
	@$(GATE) layers

test: ## the suite on PostgreSQL 18 (for a part: .venv/bin/pytest tests/pure)
	@$(GATE) test

test-15: ## the database tests on PostgreSQL 15
	@$(GATE) test-15

sqlalchemy-20: ## the tests that a version of SQLAlchemy could break, on the newest 2.0
	@$(GATE) sqlalchemy-20

check: ## before every commit: format, lint, types, layers, test; changes nothing
	@$(GATE) format lint types layers test

wheel: ## build dist/*, install the wheel elsewhere and run it
	@$(GATE) wheel

ci: ## the gate, all of it
	@$(GATE)

mutants: ## break the lines that keep the guarantees, one by one: each must turn a test red
	$(BIN)/python tests/mutants/run.py

full: ci mutants bench ## the gate, mutants, benchmarks, the long tests, the suite on every newer Python found
	$(BIN)/pytest -m full
	@for version in 3.12 3.13 3.14; do \
		python$$version -c 'import venv, ensurepip' 2>/dev/null || { echo "no python$$version here"; continue; }; \
		echo "== the suite on Python $$version"; \
		venv=$$(mktemp -d) && python$$version -m venv $$venv && \
		PIP_QUIET=2 $$venv/bin/pip install -e '.[test]' && $$venv/bin/python -m pytest; \
		code=$$?; rm -rf "$$venv"; [ $$code = 0 ] || exit $$code; \
	done

bench: ## the benchmarks (alone on the machine, or the figures mean nothing)
	$(BIN)/python tests/bench/drain.py

clean: ## remove what was built or cached; keeps .venv
	rm -rf dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
