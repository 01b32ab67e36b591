"""FLOPs and bytes of ops: against torch's own counter and the tensors' own sizes, over real traces, over any text."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from parametrized import parametrized
from stepscope.analysis.costs.op_calls import _SCALAR_TYPES, FORMULAS, ITEM_BYTES
from stepscope.analysis.costs.op_costs import DTYPES, UNKNOWN, OpCost, op_cost, op_costs, touched_bytes
from stepscope.analysis.costs.traffic_formulas import FREE

TRACES = Path(__file__).parents[2].parent / "shared" / "traces"
_COMPOSITE = """
    linear matmul einsum tensordot outer inner chain_matmul linalg_multi_dot
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution
    _convolution_mode thnn_conv2d cudnn_convolution_backward miopen_convolution_backward
    scaled_dot_product_attention _scaled_dot_product_attention_math
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
    layer_norm rms_norm group_norm batch_norm _batch_norm_impl_index instance_norm
    softmax log_softmax cross_entropy_loss nll_loss nll_loss_nd binary_cross_entropy_with_logits
    dropout feature_dropout embedding embedding_backward embedding_bag
    to _to_copy type_as contiguous clone reshape repeat flatten_dense_tensors pin_memory _pin_memory item
    zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full zero_ rand randn randint
    rand_like randn_like relu relu_ stack concat concatenate hstack vstack index_put_ argsort rsub
    slice_backward select_backward gather_backward value_selecting_reduction_backward pad constant_pad_nd
    masked_fill diff one_hot max_pool2d adaptive_avg_pool2d
    multiply multiply_ divide divide_ true_divide true_divide_ subtract subtract_ clip clip_
"""
COMPOSITE = frozenset("aten::" + name for name in _COMPOSITE.split())
"""Ops that leave their work to ops they call, which a trace lists too: count those, or these, not both.

Other ops call one of the same cost only sometimes: themselves, by another overload or under autocast (`aten::sum`,
`aten::addmm`), `aten::index_select` a gather, a list op one op a tensor. The op that launched the kernel, which a
trace names, is always the innermost.
"""

KEYS = ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")


def cost_of(event: dict[str, Any], **options: str) -> OpCost:
    texts = [json.dumps(event["args"][key]) if key in event["args"] else None for key in KEYS]
    return op_cost(event["name"], *texts, **options)


def texts(dims: list[Any], types: list[str] | None = None, inputs: list[str] | None = None) -> list[str | None]:
    types = ["float" if dim else "" for dim in dims] if types is None else types
    return [json.dumps(dims), json.dumps(types), None, json.dumps(inputs) if inputs is not None else None]


# Real ops


def r(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(*shape).to(dtype)


BF16 = torch.bfloat16
A, B, V = r(24, 16), r(16, 40), r(16)
X3, W, BIAS = r(4, 6, 16), r(40, 16), r(40)
B1, B2 = r(3, 5, 16), r(3, 16, 7)
IMAGE, KERNEL, KERNEL_BIAS = r(2, 6, 9, 11), r(8, 3, 3, 2), r(8)
UP = r(6, 4, 3, 3)
Q, K, VALUE = r(2, 8, 12, 16), r(2, 8, 20, 16), r(2, 8, 20, 16)
INDEX = torch.tensor([1, 0, 3, 3])
TABLE = r(50, 16)
HALF = r(24, 16, dtype=BF16)
IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
MASK = A > 0
LONGS = torch.arange(24 * 16).reshape(24, 16)
SCORES, TARGET = r(12, 50), torch.arange(12)
WIDE = V.expand(24, 16)


@dataclass
class Case:
    run: Callable[[], Any]
    """What is profiled; what it returns was written, unless `writes` says otherwise."""
    reads: list[torch.Tensor] = field(default_factory=list)
    writes: list[torch.Tensor] | None = None
    extra_read: int = 0
    """Bytes of what is no tensor here: a Python number becomes a tensor of 8 bytes."""
    flops: int | None = None
    """Where torch's counter counts something else; the case says what."""


def empty_bool(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bool)


