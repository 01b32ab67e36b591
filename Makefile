# The whole developer interface: `make demo` and `make test`, on a machine with Python, pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Holistic Trace Analysis, against which some results are tested, wants an older pandas and brings Jupyter: its own place.
HTA := .venv-hta
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

.PHONY: demo test lint clean

demo: $(VENV)/demo.installed
	$(BIN)/stepscope run examples/train_gpt.py

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

lint: $(VENV)/test.installed $(HTA)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(HTA) runs build dist src/*.egg-info

# A stamp a set of extras: what is installed is installed once, and again only when its list changes.
$(VENV)/demo.installed: pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) '.[torch]'
	touch $@

$(VENV)/test.installed: pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) '.[test]'
	touch $@ $(VENV)/demo.installed

$(HTA)/installed: constraints-hta.txt
	$(PYTHON) -m venv $(HTA)
	$(HTA)/bin/pip install --quiet --disable-pip-version-check --constraint constraints-hta.txt traceinsight
	touch $@

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)
