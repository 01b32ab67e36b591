"""What torch.compile says about itself, from log records made by hand; malformed ones never raise."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.recorder.compiler import compile_watch as compiler_module
from stepscope.recorder.compiler.compile_watch import CompilerProbe

TRACE = "torch.__trace"
NEW_BREAK = """Graph break in user code at /home/me/model.py:12
Graph Break Reason: Data-dependent branching
  Explanation: Detected data-dependent branching (e.g. `if my_tensor.sum() > 0:`).

      The branch condition involves a tensor computed as follows:
        # File "/home/me/other.py", line 99, in elsewhere, code: if x.sum() > 0:
        gt = gt(sum_1, 0)

  Hint: Use `torch.cond` to express dynamic control flow.

  Developer debug context: attempted to jump with TensorVariable()

User code traceback:
  File "/home/me/train.py", line 40, in <module>
    model(x)
  File "/home/me/model.py", line 12, in forward
    if x.sum() > 0:
       ^^^^^^^^^^^

Traceback (most recent call last):
  File "/site-packages/torch/_dynamo/symbolic_convert.py", line 900, in inner
torch._dynamo.exc.Unsupported: Data-dependent branching
  Explanation: Detected data-dependent branching (e.g. `if my_tensor.sum() > 0:`).
"""
OLD_BREAK = """Graph break in user code at /home/me/train.py:12
Reason: Unsupported: generic_jump TensorVariable()
Graph Break Reason: generic_jump TensorVariable()
User code traceback:
  File "/home/me/train.py", line 12, in step
    if loss > 0:
