# Two commands do all set-up on a machine with Python and make: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One version for development and CI. The code itself supports torch >= 2.9.
TORCH ?= torch==2.13.0
MEMBERS := backends backends_ddp backends_deepspeed backends_fsdp backends_fp8 backends_xla
INSTALL := -e '.[dev]' $(addprefix -e ,$(MEMBERS))
# The engine of backends_deepspeed is built from source, so the demo does without it. What it compiles is kept here.
DEEPSPEED ?= deepspeed==0.19.8
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/build/torch_extensions
# torch_xla works with one minor version of torch, so its tests have an environment of their own. Without --no-deps it would
# bring gigabytes of CUDA libraries; stand-ins for them do, where there is no GPU (backends_xla/tests/cuda_stubs.py).
XLA_VENV ?= .venv-xla
XLA_ENGINE ?= torch==2.9.1 torch_xla==2.9.0
XLA_NEEDS := absl-py attrs cattrs click filelock fsspec hypothesis jinja2 MarkupSafe mpmath networkx numpy packaging pluggy \
	psutil pytest pytest-timeout pyyaml questionary requests rich safetensors scikit-learn sympy tqdm typing-extensions
# Ranks share the cores; more threads than cores make every test slower.
export OMP_NUM_THREADS ?= 1
PYTEST := $(BIN)/python -m pytest -p no:cacheprovider
FAST := $(PYTEST) -m 'not slow and not nightly and not gpu' -x -q

.PHONY: help demo setup test test-fast fast-core fast-members test-slow test-xla test-gpu lint docs format wheels bench clean

help:  ## Show what can be done
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(VENV)/.installed  ## Install everything for development into .venv

$(VENV)/.installed: pyproject.toml $(addsuffix /pyproject.toml,$(MEMBERS)) core/src/drivetrain/__init__.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet $(INSTALL)
	@touch $@

$(VENV)/.deepspeed: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet setuptools wheel ninja
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BIN)/python -m pip install --quiet --no-build-isolation '$(TORCH)' '$(DEEPSPEED)'
	@touch $@

$(VENV)/.deepspeed-ops: $(VENV)/.deepspeed
	$(BIN)/python -m drivetrain_deepspeed.ops
	@touch $@

demo: setup  ## Set up, then train on real data with two processes
	$(BIN)/drivetrain launch --config_file examples/digits/ddp.yaml examples/digits/train.py

test: setup lint $(VENV)/.deepspeed-ops  ## Everything CI runs
	$(PYTEST) -m 'not nightly'
	$(MAKE) test-xla

test-fast: setup $(VENV)/.deepspeed-ops  ## Under three minutes: no slow tests, two halves side by side
	$(MAKE) -j2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) fast-core fast-members

fast-core:
	$(FAST) core/tests

fast-members:
	$(FAST) $(wildcard backends*/tests) tests benchmarks/tests

test-slow: setup $(VENV)/.deepspeed-ops  ## What is too long for test-fast, and what is too long for CI
	$(PYTEST) -m 'slow or nightly'

test-gpu: setup  ## On a machine with a GPU (its torch must see it: make test-gpu TORCH=torch)
	$(PYTEST) -m gpu -rs tests/test_gpu.py

$(XLA_VENV)/.installed: pyproject.toml backends_xla/pyproject.toml backends_xla/tests/cuda_stubs.py
	$(PYTHON) -m venv $(XLA_VENV)
	$(XLA_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(XLA_VENV)/bin/python -m pip install --quiet --no-deps $(XLA_ENGINE)
	$(XLA_VENV)/bin/python -m pip install --quiet $(XLA_NEEDS)
	$(XLA_VENV)/bin/python -m pip install --quiet --no-deps -e . -e backends -e backends_xla
	$(XLA_VENV)/bin/python backends_xla/tests/cuda_stubs.py \
		$$($(XLA_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') $(XLA_VENV)/cuda_stubs
	@touch $@

ifdef SKIP_XLA
test-xla:  ## backends_xla with its engine, in an environment of its own (SKIP_XLA=1: leave out)
	@echo 'SKIPPED: test-xla, since SKIP_XLA is set'
else
test-xla: $(XLA_VENV)/.installed
	@# Where the pair does not fit, tests are skipped, as in an environment that is not theirs. Here that is a failure.
	$(XLA_VENV)/bin/python -c 'from drivetrain_xla.pairing import check_pair; check_pair()'
	LD_LIBRARY_PATH=$(CURDIR)/$(XLA_VENV)/cuda_stubs$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH} \
		$(XLA_VENV)/bin/python -m pytest -p no:cacheprovider backends_xla/tests
endif

lint: setup  ## Style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup  ## Compare with plain torch and the peers; see benchmarks/README.md
	$(BIN)/python -m pip install --quiet -e '.[bench]'
	set -e; for script in import_time step_overhead transformer_step loader_rate checkpoint fsdp; do \
		$(BIN)/python benchmarks/$$script.py; done

docs: setup  ## Write the reference of hooks anew
	$(BIN)/python docs/generate_hooks.py

format: setup  ## Put the code in shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheels: setup  ## Build every member into dist/
	rm -rf dist
	set -e; for member in . $(MEMBERS); do \
		(cd $$member && $(abspath $(BIN))/python -m hatchling build -t wheel -d $(CURDIR)/dist); done

clean:  ## Remove what was built, the environment included
	rm -rf $(VENV) $(XLA_VENV) build dist */build */dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
