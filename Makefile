SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help setup test core long quickstart pretrained lint chaos modes fuzz upstream docs dist clean

SEED ?= 0
LOCK := requirements/lock.txt
TORCH := requirements/torch.txt
TORCH_INDEX := https://download.pytorch.org/whl/cpu
# The stamps say what .venv holds. Another lock, or a repository that was moved, builds it anew.
STACK := .venv/.stack-$(shell { echo '$(CURDIR)'; cat $(TORCH) $(LOCK); } | sha256sum | cut -c1-12)
PROJECT := .venv/.project
DOCS := .venv-docs/.stamp
# The first of these that is Python 3.11, 3.12 or 3.13 makes .venv.
PYTHON ?= python3.11 python3.12 python3.13 python3 python

# PyTorch looks for ninja on the PATH whenever DeepSpeed loads a C++ op, and the ops belong to this .venv's headers.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export TORCH_EXTENSIONS_DIR := $(CURDIR)/.venv/torch_extensions

help:
	@echo "make setup       .venv with the whole CPU stack (Python 3.11 to 3.13 with headers, a C++ compiler)"
	@echo "make test        set up, then pytest; ARGS='-k lopti' passes arguments on"
	@echo "make core        set up, then the tests of the method and its engine alone, and two steps without the other rooms"
	@echo "make long        set up, then the tests that make test leaves out: resumed runs are equal bit for bit, study.replicate as a toy"
	@echo "make quickstart  set up, then train a small policy on Knights and Knaves; SEED=1 changes the seed"
	@echo "make pretrained  set up, then train SmolLM2-135M-Instruct to calculate"
	@echo "make lint        set up, then ruff (rules and format), mypy, import-linter, and hadolint"
	@echo "make chaos       set up, then inject faults into tiny trainings, one by one; ARGS=--nemesis SEED=1 draws eight for one run"
	@echo "make modes       set up, then train two steps in each of OpenRLHF's modes; ARGS=--short takes the part of make long"
	@echo "make fuzz        set up, then look for inputs that break graders, server, data or maths; EXAMPLES=10000 SEED=1"
	@echo "make upstream    set up, then say what the newest OpenRLHF, vLLM, Ray, ... move of what the code depends on"
	@echo "make docs        build the documentation into site/ (its packages go into .venv-docs)"
	@echo "make dist        set up, build dist/, check it, and train with its wheel beside stock OpenRLHF"
	@echo "make clean       remove .venv and build products; outputs/ stays"

setup: $(PROJECT)

# The tests' models are too small for a second thread, and threads that wait for each other take the cores of others.
test core long chaos dist: export OMP_NUM_THREADS := 1
# Ray's workers would yield to everything else, and the tests wait for them.
test core long chaos dist: export RAY_worker_niceness := 0

ifneq ($(strip $(ARGS)),)
test: setup
	@.venv/bin/python -m pytest $(ARGS)
else
# Two processes, for two cores: one for the tests that start much of the stack, one after the other, and one for the rest.
# The first takes over what needs no other room.
SECOND = $(sort $(shell grep -rls 'mark.whole_stack' tests --include=test_*.py)) tests/forward tests/grading
test: setup
	@echo "make test: eleven minutes on two idle cores. What starts vLLM or Ray runs beside the rest, and is shown at the end."
	.venv/bin/python -m pytest -m "not long" --durations 25 $(SECOND) >.venv/whole-stack.log 2>&1 &
	whole_stack=$$!
	trap '{ pkill -P $$whole_stack; kill $$whole_stack; } 2>/dev/null || true' EXIT
	rest=0
	.venv/bin/python -m pytest -m "not long" --durations 25 $(SECOND:%=--ignore %) || rest=$$?
	kill -0 $$whole_stack 2>/dev/null && echo "make test: waits for the tests of the whole stack: tail -f .venv/whole-stack.log"
	status=0
	wait $$whole_stack || status=$$?
	cat .venv/whole-stack.log
	exit $$((rest ? rest : status))
