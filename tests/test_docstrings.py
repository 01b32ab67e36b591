"""Every example in a docstring runs and says what it shows."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from collections import Counter
from pathlib import Path

import stepscope

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(stepscope.__path__, "stepscope.")
    if not module.name.endswith("__main__")
)


def test_examples(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an example may leave files behind
    finder, examples, failed = doctest.DocTestFinder(exclude_empty=True), Counter(), []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for name in ["stepscope", *MODULES]:
        module = importlib.import_module(name)
        if b">>>" not in Path(str(module.__file__)).read_bytes():
            continue  # the finder would look for the line of every function
        for found in finder.find(module):
            examples[name] += len(found.examples)
            if runner.run(found, out=failed.append).failed:
                failed.append(name)

    assert failed == []
    assert sum(count > 0 for count in examples.values()) >= 8
    assert examples["stepscope.formatting"] >= 6 and examples["stepscope.recorder.step_ends"] >= 2