CASES: dict[str, Case] = {
    "aten::mm": Case(lambda: A @ B, [A, B]),
    "aten::mm transposed": Case(lambda: torch.mm(B.t(), A.t()), [A, B]),
    "aten::mm of float64": Case(lambda: A.double() @ B.double(), [A.double(), B.double()]),
    "aten::addmm": Case(lambda: torch.addmm(BIAS, A, B), [BIAS, A, B]),
    "aten::bmm": Case(lambda: torch.bmm(B1, B2), [B1, B2]),
    "aten::baddbmm": Case(lambda: torch.baddbmm(r(3, 5, 7), B1, B2), [r(3, 5, 7), B1, B2]),
    "aten::linear": Case(lambda: F.linear(X3, W, BIAS), [X3, W, BIAS]),
    "aten::linear without bias": Case(lambda: F.linear(X3, W), [X3, W]),
    "aten::matmul broadcast": Case(lambda: torch.matmul(r(2, 3, 5, 16), B2), [r(2, 3, 5, 16), B2]),
    # torch's counter has no formula for products with a vector.
    "aten::mv": Case(lambda: torch.mv(A, V), [A, V], flops=2 * 24 * 16),
    "aten::dot": Case(lambda: torch.dot(V, V), [V, V], flops=2 * 16),
    "aten::convolution": Case(
        lambda: F.conv2d(IMAGE, KERNEL, KERNEL_BIAS, stride=2, padding=1, groups=2), [IMAGE, KERNEL, KERNEL_BIAS]
    ),
    "aten::conv2d": Case(lambda: F.conv2d(IMAGE, r(8, 6, 3, 3), dilation=2), [IMAGE, r(8, 6, 3, 3)]),
    "aten::_convolution": Case(lambda: F.conv1d(r(2, 6, 30), r(8, 6, 5)), [r(2, 6, 30), r(8, 6, 5)]),
    "aten::convolution transposed": Case(
        lambda: F.conv_transpose2d(IMAGE, UP, stride=2, padding=1, output_padding=1), [IMAGE, UP]
    ),
    "aten::conv_transpose2d": Case(
        lambda: F.conv_transpose2d(IMAGE, r(6, 2, 3, 3), stride=3, groups=2), [IMAGE, r(6, 2, 3, 3)]
    ),
    # torch's counter counts nothing for attention on a CPU, and never halves a causal one.
    "aten::scaled_dot_product_attention": Case(
        lambda: F.scaled_dot_product_attention(Q, K, VALUE), [Q, K, VALUE], flops=4 * 2 * 8 * 12 * 20 * 16
    ),
    "aten::_scaled_dot_product_flash_attention_for_cpu causal": Case(
        lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(Q, Q, Q, 0.0, True),
        [Q, Q, Q],
        flops=2 * 2 * 8 * 12 * 12 * 16,
    ),
    "aten::add": Case(lambda: A + A, [A, A]),
    "aten::add of a row": Case(lambda: A + V, [A, V]),
    "aten::add of an expanded row": Case(lambda: A + WIDE, [A, V]),
    "aten::add of two dtypes": Case(lambda: A + HALF, [A, HALF]),
    "aten::add of a number": Case(lambda: HALF + 1.5, [HALF], extra_read=8),
    "aten::add into out": Case(lambda: torch.add(A, A, out=torch.empty(0)), [A, A]),
    "aten::add_": Case(lambda: r(24, 16).add_(A), [A, A]),
    "aten::mul of integers and a float": Case(lambda: LONGS * 2.5, [LONGS], extra_read=8),
    "aten::div of integers": Case(lambda: LONGS / LONGS.clamp(1), [LONGS, LONGS]),
    "aten::gt": Case(lambda: A > 0, [A]),
    "aten::where": Case(lambda: torch.where(MASK, A, HALF), [MASK, A, HALF]),
    "aten::exp": Case(lambda: HALF.exp(), [HALF]),
    "aten::sqrt of integers": Case(lambda: LONGS.sqrt(), [LONGS]),
    "aten::pow": Case(lambda: A.pow(2), [A]),
    "aten::gelu": Case(lambda: F.gelu(A), [A]),
    "aten::threshold_backward": Case(lambda: torch.ops.aten.threshold_backward(A, A, 0), [A, A]),
    "aten::addcmul_": Case(lambda: r(24, 16).addcmul_(A, A), [A, A, A]),
    "aten::lerp_": Case(lambda: r(24, 16).lerp_(A, 0.5), [A, A]),
    "aten::masked_fill_": Case(lambda: r(24, 16).masked_fill_(MASK, 0.0), [A, MASK]),
    "aten::copy_": Case(lambda: torch.empty(24, 16, dtype=BF16).copy_(A), [A]),
    "aten::copy_ of a row": Case(lambda: torch.empty(24, 16).copy_(V), [V]),
    "aten::_to_copy": Case(lambda: A.to(BF16), [A]),
    "aten::to": Case(lambda: A.to(BF16), [A]),
    "aten::contiguous": Case(lambda: A.t().contiguous(), [A]),
    "aten::clone": Case(lambda: HALF.clone(), [HALF]),
    "aten::fill_": Case(lambda: torch.empty(24, 16).fill_(1.0)),
    "aten::zero_": Case(lambda: torch.empty(24, 16).zero_()),
    "aten::zeros": Case(lambda: torch.zeros(24, 16, dtype=BF16)),
    "aten::ones_like": Case(lambda: torch.ones_like(HALF)),
    "aten::sum": Case(lambda: A.sum(), [A]),
    "aten::sum over rows": Case(lambda: A.sum(0), [A]),
    "aten::sum of integers": Case(lambda: IDS.int().sum(1), [IDS.int()]),
    "aten::sum in float64": Case(lambda: A.sum(1, keepdim=True, dtype=torch.float64), [A]),
    "aten::mean": Case(lambda: HALF.mean(-1), [HALF]),
    "aten::max": Case(lambda: tuple(A.max(1)), [A]),
    "aten::max of two": Case(lambda: torch.max(A, V), [A, V]),
    "aten::argmax": Case(lambda: A.argmax(0), [A]),
    "aten::any": Case(lambda: MASK.any(), [MASK]),
    "aten::var_mean": Case(lambda: torch.var_mean(A, 1), [A]),
    "aten::linalg_vector_norm": Case(lambda: torch.linalg.vector_norm(A), [A]),
    "aten::cumsum": Case(lambda: MASK.cumsum(1), [MASK]),
    "aten::topk": Case(lambda: tuple(A.topk(3)), [A]),
    "aten::sort": Case(lambda: tuple(A.sort()), [A]),
    "aten::_softmax": Case(lambda: A.softmax(-1), [A]),
    "aten::_log_softmax_backward_data": Case(
        lambda: torch.ops.aten._log_softmax_backward_data(A, A, 1, torch.float32), [A, A]
    ),
    "aten::native_layer_norm": Case(lambda: torch.native_layer_norm(X3, (16,), V, V, 1e-5), [X3, V, V]),
    "aten::native_layer_norm_backward": Case(
        lambda: torch.ops.aten.native_layer_norm_backward(
            X3, X3, (16,), r(4, 6, 1), r(4, 6, 1), V, V, [True, True, True]
        ),
        [X3, X3, r(4, 6, 1), r(4, 6, 1), V],
    ),
    "aten::native_batch_norm": Case(
        lambda: torch.native_batch_norm(IMAGE, r(6), r(6), r(6), r(6), True, 0.1, 1e-5),
        [IMAGE, *[r(6)] * 4],
        [IMAGE, *[r(6)] * 4],
    ),
    "aten::native_group_norm": Case(
        lambda: torch.native_group_norm(IMAGE, r(6), r(6), 2, 6, 99, 3, 1e-5), [IMAGE, r(6), r(6)]
    ),
    "aten::embedding": Case(lambda: F.embedding(IDS, TABLE), [IDS, r(6, 16)]),
    "aten::embedding of more than the table": Case(
        lambda: F.embedding(torch.zeros(9, 9, dtype=torch.long), TABLE), [torch.zeros(9, 9, dtype=torch.long), TABLE]
    ),
    # The zeros are an op of their own: this one writes a row an index.
    "aten::embedding_dense_backward": Case(
        lambda: torch.ops.aten.embedding_dense_backward(r(2, 3, 16), IDS, 50, -1, False),
        [r(2, 3, 16), IDS],
        [r(6, 16)],
    ),
    "aten::index_select": Case(lambda: A.index_select(1, INDEX), [INDEX, r(24, 4)]),
    "aten::gather": Case(lambda: A.gather(1, LONGS[:, :2] % 16), [r(24, 2), torch.empty(24, 2, dtype=torch.long)]),
    "aten::scatter_add_": Case(
        lambda: torch.zeros(24, 16).scatter_add_(1, LONGS[:, :2] % 16, A[:, :2]),
        [torch.empty(24, 2, dtype=torch.long), r(24, 2), r(24, 2)],
        [r(24, 2)],
    ),
    "aten::native_dropout": Case(lambda: torch.native_dropout(A, 0.5, True), [A]),
    "aten::nll_loss_forward": Case(
        lambda: torch.ops.aten.nll_loss_forward(SCORES, TARGET, None, 1, -100), [r(12), TARGET]
    ),
    "aten::nll_loss_backward": Case(
        lambda: torch.ops.aten.nll_loss_backward(r(1)[0], SCORES, TARGET, None, 1, -100, r(1)[0]),
        [r(1), TARGET, r(1)],
        [r(12)],
    ),
    "aten::max_pool2d_with_indices": Case(lambda: F.max_pool2d(IMAGE, 3, 2, 1, return_indices=True), [IMAGE]),
    "aten::avg_pool2d": Case(lambda: F.avg_pool2d(IMAGE, 2), [IMAGE]),
    "aten::view": Case(lambda: A.view(-1), writes=[]),
    "aten::transpose": Case(lambda: A.transpose(0, 1), writes=[]),
    "aten::empty": Case(lambda: torch.empty(4, 4), writes=[]),
}


