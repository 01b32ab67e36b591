"""What CUDA's kernels take inside an op, against the allocations of real traces of an NVIDIA H200."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from stepscope.devices.limits import find_device, known_devices
from stepscope.planner.allocator import rounded
from stepscope.planner.emulation.attention_backend import choose
from stepscope.planner.emulation.ops import Shapes, kind_of
from stepscope.planner.hardware import (
    Hardware,
    hardware_of,
    kept_workspaces,
    temporary_bytes,
    usable_bytes,
)
from stepscope.planner.host_kernels import HostKernels

H200 = Hardware((9, 0), 132)
aten = torch.ops.aten


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def taken(func, *args, **kwargs):
    return [rounded(size) for sizes in temporary_bytes(func, args, kwargs, H200) for size in sizes]


# Shape → semaphores and buffer, as the allocator recorded them: gpt2_eager, fp32_no_tf32, loop_optimizer.
SUMS = {
    (8192, 2304): [512, 139_198_464],
    (8192, 3072): [512, 138_412_032],
    (8192, 768): [512, 50_331_648],
    (2048, 2048): [512, 33_554_432],
    (2048, 1536): [512, 25_165_824],
    (2048, 512): [512, 8_388_608],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SUMS)
def test_the_gradient_of_a_bias_takes_a_buffer(shape, dtype):
    assert taken(aten.sum.dim_IntList, meta(*shape, dtype=dtype), [0], True) == SUMS[shape]


@pytest.mark.parametrize("shape", [(8, 4096, 1024), (16, 2048, 2048)])
def test_a_mean_over_everything_takes_a_little(shape):
    assert taken(aten.mean.default, meta(*shape, dtype=torch.float32)) == [512, 2560]


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize(
    ("name", "num_copies"),
    [("mse_loss", 1), ("smooth_l1_loss", 1), ("huber_loss", 1), ("binary_cross_entropy", 0), ("soft_margin_loss", 0)],
)
def test_a_loss_has_the_memory_that_it_has_on_a_cpu(name, num_copies, reduction):
    """The code is the same for both devices, or does the same: some keep the memory of what they reduce."""
    func, middle = getattr(aten, name).default, (None,) if name == "binary_cross_entropy" else ()
    x, y = torch.ones(300, 100), torch.ones(300, 100)
    args = [meta(300, 100, dtype=torch.float32)] * 2
    real, shapes = func(x, y, *middle, reduction), Shapes()
    for _ in range(2):
        planned = shapes.run(func, kind_of(func), [*args, *middle, reduction], {})
        assert (planned.shape, planned.dtype) == (real.shape, real.dtype)
        assert planned.untyped_storage().nbytes() == real.untyped_storage().nbytes()
    on_cpu = HostKernels().scratch_bytes(func, (*args, *middle, reduction), {})
    ours = sum(temporary_bytes(func, (*args, *middle, reduction), {}, H200)[0] if num_copies else [])
    assert on_cpu // x.nbytes == ours // x.nbytes == (num_copies if reduction else 0)


def test_a_sum_that_every_block_can_finish_takes_nothing():
    assert taken(aten.sum.dim_IntList, meta(4096, 64, dtype=torch.float32), [1]) == []


@pytest.mark.parametrize(
    ("shape", "measured"),
    [((8, 12, 1024, 64), 25_559_552), ((8, 16, 4096, 64), 136_315_392), ((2, 8, 1024, 64), 4_260_352)],
)
def test_the_backward_of_cudnn_attention(shape, measured):
    tensor = meta(*shape)

    assert taken(aten._scaled_dot_product_cudnn_attention_backward.default, tensor, tensor, tensor) == [measured]


def test_the_backward_of_memory_efficient_attention():
    tensor = meta(8, 12, 1024, 64, dtype=torch.float32)
    found = taken(aten._scaled_dot_product_efficient_attention_backward.default, tensor, tensor, tensor)

    # The product is given back before the workspace is asked for.
    assert found == [393_216, 25_165_824, 393_216, 393_216, 25_190_400]


def test_the_backward_of_an_embedding():
    gradient, indices = meta(8, 1024, 768, dtype=torch.float32), meta(8, 1024, dtype=torch.int64)
    found = taken(aten.embedding_dense_backward.default, gradient, indices, 50257, -1, False)

    assert 27_681_792 in found and 72_192 in found  # partial sums, and where they begin
    measured = 150_016 + 9 * 65_536 + 2 * 1536 + 27_681_792 + 72_192 + 2 * 512
    assert sum(found) == pytest.approx(measured, rel=0.02)
    assert taken(aten.embedding_dense_backward.default, gradient[:2], indices[:2], 50257, -1, False) == []


def test_a_running_sum_of_booleans_is_converted_first():
    assert taken(aten.cumsum.default, meta(8, 1024, dtype=torch.bool), -1) == [65_536]


def test_a_matrix_that_the_library_cannot_read_is_copied():
    plain, odd = meta(64, 32), meta(32, 64, 2)[..., 0]

    assert taken(aten.mm.default, plain, plain.t()) == []
    assert taken(aten.mm.default, plain, odd) == [32 * 64 * 2]


@pytest.mark.parametrize(
    ("dtype", "capability", "mask", "wanted"),
    [
        (torch.bfloat16, (9, 0), False, "cudnn"),
        (torch.bfloat16, (9, 0), True, "cudnn"),
        (torch.bfloat16, (8, 0), False, "flash"),
        (torch.bfloat16, (8, 0), True, "efficient"),
        (torch.float32, (9, 0), False, "efficient"),
        (torch.float64, (9, 0), False, "math"),
        (torch.bfloat16, (7, 5), False, "math"),
    ],
)
def test_the_back_end_of_attention(dtype, capability, mask, wanted):
    tensor = meta(2, 4, 128, 64, dtype=dtype)
    given = meta(128, 128, dtype=dtype) if mask else None

    assert choose(tensor, tensor, tensor, given, False, False, capability) == wanted


def test_a_forced_back_end_is_obeyed_and_grouped_heads_are_not_for_all():
    tensor, few = meta(2, 4, 128, 64, dtype=torch.float32), meta(2, 2, 128, 64, dtype=torch.float32)
    assert choose(tensor, few, few, None, False, True, (9, 0)) == "math"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert choose(tensor, tensor, tensor, None, False, False, (9, 0)) == "math"


def test_devices_have_what_a_plan_needs():
    for device in known_devices():
        assert (hardware_of(device) is None) == device.name.startswith("AMD"), device.name
        assert 0.85 * device.memory_bytes < min(usable_bytes(device)) <= max(usable_bytes(device))
    assert hardware_of(find_device("NVIDIA H200")) == H200
    assert H200.workspace_bytes == 32 << 20
    assert Hardware((8, 0), 108).workspace_bytes == 8_519_680


def test_the_backward_of_a_softmax_weighs_the_gradient_first():
    gradient, output = meta(4, 16, 64, 64, dtype=torch.float32), meta(4, 16, 64, 64, dtype=torch.bfloat16)

    assert taken(aten._softmax_backward_data.default, gradient, output, -1, torch.float32) == [1 << 20]


def test_long_transforms_have_a_workspace_and_a_real_result_a_copy_of_the_spectrum():
    assert taken(aten._fft_r2c.default, meta(64, 32768, dtype=torch.float32), [1], 0, True) == []
    assert taken(aten._fft_r2c.default, meta(64, 65536, dtype=torch.float32), [1], 0, True) == [64 * 32769 * 8]
    assert taken(aten._fft_c2c.default, meta(64, 65536, dtype=torch.complex64), [1], 0, True) == [64 * 65536 * 8]
    assert taken(aten._fft_c2r.default, meta(64, 1025, dtype=torch.complex64), [1], 2, 2048) == [64 * 1025 * 8]


def test_values_are_added_up_in_the_order_of_their_places():
    into, places, values = meta(32, 8), meta(1 << 20, dtype=torch.int64), meta(1 << 20, 8)

    assert taken(aten.index_put_.default, into, [places], values, True) == [8 << 20] * 6
    assert taken(aten.index_put_.default, into, [places], values, False) == []


def test_a_bias_has_a_workspace_of_its_own():
    bias, matrix = meta(64), meta(64, 64)

    assert kept_workspaces(aten.addmm.default, (bias, matrix, matrix), H200) == {
        "cuBLAS": 32 << 20,
        "cuBLASLt": 1 << 20,
    }
    assert kept_workspaces(aten.addmm.default, (matrix, matrix, matrix), H200) == {"cuBLAS": 32 << 20}
    assert kept_workspaces(aten.add.Tensor, (matrix, matrix), H200) == {}


@pytest.mark.parametrize(("batch", "rows", "inner", "columns"), [(0, 100, 77, 51), (0, 64, 1, 64), (3, 33, 65, 129)])
def test_what_a_product_takes_on_this_cpu(batch, rows, inner, columns):
    """oneDNN's sums in float32, or its copies of both inputs: PyTorch's own events of one call."""
    lead = (batch,) if batch else ()
    first, second = (torch.ones(*lead, *shape, dtype=torch.bfloat16) for shape in ((rows, inner), (inner, columns)))
    func = aten.bmm.default if batch else aten.mm.default
    func(first, second)
    with torch.profiler.profile(profile_memory=True) as profiler:
        out = func(first, second)

    events = [e.nbytes() for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert sum(size for size in events if size > 0) == out.nbytes + HostKernels().scratch_bytes(
        func, (first, second), {}
    )
