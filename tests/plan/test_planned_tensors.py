"""Tensors without data: what a program sees, where its tensors are, and that nothing of a plan outlives it."""

from __future__ import annotations

import copy
import io
import threading

import pytest

torch = pytest.importorskip("torch")

from stepscope.errors import UsageError
from stepscope.planner.emulation.cuda_dispatch import CudaDispatch
from stepscope.planner.emulation.dataless import DatalessMode, DataNeeded

functional = torch.nn.functional


@pytest.fixture
def cuda():
    manners = CudaDispatch("cuda")
    seen = []
    with manners, DatalessMode(manners.device, manners.kernels, lambda func, *_: seen.append(func.name())):
        yield seen


def test_a_program_sees_the_device_it_asked_for_and_nothing_is_allocated(cuda):
    huge = torch.empty(1 << 20, 1 << 20, device="cuda")

    assert huge.is_cuda and huge.device.type == "cuda" and not huge.is_cpu and huge.get_device() == 0
    assert huge.type() == "torch.cuda.FloatTensor"
    assert torch.zeros_like(huge).device == huge.device
    assert huge.to("cuda") is huge
    assert torch.tensor([1, 2], device="cuda").is_cuda
    assert not torch.tensor([1, 2]).is_cuda
    assert torch.randn(3, generator=torch.Generator(device="cuda"), device="cuda").is_cuda


def test_the_host_has_tensors_of_its_own_and_a_copy_between_devices_is_where_it_goes(cuda):
    host = torch.randn(4)
    assert not host.is_cuda and cuda == []

    there = host.to("cuda")
    assert there.is_cuda and cuda == ["aten::_to_copy"]
    back = there.cpu()
    assert not back.is_cuda and len(cuda) == 1
    back.copy_(there)
    assert len(cuda) == 1
    there.copy_(back, non_blocking=True)
    assert len(cuda) == 2

    assert host.to(there).is_cuda and host.type_as(there).is_cuda and not there.to(host).is_cuda
    assert host.to(0).is_cuda and host.to(device="cuda", dtype=torch.bfloat16).dtype is torch.bfloat16
    assert not there.new_zeros(3, device="cpu").is_cuda and there.new_zeros(3).is_cuda
    assert not torch.zeros_like(there, device="cpu").is_cuda and not torch.zeros_like(host).is_cuda
    assert there.to("cuda", torch.float32, False, True) is not there  # a copy was asked for
    assert torch.tensor([1.0, 2.0]).to("cuda").is_cuda and torch.tensor([1.0]).cuda().is_cuda


def test_a_gradient_goes_back_to_where_the_tensor_is(cuda):
    host, there = torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True, device="cuda")
    (host.to("cuda") * there).max().backward()

    assert not host.grad.is_cuda and there.grad.is_cuda


def test_the_default_device_is_the_programs_own(cuda):
    with torch.device("cuda"):
        assert torch.randn(3).is_cuda and torch.tensor([1]).is_cuda and not torch.randn(3, device="cpu").is_cuda
    torch.set_default_device("cuda")
    try:
        assert torch.randn(3).is_cuda
    finally:
        torch.set_default_device(None)
    with torch.device("meta"):
        module = torch.nn.Linear(2, 2)
    assert module.weight.is_meta and module.to_empty(device="cuda").weight.is_cuda


def test_tensors_of_two_devices_do_not_mix_but_for_single_numbers(cuda):
    there = torch.randn(4, device="cuda")

    assert (torch.tensor(2.0) * there + torch.ones(())).is_cuda
    for other in (torch.randn(4), torch.tensor([1.0, 2.0, 3.0, 4.0])):
        with pytest.raises(RuntimeError, match=r"same device.*test_planned_tensors\.py"):
            there + other
    with pytest.raises(UsageError, match="cuda:1"):
        torch.randn(4, device="cuda:1")


def test_host_and_device_are_kept_apart_where_a_checkpoint_runs_again(cuda):
    linear = torch.nn.Linear(4, 4).cuda()

    def block(x):
        return linear(x) * torch.tensor(2.0, device="cuda") + torch.zeros(4).to("cuda")

    for reentrant in (False, True):
        x = torch.randn(2, 4, device="cuda", requires_grad=True)
        torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant).sum().backward()
        assert x.grad.is_cuda


def test_a_module_changes_its_dtype_and_can_be_copied(cuda):
    module = torch.nn.Linear(8, 8, device="cuda").to(torch.bfloat16)

    assert torch.zeros_like(module.weight)._stepscope_inner.dtype is torch.bfloat16
    twin = copy.deepcopy(module)
    assert isinstance(twin.weight, torch.nn.Parameter) and twin.weight.is_cuda
    storages = [m.weight._stepscope_inner.untyped_storage()._cdata for m in (module, twin)]
    assert storages[0] != storages[1]
    assert twin(torch.randn(2, 8, dtype=torch.bfloat16, device="cuda")).dtype is torch.bfloat16


