# The whole developer interface: `make demo`, `make test` and `make test-all`, on a machine with Python, pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Holistic Trace Analysis, against which some results are tested, wants an older pandas and brings Jupyter: its own place.
HTA := .venv-hta
# Compiled where there is a C compiler, and again when it changes.
FAST := $(wildcard src/stepscope/trace/fast/*.[ch] src/stepscope/recorder/usual/*.c)
PIP := $(BIN)/pip install --quiet --no-compile --disable-pip-version-check
# uv installs the many packages in seconds. It knows no folder of wheels that pip has, so pip brings torch.
INSTALL := $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable

# Without bytecode every process that imports torch takes four seconds longer.
unexport PYTHONDONTWRITEBYTECODE

# Independent targets run in parallel: installing, linting and testing.
MAKEFLAGS += --jobs=3

.PHONY: demo test quick-tests test-all docs lint chromium clean

demo: $(VENV)/demo.installed
	$(BIN)/stepscope run -o runs/demo --force examples/train_gpt.py
	$(BIN)/stepscope report runs/demo --force

test: lint quick-tests

quick-tests: $(VENV)/test.installed chromium
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not long" $(PYTEST_ARGS)

# With those that take minutes: every fix of verify, compiled plans, the largest campaigns.
test-all: lint chromium $(HTA)/installed
	HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-all} $(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

# The documentation as a site in build/site: a link or an anchor that leads nowhere is an error.
docs: $(VENV)/test.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

lint: $(VENV)/test.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The page of `stepscope report` is tested in a real browser where there is one, or where it can be installed.
chromium:
	@command -v chromium >/dev/null \
	  || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	       && apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y chromium >/dev/null; } \
	  || echo "There is no chromium and it could not be installed: the tests in a browser are skipped."

clean:
	rm -rf $(VENV) $(HTA) runs build dist src/*.egg-info src/stepscope/trace/fast/_scan.*.so src/stepscope/recorder/usual/_notes.*.so

# A stamp a set of extras: what is installed is installed once, and again only when its list changes.
$(VENV)/demo.installed: pyproject.toml setup.py constraints.txt $(FAST) | $(BIN)/uv
	$(INSTALL) '.[torch]'
	touch $@

$(VENV)/test.installed: pyproject.toml setup.py constraints.txt $(FAST) | $(BIN)/uv
	$(INSTALL) '.[test]'
	touch $@ $(VENV)/demo.installed

$(HTA)/installed: constraints-hta.txt
	$(PYTHON) -m venv $(HTA)
	$(HTA)/bin/pip install --quiet --disable-pip-version-check --constraint constraints-hta.txt traceinsight
	touch $@

$(BIN)/uv:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt torch numpy uv