endif

core: setup
	@.venv/bin/python -m pytest -m "not whole_stack and not long" tests/forward tests/update tests/test_token_*.py
	.venv/bin/python -m pytest tests/test_core.py -k "not stock"

long: setup
	@.venv/bin/python -m pytest -m long --durations 25

quickstart: setup
	@.venv/bin/python -m arlopti_openrlhf quickstart --seed $(SEED) $(ARGS)

pretrained: setup
	@.venv/bin/python -m arlopti_openrlhf quickstart --task sums --seed $(SEED) $(ARGS)

lint: setup
	@.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports >.venv/lint-imports.log || { cat .venv/lint-imports.log; exit 1; }
	.venv/bin/hadolint docker/*.Dockerfile

# The suites of tests/long are programs too, besides what pytest takes of them.
chaos modes: export PYTHONPATH := $(CURDIR)/tests/long

chaos: setup
	@.venv/bin/python -m chaos.run --seed $(SEED) $(ARGS)

modes: setup
	@.venv/bin/python -m modes.run $(ARGS)

fuzz: setup
	@.venv/bin/python -m pytest -m hypothesis --hypothesis-profile fuzz --hypothesis-seed $(SEED) --timeout 0 $(ARGS)

upstream: setup
	@PYTHONPATH=tests .venv/bin/python -m contract.newest

# An environment of its own: what builds the site is not what is trained with. It reads the sources, and imports none.
docs: $(DOCS)
	@# Not --quiet, which keeps warnings from --strict too.
	PATH="$(CURDIR)/.venv-docs/bin:$$PATH" NO_MKDOCS_2_WARNING=true .venv-docs/bin/python -m mkdocs build --strict
	echo "docs: site/index.html"

$(DOCS): requirements/docs.txt
	@rm -rf .venv-docs
	python3 -m venv .venv-docs
	.venv-docs/bin/python -m pip install --no-input --disable-pip-version-check --progress-bar off --no-compile --no-deps \
		--require-hashes --requirement $< >.venv-docs/install.log 2>&1 || { tail -n 25 .venv-docs/install.log >&2; exit 1; }
	touch $@

# What is uploaded is what trains: the wheel of dist/, which is built from the sdist there.
dist: export ARLOPTI_DIST := $(CURDIR)/dist
dist: setup
	@rm -rf dist
	uv tool run --system-certs --from build==1.6.1 python -m build >.venv/build.log 2>&1 || { cat .venv/build.log; exit 1; }
	uv tool run --system-certs twine@7.0.0 check --strict dist/*
	.venv/bin/python -m pytest tests/test_wheel.py

clean:
	rm -rf .venv .venv-* site build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache

$(STACK): export VIRTUAL_ENV := $(CURDIR)/.venv
$(STACK):
	@# All that is missing is said before the old .venv goes.
	if [ "$$(uname -sm)" != "Linux x86_64" ]; then
		echo "make setup: needs Linux on x86-64, for which $(LOCK) has wheels, and this is $$(uname -sm)" >&2
		exit 1
	fi
	if [[ "$(CURDIR)" == *[[:space:]]* ]]; then
		echo "make setup: $(CURDIR) has a space in its path, which the linker of DeepSpeed's ops cannot take: move it" >&2
		exit 1
	fi
	python=
	found=none
	for name in $(PYTHON); do
		# Not the old .venv's, which goes.
		candidate=$$(PATH=$${PATH//"$(CURDIR)/.venv/bin:"/}; type -P $$name) || continue
		$$candidate -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || continue
		$$candidate -c 'import ensurepip, venv' 2>/dev/null || { found="$$name without it"; continue; }
		python=$$candidate
		break
	done
	if [ -z "$$python" ]; then
		echo "make setup: needs Python 3.11, 3.12 or 3.13 with its venv module, as in python3-venv, and found $$found" >&2
		exit 1
	fi
	include=$$($$python -c 'import sysconfig; print(sysconfig.get_path("include"))')
	if [ ! -e "$$include/Python.h" ]; then
		echo "make setup: needs Python's headers, as in the package $${include##*/}-dev: no $$include/Python.h" >&2
		exit 1
	fi
	if ! command -v "$${CXX:-c++}" >/dev/null; then
		echo "make setup: needs a C++ compiler (g++): DeepSpeed compiles its CPU optimizer" >&2
		exit 1
	fi
	if ! $$python -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then
		echo "make setup: needs libnuma.so.1, as in the package libnuma1: vLLM links to it" >&2
		exit 1
	fi
	rm -rf .venv
	log=.venv/setup.log
	install=".venv/bin/python -m pip install --no-input --disable-pip-version-check --progress-bar off --no-compile"
	echo "set-up 1/6: .venv with $$($$python --version), $$python; details in $$log"
	$$python -m venv .venv
	trap 'status=$$?; if [ $$status != 0 ]; then tail -n 25 $$log >&2; echo "make setup: failed, see $$log" >&2; fi' EXIT
	torch=$$(grep '^torch==' $(TORCH))
	echo "set-up 2/6: $$torch"
	# The configured index first, so that a machine without access to PyTorch's own does not wait for it.
	{ $$install --no-deps "$$torch" || $$install --no-deps --index-url $(TORCH_INDEX) "$$torch"; } >>$$log 2>&1 || {
		echo "set-up 2/6: no index has that build, so PyPI's, with gigabytes of CUDA's libraries"
		$$install "$${torch%+*}" >>$$log 2>&1
	}
	echo "set-up 3/6: $$(grep -c == $(LOCK)) pinned packages"
	for name in uv openrlhf; do grep "^$$name==" $(LOCK) >.venv/$$name.txt; done
	grep -v '^openrlhf==' $(LOCK) >.venv/lock.txt
	cut -d ' ' -f 1 $(LOCK) | grep == >.venv/versions.txt
	# uv takes seconds, but does not read pip's configuration: where it finds no index, pip does the same in minutes. It
	# takes no hashes for what two packages are built with, only versions.
	pinned="--no-deps --require-hashes --requirement"
	{ $$install $$pinned .venv/uv.txt && uv pip install --system-certs --build-constraints $(LOCK) $$pinned .venv/lock.txt ||
		PIP_CONSTRAINT=.venv/versions.txt $$install $$pinned .venv/lock.txt; } >>$$log 2>&1
	# OpenRLHF has no wheel for 3.13. Its wheels are pure Python, so the one for 3.12 serves all.
	$$install $$pinned .venv/openrlhf.txt --only-binary :all: --python-version 3.12 \
		--target "$$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" >>$$log 2>&1
	echo "set-up 4/6: bytecode"
	# A run starts some ten processes that import PyTorch, vLLM and DeepSpeed. Each would compile what none had kept.
	.venv/bin/python -m compileall -q -j 0 .venv/lib >>$$log 2>&1 || true  # some packages hold templates, not Python
	echo "set-up 5/6: DeepSpeed's C++ ops"
	# Compiled here once. Ranks that start together would wait for each other's build, or for the lock of a killed one.
	DS_ACCELERATOR=cpu .venv/bin/python -c "from deepspeed.accelerator import get_accelerator as accelerator; \
		[accelerator().create_op_builder(op).load() for op in ('FusedAdamBuilder', 'ShareMemCommBuilder')]" >>$$log 2>&1
	touch $@

$(PROJECT): $(STACK) setup.py pyproject.toml
	@echo "set-up 6/6: arlopti_openrlhf"
	.venv/bin/python -m pip install --no-input --disable-pip-version-check --no-deps --no-build-isolation --editable . \
		>>.venv/setup.log 2>&1 || { tail -n 25 .venv/setup.log >&2; exit 1; }
	touch $@
