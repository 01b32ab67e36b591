"""Every example in a docstring runs and says what it shows."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import stepscope

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(stepscope.__path__, "stepscope.")
    if not module.name.endswith("__main__")
)


@pytest.mark.parametrize("name", ["stepscope", *MODULES])
def test_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an example may leave files behind
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)

    assert result.failed == 0


def test_there_are_examples_to_run():
    finder = doctest.DocTestFinder(exclude_empty=True)
    examples = {
        name: sum(len(test.examples) for test in finder.find(importlib.import_module(name))) for name in MODULES
    }

    assert sum(count > 0 for count in examples.values()) >= 8
    assert examples["stepscope.formatting"] >= 6 and examples["stepscope.recorder.step_ends"] >= 2
