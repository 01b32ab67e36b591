"""FLOPs of single ops: products by hand, the causal half, the model's share of an attention backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from stepscope.recorder.ledger.flops import Op, count_flops, has_formula, op_name
from stepscope.recorder.ledger.ledger import Ledger
from stepscope.recorder.machine.environment import float32_matmul

ATEN = torch.ops.aten
B, H, S, T, D = 2, 4, 16, 32, 8  # batch, heads, queries, keys, head width


def counted(function, phase: str = "forward") -> dict:
    """The FLOPs of whatever `function` calls."""
    ledger = Ledger([], [], lambda: phase)
    ledger.start()
    try:
        function()
    finally:
        ledger.stop()
    return ledger.flops(compiled=False)


def by_op(facts: dict) -> dict[str, int]:
    return {entry["op"]: entry["flops"] for entry in facts["by_op"]}


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("function", "op", "flops"),
    [
        (lambda: zeros(3, 5) @ zeros(5, 7), "aten.mm", 2 * 3 * 5 * 7),
        (lambda: F.linear(zeros(3, 5), zeros(7, 5), zeros(7)), "aten.addmm", 2 * 3 * 5 * 7),
        (lambda: F.linear(zeros(2, 3, 5), zeros(7, 5)), "aten.mm", 2 * 6 * 5 * 7),
        (lambda: torch.bmm(zeros(4, 3, 5), zeros(4, 5, 7)), "aten.bmm", 2 * 4 * 3 * 5 * 7),
        (lambda: torch.einsum("bid,bjd->bij", zeros(4, 3, 5), zeros(4, 7, 5)), "aten.bmm", 2 * 4 * 3 * 5 * 7),
        (
            lambda: torch.baddbmm(zeros(4, 3, 7), zeros(4, 3, 5), zeros(4, 5, 7)),
            "aten.baddbmm",
            2 * 4 * 3 * 5 * 7,
        ),
        (lambda: F.conv1d(zeros(2, 3, 10), zeros(6, 3, 4)), "aten.convolution", 2 * 2 * 7 * 6 * 3 * 4),
        (lambda: F.conv2d(zeros(2, 4, 8, 8), zeros(6, 4, 3, 3)), "aten.convolution", 2 * 2 * 36 * 6 * 4 * 9),
        (
            lambda: F.conv2d(zeros(2, 4, 8, 8), zeros(6, 2, 3, 3), groups=2),
            "aten.convolution",
            2 * 2 * 36 * 6 * 2 * 9,
        ),
    ],
)
def test_products_are_two_flops_a_multiply_add(function, op, flops):
    facts = counted(function)

    assert by_op(facts) == {op: flops}
    assert facts["model_flops_by_dtype"] == {"fp32": flops}
    assert facts["error"] is None


def test_a_linear_layers_backward_is_twice_its_forward():
    x, weight = torch.ones(3, 5, requires_grad=True), torch.ones(7, 5, requires_grad=True)
    out = F.linear(x, weight).sum()

    assert by_op(counted(out.backward, "backward")) == {"aten.mm": 2 * (2 * 3 * 5 * 7)}


def test_a_convolutions_backward_is_twice_its_forward():
    x, weight = torch.ones(2, 4, 8, 8, requires_grad=True), torch.ones(6, 4, 3, 3, requires_grad=True)
    out = F.conv2d(x, weight).sum()

    assert by_op(counted(out.backward, "backward")) == {"aten.convolution_backward": 2 * (2 * 2 * 36 * 6 * 4 * 9)}


FORWARD_FLOPS = 2 * (2 * B * H * S * T * D)


@pytest.mark.parametrize(("causal", "share"), [(False, 1), (True, 2)])
def test_attention_on_a_cpu_forward_and_backward(causal, share):
    query = torch.ones(B, H, S, D, requires_grad=True)
    key, value = (torch.ones(B, H, S, D, requires_grad=True) for _ in range(2))
    square = 2 * (2 * B * H * S * S * D) // share  # the scores, and their product with the values
    out = []

    forward = counted(lambda: out.append(F.scaled_dot_product_attention(query, key, value, is_causal=causal)))
    backward = counted(lambda: out[0].sum().backward(), "backward")

    assert by_op(forward) == {"aten._scaled_dot_product_flash_attention_for_cpu": square}
    assert forward["model_flops_by_dtype"] == {"fp32": square}
    # Executed: the scores once more and four gradients; the model asks for the four.
    assert by_op(backward) == {"aten._scaled_dot_product_flash_attention_for_cpu_backward": square * 5 // 2}
    assert backward["model_flops_by_dtype"] == {"fp32": square * 2}


def test_grouped_queries_on_a_cpu_count_every_query_head():
    query, key = torch.ones(B, H, S, D), torch.ones(B, H // 2, S, D)
    facts = counted(lambda: F.scaled_dot_product_attention(query, key, key, enable_gqa=True))

    assert sum(by_op(facts).values()) == 2 * (2 * B * H * S * S * D)
    assert facts["error"] is None


def attention_arguments(op, tensors: list[torch.Tensor], causal: bool, out: object = None) -> list[object]:
    """The op's arguments in order: the tensors first, `is_causal` where the schema has it."""
    arguments: list[object] = []
    for position, argument in enumerate(op._schema.arguments):
        if position < len(tensors):
            arguments.append(tensors[position])
        elif argument.name == "is_causal":
            arguments.append(causal)
        else:
            arguments.append(None)
    return arguments


