# The commands of this repository. Each does the set-up it needs on a fresh machine.
# Empty is the distribution's, or the first on PATH where that is too old.
PYTHON ?=
VENV := .venv
BIN := $(VENV)/bin
COLLECTION := .collections/ansible_collections/gpufarm/core
ENVIRONMENT := $(VENV)/.installed
# The demo needs Ansible alone, which is there much sooner than everything that tests need.
ANSIBLE := $(VENV)/.installed-ansible

# Bytecode is kept: what the tests start, they start a thousand times.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo demo-down test test-machine lint readmes mutants bench

help:
	@echo "make demo       a GPU farm of containers on this machine (root, Debian or Ubuntu)"
	@echo "make demo-down  remove that farm"
	@echo "make test       everything that must pass"
	@echo "make test-machine  what only a whole machine shows, in QEMU (takes long without KVM)"
	@echo "make lint       the linters alone"
	@echo "make readmes    the roles' READMEs, from their specifications"
	@echo "make mutants    changes of the plugins that no unit test notices (SEED=1 SAMPLE=100)"
	@echo "make bench      timings, by their limits (AGAINST=another checkout, on the farm of make demo)"
	@echo "make setup      the Python environment in .venv"

setup: $(ENVIRONMENT) $(COLLECTION)

$(ENVIRONMENT): pyproject.toml tests/setup.sh
	@PYTHON="$(PYTHON)" sh tests/setup.sh $(VENV) test lint windows
	@touch $@ $(ANSIBLE)

$(ANSIBLE): pyproject.toml tests/setup.sh
	@PYTHON="$(PYTHON)" sh tests/setup.sh $(VENV) run
	@touch $@

$(COLLECTION):
	@mkdir -p $(@D)
	@ln -sfn ../../.. $@

demo: $(ANSIBLE) $(COLLECTION)
	@$(BIN)/python -m tests.simulator.demo up

demo-down: $(ANSIBLE)
	@$(BIN)/python -m tests.simulator.demo down

lint: setup
	@sh tests/lint.sh $(BIN)

test: setup
	@sh tests/run.sh $(BIN)

# No part of `make test`: without KVM all that computes takes ten times as long.
test-machine: setup
	@$(BIN)/python -m pytest -v --durations 0 tests/machine

readmes: setup
	@PYTHONPATH=.collections $(BIN)/python -m tests.readmes

mutants: setup
	@$(BIN)/python -m tests.mutants --seed $(or $(SEED),1) --sample $(or $(SAMPLE),100)

bench: setup
	@PYTHON=$(BIN)/python sh tests/bench/run.sh $(AGAINST)
