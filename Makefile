# All targets share one virtual environment, .venv, and install what they need into it.

PYTHON ?= python3
CONFIG ?= data/sample/corpus.yaml
# Default: one per core.
WORKERS ?=
# The sample is small: with fewer tokens per step it has 44 steps, enough to see the loss fall.
SAMPLE_OPTIONS := $(if $(filter data/sample/corpus.yaml,$(CONFIG)),--tokens-per-step 2048)
OPTIONS ?=
BIN := .venv/bin
TORCH := $(patsubst torch==%,%,$(shell grep ^torch== constraints.txt))
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt

# One thread per process: the workers use all cores. More than 8 of them could need more memory than there is. The tests
# start hundreds of processes: without bytecode files, each would compile the sources again.
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup extras corpus train diagnose doctor inspect report quick test check docs bench faults mutants bad-inputs fuzz lock schemas sample clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | awk -F'\t' '{printf "  make %-10s %s\n", $$1, $$2}'
	@echo "  CONFIG=$(CONFIG) WORKERS=$(or $(WORKERS),one per core)"

.venv/.created:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15) and "packcorpus needs Python 3.11 to 3.14, $(PYTHON) is " + sys.version.split()[0] + "; name another with make PYTHON=python3.12")'
	@echo 'setting up .venv'; $(PYTHON) -m venv .venv
	@touch $@

# Luigi 3.8 says that it needs Python 3.13 or an older one, but it runs on 3.14.
.venv/.setup: .venv/.created pyproject.toml constraints.txt
	@echo 'installing the packing core'; $(PIP) --no-deps --ignore-requires-python luigi
	@$(PIP) --editable .
	@touch $@

.venv/.test: .venv/.setup
	@echo 'installing the requirements of the tests'; $(PIP) --editable '.[test]'
	@touch $@

# Every file is compared with its digest in requirements.lock. The second command installs packcorpus itself and, with
# another Python than CI's, torch.
locked: .venv/.created
	@echo 'installing requirements.lock'; $(PIP) --require-hashes --no-deps --ignore-requires-python --requirement requirements.lock
	@$(PIP) --no-build-isolation --editable '.[test]'
	@touch .venv/.setup .venv/.test .venv/.train

.venv/.train: .venv/.setup
	@echo 'installing the requirements of training (some minutes, about 2 GB)'; $(PIP) --editable '.[train]'
	@touch $@

extras: .venv/.train  ## add the requirements of training (transformers, torch, and more)

report: .venv/.setup  ## write an HTML report of the latest corpus
	@$(BIN)/packcorpus report

setup: .venv/.setup  ## .venv with the packing core and the commands luigi and packcorpus

corpus: .venv/.setup  ## pack CONFIG (default: the bundled sample)
	@$(BIN)/luigi --module pipeline PackCorpus --config $(CONFIG) $(addprefix --workers ,$(WORKERS))

train: .venv/.train  ## train an adapter on CONFIG's corpus; settings: OPTIONS="--max-steps 50"
	@$(BIN)/luigi --module pipeline TrainAdapter --config $(CONFIG) $(addprefix --workers ,$(WORKERS)) --options "$(SAMPLE_OPTIONS) $(OPTIONS)"

diagnose: .venv/.train  ## find out which settings train faster on CONFIG's corpus: ten minutes; options: OPTIONS="--budget 1200"
	@$(BIN)/luigi --module pipeline DiagnoseTraining --config $(CONFIG) $(addprefix --workers ,$(WORKERS)) --options "$(SAMPLE_OPTIONS) $(OPTIONS)"

doctor: .venv/.train  ## report what this machine can train with, and how to install what is missing
	@$(BIN)/packcorpus train doctor

inspect: .venv/.setup  ## show the latest corpus
	@$(BIN)/packcorpus inspect

quick: .venv/.test  ## run the quick tests in parallel: under a minute on two cores
	$(PYTEST)

# In two parts: processes that have loaded torch take longer to fork.
test: .venv/.test  ## run all tests in parallel, also without Chromium, strace, and ../shared
	$(PYTEST) -m "not training" --hypothesis-profile=ci --durations=5
	$(PYTEST) -m training --hypothesis-profile=ci --durations=5

check: .venv/.test  ## lint, types, layers, words, documentation, and all tests: what CI runs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python bench/words.py
	$(MAKE) docs
	$(MAKE) test

docs: .venv/.test  ## build the documentation site in build/site/
	$(BIN)/mkdocs build --strict

bench: .venv/.train  ## pack CONFIG and the same data with TRL, in turns, once as it is and once tenfold
	$(BIN)/python bench/preparation/whole_command.py $(CONFIG) --write bench/LOG.md
	$(BIN)/python bench/preparation/whole_command.py $(CONFIG) --times 10 --write bench/LOG.md

faults: .venv/.test  ## kill runs, refuse their writes, start two at once: about half an hour; needs strace, and root for the full-disk tests
	$(BIN)/python bench/reliability/faults.py
	$(BIN)/python bench/reliability/damage.py --flips 10000

mutants: .venv/.test  ## change the modules that write, verify, and repair, and check that a test fails: hours
	$(BIN)/python bench/reliability/mutate.py

bad-inputs: .venv/.test  ## write tests/properties/bad_inputs.md: the message for each bad input
	$(BIN)/python bench/reliability/bad_inputs.py --write tests/properties/bad_inputs.md

fuzz: .venv/.test  ## run the long property tests and fuzzers, about an hour: docs/reliability.md
	@$(PIP) atheris==3.0.0
	$(PYTEST) -m "" --hypothesis-profile=fresh
	$(BIN)/python bench/reliability/fuzz.py

lock: .venv/.setup  ## pin what CI installs in requirements.lock, with digests (after a change of constraints.txt)
	@$(PIP) uv==0.13.8
	$(BIN)/uv pip compile --quiet --system-certs --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
	    --no-emit-package torch --constraint constraints.txt --extra test pyproject.toml --output-file requirements.lock
	@# The CPU build is not on PyPI: its digest is that of the file which pip takes here.
	@rm -rf build/torch; $(BIN)/python -m pip download --quiet --no-deps --dest build/torch --constraint constraints.txt torch
	@$(BIN)/python -c "import platform as p; print('torch==$(TORCH) ; python_version == \'%s\' and platform_machine == \'%s\'' % \
	    ('.'.join(p.python_version_tuple()[:2]), p.machine()), '--hash=sha256:$$(sha256sum build/torch/*.whl | cut -c-64)')" >> requirements.lock

schemas: .venv/.setup  ## generate docs/reference: errors, schemas, and the pages that follow from the code
	$(BIN)/python docs/generate.py

sample: .venv/.setup  ## rebuild the bundled sample
	$(BIN)/python data/sample/generator/generate.py

clean:  ## remove build outputs: corpora, token files, proofs, plans, tokenizers, copies (not .venv, manifests, models, adapters)
	rm -rf data/corpora data/exports data/tokens data/engines data/digests data/plans data/tokenizers data/remote .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
