# One command per job. Each sets up its own virtual environment in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test check bench bench-read docs clean

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/bioptimus embed examples/CMU-1-Small-Region.svs --out demo-out

# What tests compare our models with. Without what these depend on: timm's would bring another
# torch. Tests that lack it skip, and say so.
.reference: $(VENV)/.installed
	-$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $@ timm==1.0.31 \
	  transformers==5.24.0 tokenizers==0.23.3 safetensors==0.8.0 regex==2026.11.19

test: $(VENV)/.installed .reference
	$(BIN)/python -m pytest

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks

docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench-read: $(VENV)/.installed
	$(BIN)/python -m benchmarks.reading

clean:
	rm -rf $(VENV) .reference build dist demo-out site
