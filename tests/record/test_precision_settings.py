"""Torch's switches of precision: set in one call, both of torch's ways at once, and put back exactly."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

import stepscope
from stepscope.errors import UsageError
from stepscope.recorder.precision.settings import precision_settings
from stepscope.recorder.windows import Windows

HAS_NEW_WAY = hasattr(torch.backends.cuda.matmul, "fp32_precision") if torch.__version__ >= "2.9" else False
PLACES = [(b, op) for b in ("cuda", "mkldnn") for op in ("matmul", "conv", "rnn", "all")] + [("generic", "all")]


def set_new(*place_and_value):
    torch._C._set_fp32_precision_setter(*place_and_value)


def reset():
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"):
        setattr(torch.backends.cuda.matmul, name, True)
    if HAS_NEW_WAY:
        for place in PLACES:
            set_new(*place, "tf32" if place in (("cuda", "conv"), ("cuda", "rnn")) else "none")


@pytest.fixture(autouse=True)
def _fresh():
    reset()
    yield
    reset()


def everything():
    """All that torch says about precision, what raises among it; what is inherited is told by changing parents."""

    def asked(get):
        try:
            return get()
        except RuntimeError as error:
            return str(error)[:40]

    matmul = torch.backends.cuda.matmul
    found = {
        "old": asked(torch.get_float32_matmul_precision),
        "cublas": asked(lambda: matmul.allow_tf32),
        "cudnn": asked(lambda: torch.backends.cudnn.allow_tf32),
        "bf16": matmul.allow_bf16_reduced_precision_reduction,
        "fp16": matmul.allow_fp16_reduced_precision_reduction,
    }
    if HAS_NEW_WAY:
        found |= {place: torch._C._get_fp32_precision_getter(*place) for place in PLACES}
        generic = found["generic", "all"]
        set_new("generic", "all", "ieee")
        found |= {("under ieee", *place): torch._C._get_fp32_precision_getter(*place) for place in PLACES}
        set_new("generic", "all", generic)
    return found


STARTS = {
    "fresh": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "cudnn off": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
}
if HAS_NEW_WAY:
    STARTS |= {
        "new matmul": lambda: set_new("cuda", "matmul", "tf32"),
        "new everywhere": lambda: set_new("generic", "all", "tf32"),
        "new back end": lambda: set_new("cuda", "all", "tf32"),
        "new conv": lambda: set_new("cuda", "conv", "ieee"),
        "new mkldnn": lambda: set_new("mkldnn", "matmul", "bf16"),
    }
CALLS = [
    {"allow_tf32": True},
    {"allow_tf32": False},
    {"matmul_precision": "high"},
    {"matmul_precision": "highest", "allow_tf32": False},
    {"matmul_precision": "medium", "allow_tf32": True},
    {"allow_bf16_reduced_precision_reduction": False, "allow_fp16_reduced_precision_reduction": False},
    {},
]


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: "+".join(call) or "nothing")
def test_it_does_what_it_is_told_and_is_undone_exactly(start, call):
    STARTS[start]()
    before, settings = everything(), precision_settings()

    with stepscope.configure_precision(**call) as change:
        after = precision_settings()
        if "allow_tf32" in call:
            assert after["cuda.matmul.allow_tf32"] == after["cudnn.allow_tf32"] == call["allow_tf32"]
            assert torch.backends.cuda.matmul.allow_tf32 == call["allow_tf32"]
            assert torch.backends.cudnn.allow_tf32 == call["allow_tf32"]
            if "new" not in start:  # after torch's own `allow_tf32 = False` this raises where "high" was set before
                assert (torch.get_float32_matmul_precision() == "highest") == (not call["allow_tf32"])
        if "matmul_precision" in call:
            assert torch.get_float32_matmul_precision() == call["matmul_precision"]
        reduced = "allow_bf16_reduced_precision_reduction"
        assert after[f"cuda.matmul.{reduced}"] == call.get(reduced, True)
        assert {name: (one.old, one.new) for name, one in change.changed.items()} == {
            name: (settings[name], after[name]) for name in after if after[name] != settings[name]
        }
        if not call:
            assert everything() == before and str(change) == "precision: nothing changed"

    assert everything() == before


def test_what_changed_is_printed_and_undone_once():
    change = stepscope.configure_precision(allow_tf32=True, allow_bf16_reduced_precision_reduction=False)

    assert str(change).splitlines() == [
        "precision:",
        "  float32_matmul_precision                            highest → high",
        "  cuda.matmul.allow_tf32                              False → True",
        "  cuda.matmul.allow_bf16_reduced_precision_reduction  True → False",
    ]
    change.undo()
    torch.set_float32_matmul_precision("medium")
    change.undo()
    assert torch.get_float32_matmul_precision() == "medium"


def test_an_exception_inside_is_the_users_and_everything_is_put_back():
    with pytest.raises(KeyError), stepscope.configure_precision(matmul_precision="high"):
        raise KeyError

    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({"allow_tf32": False, "matmul_precision": "high"}, 'contradicts matmul_precision="high", which allows TF32'),
        ({"allow_tf32": True, "matmul_precision": "highest"}, "which forbids TF32"),
        ({"matmul_precision": "best"}, "one of highest, high, medium"),
        ({"allow_tf32": 1}, "True, False, or left out"),
    ],
)
def test_contradictions_are_refused_and_change_nothing(call, said):
    before = everything()

    with pytest.raises(UsageError, match=said):
        stepscope.configure_precision(**call)
    assert everything() == before


def record(folder, steps, on_step=lambda step: None):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stepscope.record(folder, model=model, windows=Windows(warmup=2, clean=2, trace=1, memory=0)):
        for step in range(steps):
            on_step(step)
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
    return json.loads((folder / "recording.json").read_text())


def test_a_recording_has_the_switches_of_its_timed_steps(tmp_path):
    change = None

    def on_step(step):
        nonlocal change
        if step == 1:
            change = stepscope.configure_precision(matmul_precision="high")
        if step == 7:
            change.undo()

    facts = record(tmp_path / "run", 9, on_step)

    assert torch.get_float32_matmul_precision() == "highest"
    assert facts["precision"]["float32_matmul_precision"] == "high"
    assert facts["precision"]["cuda.matmul.allow_tf32"] is True and "notes" not in facts
    card = stepscope.read(tmp_path / "run")
    assert "TF32" in str(card)
    assert card.to_json()["precision"] == facts["precision"]


def test_a_change_between_the_timed_and_the_traced_steps_is_a_note(tmp_path):
    facts = record(tmp_path / "run", 9, lambda step: step == 4 and torch.set_float32_matmul_precision("high"))

    assert facts["precision"]["float32_matmul_precision"] == "highest"
    texts = [note["text"] for note in facts["notes"]]
    assert "float32_matmul_precision was highest in the timed steps, high in the traced window" in texts


def test_a_run_that_ends_early_has_the_switches_of_its_end(tmp_path):
    assert record(tmp_path / "run", 1)["precision"] == precision_settings()
