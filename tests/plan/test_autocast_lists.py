"""Autocast in a plan: lists of tensors among the arguments, and a PyTorch whose lists cannot be read."""

from __future__ import annotations

from functools import partial

import pytest

torch = pytest.importorskip("torch")

from stepscope.errors import UsageError
from stepscope.planner.emulation import autocast
from stepscope.planner.emulation.cuda_dispatch import CudaDispatch
from stepscope.planner.emulation.dataless import DatalessMode


@pytest.fixture
def cuda():
    manners = CudaDispatch("cuda")
    seen = []
    with manners, DatalessMode(manners.device, manners.kernels, lambda func, *_: seen.append(func.name())):
        yield seen


@pytest.mark.parametrize("join", [torch.ops.aten.cat.default, torch.ops.aten.stack.default])
def test_tensors_of_a_list_are_widened_first(cuda, join):
    low, wide = (torch.zeros(2, 8, device="cuda", dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    kernel = partial(autocast._changed, join, autocast._in_widest)
    cuda.clear()

    assert kernel([low, wide]).dtype is torch.float32
    assert cuda.count("aten::_to_copy") == 1
    assert kernel([low, low]).dtype is torch.bfloat16
    assert cuda.count("aten::_to_copy") == 1


@pytest.mark.parametrize("header", ["#define AT_FORALL_OTHER(_) \\\n _(mm)\n", None], ids=["renamed", "missing"])
def test_lists_that_cannot_be_read_matter_to_autocast_alone(header, tmp_path, monkeypatch):
    path = tmp_path / "autocast_mode.h"
    if header is not None:
        path.write_text(header)
    monkeypatch.setattr(autocast, "_HEADER", path)
    manners = CudaDispatch("cuda")
    with manners, DatalessMode(manners.device, manners.kernels, lambda *_: None):
        with torch.autocast("cuda", enabled=False):
            assert torch.nn.Linear(8, 8, device="cuda")(torch.zeros(2, 8, device="cuda")).is_cuda
        with pytest.raises(UsageError, match=rf"autocast: torch {torch.__version__[:3]}.* lacks the lists"):
            torch.autocast("cuda", dtype=torch.bfloat16)
