"""`stepscope.record` in somebody's own code: context manager, decorator, and gone without a trace."""

import pickle
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

import stepscope
from parametrized import parametrized
from stepscope.errors import RecordingError, UsageError
from stepscope.recorder.windows import Windows

WINDOWS = Windows(warmup=2, clean=4, trace=1)
NUM_STEPS = WINDOWS.num_steps + 3


class Training:
    """A tiny loop body, one call a step."""

    def __init__(self):
        self.model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16, bias=False))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def __call__(self):
        loss = self.model(torch.randint(16, (2, 5))).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


class OwnCall(nn.Module):
    """Calls its forward itself, past nn.Module's call, as GPyTorch's modules do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def __call__(self, *args):
        return self.forward(*args)

    def forward(self, inputs):
        return inputs * self.weight


class Objective(OwnCall):
    def __init__(self, model):
        nn.Module.__init__(self)
        self.model = model

    def forward(self, outputs, targets):
        return (outputs.sum(1) - targets).square().mean()


def hooked_places():
    """Everything of PyTorch that a recording may replace or add to."""
    return {
        "call": nn.Module.__call__,
        "backward": torch.autograd.backward,
        "grad": torch.autograd.grad,
        "scaler": torch.amp.GradScaler.step,
        "iter": DataLoader.__iter__,
        "next": _BaseDataLoaderIter.__next__,
        "profiler": torch.autograd.profiler.profile._prepare_trace,
        "before steps": dict(torch_optimizer._global_optimizer_pre_hooks),
        "after steps": dict(torch_optimizer._global_optimizer_post_hooks),
        "finders": list(sys.meta_path),
    }


def hooks_of(model):
    return [
        (dict(m._forward_hooks), dict(m._forward_pre_hooks), m._compiled_call_impl, "forward" in vars(m))
        for m in model.modules()
    ]


@pytest.fixture
def training():
    return Training()


def test_steps_that_are_said_aloud(training, tmp_path):
    with stepscope.record(tmp_path / "x", model=training.model, windows=WINDOWS) as rec:
        for number in range(NUM_STEPS):
            with rec.phase("forward"):
                loss = training()
            rec.step(tokens=7, loss=loss if number % 2 else float(number))
    samples = rec.result.recording.samples
    assert rec.result.recording.status == "finished"
    assert rec.result.recording.facts["steps"]["source"] == "step()"
    assert [sample.step for sample in samples] == list(range(len(samples)))
    assert NUM_STEPS - 1 <= len(samples) <= NUM_STEPS
    for sample in rec.result.recording.window("clean"):
        assert sample.num_tokens == 7
        assert sample.loss is not None
        assert set(sample.host_ns) <= {"forward", "other", "before_forward"}  # whatever the hooks say
        assert sum(sample.host_ns.values()) == sample.wall_ns
    shares = {row.name: row.share for row in rec.result.summary.rows}
    assert shares["backward"] == shares["optimizer"] == 0 < shares["forward"]


def test_losses_are_those_that_were_given(training, tmp_path):
    with stepscope.record(tmp_path / "x", model=training.model, windows=WINDOWS) as rec:
        for number in range(NUM_STEPS):
            training()
            rec.step(loss=torch.tensor(float(number)))
    clean = rec.result.recording.window("clean")
    assert [later.loss - earlier.loss for earlier, later in pairwise(clean)] == [1.0] * (len(clean) - 1)


def test_without_a_word_the_optimizer_ends_the_steps(training, tmp_path):
    with stepscope.record(tmp_path / "x", windows=WINDOWS, tokens_per_step=100) as rec:
        for _ in range(NUM_STEPS):
            training()
    assert [sample.step for sample in rec.result.recording.samples] == list(range(NUM_STEPS))
    assert rec.result.summary.throughput.per_step == 100
    assert rec.result.summary.parameters["num_total"] == 2 * 16 * 8
    assert str(stepscope.read(tmp_path / "x")) == str(rec.result)


def test_a_model_that_is_given_is_known_from_the_first_step(training, tmp_path):
    windows = Windows(warmup=0, clean=3, trace=0, memory=0)
    with stepscope.record(tmp_path / "x", model=training.model, optimizer=training.optimizer, windows=windows) as rec:
        for _ in range(3):
            training()
    assert [sample.num_tokens for sample in rec.result.recording.window("clean")] == [10, 10, 10]


def test_as_a_decorator(training, tmp_path):
    @stepscope.record(tmp_path / "x", windows=WINDOWS)
    def train(num_steps):
        """Train."""
        for _ in range(num_steps):
            training()
        return "trained"

    assert train(num_steps=5) == "trained"
    assert (train.__name__, train.__doc__) == ("train", "Train.")
    assert stepscope.read(tmp_path / "x").summary.num_steps == 5


def test_an_unknown_phase_is_named_with_those_that_exist(tmp_path):
    with stepscope.record(tmp_path / "x") as rec:
        with pytest.raises(ValueError, match=r"'sideways'.*data, forward, backward, optimizer, other"):
            with rec.phase("sideways"):
                pass


def test_an_unknown_argument_is_an_error(tmp_path):
    with pytest.raises(TypeError, match="tokens_a_step"):
        stepscope.record(tmp_path / "x", tokens_a_step=3)


def test_one_recording_at_a_time(training, tmp_path):
    with stepscope.record(tmp_path / "outer", windows=WINDOWS) as outer:
        with pytest.raises(UsageError, match=r"already recording to .*outer"):
            with stepscope.record(tmp_path / "inner"):
                pass
        for _ in range(3):
            training()
    assert outer.result.summary.num_steps == 3
    assert not (tmp_path / "inner").exists()


def test_an_earlier_recording_is_only_replaced_by_force(training, tmp_path):
    for _ in range(2):
        with stepscope.record(tmp_path / "x", force=True):
            training()
    with pytest.raises(RecordingError, match="already holds a recording"):
        with stepscope.record(tmp_path / "x"):
            pass
    with stepscope.record(tmp_path / "y"):  # and the refusal left nothing behind that is in the way
        training()


def test_an_exception_passes_through(training, tmp_path):
    with pytest.raises(ZeroDivisionError), stepscope.record(tmp_path / "x", windows=WINDOWS) as rec:
        for _ in range(4):
            training()
        1 / 0  # noqa: B018
    assert rec.result.recording.status == "failed"
    assert rec.result.summary.num_steps == 4
    with pytest.raises(KeyboardInterrupt), stepscope.record(tmp_path / "y", windows=WINDOWS) as rec:
        raise KeyboardInterrupt
    assert rec.result.recording.status == "interrupted"


@parametrized("num_steps", [0, 1, 2, 4, 6, 7, 8, 9, 12], quick=4)
def test_afterwards_every_place_is_as_it_was(training, tmp_path, num_steps):
    before, model_before = hooked_places(), hooks_of(training.model)
    with stepscope.record(tmp_path / "x", windows=WINDOWS):
        for _ in range(num_steps):
            training()
        assert hooked_places() != before
    assert hooked_places() == before
    assert hooks_of(training.model) == model_before
    assert torch.autograd._profiler_enabled() is False
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0


def test_the_notebook_table_escapes_names(training, tmp_path):
    with stepscope.record(tmp_path / "<script>alert(1)", windows=WINDOWS) as rec:
        for _ in range(NUM_STEPS):
            training()
    page = rec.result._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert page.count("<tr>") == page.count("</tr>") > 5


def test_disabled_it_costs_nothing_and_writes_nothing(tmp_path):
    source = (
        "import sys, stepscope\n"
        "@stepscope.record('decorated')\n"
        "def work(): return 3\n"
        "with stepscope.record('runs/x') as rec:\n"
        "    with rec.phase('forward'): pass\n"
        "    rec.step(tokens=3, loss=1.0)\n"
        "    stepscope.step()\n"
        "    with stepscope.phase('data'): pass\n"
        "print(work(), rec.result, 'torch' in sys.modules)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", source],
        cwd=tmp_path,
        env={"STEPSCOPE_DISABLE": "1", "PYTHONPATH": str(Path(stepscope.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (run.stdout, run.stderr) == ("3 None False\n", "")
    assert list(tmp_path.iterdir()) == []


def test_outside_a_recording_step_and_phase_are_free():
    before = hooked_places()
    stepscope.step(tokens=3)
    with stepscope.phase("data"):
        pass
    assert hooked_places() == before


def test_a_class_with_a_call_of_its_own_is_a_model_too(tmp_path):
    model, own = OwnCall(), OwnCall.__call__
    objective, optimizer = Objective(model), torch.optim.SGD(model.parameters(), lr=0.1)
    with stepscope.record(tmp_path / "run", windows=replace(WINDOWS, warmup=3)) as recorder:
        for _ in range(NUM_STEPS + 1):
            objective(model(torch.ones(5, 3)), torch.ones(5)).backward()
            optimizer.step()
            optimizer.zero_grad()
        copy = pickle.loads(pickle.dumps(model))

    recording = recorder.result.recording
    timed = [each for each in recording.samples if each.window in ("clean", "free")]
    assert {(each.num_samples, each.num_micro_batches) for each in timed} == {(5, 1)} and len(timed) == 7
    assert recording.facts["roots"] == ["OwnCall"]
    assert vars(copy).keys() == vars(model).keys() == vars(OwnCall()).keys()
    assert OwnCall.__call__ is own
