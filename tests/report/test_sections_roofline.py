"""The section `roofline`: dots are the analysis's rates, limits the device's, and what is not known is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepscope.devices import Ceilings, find_device, save_ceilings
from stepscope.document.model import Bars, Facts, Missing, Scatter, Table, Text
from stepscope.document.sections.roofline import LEAST_SHARE, MOST_DOTS, parts
from stepscope.session import Session, open_session
from trace_builder import TRACES, TraceBuilder, needs_traces

H200 = "NVIDIA H200"
PEAK, BANDWIDTH = 989.4e12, 4.8e12


@pytest.fixture(autouse=True)
def no_ceilings_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "cache"))


def on(device: str | None) -> TraceBuilder:
    return TraceBuilder(deviceProperties=[{"id": 0, "name": device}] if device else [])


def product(trace: TraceBuilder, ts: float, runs: float, size: int = 1024, name: str = "gemm_kernel") -> TraceBuilder:
    args = {"Input Dims": [[size, size]] * 2, "Input type": ["c10::BFloat16"] * 2}
    return trace.op("aten::mm", ts, 1, **args).launch(name, ts + 0.2, (ts + 2, runs), took=0.1)


def added(trace: TraceBuilder, ts: float, runs: float, size: int = 1024) -> TraceBuilder:
    args = {"Input Dims": [[size, size]] * 2, "Input type": ["float"] * 2}
    return trace.op("aten::add", ts, 1, **args).launch("add_kernel", ts + 0.2, (ts + 2, runs), took=0.1)


def source_of(trace: TraceBuilder, folder: Path) -> Session:
    return open_session(trace.write(folder / "trace.json"), use_cache=False)


def one(every: tuple[Any, ...], kind: type, id: str) -> Any:
    (part,) = (part for part in every if isinstance(part, kind) and part.id == id)
    return part


def test_a_product_is_a_dot_below_its_roof(tmp_path):
    source = source_of(added(product(on(H200), 0, 10), 20, 30), tmp_path)
    chart = one(parts(source), Scatter, "roofline")

    (dot,) = chart.points
    flops, num_bytes = 2 * 1024**3, 3 * 1024**2 * 2
    assert (dot.x, dot.y) == (pytest.approx(flops / num_bytes), pytest.approx(flops / 10e-6))
    assert (dot.weight, dot.group) == (0.25, "gemm")
    assert dot.name == "aten::mm [[1024, 1024], [1024, 1024]]: gemm_kernel"
    memory, bf16 = chart.limits
    ridge = PEAK / BANDWIDTH
    assert memory.x[-1] == bf16.x[0] == pytest.approx(ridge) and memory.y[-1] == bf16.y[0] == bf16.y[1] == PEAK
    assert memory.x[0] < memory.x[1] and memory.y[0] == pytest.approx(BANDWIDTH * memory.x[0])
    assert (memory.name, bf16.name) == ("memory, 4,800 GB/s", "bf16, 989 TFLOP/s")
    assert "Another 75.0 % has no FLOPs" in chart.caption


def test_bytes_a_second_are_over_the_time_of_one_call(tmp_path):
    trace = added(added(on(H200), 0, 10), 20, 30)
    chart = one(parts(source_of(trace, tmp_path)), Scatter, "bandwidth")

    (dot,) = chart.points
    assert dot.x == 20_000 and dot.y == pytest.approx(2 * 3 * 1024**2 * 4 / 40e-6)
    (limit,) = chart.limits
    assert list(limit.y) == [BANDWIDTH] * 2


def test_what_is_above_the_line_is_explained(tmp_path):
    chart = one(parts(source_of(added(on(H200), 0, 1), tmp_path)), Scatter, "bandwidth")

    assert chart.points[0].y > BANDWIDTH
    assert "1 dot above the line" in chart.caption


def test_the_time_that_the_limits_explain_adds_up(tmp_path):
    source = source_of(added(product(on(H200), 0, 10), 20, 30).kernel("what_nobody_knows", 100, 5), tmp_path)
    every, summary = parts(source), source.analysis.ranks[0].roofline_summary

    chart = one(every, Bars, "time_at_limit")
    assert sum(sum(series.y) for series in chart.series) == summary.total_ns == 45_000
    assert sum(chart.series[2].y) == summary.unknown_ns == 5_000
    bounds = one(every, Bars, "bounds")
    assert bounds.labels == ["compute", "memory", "neither", "unknown"]
    assert list(bounds.series[0].y) == [summary.compute_ns, summary.memory_ns, summary.neither_ns, summary.unknown_ns]


def test_a_device_that_is_not_in_the_table_leaves_the_dots_and_says_what_to_run(tmp_path):
    every = parts(source_of(product(on("Strange 9000"), 0, 10), tmp_path))

    missing = every[0]
    assert isinstance(missing, Missing)
    assert "Strange 9000" in missing.text and "stepscope doctor --measure" in missing.text
    chart = one(every, Scatter, "roofline")
    assert len(chart.points) == 1 and chart.limits == ()
    assert not [part for part in every if isinstance(part, Bars)]
    assert "limit_share" not in one(every, Table, "roofline").columns


def test_a_device_without_a_name_is_said_to_have_none(tmp_path):
    missing, *_ = parts(source_of(product(on(None), 0, 10), tmp_path))

    assert "does not name its device" in missing.text


def test_limits_that_were_measured_here_are_drawn(tmp_path):
    save_ceilings(Ceilings("Strange 9000", {"bf16": 10**14}, 10**12, "2026-01-01T00:00:00Z", "2.9"))
    every = parts(source_of(product(on("Strange 9000"), 0, 100), tmp_path))

    assert [limit.name for limit in one(every, Scatter, "roofline").limits] == [
        "memory, 1,000 GB/s", "bf16, 100 TFLOP/s"
    ]  # fmt: skip
    assert "measured on this machine" in next(part for part in every if isinstance(part, Facts)).rows[0].detail


def test_a_peak_that_the_maker_does_not_name_is_said(tmp_path, monkeypatch):
    device = find_device("Tesla T4")
    if device is None or "bf16" in device.peak_flops:
        pytest.skip("no device without bf16 in the table")
    facts = next(
        part for part in parts(source_of(product(on("Tesla T4"), 0, 10), tmp_path)) if isinstance(part, Facts)
    )

    assert ("no peak", "bf16") in [(fact.title, fact.value) for fact in facts.rows]


def test_without_shapes_there_is_nothing_to_place(tmp_path):
    (missing,) = parts(source_of(on(H200).op("aten::mm", 0, 5).launch("gemm", 1, (10, 5)), tmp_path))

    assert isinstance(missing, Missing) and "record_shapes=True" in missing.text


def test_on_a_processor_there_is_no_roofline(tmp_path):
    (missing,) = parts(source_of(TraceBuilder().op("aten::mm", 0, 5), tmp_path))

    assert isinstance(missing, Missing) and "no GPU work" in missing.text


def test_what_is_too_little_to_draw_is_said_to_be(tmp_path):
    every = parts(source_of(added(product(on(H200), 0, 0.01), 20, 1000), tmp_path))

    assert not [part for part in every if isinstance(part, Scatter) and part.id == "roofline"]
    assert any(isinstance(part, Text) and "too little to draw" in part.text for part in every)


def test_many_ops_are_many_dots_and_not_all(tmp_path):
    trace = on(H200)
    for number in range(MOST_DOTS + 20):
        product(trace, 20 * number, 10, size=64 + number)
    every = parts(source_of(trace, tmp_path))

    chart = one(every, Scatter, "roofline")
    assert len(chart.points) == MOST_DOTS
    assert f"{MOST_DOTS} ops of {MOST_DOTS + 20}, those with the most time" in chart.caption
    assert one(every, Table, "roofline").num_rows == MOST_DOTS + 20


def test_names_are_as_they_were(tmp_path):
    hostile = '<img src=x onerror="x">\u202e</script>'
    every = parts(source_of(product(on(H200), 0, 10, name=hostile), tmp_path))

    assert one(every, Scatter, "roofline").points[0].name.startswith("aten::mm [[")
    assert one(every, Table, "roofline").columns["op"] == ["aten::mm"]


@needs_traces
def test_of_a_real_trace_dots_and_table_are_the_analysis():
    source = open_session(TRACES / "h200" / "gpt2_eager.json.gz", use_cache=False)
    every, rows = parts(source), source.analysis.ranks[0].roofline

    table = one(every, Table, "roofline").columns
    for column in ("num_calls", "total_ns", "time_share", "flops", "bytes", "flops_per_s", "limit_share"):
        assert table[column] == rows[column].to_list()
    worth = rows.filter((rows["flops"] > 0) & (rows["intensity"] > 0) & (rows["time_share"] >= LEAST_SHARE))
    dots = one(every, Scatter, "roofline").points
    assert [(dot.x, dot.y) for dot in dots] == list(worth.select("intensity", "flops_per_s").iter_rows())
    assert all(dot.y <= min(PEAK, BANDWIDTH * dot.x) for dot in dots), "nothing is above its roof"
