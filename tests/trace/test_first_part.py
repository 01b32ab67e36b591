"""Of a trace with more rows than the limit, its first whole steps are kept, in whatever order it was written."""

import json
import random

from parametrized import parametrized
from stepscope.trace import source
from stepscope.trace.cache import open_trace
from stepscope.trace.reader import read_trace

STEPS, STEP_US, LAG_US = 60, 1000, 250


def events() -> list[dict]:
    """Each step launches 20 kernels, the last of which end after it, and one collective."""
    found = []
    for step in range(STEPS):
        start = step * STEP_US
        found.append(_event("user_annotation", f"ProfilerStep#{step}", start, STEP_US - 10))
        for i in range(20):
            number, ts = 1 + step * 20 + i, start + 45 * i
            args = {"Collective name": "allreduce", "In msg nelems": 4} if i == 7 else {}
            found.append(_event("cpu_op", "aten::mm", ts, 30, **{"External id": number}))
            found.append(_event("cuda_runtime", "cudaLaunchKernel", ts + 5, 10, correlation=number))
            gpu = {"correlation": number, "device": 0, "stream": 7, **args}
            found.append(_event("kernel", "gemm", ts + LAG_US, 40, **gpu) | {"pid": 0, "tid": 7})
    return found


def _event(category, name, ts, dur, **args):
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": args}


ORDERS = {
    "by time": lambda found: found,
    "by category": lambda found: sorted(found, key=lambda event: event["cat"]),
    "last first": lambda found: found[::-1],
    "any": lambda found: random.Random(3).sample(found, len(found)),
}


@parametrized("order", ORDERS, quick=2)
def test_whole_steps_are_kept(order, tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": ORDERS[order](events())}))
    monkeypatch.setattr(source, "SLICE", 1 << 14)
    whole = read_trace(path, workers=1)
    assert not whole.warnings
    monkeypatch.setenv("STEPSCOPE_MAX_TRACE_ROWS", "2000")
    trace = read_trace(path, workers=1)

    steps = trace.host.filter(kind="annotation").height
    assert 10 < steps < STEPS
    assert trace.host.filter(name="aten::mm").height == trace.device.height == 20 * steps
    assert trace.collectives.height == steps
    assert trace.host.height + trace.device.height + trace.collectives.height <= 2000
    assert set(trace.device["correlation"]) == set(range(1, 20 * steps + 1))
    assert trace.num_events == whole.num_events
    (warning,) = trace.warnings
    rows = whole.host.height + whole.device.height + whole.collectives.height
    assert f"only the first {steps / 1e3 - 1e-5:.4g} of 0.06014 s were kept" in warning
    assert f"STEPSCOPE_MAX_TRACE_ROWS={rows} keeps all" in warning


def test_a_raised_limit_is_not_answered_from_the_columns_of_the_part(tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events()}))
    monkeypatch.setattr("stepscope.trace.cache.WORTH_KEEPING", 1)
    monkeypatch.setattr("stepscope.trace.cache._SETTLED_NS", 0)
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("STEPSCOPE_MAX_TRACE_ROWS", "2000")
    assert open_trace(path).warnings == open_trace(path).warnings != ()
    monkeypatch.delenv("STEPSCOPE_MAX_TRACE_ROWS")
    assert open_trace(path).host.height == STEPS * 41


def test_events_at_one_moment_stay_within_the_limit(tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [_event("cpu_op", "op", 5, 0) for _ in range(5000)]}))
    monkeypatch.setattr(source, "SLICE", 1 << 14)
    monkeypatch.setenv("STEPSCOPE_MAX_TRACE_ROWS", "1000")
    trace = read_trace(path, workers=1)
    assert trace.host.height <= 1000
    assert len(trace.warnings) == 1
