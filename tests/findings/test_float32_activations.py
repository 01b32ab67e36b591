"""Float32 tensors that casts made and the backward needs, although products run in 16 bits."""

from __future__ import annotations

from typing import Any

import pytest
from device_cases import BF16, FP32, Program

from parametrized import parametrized
from stepscope.errors import Unavailable
from stepscope.findings.rules.activations import float32_activations
from stepscope.session.case import Case

GIB = 1 << 30
SHAPE = [16, 2048, 8192]  # 1 GiB of float32


def kept(op: str, layer: int, module: str = "blocks.{}.ff", **fields: Any) -> dict[str, Any]:
    known = {"device": "cuda:0", "dtype": "float32", "shape": SHAPE, "owner": "activation", "phase": "forward"}
    place = {"module": module.format(layer), "op": f"aten.{op}", "bytes": GIB, "born": 2 + 2 * layer, "died": 90}
    return known | place | fields


def recorded(allocations: list[dict[str, Any]], others_bytes: int = GIB, dtype: str = BF16) -> Case:
    program = Program()
    program.op("aten::mm", [[4096, 4096], [4096, 4096]], 300, dtype)
    case = program.case()
    weights = kept("empty", 0, owner="parameter", born=None, died=None, bytes=others_bytes)
    stages = [{"name": "other", "event": 0}, {"name": "forward", "event": 1}, {"name": "backward", "event": 60}]
    window = {"device": "cuda:0", "allocations": [weights, *allocations], "num_dropped": 0, "stages": stages}
    case._window = lambda: window
    return case


def test_casts_count_by_half_and_what_is_computed_from_them_in_full():
    ops = ("_to_copy", "_to_copy", "sigmoid", "mul")
    case = recorded([kept(op, layer) for layer in range(2) for op in ops])

    (finding,) = float32_activations(case)

    assert finding.saving_bytes == 8 * GIB - 2 * GIB and finding.upper_bound and finding.saving_ns is None
    assert "8.00 GiB of the 9.00 GiB" in finding.sentence
    assert "_to_copy in blocks.*.ff (4 tensors, 4.00 GiB)" in finding.sentence
    assert "save_for_backward" in finding.fix
    assert [row["num_tensors"] for row in finding.evidence[0].rows] == [4, 2, 2]


@parametrized(
    "allocations",
    [
        [kept("add", layer) for layer in range(8)],
        [kept("native_layer_norm", layer) for layer in range(8)],
        [kept("gelu", layer) for layer in range(8)],
        [kept("_to_copy", layer, dtype="bfloat16") for layer in range(8)],
        [kept("_to_copy", layer, owner="temporary") for layer in range(8)],
        [kept("_to_copy", 0), *(kept("gelu", layer, "mlp.{}") for layer in range(8))],
    ],
    quick=3,
    ids=["a residual stream", "norms", "no cast", "in 16 bits", "temporaries", "a cast somewhere else"],
)
def test_what_ordinary_mixed_precision_keeps_is_clean(allocations):
    assert float32_activations(recorded(allocations)) == []


def test_a_part_of_the_peak_that_is_not_much():
    casts = [kept("_to_copy", layer) for layer in range(4)]

    assert float32_activations(recorded(casts, 3 * GIB)) and float32_activations(recorded(casts, 5 * GIB)) == []


def test_a_model_in_float32_is_clean():
    assert float32_activations(recorded([kept("_to_copy", layer) for layer in range(8)], dtype=FP32)) == []


def test_memory_that_nothing_recorded():
    program = Program()
    program.op("aten::mm", [[4096, 4096], [4096, 4096]], 300, BF16)

    with pytest.raises(Unavailable):
        float32_activations(program.case())