def test_a_shape_that_is_changed_in_place_is_seen(cuda):
    x = torch.randn(3, 5, device="cuda")
    x.t_().unsqueeze_(0)

    assert x.shape == (1, 5, 3) == (x * 2).shape


def test_data_is_loaded_in_this_process(cuda):
    rows = torch.utils.data.TensorDataset(torch.randn(8, 2), torch.randint(3, (8,)))
    loader = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True, num_workers=2, pin_memory=True)

    assert [x.to("cuda").shape for x, _ in loader] == [(4, 2), (4, 2)]


def test_calls_become_the_ops_of_a_cuda_device(cuda):
    x = torch.randn(2, 4, 16, 8, dtype=torch.bfloat16, requires_grad=True, device="cuda")
    functional.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()
    functional.dropout(x, 0.1)
    functional.rms_norm(x, (8,))

    assert {"aten::_scaled_dot_product_cudnn_attention", "aten::native_dropout", "aten::_fused_rms_norm"} <= set(cuda)
    assert "aten::_scaled_dot_product_cudnn_attention_backward" in cuda


def test_autocast_is_that_of_cuda(cuda):
    linear = torch.nn.Linear(8, 8, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = linear(torch.randn(2, 8, device="cuda"))
        assert torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") is torch.bfloat16

        assert out.dtype is torch.bfloat16
        assert out.softmax(-1).dtype is out.sum().dtype is functional.layer_norm(out, (8,)).dtype is torch.float32
    for options in ({}, {"dtype": None}):
        with torch.autocast(device_type="cuda", **options):
            assert linear(torch.randn(2, 8, device="cuda")).dtype is torch.float16


def test_torch_cuda_answers_as_the_device_would(cuda):
    stream = torch.cuda.Stream()
    with torch.cuda.device(0), torch.cuda.stream(stream):
        x = torch.randn(2, device="cuda" if torch.cuda.is_available() else "cpu")
    torch.cuda.current_stream().wait_stream(stream)
    x.record_stream(stream)
    torch.cuda.nvtx.range_push("step")
    torch.cuda.nvtx.range_pop()
    torch.cuda.reset_peak_memory_stats(device=x.device)

    assert x.is_cuda and torch.cuda.device_count() == 1
    assert torch.cuda.memory_allocated() == torch.cuda.max_memory_reserved(0) == 0
    assert torch.accelerator.current_accelerator().type == "cuda"


def test_in_a_plan_for_a_cpu_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    manners = CudaDispatch("cpu")
    with manners, DatalessMode(manners.device, manners.kernels, lambda *_: None):
        assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
        with pytest.raises(UsageError, match="cuda"):
            torch.randn(2).to("cuda")


def test_nothing_of_a_plan_outlives_it():
    def facts():
        here = torch.autocast.__init__, torch.is_autocast_enabled, torch.cuda._lazy_init, torch.cuda.is_available
        return (*here, torch.Generator, torch._C._get_mkldnn_enabled(), torch.accelerator.is_available)

    before = facts()
    with pytest.raises(ZeroDivisionError), CudaDispatch("cuda"):
        raise ZeroDivisionError

    assert before == facts()
    x = torch.randn(1, 2, 8, 4, requires_grad=True)
    assert functional.scaled_dot_product_attention(x, x, x).grad_fn.name() == (
        "ScaledDotProductFlashAttentionForCpuBackward0"
    )
    assert functional.dropout(x, 0.5).grad_fn.name() == "MulBackward0"
    assert functional.rms_norm(x, (4,)).isfinite().all()


def test_a_ghost_is_of_no_use_in_another_thread():
    manners = CudaDispatch("cpu")
    with manners, DatalessMode(manners.device, manners.kernels, lambda *_: None):
        x = torch.ones(2)
    errors = []

    def use():
        try:
            x + 1
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=use, name="prefetcher")
    thread.start()
    thread.join()
    assert "in the thread 'prefetcher'" in errors[0]
    with pytest.raises(DataNeeded, match=r"test_planned_tensors\.py"):
        torch.save(x, io.BytesIO())


def test_a_ghost_is_of_no_use_after_the_plan():
    manners = CudaDispatch("cpu")
    with manners, DatalessMode(manners.device, manners.kernels, lambda *_: None):
        x = torch.ones(2)
    with pytest.raises(RuntimeError, match="used after the plan"):
        x + 1
