"""What every test shares: hypothesis that repeats itself and does not mind a slow machine, and torch as it was."""

import gc
import os
import sys
import tempfile
from types import FunctionType

import pytest
from hypothesis import settings

from forks import RECORDER, Forks
from forks import settings as environment_of_scripts

# Two processes test side by side on two cores: threads of one would wait for the other's.
os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOM_SECONDS = 1_100  # of two processes, in ten minutes with what they import
# Neither what a developer's own cache holds nor what tests leave there may matter.
_CACHE = tempfile.TemporaryDirectory(prefix="stepscope-cache-")
os.environ["STEPSCOPE_CACHE"] = _CACHE.name
settings.register_profile("stepscope", deadline=None, derandomize=True, max_examples=8)
settings.register_profile("all", deadline=None, derandomize=True, max_examples=20)  # make test-all
# For a long night: HYPOTHESIS_PROFILE=thorough make test
settings.register_profile("thorough", deadline=None, max_examples=1_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "stepscope"))


def pytest_collection_finish() -> None:
    _leave_out_of_collections()


def _leave_out_of_collections() -> None:
    """Neither collections nor recorders, which look at every object, go through what was there before.

    Hundreds of files of tests leave millions of objects: each recording would wait seconds for one collection.
    """
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say so when `make test` has become too long for its ten minutes on two cores."""
    reports = [report for some in terminalreporter.stats.values() for report in some]
    seconds = sum(report.duration for report in reports if isinstance(report, pytest.TestReport))
    if config.option.markexpr == "not long" and seconds > ROOM_SECONDS:
        terminalreporter.write_line(
            f"The tests took {seconds:,.0f} s one after the other; `make test` has room for {ROOM_SECONDS:,} s. "
            "See CONTRIBUTING.md for what to mark `long`."
        )


def pytest_sessionfinish() -> None:
    """Triton complains of what is not collected when Python ends."""
    gc.unfreeze()


def _of_torch() -> dict[str, object]:
    """What a test can leave changed in torch for those after it."""
    import torch
    from torch.utils.data import DataLoader

    owners = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    owners += [torch, torch.nn.Module, torch.Tensor, DataLoader, torch.nn.functional, torch.autograd]
    functions = [(f"{owner.__name__}.{name}", value) for owner in owners for name, value in list(vars(owner).items())]
    return {
        "wrapped by us": [
            name
            for name, value in functions
            if isinstance(value, FunctionType) and "stepscope" in value.__code__.co_filename
        ],
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "precision of float32 products": torch.get_float32_matmul_precision(),
    }


@pytest.fixture(scope="session")
def forks():
    """A process that has torch: what needs torch, but no process of its own from the start, runs in forks of it."""
    forks = Forks(environment_of_scripts(), *RECORDER)
    yield forks
    forks.close()


@pytest.fixture(autouse=True, scope="module")
def torch_is_left_as_it_was():
    """A file of tests that changes torch for the next one is told so, in whatever order they run."""
    _leave_out_of_collections()
    before = _of_torch() if "torch" in sys.modules else None
    yield
    assert before is None or _of_torch() == before
