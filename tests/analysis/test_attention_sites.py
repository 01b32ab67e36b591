"""Calls of attention in traces, written by hand and real: back end, shape, mask, time, and why not flash."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from stepscope.analysis.attention.reasons import against_flash, reasons
from stepscope.analysis.attention.sites import attention_sites, attention_summary
from stepscope.analysis.structure.links import link
from stepscope.border import NotOfSchema, check
from stepscope.trace.reader import read_trace
from stepscope.trace.recording_facts import SCHEMA
from trace_builder import AUTOGRAD, TRACES, TraceBuilder, needs_traces

SIZES = [2, 4, 64, 16]
HALF = "c10::BFloat16"
CALL = {
    "backend": "cudnn", "dtype": "bfloat16", "batch": 2, "num_heads": 4, "num_key_heads": 4, "num_queries": 64,
    "num_keys": 64, "head_size": 16, "value_size": 16, "mask": "[64, 64]", "is_causal": False, "dropout": 0.0,
    "is_dense": True, "module": None, "caller": None,
}  # fmt: skip


def given(name, mask):
    shapes = [SIZES, SIZES, SIZES, mask, [], [], [], []]
    dtypes = [HALF, HALF, HALF, "bool" if mask else "", "Scalar", "Scalar", "", "Scalar"]
    values = ["", "", "", "", "0.", "False", "", "False"]
    if name == "cudnn":
        values = ["", "", "", "", "True", "0.", "False", "False"]
    return {"Input Dims": shapes, "Input type": dtypes, "Concrete Inputs": values}


def masked() -> TraceBuilder:
    """One step: SDPA makes a bias of the mask, then runs cuDNN; its backward; a call that a mask does not enter."""
    trace = TraceBuilder(deviceProperties=[{"id": 0, "name": "NVIDIA H200"}]).step(1, 0, 400)
    trace.op("aten::scaled_dot_product_attention", 10, 60, **given("sdpa", [64, 64]))
    trace.op("aten::where", 12, 10, id=1).launch("where_kernel", 14, (30, 5), id=1)
    fused = "aten::_scaled_dot_product_cudnn_attention"
    trace.op(fused, 30, 30, id=2, sequence=7, **given("cudnn", [64, 64])).launch("sdpa_kernel", 35, (50, 20), id=2)
    node = "autograd::engine::evaluate_function: ScaledDotProductCudnnAttentionBackward0"
    trace.op(node, 150, 60, AUTOGRAD, sequence=7, forward_thread=1)
    trace.op(f"{fused}_backward", 155, 40, AUTOGRAD, id=3).launch("bprop", 160, (170, 50), id=3, thread=AUTOGRAD)
    return trace


def test_a_call_its_backward_and_what_it_does_beside_are_one_row():
    calls = attention_sites(masked().linked())

    (row,) = calls.to_dicts()
    assert (row["backend"], row["direction"], row["dtype"]) == ("cudnn", "forward", "bfloat16")
    assert [row[name] for name in ("batch", "num_heads", "num_queries", "num_keys", "head_size")] == [
        2,
        4,
        64,
        64,
        16,
    ]
    assert (row["mask"], row["is_causal"], row["dropout"]) == ("[64, 64]", False, 0.0)
    assert (row["forward_ns"], row["backward_ns"], row["beside_ns"]) == (20_000, 50_000, 5_000)
    summary = attention_summary(calls, 1).row(0, named=True)
    assert (summary["num_calls"], summary["total_ns"]) == (1.0, 75_000)


def test_flex_is_known_by_its_kernels():
    trace = TraceBuilder().step(1, 0, 200)
    shapes = {"Input Dims": [SIZES, SIZES, SIZES], "Input type": [HALF] * 3}
    for name, start in (
        ("triton_tem_fused_flex_attention_0", 10),
        ("triton_tem_fused_flex_attention_backward_1", 80),
    ):
        trace.op(name, start, 20, id=start, **shapes).launch(name, start + 2, (start + 5, 30), id=start)

    (row,) = attention_summary(attention_sites(trace.linked()), 1).to_dicts()
    assert (row["backend"], row["head_size"], row["num_calls"]) == ("flex", 16, 1.0)
    assert (row["forward_ns"], row["backward_ns"]) == (30_000, 30_000)


def test_without_gpu_work_times_are_the_hosts():
    trace = TraceBuilder().step(1, 0, 100)
    trace.op("aten::scaled_dot_product_attention", 10, 40, **given("sdpa", []))
    trace.op("aten::_scaled_dot_product_attention_math", 12, 30, **given("sdpa", [])).op("aten::bmm", 15, 20)

    (row,) = attention_sites(trace.linked()).to_dicts()
    assert (row["backend"], row["mask"]) == ("math", None)
    assert row["forward_ns"] == 40_000


@pytest.mark.parametrize(
    ("changed", "on_gpu", "codes"),
    [
        ({}, True, ["mask"]),
        ({"mask": None}, True, []),
        ({"dtype": "float32"}, True, ["mask", "dtype"]),
        ({"mask": None, "head_size": 512, "value_size": 512}, True, ["head_size"]),
        ({"mask": None, "value_size": 8}, True, ["value_size"]),
        ({"mask": None, "is_dense": False}, False, ["layout"]),
        ({"mask": None, "is_causal": True, "num_keys": 65}, True, ["causal_lengths"]),
        ({"dtype": "float32"}, False, []),
        ({"dropout": 0.5}, False, ["dropout"]),
    ],
)
def test_documented_rules(changed, on_gpu, codes):
    assert against_flash({**CALL, **changed}, on_gpu) == codes


def test_old_devices_have_no_flash():
    assert against_flash({**CALL, "mask": None}, True, (7, 5)) == ["capability"]


def recorded(**changed):
    entry = {
        "device": "cuda", "dtype": "bfloat16", "query": SIZES, "key": SIZES, "value": SIZES, "mask": [64, 64],
        "is_causal": False, "module": None, "backend": "cudnn", "switched_off": [],
        "refused": {"flash": ["Flash Attention does not support non-null attn_mask."]},
    }  # fmt: skip
    return {**entry, **changed}


def test_torchs_words_come_first_and_are_not_said_twice():
    (reason,) = reasons(CALL, [recorded()], True)

    assert (reason.source, reason.said) == ("torch", "Flash Attention does not support non-null attn_mask.")


def test_what_torch_did_not_come_to_is_derived():
    words, derived = reasons({**CALL, "dtype": "float32"}, [recorded(dtype="float32")], True)

    assert (words.source, derived.source, derived.code) == ("torch", "derived", "dtype")


def test_a_switch_a_preference_and_a_silence_are_told_apart():
    call = {**CALL, "mask": None}

    def codes(**changed):
        return [reason.code for reason in reasons(call, [recorded(mask=None, **changed)], True)]

    assert codes(refused={}, switched_off=["flash"]) == ["switched_off"]
    assert codes(refused={}) == ["preferred"]
    assert codes(refused={"flash": []}) == ["unsaid"]
    assert [reason.code for reason in reasons(call, [], True)] == ["not_seen"]
    assert reasons({**call, "backend": "flash"}, [], True) == ()


def test_a_record_of_other_shapes_says_nothing_and_garbage_stops_at_the_border():
    (reason,) = reasons(CALL, [recorded(query=[1, 4, 64, 16]), recorded(mask=None), {}], True)

    assert reason.source == "derived"
    check([recorded()], SCHEMA["attention"])
    for garbage in ({"query": "x"}, recorded(refused=7), 3):
        with pytest.raises(NotOfSchema):
            check([garbage], SCHEMA["attention"])


def of_real(name):
    path = Path(TRACES) / "h200" / f"{name}.json.gz"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    linked = link(read_trace(path))
    calls = attention_sites(linked).filter(pl.col("step").is_not_null())
    return attention_summary(calls, linked.steps.num).to_dicts()


@needs_traces
def test_the_mask_of_a_real_trace_is_the_reason():
    (row,) = of_real("mask_blocks_flash")

    assert (row["backend"], row["num_calls"], row["mask"]) == ("cudnn", 6.0, "[8, 1, 4096, 4096]")
    assert row["backward_ns"] > row["forward_ns"] > row["beside_ns"] > 0
    assert [reason.code for reason in reasons(row, [], True, (9, 0))] == ["mask"]


@needs_traces
def test_a_compiled_backward_finds_its_forward():
    (row,) = of_real("llama_compiled")

    assert (row["num_calls"], row["mask"]) == (16.0, "[16, 1, 1024, 1024]")
    assert row["backward_ns"] > row["forward_ns"] > 0


@needs_traces
def test_float32_is_the_reason_where_nothing_else_is():
    (row,) = of_real("fp32_no_tf32")

    assert [reason.code for reason in reasons(row, [], True, (9, 0))] == ["dtype"]
