# Each target sets up what it needs on a machine with python3.11 (venv), g++ and apt; nothing else is assumed.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Folders named `proto` and `kernels` would shadow packages of those names if the checkout were on sys.path.
export PYTHONSAFEPATH := 1
# Inductor's own parallel compile pool gains nothing on two cores and outlives its tests.
export TORCHINDUCTOR_COMPILE_THREADS ?= 1

.PHONY: setup system demo test test-slow bench check format proto clean
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
	$(BIN)/pytest -q

test-slow: setup system
	$(BIN)/pytest -q -m slow

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