QUERY, KEY, VALUE = (zeros(B, H, length, D, dtype=torch.bfloat16, device="meta") for length in (S, T, T))
FUSED = ["flash", "efficient", "cudnn"]


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize(("causal", "share"), [(False, 1), (True, 2)])
def test_a_gpus_fused_attention_by_its_shapes(kind, causal, share):
    forward = getattr(ATEN, f"_scaled_dot_product_{kind}_attention").default
    backward = getattr(ATEN, f"_scaled_dot_product_{kind}_attention_backward").default

    one = count_flops(forward, attention_arguments(forward, [QUERY, KEY, VALUE], causal), {}, (QUERY,))
    two = count_flops(backward, attention_arguments(backward, [QUERY, QUERY, KEY, VALUE], causal), {}, (QUERY,))

    assert (one.flops, one.model_flops, one.dtype) == (FORWARD_FLOPS // share, FORWARD_FLOPS // share, "bf16")
    assert two.flops == FORWARD_FLOPS * 5 // 2 // share
    assert two.model_flops == FORWARD_FLOPS * 2 // share


@pytest.mark.parametrize("kind", ["efficient", "cudnn"])
def test_the_models_backward_is_twice_its_forward_when_values_are_narrower_than_keys(kind):
    """GIVEN values half as wide as keys THEN exactly the scores computed again are left out."""
    narrow = zeros(B, H, T, D // 2, dtype=torch.bfloat16, device="meta")
    gradient = zeros(B, H, S, D // 2, dtype=torch.bfloat16, device="meta")
    forward = getattr(ATEN, f"_scaled_dot_product_{kind}_attention").default
    backward = getattr(ATEN, f"_scaled_dot_product_{kind}_attention_backward").default

    one = count_flops(forward, attention_arguments(forward, [QUERY, KEY, narrow], False), {}, (gradient,))
    two = count_flops(backward, attention_arguments(backward, [gradient, QUERY, KEY, narrow], False), {}, (QUERY,))

    assert one.flops == 2 * B * H * S * T * (D + D // 2)
    assert two.flops == 2 * B * H * S * T * (3 * D + 2 * (D // 2))
    assert two.model_flops == 2 * one.model_flops


def test_causal_is_found_as_a_keyword_too():
    op = ATEN._scaled_dot_product_flash_attention.default

    assert count_flops(op, (QUERY, KEY, VALUE), {"is_causal": True}, (QUERY,)).flops == FORWARD_FLOPS // 2
    assert count_flops(op, (QUERY, KEY, VALUE), {}, (QUERY,)).flops == FORWARD_FLOPS


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float64, "fp64"),
        (torch.float32, "fp32"),
        (torch.bfloat16, "bf16"),
        (torch.float16, "fp16"),
        (torch.int8, "int8"),
        (torch.float8_e4m3fn, "fp8"),
        (torch.float8_e5m2, "fp8"),
        (torch.complex64, "complex64"),
    ],
)
def test_dtypes_are_named_as_the_peaks_table_names_them(dtype, name):
    a, b = torch.empty(4, 4, dtype=dtype, device="meta"), torch.empty(4, 4, dtype=dtype, device="meta")

    assert count_flops(ATEN.mm.default, (a, b), {}, a).dtype == name


def test_a_wider_bias_does_not_decide_the_dtype():
    bias, a = torch.empty(4, device="meta"), torch.empty(4, 4, dtype=torch.bfloat16, device="meta")

    assert count_flops(ATEN.addmm.default, (bias, a, a), {}, a).dtype == "bf16"


def test_ops_without_a_formula_are_named_with_their_elements():
    facts = counted(lambda: torch.softmax(zeros(3, 4), dim=-1).cumsum(0).view(12))

    assert facts["by_op"] == [] and facts["model_flops_by_dtype"] == {}
    uncounted = {entry["op"]: (entry["num_calls"], entry["num_elements"]) for entry in facts["uncounted"]}
    assert uncounted["aten._softmax"] == (1, 12) and uncounted["aten.cumsum"] == (1, 12)
    assert "aten.view" not in uncounted  # nothing is computed
    sizes = [entry["num_elements"] for entry in facts["uncounted"]]
    assert sizes == sorted(sizes, reverse=True)


def test_ops_that_only_move_or_fill_data_need_no_formula():
    def move():
        table = torch.arange(12.0).view(3, 4).clone()
        torch.cat([table, torch.zeros_like(table)]).index_select(0, torch.randint(3, (2,))).to(torch.bfloat16)
        torch.split_with_sizes_copy(table, [1, 2])
        table.new_empty(3).fill_(table.sum())

    assert [entry["op"] for entry in counted(move)["uncounted"]] == ["aten.sum"]


@pytest.mark.parametrize(
    ("op", "may_hide"),
    [
        (ATEN.mv.default, True),
        (ATEN.split_with_sizes_copy.default, False),
        (ATEN.resize_.default, False),
        (torch.ops.c10d.allreduce_.default, False),
    ],
)
def test_an_op_that_copies_or_communicates_hides_no_product(op, may_hide):
    assert Op(op).may_hide_product is may_hide


def test_the_count_of_a_sharded_model_is_exact():
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model = fully_shard(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)), mesh=mesh)
        ledger = Ledger([model], [], lambda: "forward")
        ledger.start()
        model(zeros(3, 8))
        ledger.stop()
    finally:
        torch.distributed.destroy_process_group()
    facts = ledger.flops(compiled=False)

    assert by_op(facts) == {"aten.addmm": 2 * 3 * (8 * 16 + 16 * 4)}
    assert facts["hidden_products"] == [] and facts["uncounted"] == []


def test_an_op_without_a_formula_is_none_and_its_name_has_no_overload():
    assert count_flops(ATEN.relu.default, (zeros(2),), {}, zeros(2)) is None
    assert op_name(ATEN.add.Tensor) == "aten.add"
    assert has_formula(ATEN.mm.default) and not has_formula(ATEN.add.Tensor)


def test_an_op_may_say_in_what_it_multiplies():
    from stepscope.workloads.ops.cross_entropy import next_token_loss

    def loss():
        hidden, weight = zeros(8, 4).requires_grad_(), zeros(16, 4).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            next_token_loss(hidden, weight, torch.zeros(8, dtype=torch.long), "fused", chunk_rows=4)

    facts = counted(loss)

    assert facts["model_flops_by_dtype"] == {"bf16": 3 * 2 * 8 * 4 * 16}


def test_float32_convolutions_have_their_own_switch_for_tf32(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)

    assert float32_matmul(0, is_convolution=True) == "tf32"
    assert float32_matmul(0) == "fp32"  # torch's default

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert float32_matmul(0, is_convolution=True) == "fp32"