"""


@pytest.fixture
def probe():
    probe = CompilerProbe()
    probe.start()
    yield probe
    probe.stop()


def emit(metadata: object = None, payload: object = None, logger: str = TRACE, message: str = "") -> None:
    record = logging.LogRecord(logger, logging.DEBUG, __file__, 1, message, None, None)
    if metadata is not None:
        record.metadata = metadata
    if payload is not None:
        record.payload = payload
    for handler in logging.getLogger(logger).handlers:
        if isinstance(handler, compiler_module._Handler):
            handler.handle(record)


def artifact(name: str, payload: object, frame_id: int = 0, compile_id: int = 0) -> None:
    emit({"artifact": {"name": name}, "frame_id": frame_id, "frame_compile_id": compile_id}, payload)


def compiled(frame_id: int = 0, compile_id: int = 0, **metrics: object) -> None:
    known = {
        "co_name": "forward",
        "co_filename": "/home/me/model.py",
        "co_firstlineno": 8,
        "entire_frame_compile_time_s": 1.5,
    }
    emit({"compilation_metrics": {**known, **metrics}, "frame_id": frame_id, "frame_compile_id": compile_id})


def test_a_run_that_compiles_nothing_is_silent(probe):
    assert not probe.used and probe.num_compiles == 0


def test_compiles_are_counted_by_frame_with_their_seconds(probe):
    compiled(0, 0)
    compiled(0, 1, entire_frame_compile_time_s=0.25)
    compiled(1, 0, co_name="loss", entire_frame_compile_time_s=None)
    report = probe.report()

    assert probe.used
    assert (report["num_compiles"], report["compile_seconds"]) == (3, 1.75)
    assert report["frames"] == [
        {"frame": "forward (/home/me/model.py:8)", "num_compiles": 2},
        {"frame": "loss (/home/me/model.py:8)", "num_compiles": 1},
    ]


def test_a_graph_break_of_todays_torch_has_its_explanation_and_its_innermost_place(probe):
    for _ in range(3):
        artifact("dynamo_graph_break_reason", NEW_BREAK)

    assert probe.report()["graph_breaks"] == [
        {
            "reason": "Detected data-dependent branching (e.g. `if my_tensor.sum() > 0:`).",
            "place": "/home/me/model.py:12 in forward",
            "count": 3,
        }
    ]


def test_a_graph_break_of_an_older_torch_has_its_reason(probe):
    artifact("dynamo_graph_break_reason", OLD_BREAK)

    assert probe.report()["graph_breaks"] == [
        {"reason": "generic_jump TensorVariable()", "place": "/home/me/train.py:12 in step", "count": 1}
    ]


def test_a_graph_break_in_no_known_form_keeps_its_first_line(probe):
    artifact("dynamo_graph_break_reason", "something new\nmore")

    assert probe.report()["graph_breaks"] == [{"reason": "something new", "place": "unknown place", "count": 1}]


def test_a_recompile_names_the_guard_that_failed(probe):
    compiled(0, 0)
    artifact("recompile_reasons", json.dumps(["x.size()[0] == 4", "y is None"]), 0, 1)
    compiled(0, 1)
    compiled(1, 0)

    assert probe.report()["recompiles"] == [
        {"frame": "forward (/home/me/model.py:8)", "failed_guards": ["x.size()[0] == 4", "y is None"]}
    ]


@pytest.mark.parametrize(
    ("payload", "guards"),
    [
        (["a", "b"], ["a", "b"]),
        ('"a"', ["a"]),
        ("not json", ["not json"]),
        (json.dumps([str(i) for i in range(20)]), [str(i) for i in range(8)]),
    ],
)
def test_recompile_reasons_come_as_lists_or_as_text(probe, payload, guards):
    artifact("recompile_reasons", payload, 0, 1)
    compiled(0, 1)

    assert probe.report()["recompiles"][0]["failed_guards"] == guards


def test_skips_failures_and_limits_are_counted_by_reason(probe):
    compiled(cudagraph_skip_reason="skipping cudagraphs due to cpu device\ndetails", fail_reason="no luck\ndetails")
    emit(
        logger="torch._inductor.cudagraph_utils",
        message="skipping cudagraphs due to mutated inputs (1 instances)\nwhere",
    )
    limit = "torch._dynamo hit config.recompile_limit (8)\n   function: 'forward' (/home/me/model.py:8)\n   last: x"
    emit(logger="torch._dynamo.convert_frame", message=limit)
    emit(logger="torch._dynamo.convert_frame", message="cache_size_limit reached")
    emit(logger="torch._dynamo.convert_frame", message="something else entirely")
    report = probe.report()

    assert report["cuda_graph_skips"] == [
        {"reason": "skipping cudagraphs due to cpu device", "count": 1},
        {"reason": "skipping cudagraphs due to mutated inputs (1 instances)", "count": 1},
    ]
    assert report["failures"] == [{"reason": "no luck", "count": 1}]
    assert report["recompile_limit_hits"] == [
        {"frame": "'forward' (/home/me/model.py:8)", "count": 1},
        {"frame": "cache_size_limit reached", "count": 1},
    ]


def test_the_start_of_a_compile_is_told_before_it_happens(probe):
    told = []
    probe.on_start = lambda: told.append("starts")
    emit({"dynamo_start": {"stack": []}, "frame_id": 0})

    assert told == ["starts"] and not probe.used


def test_the_report_is_json_and_bounded(probe, monkeypatch):
    monkeypatch.setattr(compiler_module, "MAX_ENTRIES", 5)
    for number in range(20):
        artifact("dynamo_graph_break_reason", f"Graph Break Reason: number {number}")
        artifact("recompile_reasons", ["guard"], 0, number)
        compiled(0, number)
    report = json.loads(json.dumps(probe.report(), allow_nan=False))

    assert len(report["graph_breaks"]) == len(report["recompiles"]) == 5
    assert report["num_compiles"] == 20


def test_a_break_that_is_known_is_still_counted_when_the_list_is_full(probe, monkeypatch):
    monkeypatch.setattr(compiler_module, "MAX_ENTRIES", 1)
    for _ in range(3):
        artifact("dynamo_graph_break_reason", OLD_BREAK)

    assert [entry["count"] for entry in probe.report()["graph_breaks"]] == [3]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["dynamo_graph_break_reason", "recompile_reasons", "fx_graph_cache_hit"])
METRICS = st.sampled_from(
    [
        "co_name",
        "entire_frame_compile_time_s",
        "dynamo_cumulative_compile_time_us",
        "graph_op_count",
        "cudagraph_skip_reason",
        "fail_reason",
    ]
)
SYMBOL = st.sampled_from(["source", "symbol", "val", "user_stack"])
METADATA = JSON | st.fixed_dictionaries(
    {},
    optional={
        "artifact": JSON | st.fixed_dictionaries({"name": NAMES}),
        "compilation_metrics": JSON | st.dictionaries(METRICS, JSON),
        "frame_id": JSON,
        "frame_compile_id": JSON,
        "dynamo_start": JSON,
        "bwd_compilation_metrics": JSON | st.dictionaries(METRICS, JSON),
        "create_symbol": JSON | st.dictionaries(SYMBOL, JSON),
        "inductor_output_code": JSON,
        "dynamo_output_graph": JSON,
        "str": JSON,
    },
)


@settings(max_examples=5 * settings().max_examples)
@given(METADATA, JSON)
def test_no_record_however_malformed_raises_or_spoils_the_report(metadata, payload):
    probe = CompilerProbe()
    probe.start()
    try:
        emit(metadata, payload)
        emit(logger="torch._dynamo.convert_frame", message=str(payload))
        json.dumps(probe.report(), allow_nan=False)
    finally:
        probe.stop()


def test_our_handlers_come_off_again():
    names = (TRACE, "torch._dynamo.convert_frame", "torch._inductor.cudagraph_utils")
    before = [list(logging.getLogger(name).handlers) for name in names]
    probe = CompilerProbe()
    probe.start()
    probe.stop()

    assert [logging.getLogger(name).handlers for name in names] == before
