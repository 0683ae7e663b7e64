# Each target sets up what it needs on a machine with python3.11 (venv), g++ and apt; nothing else is assumed.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
# Test files side by side. What has a time to keep, or both cores to itself, is marked `apart` and runs alone.
JOBS ?= 2
STAMP := $(VENV)/.installed
PYTHON211 ?= python3.12
VENV211 ?= .venv211
STAMP211 := $(VENV211)/.installed
# Folders named `proto` and `kernels` would shadow packages of those names if the checkout were on sys.path.
export PYTHONSAFEPATH := 1
# Inductor's own parallel compile pool gains nothing on two cores and outlives its tests.
export TORCHINDUCTOR_COMPILE_THREADS ?= 1

.PHONY: setup system demo test test-slow test-torch211 bench check format proto clean
setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch triton
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# Tests start a real redis-server and read binaries with objdump (binutils).
system:
	@command -v redis-server >/dev/null && command -v objdump >/dev/null && command -v g++ >/dev/null || \
	  { SUDO=; test "$$(id -u)" = 0 || SUDO=sudo; $$SUDO apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive $$SUDO apt-get install -y -qq redis-server binutils g++ >/dev/null; }

demo: setup
	$(BIN)/python tests/demo.py

test: setup system
	$(BIN)/pytest -q -n $(JOBS) --dist loadfile -m "not slow and not apart"
	$(BIN)/pytest -q -m "apart and not slow"

test-slow: setup system
	$(BIN)/pytest -q -n $(JOBS) --dist loadfile -m "slow and not apart"
	$(BIN)/pytest -q -m "slow and apart"

# What depends on torch, on the oldest torch and another Python. By hand, never in CI: its CUDA wheels are 5 GB.
test-torch211: $(STAMP211) system
	$(VENV211)/bin/pytest -q tests/proto tests/kernels tests/passes tests/client tests/server/worker \
	  tests/e2e/test_models.py tests/e2e/test_round_trip.py

$(STAMP211): pyproject.toml constraints.txt
	test -x $(VENV211)/bin/python || $(PYTHON211) -m venv $(VENV211)
	sed -e 's/^torch==.*/torch==2.11.0/' -e 's/^triton==.*/triton==3.6.0/' constraints.txt >$(VENV211)/constraints.txt
	$(VENV211)/bin/python -m pip install --quiet --disable-pip-version-check -c $(VENV211)/constraints.txt torch triton
	$(VENV211)/bin/python -m pip install --quiet --disable-pip-version-check -c $(VENV211)/constraints.txt -e '.[dev]'
	touch $@

bench: setup system
	$(BIN)/python tests/bench/run.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	PYTHON=$(CURDIR)/$(BIN)/python bash proto/generate.sh >/dev/null 2>&1
	git diff --exit-code --stat -- proto

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: setup
	PYTHON=$(CURDIR)/$(BIN)/python bash proto/generate.sh

clean:
	rm -rf $(VENV) build dist
