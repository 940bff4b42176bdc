# make demo   install into .venv and decode one prompt with the default model, three ways
# make test   everything that must pass: format, lint, types, import layers, tests
# make lint   the same without the tests
# make clean  remove .venv, build output and caches
#
# Another interpreter:  make test PYTHON=python3.13
# Some tests only:      make test PYTEST_ARGS="-k threshold"

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?= -n 2
PROMPT ?= How many legs does a spider have?

BIN := $(VENV)/bin
# Only what is imported is compiled, when it is imported: all of it takes longer than the rest of an installation.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -n 7

demo: $(VENV)/.installed
	$(BIN)/adjust compare "$(PROMPT)" --tokens-per-step 4 --max-new-tokens 48
	@echo
	@echo 'Try next:'
	@echo '  $(BIN)/adjust compare "Write a short story about a dog."     # an open text'
	@echo '  $(BIN)/adjust chat                                           # a conversation'
	@echo '  $(BIN)/pip install -e ".[serve]" && $(BIN)/adjust serve   # in the browser'
	@echo '  docs/tutorial.md                                                # all of it'

# Two workers share the cores, so each gets one thread.
test: lint
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# pip 25.1 is the first that installs dependency groups.
$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || { \
		echo "error: no $(PYTHON) here; adjust-dlm needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "error: adjust-dlm needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1):" \
			"make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@touch $@

$(VENV)/.installed: pyproject.toml constraints.txt $(VENV)/.created
	@echo "installing into $(VENV) (the first time takes some minutes: PyTorch is large)"
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt $(VENV)/.created
	@echo "installing into $(VENV) (the first time takes some minutes: PyTorch is large)"
	$(PIP_INSTALL) -e '.[eval,serve]' --group dev
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
