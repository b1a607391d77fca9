# make demo | test | lint | bench | mutants | audit RUN=DIR
# TORCH_SPEC: another torch (for example TORCH_SPEC=torch==2.6.0); PIP_ARGS: extra arguments for pip.
PYTHON ?= python3
VENV ?= .venv
TORCH_SPEC ?=
PIP_ARGS ?=
BIN := $(VENV)/bin
RUN ?= runs/demo

.PHONY: install demo test slow lint bench audit mutants proto clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) $(if $(TORCH_SPEC),"$(TORCH_SPEC)",-c constraints.txt torch)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) $(if $(TORCH_SPEC),,-c constraints.txt) -e ".[dev]"
	touch $@

demo: install
	$(BIN)/python tools/demo.py

test: lint
	$(BIN)/python -m pytest -m "not slow"

slow: install
	$(BIN)/python -m pytest -m slow --timeout=1200

lint: install
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: install
	$(BIN)/python benchmarks/overhead.py

audit: install
	$(BIN)/python tools/audit.py $(RUN)

mutants: install
	$(BIN)/python tools/mutants.py

proto: install
	$(BIN)/python -m grpc_tools.protoc -Isrc --python_out=src --pyi_out=src --grpc_python_out=src src/atoll/wire/atoll.proto

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
