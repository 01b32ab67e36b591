"""A user's own factory: knobs from its signature, whatever it returns made one thing, its own errors untouched."""

from __future__ import annotations

import textwrap
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from stepscope.errors import UsageError
from stepscope.workloads.factory import normalized, user_factory
from stepscope.workloads.workload import Built, WholeStep

MODEL = """
    from typing import Literal
    import torch
    from torch import nn
    from neighbor import WIDTH

    def build(
        width: int = WIDTH, dropout: float = 0, kind: Literal["a", "b"] = "a", name="x", flag=False, pair=(1, 2)
    ):
        '''A linear layer.

        More words.'''
        return nn.Linear(width, 2), lambda: torch.ones(3, width), 3

    def whole(steps: int = 2):
        return lambda: steps

    def _hidden():
        pass
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "neighbor.py").write_text("WIDTH = 4\n")
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(MODEL))
    return path


def test_arguments_are_knobs(mine):
    workload = user_factory(f"{mine}:build")

    found = {knob.name: (knob.kind, knob.default, knob.values) for knob in workload.knobs()}
    assert found == {
        "width": (int, 4, None),
        "dropout": (float, 0, None),
        "kind": (str, "a", ("a", "b")),
        "name": (str, "x", None),
        "flag": (bool, False, (True, False)),
    }
    assert workload.about == "A linear layer." and workload.name == f"{mine}:build"


def test_a_module_and_a_batch_function(mine):
    workload = user_factory(f"{mine}:build")

    built = workload.build(workload.configure(width=6))

    assert isinstance(built, Built) and built.num_tokens == 3
    assert built.module(**built.batch()).shape == (3, 2)
    assert sum(p.numel() for p in built.module.parameters()) == 14


def test_a_whole_step(mine):
    workload = user_factory(f"{mine}:whole")

    built = workload.build(workload.configure(steps=5))

    assert isinstance(built, WholeStep) and built.step() == 5 and built.num_tokens == 0


def test_a_module_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "package_of_mine").mkdir()
    (tmp_path / "package_of_mine" / "__init__.py").touch()
    (tmp_path / "package_of_mine" / "models.py").write_text("def build(n: int = 1):\n    return lambda: n\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in __import__("sys").path if path])

    assert user_factory("package_of_mine.models:build").build is not None
    with pytest.raises(UsageError, match=r"package_of_mine\.model not found: did you mean models\?"):
        user_factory("package_of_mine.model:build")
    with pytest.raises(UsageError, match=r"package_of_min not found: did you mean package_of_mine\?"):
        user_factory("package_of_min.models:build")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine.py:buld", r"no function 'buld': did you mean build\?"),
        ("mine.py:_hiden", "no function '_hiden'"),
        ("mein.py:build", r"mein\.py not found in .*: did you mean mine\.py\?"),
        ("nowhere/mine.py:build", "no folder"),
        ("mine.py:", r"path/to/file\.py:build"),
        (":build", r"path/to/file\.py:build"),
    ],
)
def test_what_is_missing_is_one_line_with_the_nearest(mine, name, message):
    with pytest.raises(UsageError, match=message) as caught:
        user_factory(f"{mine.parent}/{name}" if name[0] != ":" else name)

    assert "\n" not in str(caught.value)


def test_the_users_own_errors_pass_through(tmp_path):
    (tmp_path / "broken.py").write_text("import a_package_nobody_has\n")
    with pytest.raises(ModuleNotFoundError, match="a_package_nobody_has"):
        user_factory(f"{tmp_path}/broken.py:build")

    (tmp_path / "syntax.py").write_text("def build(:\n")
    with pytest.raises(SyntaxError):
        user_factory(f"{tmp_path}/syntax.py:build")

    (tmp_path / "raises.py").write_text("def build():\n    raise KeyError('mine')\n")
    workload = user_factory(f"{tmp_path}/raises.py:build")
    with pytest.raises(KeyError, match="mine"):
        workload.build(workload.configure())


def test_an_argument_without_default_is_refused(tmp_path):
    (tmp_path / "needs.py").write_text("def build(size):\n    return lambda: size\n")

    with pytest.raises(UsageError, match="argument 'size' needs a default"):
        user_factory(f"{tmp_path}/needs.py:build")


def test_annotations_that_cannot_be_read_and_kwargs_are_no_obstacle(tmp_path):
    source = "def build(size: 'NotThere' = 3, **rest):\n    return lambda: (size, rest)\n"
    (tmp_path / "odd.py").write_text(source)
    workload = user_factory(f"{tmp_path}/odd.py:build")

    assert [(knob.name, knob.kind) for knob in workload.knobs()] == [("size", int)]
    assert workload.build(workload.configure(size=4)).step() == (4, {})


class Returns(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.shape = shape

    def forward(self, x=None, y=None):
        loss = (self.weight * (x if y is None else x - y)).sum()
        return self.shape(loss, x)


@pytest.mark.parametrize(
    "shape",
    [
        lambda loss, x: loss,
        lambda loss, x: loss[None],
        lambda loss, x: {"loss": loss, "logits": x},
        lambda loss, x: SimpleNamespace(loss=loss, logits=x),
        lambda loss, x: (loss, x),
        lambda loss, x: [loss],
    ],
)
@pytest.mark.parametrize(
    "batch",
    [
        lambda: torch.ones(2),
        lambda: (torch.ones(2),),
        lambda: [torch.full((2,), 3.0), torch.full((2,), 2.0)],
        lambda: {"x": torch.ones(2)},
        lambda: {"y": torch.full((2,), 2.0), "x": torch.full((2,), 3.0)},
    ],
)
def test_whatever_has_a_loss_gives_that_loss(shape, batch):
    built = normalized((Returns(shape), batch), "mine")

    loss = built.module(**built.batch())

    assert loss.shape == () and loss.item() == 2.0
    loss.backward()
    assert built.module.module.weight.grad.tolist() == [1.0, 1.0]


def test_outputs_without_a_loss_are_tensors():
    one = normalized((Returns(lambda loss, x: x), lambda: torch.ones(2)), "mine")
    named = normalized((Returns(lambda loss, x: {"a": x, "b": None, "loss": None}), lambda: torch.ones(2)), "mine")
    several = normalized((Returns(lambda loss, x: (x, x + 1, "text")), lambda: torch.ones(2)), "mine")

    assert one.module(**one.batch()).shape == (2,)
    assert [t.tolist() for t in named.module(**named.batch())] == [[1, 1]]
    assert [t.tolist() for t in several.module(**several.batch())] == [[1, 1], [2, 2]]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (nn.Linear(1, 1), "returned Linear"),
        (None, "returned NoneType"),
        ((nn.Linear(1, 1), torch.ones(1)), r"returned \(Linear, Tensor\)"),
        ((1, 2, 3, 4), "returned"),
    ],
)
def test_what_is_neither_is_refused(made, words):
    with pytest.raises(UsageError, match=words):
        normalized(made, "mine")


@pytest.mark.parametrize("batch", [1, {"x": 1}, (torch.ones(1), None)])
def test_a_batch_of_something_else_is_refused(batch):
    built = normalized((Returns(lambda loss, x: loss), lambda: batch), "mine")

    with pytest.raises(UsageError, match="mine: a batch must be a tensor"):
        built.batch()


def test_an_output_without_tensors_is_refused():
    built = normalized((Returns(lambda loss, x: None), lambda: torch.ones(2)), "mine")

    with pytest.raises(UsageError, match="NoneType"):
        built.module(**built.batch())


def test_what_is_ready_is_taken_as_it_is():
    step = WholeStep(lambda: 1, num_tokens=7)

    assert normalized(step, "mine") is step
