"""What every test shares: hypothesis that repeats itself and does not mind a slow machine, and torch as it was."""

import os
import sys
from types import FunctionType

import pytest
from hypothesis import settings

settings.register_profile("stepscope", deadline=None, derandomize=True, max_examples=20)
# For a long night: HYPOTHESIS_PROFILE=thorough make test
settings.register_profile("thorough", deadline=None, max_examples=1_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "stepscope"))

# Minutes in all, and seldom the first to break: `make test` leaves them out, `make test-all` runs them too.
LONG = (
    "analysis/test_against_hta.py",
    "findings/test_noisy_steps.py::test_a_script_that_sleeps_every_tenth_step",
    "plan/test_compiled.py",
    "plan/test_compiled_models.py",
    "report/test_card_of_anything.py",
    "report/test_page_browser.py::test_every_section_of_a_real_trace",
    "run/test_bad_luck.py::test_the_scripts_own_profiler_sees_all_of_its_steps",
    "run/test_odd_loops.py",
    "run/test_steps.py::test_a_compiled_loop_compiles_what_it_always_compiles",
    "run/test_verify_compile.py",
    "run/test_verify_optimizer.py::test_it_is_a_function_too",
    "run/test_verify_recording.py",
    "run/test_verify_trouble.py",
    "sweep/test_bench_verb.py::test_nobody_need_listen_and_closed_streams_are_left_alone",
    "trace/test_fuzz.py",
    "workloads/test_ema_triton.py",
)


def pytest_collection_modifyitems(items):
    for item in items:
        file = "/".join(item.path.parts[-2:])
        if file in LONG or f"{file}::{getattr(item, 'originalname', None)}" in LONG:
            item.add_marker(pytest.mark.long)


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


@pytest.fixture(autouse=True, scope="module")
def torch_is_left_as_it_was():
    """A file of tests that changes torch for the next one is told so, in whatever order they run."""
    before = _of_torch() if "torch" in sys.modules else None
    yield
    assert before is None or _of_torch() == before
