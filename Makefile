# make install | demo | test | test-all | parity | faults | mutants | bench | gpu | lint | docs | clean        (see README.md)
# The first of these that is installed; CI and the timings in the docs use 3.11.
PYTHON ?= $(or $(firstword $(foreach minor,11 12 13,$(shell command -v python3.$(minor) 2>/dev/null))),python3)
# The pinned packages are those of torch 2.13; with STACK=2.14 those of torch 2.14, in an environment of its own.
STACK  ?= 2.13
OTHER  := $(if $(filter-out 2.13,$(STACK)),-$(STACK))
LOCK   := requirements/cpu$(OTHER).lock
VENV   := .venv$(OTHER)
BIN    := $(VENV)/bin
# On a machine where `pip install torch` brings the CUDA build, name PyTorch's CPU wheel index here.
TORCH_INDEX ?=
PIP_FLAGS := --disable-pip-version-check --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
STAMP  := $(VENV)/.installed
# Tests are shared out among three processes, on two cores, since ranks wait for one another; the one that is done first
# takes over half of what is left to another.
WORKERS := -n 3 --dist worksteal
export OMP_NUM_THREADS ?= 1
# Tests start dozens of interpreters, which need not compile the same modules again each.
test test-all: export PYTHONDONTWRITEBYTECODE :=

.PHONY: docs install demo test test-all parity faults mutants bench gpu lint clean

install: $(STAMP)

$(STAMP): $(LOCK) pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	  2>/dev/null || { echo "This needs Python 3.11, 3.12 or 3.13 with venv; '$(PYTHON)' does not qualify. Install one (such as the"; \
	  echo "packages python3.11 and python3.11-venv, or 'uv python install 3.11') or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; \
	  exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python requirements/check_torch.py $(LOCK) $(PIP_FLAGS)
	@echo "Installing the pinned packages into $(VENV) (a minute or two) ..."
	@$(BIN)/pip install $(PIP_FLAGS) --no-deps -r $(LOCK)
	@$(BIN)/pip install $(PIP_FLAGS) --no-deps --no-build-isolation -e .
	@$(BIN)/dmt doctor
	@touch $@

demo: install
	$(BIN)/dmt demo $(if $(DATA),--data "$(DATA)") $(DEMO_FLAGS)

test: install
	$(BIN)/python -m pytest -m "not slow" $(WORKERS)

test-all: install
	$(BIN)/python -m pytest $(WORKERS)

# Every scheme, pooling, topology, id route and precision against the plain module, 2,496 cases, and 200 random mixtures
# of options; some 25 minutes.
parity: install
	MIXTURES_SEED=$(SEED) $(BIN)/python -m pytest tests/dmt/test_parity.py tests/dmt/test_mixtures.py --durations=0

# Ranks of runs in five layouts killed 100 times, by SIGKILL and SIGTERM and after SIGSTOP; 2,000 files and settings that
# nobody meant; some twenty minutes.
SEED ?= $(shell date +%s)
faults: install
	KILLS_SEED=$(SEED) $(BIN)/python -m pytest tests/training/test_faults.py tests/test_fuzz.py --durations=0 --hypothesis-seed=$(SEED)

# Deliberate faults in the library, each of which the test named beside it must catch; at most 20 minutes.
mutants: install
	$(BIN)/python -m tests.mutants $(MUTANTS)

# Step times of everything on emulated hosts; as root, some 45 minutes, on a machine that does nothing else.
bench: install
	$(BIN)/python -m benchmarks.bench $(BENCH_FLAGS)

# What one rank on one GPU does: environment, parity, step time and memory; in the environment that is there, since that
# of `make install` has no CUDA build (docs/status.md).
gpu:
	@test -x $(BIN)/python || { echo "There is no $(VENV): docs/install.md, By hand, makes one with the CUDA build."; exit 2; }
	$(BIN)/python -m benchmarks.gpu $(GPU_FLAGS)

# The pages as a site, in build/site, with an environment of its own: neither torch nor the library is needed. A broken
# link or a docstring that cannot be read is an error.
DOCS := .venv-docs
docs: $(DOCS)/.installed
	@$(DOCS)/bin/python docs/build_site.py
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet
	@echo "build/site/index.html"

$(DOCS)/.installed: requirements/docs.txt
	@test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/pip install $(PIP_FLAGS) -r requirements/docs.txt
	@touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p dmt

clean:
	rm -rf .venv .venv-* build runs demo_output *.egg-info .pytest_cache .mypy_cache .ruff_cache