@pytest.fixture(scope="module")
def profiled(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """Each case's op as torch.profiler writes it: the outermost of its name."""
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        for name, case in CASES.items():
            with torch.profiler.record_function(f"case {name}"):
                case.run()
    profiler.export_chrome_trace(str(path))
    events = sorted(json.loads(path.read_text())["traceEvents"], key=lambda event: event.get("ts", 0))
    found: dict[str, dict[str, Any]] = {}
    case_name = ""
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"].startswith("case "):
            case_name = event["name"].removeprefix("case ")
        elif event.get("cat") == "cpu_op" and event["name"] == case_name.partition(" ")[0]:
            found.setdefault(case_name, event)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_real_op_costs_what_torch_counts_and_its_tensors_hold(name, profiled):
    case = CASES[name]
    with FlopCounterMode(display=False) as counter:
        result = case.run()
    results = result if isinstance(result, tuple) else (result,)
    written = (
        [tensor for tensor in results if isinstance(tensor, torch.Tensor)] if case.writes is None else case.writes
    )

    cost = cost_of(profiled[name])

    assert cost.flops == (counter.get_total_flops() if case.flops is None else case.flops)
    assert cost.read_bytes == sum(tensor.nbytes for tensor in case.reads) + case.extra_read
    assert cost.written_bytes == sum(tensor.nbytes for tensor in written)


@pytest.mark.parametrize("mask", [(True, True, True), (True, False, False), (False, True, True)])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolution_backward_counts_the_products_it_is_asked_for(mask, transposed, tmp_path):
    image, kernel = r(2, 6, 9, 9), r(6, 4, 3, 3) if transposed else r(4, 6, 3, 3)
    args = (kernel, [4], [2, 2], [1, 1], [1, 1], transposed, [0, 0], 1)
    grad = torch.convolution(image, kernel, None, *args[2:]).clone()
    with FlopCounterMode(display=False) as counter:
        event = profile_one(
            lambda: torch.ops.aten.convolution_backward(grad, image, *args, mask), "convolution_backward", tmp_path
        )

    cost = cost_of(event)

    assert cost.flops == counter.get_total_flops() > 0
    reads = [grad] + [kernel] * mask[0] + [image] * mask[1]
    writes = [image] * mask[0] + [kernel] * mask[1] + [r(4)] * mask[2]
    assert (cost.read_bytes, cost.written_bytes) == tuple(sum(t.nbytes for t in ts) for ts in (reads, writes))


def test_a_grouped_convolution_backward_counts_a_group_where_torch_counts_all_channels(tmp_path):
    image, kernel, grad = r(2, 6, 9, 9), r(4, 3, 3, 3), r(2, 4, 7, 7)
    args = ([4], [1, 1], [0, 0], [1, 1], False, [0, 0], 2, (True, True, False))
    event = profile_one(
        lambda: torch.ops.aten.convolution_backward(grad, image, kernel, *args), "convolution_backward", tmp_path
    )

    # Both gradients do the forward's products; torch's formula for the weight's forgets the two groups.
    forward = 2 * (2 * 4 * 7 * 7) * (3 * 3 * 3)
    assert cost_of(event).flops == 2 * forward


def profile_one(run: Callable[[], Any], op: str, tmp_path: Path) -> dict[str, Any]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        run()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    return next(event for event in events if event["name"] == f"aten::{op}")


def test_attention_backward_on_a_cpu(tmp_path):
    query = r(2, 8, 12, 16).requires_grad_()
    out = F.scaled_dot_product_attention(query, query, query, is_causal=True)
    event = profile_one(
        lambda: out.backward(r(2, 8, 12, 16)), "_scaled_dot_product_flash_attention_for_cpu_backward", tmp_path
    )

    cost = cost_of(event)

    # Five products over half of the square.
    assert cost.flops == 5 * 2 * 2 * 8 * 12 * 12 * 16 // 2
    assert cost.read_bytes == 5 * query.nbytes + 2 * 8 * 12 * 4
    assert cost.written_bytes == 3 * query.nbytes


def test_a_fused_optimizer_reads_four_and_writes_three(tmp_path):
    parameters = [r(24, 16).requires_grad_(), r(16).requires_grad_()]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    event = profile_one(optimizer.step, "_fused_adamw_", tmp_path)
    num_bytes = sum(parameter.nbytes for parameter in parameters)

    cost = cost_of(event, parameter_dtype="float32")

    assert cost == OpCost(0, 4 * num_bytes + 2 * 4, 3 * num_bytes, "float32")
    # The trace does not say the dtype of a list.
    assert cost_of(event) == OpCost(0, None, None, None)


@pytest.mark.parametrize(
    ("run", "op", "num_read", "num_written"),
    [
        (lambda a, b: torch._foreach_add_(a, b), "_foreach_add_", 2, 1),
        (lambda a, b: torch._foreach_mul(a, 2.0), "_foreach_mul", 1, 1),
        (lambda a, b: torch._foreach_addcdiv_(a, b, b), "_foreach_addcdiv_", 3, 1),
        (lambda a, b: torch._foreach_copy_(a, b), "_foreach_copy_", 1, 1),
        (lambda a, b: torch._foreach_zero_(a), "_foreach_zero_", 0, 1),
    ],
)
def test_a_foreach_op_reads_its_lists_and_writes_the_first(run, op, num_read, num_written, tmp_path):
    first, second = [r(24, 16), r(5)], [r(24, 16), r(5)]
    event = profile_one(lambda: run(first, second), op, tmp_path)
    num_bytes = (24 * 16 + 5) * 4

    cost = cost_of(event, parameter_dtype="float32")

    assert (cost.flops, cost.read_bytes, cost.written_bytes) == (0, num_read * num_bytes, num_written * num_bytes)


# Ops of a GPU, by the texts a GPU's trace has

BHSD = [[8, 12, 1024, 64]] * 3
BSHD = [[8, 1024, 12, 64]] * 3
SQUARE = 8 * 12 * 1024 * 1024 * 64


@pytest.mark.parametrize(
    ("name", "dims", "inputs", "flops"),
    [
        ("_scaled_dot_product_flash_attention", BHSD, ["", "", "", "0.", "False", "False", ""], 4 * SQUARE),
        ("_scaled_dot_product_flash_attention", BHSD, ["", "", "", "0.", "True", "False", ""], 2 * SQUARE),
        ("_scaled_dot_product_cudnn_attention", BHSD, [*[""] * 4, "True", "0.", "True", "False", ""], 2 * SQUARE),
        ("_scaled_dot_product_attention_math", BHSD, [*[""] * 4, "0.", "True"], 4 * SQUARE),
        ("_flash_attention_forward", BSHD, [*[""] * 5, "1024", "1024", "0.", "True", "False", "0.125"], 2 * SQUARE),
        ("_efficient_attention_forward", BSHD, [*[""] * 8, "0.", "1", "True", "0.125", "", ""], 2 * SQUARE),
        ("_efficient_attention_forward", BSHD, [*[""] * 8, "0.", "0", "True", "0.125", "", ""], 4 * SQUARE),
        ("_cudnn_attention_forward", BHSD, [*[""] * 6, "1024", "1024", "True", "0.", "False"], 4 * SQUARE),
        # A window, lengths that differ, or no word of the mask: not known.
        ("_flash_attention_forward", BSHD, [*[""] * 5, "9", "9", "0.", "True", "False", "", "128", "0"], None),
        ("_scaled_dot_product_flash_attention", BHSD, None, None),
        ("_flash_attention_forward", [[8192, 12, 64]] * 3, [*[""] * 5, "9", "9", "0.", "True", "False", ""], None),
    ],
)
def test_attention_forward(name, dims, inputs, flops):
    types = ["c10::BFloat16"] * 3
    padding = len(inputs) - 3 if inputs else 4
    cost = op_cost(f"aten::{name}", *texts([*dims, *[[]] * padding], [*types, *["Scalar"] * padding], inputs))

    assert cost.flops == flops
    assert (cost.read_bytes, cost.dtype) == (3 * 2 * 8 * 12 * 1024 * 64, "bfloat16") or flops is None


def test_grouped_query_attention_counts_the_heads_of_the_queries():
    dims = [[2, 8, 128, 64], [2, 2, 256, 64], [2, 2, 256, 32], [], [], [], []]
    inputs = ["", "", "", "0.", "False", "False", ""]
    tensors = [torch.empty(dim, device="meta") for dim in dims[:3]]

    cost = op_cost("aten::_scaled_dot_product_flash_attention", *texts(dims, ["float"] * 3 + ["Scalar"] * 4, inputs))

    counted = flop_registry[torch.ops.aten._scaled_dot_product_flash_attention](*tensors, out_val=None)
    assert cost.flops == counted == 2 * 2 * 8 * 128 * 256 * (64 + 32)


def test_attention_backward_is_five_products_as_in_torch():
    # As the H200 wrote it.
    dims = [*[[8, 12, 1024, 64]] * 5, [8, 12, 1024, 1], *[[]] * 10]
    types = [*["c10::BFloat16"] * 5, "float", "long int", "long int", "", "", "", *["Scalar"] * 5]
    inputs = [*[""] * 11, "1024", "1024", "0.", "False", "0.125"]
    tensors = [torch.empty(8, 12, 1024, 64, device="meta") for _ in range(4)]
    counted = flop_registry[torch.ops.aten._scaled_dot_product_cudnn_attention_backward](*tensors, out_val=None)

    cost = op_cost("aten::_cudnn_attention_backward", *texts(dims, types, inputs))
    causal = op_cost("aten::_cudnn_attention_backward", *texts(dims, types, [*inputs[:14], "True", "0.125"]))

    assert cost.flops == counted == 10 * SQUARE
    # torch's counter does not know that a causal mask halves the work.
    assert causal.flops == counted // 2
    one = 8 * 12 * 1024 * 64 * 2
    assert (cost.read_bytes, cost.written_bytes) == (5 * one + 8 * 12 * 1024 * 4, 3 * one)


def test_efficient_attention_backward_writes_the_bias_gradient_when_asked():
    dims = [[2, 64, 4, 8]] * 4 + [[2, 4, 64, 64], [2, 64, 4, 8]] + [[]] * 4 + [[2, 4, 64]] + [[]] * 9
    types = ["float"] * 6 + ["", "", "Scalar", "Scalar", "float", "Scalar", "long int", "long int"] + ["Scalar"] * 6
    inputs = [*[""] * 8, "64", "64", "", "0.", "", "", "0", "True", "0.125", "", "", "False"]
    one, bias = 2 * 64 * 4 * 8 * 4, 2 * 4 * 64 * 64 * 4

    cost = op_cost("aten::_efficient_attention_backward", *texts(dims, types, inputs))

    assert cost == OpCost(10 * 2 * 4 * 64 * 64 * 8, 5 * one + bias + 2 * 4 * 64 * 4, 3 * one + bias, "float32")


def test_a_scaled_product_runs_in_float8_and_writes_what_it_is_told():
    dims = [[64, 32], [32, 16], [], [], [], [], [], []]
    types = ["c10::Float8_e4m3fn", "c10::Float8_e4m3fn", "float", "float", "", "", "Scalar", "Scalar"]
    inputs = ["", "", "", "", "", "", "15", "False"]

    cost = op_cost("aten::_scaled_mm", *texts(dims, types, inputs))

    assert cost == OpCost(2 * 64 * 32 * 16, 64 * 32 + 32 * 16 + 8, 64 * 16 * 2, "float8")


@pytest.mark.parametrize(
    ("left", "right", "flops", "out"),
    [
        ([100, 32], [4, 32, 16], 2 * 100 * 32 * 16, 100 * 16),
        ([4, 25, 32], [4, 32, 16], 2 * 100 * 32 * 16, 100 * 16),
        ([25, 96], [96, 16], 2 * 25 * 96 * 16, 4 * 25 * 16),
        ([4, 25, 32], [32, 64], 2 * 25 * 32 * 64, 25 * 64),
    ],
)
def test_a_grouped_product_adds_up_over_its_groups(left, right, flops, out):
    types = ["c10::BFloat16", "c10::BFloat16", "int", "", ""]

    cost = op_cost("aten::_grouped_mm", *texts([left, right, [4], [], []], types, [""] * 5))

    assert (cost.flops, cost.written_bytes) == (flops, out * 2)


def test_batch_norm_of_cudnn():
    dims, types = [[32, 64, 56, 56], *[[64]] * 4, [], [], []], [*["float"] * 5, "Scalar", "Scalar", "Scalar"]
    image, channels = 32 * 64 * 56 * 56 * 4, 64 * 4

    training = op_cost("aten::cudnn_batch_norm", *texts(dims, types, [*[""] * 5, "True", "0.1", "1e-05"]))
    evaluating = op_cost("aten::cudnn_batch_norm", *texts(dims, types, [*[""] * 5, "False", "0.1", "1e-05"]))

    assert training == OpCost(0, image + 4 * channels, image + 4 * channels, "float32")
    assert evaluating == OpCost(0, image + 4 * channels, image, "float32")


# What a trace does not say


def test_old_traces_without_values_do_not_guess_a_convolution():
    cost = op_cost("aten::cudnn_convolution", *texts([[32, 3, 224, 224], [64, 3, 7, 7], *[[]] * 7]))

    assert cost == OpCost(None, (32 * 3 * 224 * 224 + 64 * 3 * 7 * 7) * 4, None, "float32")


def test_the_gradient_of_a_convolutions_input_needs_no_stride():
    dims = [[], [32, 512, 7, 7], [512, 512, 3, 3], *[[]] * 7]

    cost = op_cost("aten::cudnn_convolution_backward_input", *texts(dims))

    assert (cost.flops, cost.written_bytes) == (2 * 32 * 512 * 7 * 7 * 512 * 9, None)


def test_without_dtypes_flops_are_known_and_bytes_are_not():
    assert op_cost("aten::mm", "[[8, 16], [16, 4]]", None) == OpCost(1024, None, None, None)


def test_a_list_of_over_30_tensors_is_empty_in_a_trace():
    dims, types = json.dumps([[]] * 15), json.dumps(["TensorList"] * 6 + ["Scalar"] * 9)

    assert op_cost("aten::_fused_adamw_", dims, types, None, None, parameter_dtype="float32") == OpCost(
        0, None, None, None
    )


def test_a_concatenation_has_shapes_and_no_dtype():
    cost = op_cost("aten::cat", *texts([[[8, 4], [8, 4]], []], ["TensorList", "Scalar"], ["", "1"]))

    assert cost == OpCost(0, None, None, None)


@pytest.mark.parametrize("name", ["aten::frobnicate", "mm", "MmBackward0", "", "triton_poi_fused_add_0", "aten::"])
def test_ops_not_known_are_unknown(name):
    assert op_cost(name, *texts([[8, 16], [16, 4]])) == UNKNOWN


def test_overlapping_windows_are_read_once():
    # Ten windows of five elements over fourteen.
    cost = op_cost("aten::exp", "[[10, 5]]", '["float"]', "[[1, 1]]", '[""]')

    assert (cost.read_bytes, cost.written_bytes) == (14 * 4, 50 * 4)


def test_padded_rows_that_repeat_are_read_once():
    # Eight times the same four rows of four, a hundred elements apart.
    cost = op_cost("aten::exp", "[[8, 4, 4]]", '["float"]', "[[0, 100, 1]]", '[""]')

    assert (cost.read_bytes, cost.written_bytes) == (16 * 4, 128 * 4)


@pytest.mark.parametrize(
    "size", ["[-5]", "[9223372036854775807, 2]", "[99999999999999999999999]", "[" + "1, " * 99 + "1]"]
)
def test_sizes_that_no_tensor_has_are_not_known(size):
    cost = op_cost("aten::zeros", *texts([[]] * 5, ["ScalarList", *[""] * 4], [size, "6", "", "", ""]))

    assert cost.written_bytes is None


def test_a_compiled_kernel_touches_all_it_is_given():
    dims, types = "[[16, 1024], [16, 1024], [1024], []]", '["float", "c10::BFloat16", "float", "Scalar"]'

    assert touched_bytes(dims, types) == 16 * 1024 * (4 + 2) + 1024 * 4
    assert touched_bytes(dims, None) is None
    assert touched_bytes("[[[2, 2]]]", '["TensorList"]') is None
    assert touched_bytes("[" * 50_000, types) is None


# The tables of names


def test_argument_names_stand_where_torch_has_them():
    """A formula names arguments as the op's schema does: those it names otherwise are listed."""
    ours = {"left", "right", "bias", "input", "src", "mean", "rstd", "grad_out", "grad_output"}
    compared = Counter()
    for name, (_, arguments) in FORMULAS.items():
        packet = getattr(torch.ops.aten, name, None)
        if packet is None or not arguments:
            continue
        schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
        places = {
            (argument.name.rstrip("_"), index)
            for schema in schemas
            for index, argument in enumerate(schema.arguments)
        }
        known = {place[0] for place in places}
        for index, argument in enumerate(arguments):
            if argument in known:
                compared[name] += 1
                assert (argument, index) in places, f"{name}: {argument} is not argument {index}"
            else:
                assert argument in ours, f"{name} has no {argument}"

    assert len(compared) > 120 and sum(compared.values()) > 400


def test_every_op_named_is_one_of_torch():
    gone = {"cudnn_convolution_backward_input", "miopen_convolution_backward_input", "_cat", "masked_scale",
            "cudnn_convolution_backward", "miopen_convolution_backward", "gather_backward"}  # fmt: skip
    inplace_of_none = {f"{name}_" for name in FORMULAS if not hasattr(torch.ops.aten, f"{name}_")}
    names = (
        {name for name in FORMULAS if "::" not in name} | FREE | {name.removeprefix("aten::") for name in COMPOSITE}
    )

    unknown = {name for name in names if not hasattr(torch.ops.aten, name)} - gone - inplace_of_none

    assert unknown == set()


def test_dtype_numbers_and_names_are_torchs(tmp_path):
    dtypes = [getattr(torch, name) for name in sorted(ITEM_BYTES.keys() - {"float8"})]
    dtypes += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
    dtypes.append(torch.float8_e8m0fnu)
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        name = "float8" if name.startswith("float8") else name
        source = torch.ones(2, dtype=torch.float16 if dtype == torch.float32 else torch.float32)

        event = profile_one(lambda source=source, dtype=dtype: source.to(dtype), "_to_copy", tmp_path)
        copied = profile_one(lambda dtype=dtype: torch.empty(2, dtype=dtype).fill_(1), "fill_", tmp_path)

        assert _SCALAR_TYPES[int(event["args"]["Concrete Inputs"][1])] == name
        assert cost_of(event).written_bytes == 2 * dtype.itemsize == 2 * ITEM_BYTES[name]
        assert cost_of(copied) == OpCost(0, 0, 2 * dtype.itemsize, name)
    assert set(DTYPES.values()) <= ITEM_BYTES.keys()


# Any text

TEXT = st.one_of(st.none(), st.text(), st.text(alphabet='[]{}",0123456789-.eE truefalsn'))
NAMES = st.sampled_from(sorted(FORMULAS)).map(lambda name: name if "::" in name else f"aten::{name}")
SIZE = st.one_of(st.integers(-2, 9), st.integers(2**31, 2**70), st.floats(), st.none(), st.text(max_size=2))
SHAPE = st.one_of(st.lists(st.integers(0, 5), max_size=5), st.lists(SIZE, max_size=5))
OPERANDS = st.lists(st.one_of(SHAPE, st.lists(SHAPE, max_size=4), SIZE), max_size=12)
TYPES = st.lists(st.sampled_from([*DTYPES, "Scalar", "ScalarList", "TensorList", "", "GenericList"]), max_size=12)
VALUE_TEXT = st.sampled_from(
    ["", "0", "-1", "1", "2.", "True", "False", "[1, 1]", "[]", "[True, False]", "9" * 40, "["]
)
VALUES = st.lists(st.one_of(VALUE_TEXT, st.integers(), st.text(max_size=5)), max_size=16)


def is_sound(cost: OpCost) -> bool:
    numbers = (cost.flops, cost.read_bytes, cost.written_bytes)
    return all(number is None or (type(number) is int and 0 <= number < 2**63) for number in numbers)


@given(st.one_of(st.text(), NAMES), TEXT, TEXT, TEXT, TEXT)
def test_no_text_raises(name, shapes, dtypes, strides, inputs):
    assert is_sound(op_cost(name, shapes, dtypes, strides, inputs))
    touched_bytes(shapes, dtypes, strides)


@parametrized("seed", range(8), quick=4)
def test_no_well_formed_nonsense_raises(seed):
    @given(st.lists(NAMES, min_size=40, max_size=40), OPERANDS, TYPES, OPERANDS, VALUES)
    def check(names, shapes, dtypes, strides, inputs):
        arguments = [json.dumps(part) for part in (shapes, dtypes, strides, inputs)]
        for name in names:
            assert is_sound(op_cost(name, *arguments, parameter_dtype="float32"))

    check()


@pytest.mark.parametrize(
    "shapes",
    [
        "[" * 30_000,
        "[" * 100_000,
        "[[8, 16], [16, 4]" + " " * 40_000 + "]",
        "[[" + "9" * 30_000 + "]]",
        "[[" + "2," * 10_000 + "2]]",
        "[" + "[2]," * 8_000 + "[2]]",
        "[[9223372036854775807, 9223372036854775807], [9223372036854775807, 9223372036854775807]]",
        '[[8, 16], "x"]',
        "[[8, 16], [true, 4]]",
        "[[8.0, 16], [16, 4]]",
        "[[NaN], [Infinity]]",
        "{}",
        "null",
        "",
    ],
    ids=lambda text: text[:12],
)
def test_absurd_shapes_are_unknown(shapes):
    cost = op_cost("aten::mm", shapes, '["float", "float"]', shapes, shapes)

    assert (cost.flops, cost.read_bytes, cost.written_bytes) == (None, None, None)


# Frames


def frame(rows: list[tuple[str | None, ...]]) -> pl.DataFrame:
    columns = ("name", "shapes", "dtypes", "strides", "inputs")
    return pl.DataFrame(rows, schema=dict.fromkeys(columns, pl.String), orient="row")


MM = ("aten::mm", "[[8, 16], [16, 4]]", '["float", "float"]', None, None)
ADD = ("aten::add", "[[8], [8], []]", '["float", "float", "Scalar"]', "[[1], [1], []]", '["", "", "1"]')


def test_a_frame_keeps_its_rows_their_order_and_its_other_columns():
    ops = frame([MM, ADD, MM, ("aten::what", None, None, None, None), ADD, (None, None, None, None, None)])
    ops = ops.with_columns(ts=pl.int_range(pl.len()))
    before = ops.clone()

    costs = op_costs(ops)

    assert costs["ts"].to_list() == [0, 1, 2, 3, 4, 5]
    assert costs["flops"].to_list() == [1024, 0, 1024, None, 0, None]
    assert costs["read_bytes"].to_list() == [768, 64, 768, None, 64, None]
    assert costs["written_bytes"].to_list() == [128, 32, 128, None, 32, None]
    assert costs["dtype"].to_list() == ["float32", "float32", "float32", None, "float32", None]
    assert costs.drop("flops", "read_bytes", "written_bytes", "dtype").equals(before) and ops.equals(before)
    assert costs.schema["flops"] == costs.schema["read_bytes"] == costs.schema["written_bytes"] == pl.Int64


def test_categories_nothing_and_numbers_beyond_an_int64():
    ops = frame([MM, ("aten::mm", "[[4294967296, 4294967296], [4294967296, 1]]", '["bool", "bool"]', None, None)])

    costs = op_costs(ops.with_columns(pl.all().cast(pl.Categorical)))

    assert costs["flops"].to_list() == [1024, None]
    assert op_costs(frame([])).height == 0
    nothing = pl.DataFrame(
        {"name": ["aten::mm"], "shapes": [None], "dtypes": [None], "strides": [None], "inputs": [None]}
    )
    assert op_costs(nothing)["flops"].to_list() == [None]


def test_a_row_that_repeats_is_worked_out_once(monkeypatch):
    calls = Counter()

    def counted(name, *texts, **options):
        calls[name] += 1
        return op_cost(name, *texts, **options)

    monkeypatch.setattr("stepscope.analysis.costs.op_costs.op_cost", counted)

    costs = op_costs(pl.concat([frame([MM, ADD])] * 1000))

    assert calls == {"aten::mm": 1, "aten::add": 1}
    assert costs["flops"].sum() == 1024 * 1000


# Real traces

KERNEL_CATEGORIES = ("kernel", "Kernel", "gpu_memcpy", "gpu_memset", "Memcpy", "Memset")
PEAK_BYTES_PER_S, L2_BYTES = 4.8e12, 60e6
PEAK_FLOPS_PER_S = {"bfloat16": 989e12, "float32": 67e12}


def launching_ops(path: Path) -> list[tuple[dict[str, Any], float]]:
    """Ops that launched kernels, with the kernels' microseconds; every op's cost is asked for on the way."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    ops = {}
    for event in events:
        if event.get("cat") in ("cpu_op", "Operator"):
            assert is_sound(cost_of(event))
            ops[event["args"].get("External id")] = event
    kernel_us: Counter[Any] = Counter()
    for event in events:
        if event.get("cat") in KERNEL_CATEGORIES:
            kernel_us[event["args"].get("External id", event["args"].get("external id"))] += event["dur"]
    return [(ops[key], us) for key, us in kernel_us.items() if key in ops]


def traces(pattern: str) -> list[Any]:
    found = sorted(TRACES.glob(pattern))
    missing = pytest.param(None, marks=pytest.mark.skip(reason=f"no traces at {pattern}"), id="none")
    return [pytest.param(path, id=path.name[:24]) for path in found] or [missing]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("path", traces("public/**/*.json.gz"))
def test_public_traces_raise_nothing_and_composites_launch_nothing(path):
    assert {event["name"] for event, _ in launching_ops(path)}.isdisjoint(COMPOSITE)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("path", traces("h200/*.json.gz"))
def test_no_op_is_faster_than_the_device(path):
    known_us = total_us = 0.0
    for event, us in launching_ops(path):
        assert event["name"] not in COMPOSITE
        cost = cost_of(event)
        total_us += us
        if cost.flops:
            assert cost.flops / us * 1e6 < PEAK_FLOPS_PER_S[str(cost.dtype)], event
        if cost.read_bytes is None or cost.written_bytes is None:
            continue
        known_us += us
        num_bytes = cost.read_bytes + cost.written_bytes
        # AdamW gives addcmul_ its gradient twice, which is read once: a trace does not tell one tensor from two.
        if num_bytes > L2_BYTES and event["name"] != "aten::addcmul_":
            assert num_bytes / us * 1e6 < PEAK_BYTES_PER_S, event

    # What torch.compile made is no op; the rest are optimizers over lists of more than 30 tensors, and cat.
    assert known_us / total_us > (0.7 if "compiled" in path.name else 0.9)
