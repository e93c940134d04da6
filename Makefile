# Every target does its own set-up: a fresh clone needs nothing but Python 3.11+ and make.
# Every install goes through the locks. TORCH says which torch (docs/install.md): cuda, cpu, installed, proven;
# auto takes what .venv was made with, and for a new one cuda where an NVIDIA driver is, otherwise cpu.

PYTHON ?= python3
TORCH  ?= auto
VENV   ?= .venv
BIN    := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests and ranks are processes: without its bytecode each would compile the whole package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help ladder train finetune test test-changed test-trackers test-planted test-all test-slow test-gpu check docs docs-site format bundle lock clean FORCE
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

ladder: $(VENV)/.run ## measure what each technique gains on this machine (at most ten minutes), with a report
	$(BIN)/rush ladder here

train: $(VENV)/.run ## train a small model on this machine and see it learn (a few minutes on two cores)
	$(BIN)/rush train tiny

# Each part is kept: a second call resumes with the missing ones. Start over with rm -r runs/finetune.
FINETUNE := runs/finetune
finetune: $(VENV)/.run ## a small chat model on this machine: pretrain, LoRA, merge, DPO, answers before and after, export
	test -d $(FINETUNE)/base || $(BIN)/rush train tiny --out $(FINETUNE)/base
	test -d $(FINETUNE)/lora || $(BIN)/rush train sft-lora-tiny model.init_from=$(FINETUNE)/base data.tokenizer=model --out $(FINETUNE)/lora
	test -d $(FINETUNE)/merged || $(BIN)/rush merge $(FINETUNE)/lora --to $(FINETUNE)/merged
	test -d $(FINETUNE)/dpo || $(BIN)/rush train dpo-tiny model.init_from=$(FINETUNE)/merged data.tokenizer=model --out $(FINETUNE)/dpo
	$(BIN)/rush evaluate $(FINETUNE)/lora --against $(FINETUNE)/base --answers 3 --limit 300
	$(BIN)/rush evaluate $(FINETUNE)/dpo --against $(FINETUNE)/merged --answers 0
	test -d $(FINETUNE)/exported || $(BIN)/rush export $(FINETUNE)/dpo --to $(FINETUNE)/exported
	@echo "Talk to it: $(BIN)/rush chat $(FINETUNE)/lora   (/switch shows what the base would have said)"

# A fifth of the tests' time is waiting (for ranks, kills and starts): one worker more than there are cores fills it.
WORKERS ?= 3
test: $(VENV)/.dev ## the tests: some 11 minutes on two cores, a fifth of it lives
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-changed: $(VENV)/.dev ## the tests of what changed since the last commit (or since BASE=…)
	tests=$$($(BIN)/python scripts/changed_tests.py $(BASE)); test -z "$$tests" || $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $$tests

test-trackers: ## the tests of W&B, MLflow and trackio, with the real libraries in an environment of their own, offline
	$(PYTHON) scripts/install.py $(VENV)-trackers --torch $(TORCH) --extras dev,trackers
	$(VENV)-trackers/bin/python -m pytest tests/training/test_trackers.py

# In a copy of the tree, one bug at a time; ARGS="--area data", ARGS="--only NAME" try some of them.
test-planted: $(VENV)/.dev ## put back some two hundred bugs, one at a time: which share do the tests of `make test` catch?
	$(BIN)/python -m tests.planted --jobs 2 $(ARGS)

# The lock has two versions of torch: the one in .venv, and the other in a virtual environment of its own. There every pair
# of techniques lives in the covering array; each pair for itself is another half of the time.
OTHER = $(if $(filter cpu,$(shell cat $(VENV)/.torch)),proven,cpu)
# What passed on exactly this tree is remembered beside the environment: after an interruption the same command resumes, and
# after a whole green run, which $(VENV)/passed.jsonl.runs lists, it begins anew (or after rm $(VENV)/passed.jsonl).
test-all: $(VENV)/.dev ## the tests, with the slow ones, on both versions of torch; an interrupted run resumes
	$(MAKE) test-slow
	$(MAKE) test-slow VENV=.venv-$(OTHER) TORCH=$(OTHER) \
	  ARGS="--deselect tests/lives/test_pairs.py::test_every_allowed_pair_lives_alone"

test-slow: $(VENV)/.dev ## the tests, with the slow ones, on the torch in .venv
	$(BIN)/python -m pytest -p tests.passed_before --passed $(VENV)/passed.jsonl -n $(WORKERS) --dist worksteal -m 'not gpu' $(ARGS)

