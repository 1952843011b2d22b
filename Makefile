# Everything a clone needs: `make demo` to see it work, `make test` before a commit. Both set up .venv when it is missing or out of date.
#
#   PYTHON   the interpreter for .venv, 3.11 or newer    make demo PYTHON=python3.12
#   PYTEST   arguments for pytest                        make test PYTEST='tests/unit -x'
#   JOBS     processes that test side by side: five, of which some wait, or three for `make check`

PYTHON ?= python3
PYTEST ?=
JOBS   ?= 5
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
LINK   := .dev/crosstrain

# Files and classes side by side, the longest first (tests/conftest.py).
SIDE_BY_SIDE = $(BIN)/python -m pytest -n $(JOBS) --dist loadscope --no-loadscope-reorder --durations 40 --durations-min 5

# Images and shells that forbid Python to keep what it has compiled would have each of some thousand processes compile all sources anew.
unexport PYTHONDONTWRITEBYTECODE

SHELL  := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.PHONY: help demo test test-thorough check clusters faults translations conformance lint types format bench install clean distclean

help:
	@echo 'make demo       train on TensorFlow (async) and on torch (sync), three nodes each, and compare'
	@echo 'make test       ruff, mypy and the tests, in ten minutes on two cores'
	@echo 'make test-thorough  further cases of them, and the long tests, in half an hour'
	@echo 'make check      ruff, mypy and the quick unit tests, for the daily loop'
	@echo 'make conformance  every backend, optimiser and number of workers against the float64 reference; all slow tests'
	@echo 'make clusters   runs on hosts behind ssh, Slurm and Ray, and their faults'
	@echo 'make faults     kills, stops and cuts at random steps of runs that go on by themselves (KIND=worker SEED=7)'
	@echo 'make translations  trains named models and computes 200 random modules on torch and on TensorFlow (MINUTES=60)'
	@echo 'make lint       ruff and mypy alone;  make format  puts the sources in shape'
	@echo 'make bench      the speed of trainer beside hand-written loops and other trainers'
	@echo 'make clean      remove what was built;  make distclean  also .venv'

demo: $(VENV)/.all
	@out=runs/demo-$$(date +%Y%m%d-%H%M%S); \
	same="--nodes 3 --data glyphs28 --batch-size 10 --epochs 1 --out $$out"; \
	run() { echo "== $$*" >&2; "$$@"; }; \
	run $(BIN)/trainer run --backend tf --mode async $$same --name tf-async; \
	run $(BIN)/trainer run --backend torch --mode sync $$same --name torch-sync; \
	run $(BIN)/trainer compare $$out/tf-async $$out/torch-sync

test: lint
	@echo '== pytest'
	@$(SIDE_BY_SIDE) $(PYTEST)

test-thorough: $(VENV)/.dev
	@echo '== pytest (thorough tests)'
	@$(SIDE_BY_SIDE) -m 'thorough and not slow and not clusters' $(PYTEST)

check: JOBS = 3
check: lint
	@echo '== pytest (quick unit tests)'
	@$(SIDE_BY_SIDE) tests/unit --shorter-than 0.05 $(PYTEST)
	@echo 'make test runs also tests/cluster, tests/faults and tests/browser'

clusters: $(VENV)/.dev
	@$(BIN)/python -m pytest -m 'clusters or cluster' tests/cluster/test_ssh.py tests/cluster/test_slurm.py tests/cluster/test_gpus.py \
	    tests/cluster/test_ray.py tests/cluster/test_ray_jobs.py $(PYTEST)

faults: $(VENV)/.dev
	@cd tests && PYTHONPATH=. ../$(BIN)/python -m fault_injection --out ../runs/faults $(if $(KIND),--kind $(KIND)) $(if $(SEED),--seed $(SEED))

translations: $(VENV)/.dev
	@cd tests && PYTHONPATH=. ../$(BIN)/python -m imported_coverage --out ../runs/imported-coverage $(if $(MINUTES),--minutes $(MINUTES))

conformance: $(VENV)/.dev
	@CROSSTRAIN_CONFORMANCE=full $(BIN)/python -m pytest --timeout 1200 -m '' -k 'conformance or toy or slow' $(PYTEST)

lint: $(VENV)/.dev $(LINK)
	@echo '== ruff'
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory types

types: $(VENV)/.dev $(LINK)
	@echo '== mypy'
	@$(BIN)/mypy -p crosstrain -p crosstrain_debian_text

format: $(VENV)/.dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(VENV)/.bench
	@$(BIN)/python -m benchmarks

install: $(VENV)/.all

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    found=$$($(PYTHON) --version 2>/dev/null || echo 'not to be run'); \
	    echo "Python 3.11 or newer is needed; $(PYTHON) is $$found. Name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.all: pyproject.toml | $(BIN)/python
	@echo 'installing crosstrain with TensorFlow and torch in $(VENV) (minutes the first time)'
	@$(PIP) -e '.[all]'
	@touch $@

$(VENV)/.dev: pyproject.toml examples/debian_text/pyproject.toml | $(BIN)/python
	@echo 'installing crosstrain with TensorFlow, torch and the tools for development in $(VENV) (minutes the first time)'
	@$(PIP) -e '.[all,dev]' -e ./examples/debian_text
	@touch $(VENV)/.all $@

$(VENV)/.bench: pyproject.toml | $(BIN)/python
	@echo 'installing crosstrain with the peers of the benchmark in $(VENV) (minutes the first time)'
	@$(PIP) -e '.[bench]'
	@touch $(VENV)/.all $@

# The packages lie at the root of the repository, but are imported as crosstrain.*; type checkers see them so through this link.
$(LINK):
	@mkdir -p .dev
	@ln -sfn .. $@

clean:
	rm -rf build dist *.egg-info examples/*/{build,*.egg-info} .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) .dev
