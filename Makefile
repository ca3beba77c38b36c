# Two commands for a newcomer: `make serve` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 8012
STAMP := $(VENV)/.installed

.PHONY: serve test lint format conformance clean

$(STAMP): pyproject.toml constraints.txt
	@echo 'installing into $(VENV): about 1.2 GB, minutes the first time'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

serve: $(STAMP)
	$(BIN)/twining serve demo --host 127.0.0.1 --port $(PORT)

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

conformance: $(STAMP)
	$(BIN)/python -m pytest tests/conformance --golden $${GOLDEN:-../shared/golden}

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
