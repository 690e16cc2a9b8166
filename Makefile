# make bench    measure copy/compute overlap on this machine and show it
# make test     lint, types, tests
#
# Both need python3 >= 3.11, make and git, and bring the rest into .venv. To use the environment that is there, such
# as a GPU image with its own torch:   make bench PYTHON=python3.12 VENV=none

PYTHON ?= python3
VENV ?= .venv
# Options of `overlap run`, for instance:   make bench ARGS="--tier nightly --launches 3 --machine h200-1"
ARGS ?= --tier quick

export MPLBACKEND ?= Agg

ifeq ($(VENV),none)
PY := $(PYTHON)
READY := environment
# asv starts its readers elsewhere: they find the package by this.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(VENV)/bin/python
READY := $(VENV)/.installed
endif

.PHONY: help bench test clean environment python
.DEFAULT_GOAL := help

help:
	@echo 'make bench   measure overlap on the best device here (ARGS="..." are options of overlap run)'
	@echo 'make test    ruff, mypy, pytest; GPU tests run where there is a GPU'
	@echo 'make clean   remove what can be made again, except the virtual environment and results'
	@echo 'PYTHON=...   the interpreter to start from (python3); VENV=DIR or VENV=none for the environment there is'

# A run with invalid or failed cases (4) is still shown and handed to asv: it is a labelled gap. What asv cannot
# file (2: uncommitted changes, no commit) is said and leaves the measurement as good as it was.
bench: $(READY)
	@note=$$(mktemp) || exit; trap 'rm -f "$$note"' EXIT; trap 'exit 130' INT; trap 'exit 129' HUP; \
	$(PY) -m harness run --note-record "$$note" $(ARGS); code=$$?; \
	record=$$(cat "$$note"); \
	case $$code in 0|4) ;; *) exit $$code;; esac; \
	[ -n "$$record" ] || exit $$code; \
	$(PY) -m harness ingest "$$record"; filed=$$?; \
	store=results; case $$record in records/*/*|*/records/*/*) \
	store=$$(dirname "$$(dirname "$$(dirname "$$record")")");; esac; \
	$(PY) -m harness report --results "$$store" "$$record" || exit; \
	case $$filed in 0|2) exit $$code;; *) exit $$filed;; esac

test: EXTRA := dev
test: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest -n 2 --dist worksteal -m 'not timing and not gpu and not multigpu'
	$(PY) -m pytest -m 'timing or gpu or multigpu'

clean:
	rm -rf .asv .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks build dist *.egg-info
	find harness tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

python:
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON) here; give PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "make: $(PYTHON) is $$($(PYTHON) --version 2>&1 | head -n 1), overlap needs Python 3.11 or newer; give PYTHON=..." >&2; exit 1; }

$(VENV)/.installed: pyproject.toml constraints.txt | python
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	{ echo "make: $(PYTHON) cannot make virtual environments; install its venv module (Debian, Ubuntu: apt install python3-venv) or give VENV=none" >&2; exit 1; }
	@echo 'Installing into $(VENV), once; torch is large.'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# Adds what is missing to the environment there is, and leaves torch and everything else in it alone. A machine
# without a network is fine if nothing that the run needs is missing.
define ADD_MISSING
import importlib.metadata, importlib.util, re, subprocess, sys, tomllib
if importlib.util.find_spec("torch") is None:
    sys.exit(f"make: {sys.executable} has no torch; VENV=none is for an environment that has one")
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
wanted = project["dependencies"] + [r for e in sys.argv[1:] for r in project["optional-dependencies"][e]]
missing = []
for requirement in wanted:
    try:
        importlib.metadata.version(re.match(r"[\w.-]+", requirement)[0])
    except importlib.metadata.PackageNotFoundError:
        missing.append(requirement)
if missing and subprocess.call([sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *missing]):
    print("make: could not install", ", ".join(missing), "- going on without; if pip says that this environment is",
          "managed from outside, PIP_BREAK_SYSTEM_PACKAGES=1 lets it", file=sys.stderr)
endef
export ADD_MISSING

environment: python
	@$(PYTHON) -c "$$ADD_MISSING" $(EXTRA)
