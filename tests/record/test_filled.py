"""Where a script puts something into a variable: read from its source, whatever line is running."""

from __future__ import annotations

import pytest

from stepscope.recorder.ledger.leaks import lines_that_fill

SOURCE = """\
log = []
def train(self):
    losses = []
    total = 0
    first, second = f(), g()
    for step in range(3):
        loss = f(losses)
        losses.append(loss)
        self.history["loss"][step] = loss
        total += loss
        losses.extend(
            [loss])
        log.append(loss)
    self.history.setdefault("last", []).append(loss)
    mean = sum(losses) / total
    mean = mean.item()
    return losses
def other():
    losses = f()
"""


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("losses", [8, 11]),  # not where it is read, nor where it was empty
        ("loss", [7]),
        ("total", [10]),
        ("mean", [16]),
        ("second", [5]),
        ("self.history", [9, 14]),
        ("*.history", [9, 14]),
        ("step", []),
        ("nobody", []),
    ],
)
def test_the_lines_that_add_to_a_variable_else_the_last_that_gives_it_a_value(tmp_path, name, lines):
    path = tmp_path / "train.py"
    path.write_text(SOURCE)
    scope: dict = {}
    exec(compile(SOURCE, str(path), "exec"), scope)

    assert lines_that_fill(name, str(path), scope["train"].__code__) == lines


def test_a_global_is_filled_wherever_it_is_and_a_local_in_its_function_alone(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SOURCE)
    scope: dict = {}
    exec(compile(SOURCE, str(path), "exec"), scope)

    assert lines_that_fill("log", str(path)) == [13]
    assert lines_that_fill("losses", str(path), scope["other"].__code__) == [19]


def test_without_a_source_nothing_is_said(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("losses = (")

    assert lines_that_fill("losses", str(broken)) == []
    assert lines_that_fill("losses", "<stdin>") == []


SHADOWED = """\
import torch
kept = torch.ones(3)
def first(kept):
    kept.append(1)
def second():
    kept = []
    def inner():
        kept.append(2)
    kept += [3]
def third():
    global kept
    kept = torch.ones(4)
other = [1]
def fourth():
    other.append(2)
    return lambda other: other.append(3)
late = torch.ones(5)
def fifth():
    late = 1
"""


@pytest.mark.parametrize(("name", "lines"), [("kept", [12]), ("other", [15]), ("late", [17])])
def test_a_variable_of_the_same_name_in_a_function_is_another(tmp_path, name, lines):
    path = tmp_path / "shadowed.py"
    path.write_text(SHADOWED)

    assert lines_that_fill(name, str(path)) == lines
