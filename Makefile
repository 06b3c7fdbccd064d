# Two commands for a fresh machine: `make demo` serves the embedded model, `make test` runs all checks (`make ray` those
# that need Ray). `make check` is the part of them for daily work, some six minutes on two cores.
# TORCH picks another build of PyTorch, e.g. make demo TORCH="torch==2.11.0", and PYTHON another Python.

BIN := .venv/bin
DEMO := demo
PORT ?= 8000
export OMP_NUM_THREADS ?= 2

.PHONY: demo answer check test setup setup-test lint types unit slow gpu-suite ray netns docs dist format clean

# The embedded model; in a clone without its weights, a tiny one whose words mean nothing.
FALLBACK := $(if $(wildcard packages/nano/stretto_nano/nano/config.json),,$(DEMO)/tiny)

demo: setup $(FALLBACK:=/config.json)
	$(BIN)/stretto serve $(FALLBACK) --port $(PORT)

answer: setup $(FALLBACK:=/config.json)
	mkdir -p $(DEMO)
	$(BIN)/stretto generate $(FALLBACK) --text "What do you sound like?" --max-tokens 40 --max-audio-frames 100 --out $(DEMO)/answer.wav

$(DEMO)/tiny/config.json: | setup
	$(BIN)/stretto tiny $(DEMO)/tiny

check: lint types
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto $$(cat tests/check.txt) $(ARGS)

test: setup-test lint types unit

setup:
	@scripts/setup.sh

setup-test:
	@scripts/setup.sh test

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy

# One thread of arithmetic per worker: with as many workers as cores, more would only get in each other's way.
unit:
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto $(ARGS)

# Tests on a Ray cluster of this machine. Apart from the others: Ray is large, and its cluster takes a while to start.
ray: setup-test
	@scripts/setup.sh ray
	OMP_NUM_THREADS=1 $(BIN)/pytest -p no:xdist tests/ray tests/deploy $(ARGS)

# Programs that look for faults for minutes: kills, attacks, fuzzing, memory over many requests.
slow: setup-test
	OMP_NUM_THREADS=1 $(BIN)/pytest -p no:xdist tests/slow $(ARGS)

# All that needs a GPU. Commit, card, versions and result go to one file in bench/results.
gpu-suite:
	$(BIN)/python -m tests.gpu $(ARGS)

# Hosts at addresses of their own, in network namespaces: as root.
netns: setup-test
	STRETTO_NETNS=1 OMP_NUM_THREADS=1 $(BIN)/pytest -p no:xdist tests/engine/test_namespaces.py $(ARGS)

# The documents as a site in build/site.
docs:
	@scripts/setup.sh docs
	$(BIN)/python scripts/site.py

# Wheels and source archives of the engine and of its voice in dist/, installed and tried in a clean environment.
dist: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "build>=1.3"
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m build --outdir dist packages/nano
	$(BIN)/python scripts/check_release.py dist

format:
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist $(DEMO) .mypy_cache .ruff_cache .pytest_cache .hypothesis
