# make demo   install into .venv, then explain, compile and run a causal kernel and compare it with its meaning
# make test   all tests this machine can run; FAGEN_REQUIRE=gpu,nvcc,cxx makes what is missing a failure
# make lint   style and types;   make format   put the style right
#
# TORCH=torch==X chooses a torch, PYTHON=python3.12 an interpreter (3.10 to 3.13).

PYTHON ?= python3
TORCH ?= torch
PY := .venv/bin/python
CLANG_FORMAT := $(PY) -c 'import clang_format; clang_format.clang_format()'
HEADERS = $(shell git ls-files 'templates/device/*' 'templates/emulator/*' | grep -E '\.(h|cuh|cpp)$$')

# Tests run in many processes: none of them compiles again what another has read.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint format
.DEFAULT_GOAL := test

# A torch of the machine's own is taken where it is the one asked for. A machine with a GPU also gets pycuda,
# and a compiler where it has none; without them kernels run on the emulator.
.venv/installed: pyproject.toml
	$(PYTHON) -m venv --system-site-packages .venv
	$(PY) -m pip install --quiet '$(TORCH)'
	$(PY) -m pip install --quiet --editable '.[dev]'
	@if command -v nvidia-smi >/dev/null; then \
	  command -v nvcc >/dev/null || extra=,nvcc; \
	  $(PY) -m pip install --quiet --editable ".[cuda$$extra]" || echo "without pycuda: see fagen doctor"; \
	fi
	touch $@

demo: .venv/installed
	$(PY) -m fagen run --head-dim 64 --mask causal --q-len 128 --explain --out out/demo

test: .venv/installed
	$(PY) -m pytest -n auto --dist worksteal

lint: .venv/installed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(CLANG_FORMAT) --dry-run -Werror $(HEADERS)
	$(PY) -m mypy

format: .venv/installed
	$(PY) -m ruff check --fix --exit-zero .
	$(PY) -m ruff format .
	$(CLANG_FORMAT) -i $(HEADERS)
