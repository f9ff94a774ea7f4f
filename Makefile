# make setup   everything this machine needs to run sandboxes (asks nothing, repeatable)
# make demo    set-up, then a two-minute tour that starts, forks and rewinds sandboxes
# make test    set-up, then all tests
# make lint    ruff, mypy and the generated client
# make bench   set-up, then the benchmarks
# make clean   remove .venv, build products and caches (not /var/lib/forkyard)
# ARGS go to the program that is run, SETUP to set-up: make test ARGS="-k fork" SETUP=--newest
.DEFAULT_GOAL := help
.PHONY: help venv setup demo test lint bench clean

BIN := .venv/bin
ARGS ?=
SETUP ?=

help:
	@sed -n 's/^# //p' Makefile

venv:
	@tools/venv.sh

setup: venv
	@$(BIN)/forkyard setup $(SETUP)

demo: setup
	@$(BIN)/python demo/run.py $(ARGS)

# Three workers, since a test mostly waits for a sandbox; what shares a machine-wide resource
# stays together by its xdist_group. What fails is tried once more, alone.
test: setup
	@[ "$$(id -u)" != 0 ] || $(BIN)/forkyard setup --engine qemu || echo "tests of microVMs are skipped"
	@$(BIN)/python tools/run_tests.py $(ARGS)

lint: venv
	@$(BIN)/ruff check .
	@$(BIN)/mypy src
	@$(BIN)/python tools/make_sync.py --check

bench: setup
	@$(BIN)/python -m bench $(ARGS)

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache src/*.egg-info src/forkyard/agent/fy-agent
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