# On a GPU machine without network the dependencies are there already; what is missing travels in bundle/. Most of the
# time is the compiler's, on the host: with a large card, GPU_WORKERS=8 takes a fraction of it. What times the card or fills
# it (marker alone) comes after the others, one by one.
GPU_WORKERS ?= 1
GPU_PYTEST   = PYTHONPATH=$(CURDIR)/bundle $(PYTHON) -m pytest -p no:cacheprovider -p no:benchmark --timeout 180 --tb short --durations 30 -vv
test-gpu: ## the GPU tests, with the Python at hand (no virtual environment, see `make bundle`)
	$(GPU_PYTEST) -m 'gpu and not alone' -n $(GPU_WORKERS) --dist worksteal
	$(GPU_PYTEST) -m 'gpu and alone'

check: $(VENV)/.dev ## format, lint, types, import contracts, spelling, links and the site, public names, the lock on every platform (OFFLINE=1 without index)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell README.md CONTRIBUTING.md CHANGELOG.md docs rush scripts examples recipes ladders
	$(BIN)/python -m pytest tests/test_public_names.py tests/test_docs.py tests/test_site.py
	$(BIN)/python scripts/lock.py check

docs: $(VENV)/.dev ## write the generated pages: techniques, recipe keys, explanations, the guide, planted bugs
	$(BIN)/python scripts/technique_pages.py
	$(BIN)/python scripts/recipe_page.py
	$(BIN)/python scripts/cli_page.py
	$(BIN)/python scripts/family_page.py
	$(BIN)/python scripts/explain_pages.py
	$(BIN)/python scripts/guide_page.py
	$(BIN)/python scripts/several_devices_page.py
	$(BIN)/python -m tests.planted --page docs/planted.md

docs-site: $(VENV)/.dev ## the documentation as a site in site/, without network (open site/index.html)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(VENV)/.dev ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# What an offline Python 3.12 x86-64 machine with torch lacks, unpacked so that PYTHONPATH=bundle finds it: our
# dependencies, and the libraries techniques and benches measure against. It has to travel, so what such a machine
# never loads is left out: bitsandbytes for other toolkits, torchao's compiled CUTLASS kernels and its tests.
BUNDLE_PLATFORMS ?= manylinux2014_x86_64 manylinux_2_24_x86_64 manylinux_2_28_x86_64
BUNDLE_PYTHON    ?= 3.12
BUNDLE_CUDA      ?= 130
BUNDLE_PACKAGES  ?= pydantic pydantic-core typer annotated-types annotated-doc typing-inspection typing-extensions shellingham click rich pytest-timeout pytest-xdist execnet \
                    liger-kernel cut-cross-entropy torchao bitsandbytes trl datasets dill multiprocess xxhash
bundle: ## gather the wheels an offline GPU machine lacks into bundle/
	rm -rf bundle
	PIP_CONSTRAINT=$(CURDIR)/locks/cuda.txt $(PYTHON) -m pip install --quiet --target bundle --no-deps --no-compile --only-binary=:all: \
	  $(addprefix --platform ,$(BUNDLE_PLATFORMS)) --python-version $(BUNDLE_PYTHON) --implementation cp $(BUNDLE_PACKAGES)
	find bundle/bitsandbytes -name 'libbitsandbytes_*.so' ! -name 'libbitsandbytes_cuda$(BUNDLE_CUDA).so' \
	  ! -name libbitsandbytes_cpu.so -delete
	rm -rf bundle/test bundle/torchao/_C*.so
	@du -sh bundle

# A virtual environment of its own: the lock is made where the one before it may not install.
lock: ## resolve every dependency for every platform: locks/, and the sizes in README and docs/install.md (UPGRADE=1: newest)
	test -x $(VENV)-lock/bin/uv || { $(PYTHON) -m venv $(VENV)-lock && $(VENV)-lock/bin/pip install --quiet uv packaging; }
	$(VENV)-lock/bin/python scripts/lock.py $(if $(UPGRADE),--upgrade)
	$(VENV)-lock/bin/python scripts/install_page.py

# .torch holds what TORCH came to; its time changes only when that does.
$(VENV)/.torch: FORCE
	@$(PYTHON) scripts/install.py $(VENV) --torch $(TORCH)

$(VENV)/.run: pyproject.toml $(wildcard locks/*.txt) $(VENV)/.torch
	@$(PYTHON) scripts/install.py $(VENV) --extras ''
	@touch $@

$(VENV)/.dev: pyproject.toml $(wildcard locks/*.txt) $(VENV)/.torch
	@$(PYTHON) scripts/install.py $(VENV) --extras dev
	@touch $@ $(VENV)/.run

clean: ## remove the virtual environments and caches (never runs/)
	rm -rf $(VENV) $(VENV)-* bundle site .pytest_cache .mypy_cache .ruff_cache
