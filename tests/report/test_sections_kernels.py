"""The section `kernels`: its figures are the analysis's, what is not known is said, names are as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepscope.document.model import Bars, Chart, Facts, Lines, Missing, Table, Text
from stepscope.document.sections.kernels import parts, titles_of
from stepscope.document.sections.time import gpu_time_parts
from stepscope.session import Session, open_session
from trace_builder import TRACES, TraceBuilder, needs_traces

HOSTILE = "void <script>alert(1)</script>\u202e\n'" + "x" * 10_000


def source_of(trace: TraceBuilder, folder: Path) -> Session:
    return open_session(trace.write(folder / "trace.json"), use_cache=False)


def one(every: tuple[Any, ...], kind: type, id: str) -> Any:
    (part,) = (part for part in every if isinstance(part, kind) and part.id == id)
    return part


def sums(chart: Bars) -> list[float]:
    return [sum(series.y[i] or 0 for series in chart.series) for i in range(len(chart.labels))]


def a_step() -> TraceBuilder:
    """Two products, an unknown kernel, a copy and a wait; idle from 22 to 40 µs and from 60 to 100."""
    trace = TraceBuilder().step(1, 0, 200).op("aten::mm", 0, 8, id=1).launch("gemm_kernel", 1, (10, 4), id=1)
    trace.launch("what_nobody_knows", 9, (14, 8))
    trace.op("aten::mm", 30, 8, id=2).launch("gemm_kernel", 31, (40, 20), id=2)
    trace.call("cudaStreamSynchronize", 50, 12)
    return trace.op("aten::copy_", 80, 8, id=3).launch(
        "Memcpy HtoD", 81, (100, 8), id=3, category="gpu_memcpy", bytes=64
    )


def test_classes_are_those_of_the_analysis_and_the_unclassified_share_is_said(tmp_path):
    source = source_of(a_step(), tmp_path)
    every, table = parts(source), source.analysis.ranks[0].kernel_classes

    chart = one(every, Bars, "kernel_classes")
    assert sums(chart) == table["total_ns"].to_list() == [24_000, 8_000, 8_000]
    assert sorted(chart.labels) == ["gemm", "memset memcpy", "unclassified"]
    assert isinstance(every[0], Text) and "40.00 µs of GPU work in 3 kernels over 1 step" in every[0].text
    assert "gemm 60.0 %, memset memcpy 20.0 %, unclassified 20.0 %" in every[0].text


def test_where_every_kernel_is_classified_that_is_said(tmp_path):
    every = parts(source_of(TraceBuilder().op("aten::mm", 0, 5).launch("gemm", 1, (10, 5)), tmp_path))

    assert "unclassified 0.0 %" in every[0].text


def test_every_kernel_is_in_the_table_with_its_whole_name(tmp_path):
    source = source_of(a_step(), tmp_path)
    table, top = one(parts(source), Table, "kernels"), source.analysis.ranks[0].top_kernels

    assert table.columns["whole_name"] == top["name"].to_list()
    for column in ("num_calls", "total_ns", "mean_ns", "p50_ns", "p99_ns", "share"):
        assert table.columns[column] == top[column].to_list()
    assert sum(table.columns["share"]) == pytest.approx(1)


def test_products_and_the_rest_are_the_phase(tmp_path):
    source = source_of(a_step(), tmp_path)
    chart, table = one(parts(source), Bars, "gemm_share"), source.analysis.ranks[0].gemm_share

    assert sums(chart) == table["total_ns"].to_list()
    assert list(chart.series[0].y) == table["gemm_ns"].to_list()


def test_idle_time_and_its_causes(tmp_path):
    account = source_of(a_step(), tmp_path).analysis.ranks[0]
    every = tuple(gpu_time_parts(account))

    chart = one(every, Bars, "idle_causes")
    assert sum(sums(chart)) == account.gpu_time.idle_ns == 58_000
    assert "98.00 µs" in one(every, Bars, "gpu_time").title and "58.00 µs" in chart.title
    assert sum(one(every, Table, "gpu_time").columns["total_ns"]) == 98_000
    assert sum(one(every, Table, "idle_causes").columns["total_ns"]) == 58_000
    gaps = one(every, Table, "longest_gaps").columns
    assert gaps["duration_ns"] == [40_000, 18_000]
    assert gaps["begin_ns"] == [60_000, 22_000], "since the first step"
    assert gaps["begin_on_trace_clock"] == account.longest_gaps["start_ns"].to_list()
    assert gaps["next_kernel"] == ["Memcpy HtoD", "gemm_kernel"]


def test_a_gpu_that_is_never_idle_is_said_to_be(tmp_path):
    source = source_of(TraceBuilder().kernel("a", 0, 5).kernel("b", 5, 5), tmp_path)
    every = tuple(gpu_time_parts(source.analysis.ranks[0]))

    assert any(isinstance(part, Text) and "never idle" in part.text for part in every)


def test_the_queue_begins_at_the_first_launch(tmp_path):
    source = source_of(a_step(), tmp_path)
    chart, table = one(parts(source), Lines, "queue_depth"), source.analysis.ranks[0].queue_depth

    (line,) = chart.series
    assert line.x[0] == 0 and line.x[-1] == table["time_ns"][-1] - table["time_ns"][0]
    assert list(line.y) == table["depth"].to_list()


def test_sizes_ops_copies_and_waits_have_their_tables(tmp_path):
    source = source_of(a_step(), tmp_path)
    every, account = parts(source), source.analysis.ranks[0]

    assert one(every, Table, "kernel_sizes").columns["num_kernels"] == [1, 1, 1, 0, 0]
    assert one(every, Table, "ops").columns["device_self_ns"] == account.ops["device_self_ns"].to_list()
    assert one(every, Table, "copies").columns["bytes"] == account.copies["bytes"].to_list()
    assert one(every, Table, "syncs").columns["call"] == ["cudaStreamSynchronize"]
    assert "1 of 3 kernels (33.3 %)" in one(every, Bars, "kernel_sizes").caption


def test_pictures_come_before_tables(tmp_path):
    every = parts(source_of(a_step(), tmp_path))

    is_table = [isinstance(part, Table) for part in every]
    assert is_table == sorted(is_table)


def test_on_a_processor_there_are_ops_and_what_to_do_for_more(tmp_path):
    missing, ops = parts(source_of(TraceBuilder().op("aten::mm", 0, 5), tmp_path))

    assert isinstance(missing, Missing) and "ProfilerActivity.CUDA" in missing.text
    assert set(ops.columns) == {"op", "num_calls", "host_self_ns", "host_total_ns", "share"}


def test_a_trace_that_is_cut_off_is_said_to_be(tmp_path):
    path = TraceBuilder().op("aten::mm", 0, 5).write(tmp_path / "trace.json")
    path.write_bytes(path.read_bytes()[:-2])

    missing, *_ = parts(open_session(path, use_cache=False))

    assert "cut off" in missing.text


def test_names_are_as_they_were(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPSCOPE_MAX_NAME", str(len(HOSTILE)))
    trace = TraceBuilder().op(HOSTILE, 0, 5).launch(HOSTILE, 1, (10, 5)).call("cudaDeviceSynchronize", 12, 10)
    every = parts(source_of(trace.launch("b", 30, (40, 5)), tmp_path))

    assert HOSTILE in one(every, Table, "kernels").columns["whole_name"]
    assert HOSTILE in one(every, Table, "ops").columns["op"]
    sentences = [part.text for part in every if isinstance(part, Text)]
    sentences += [part.caption for part in every if isinstance(part, Chart)]
    sentences += [fact.value for part in every if isinstance(part, Facts) for fact in part.rows]
    assert all("\n" not in sentence and len(sentence) < 1000 for sentence in sentences)


def test_a_kernel_has_one_short_name_everywhere(tmp_path):
    # GIVEN two kernels whose short names are alike, the one before two gaps
    trace = TraceBuilder()
    for number, name in enumerate(["void f<MulFunctor<float>, 1>(int)", "void f<MulFunctor<float>, 2>(int)"] * 2):
        trace.launch(name, 20 * number, (20 * number + 10, 5))
    source = source_of(trace, tmp_path)

    titles = titles_of(source.analysis.ranks[0])
    gaps = one(tuple(gpu_time_parts(source.analysis.ranks[0])), Table, "longest_gaps").columns["next_kernel"]

    assert len(set(titles.values())) == 2 and set(gaps) == set(titles.values())


@needs_traces
def test_of_a_real_trace_the_parts_are_the_whole():
    source = open_session(TRACES / "h200" / "gpt2_eager.json.gz", use_cache=False)
    every, account = parts(source), source.analysis.ranks[0]

    work_ns = int(account.kernel_classes["total_ns"].sum())
    assert sum(sums(one(every, Bars, "kernel_classes"))) == work_ns
    assert sum(one(every, Table, "kernels").columns["total_ns"]) == work_ns
    assert sum(sums(one(every, Bars, "gemm_share"))) == work_ns
    assert sum(one(every, Bars, "kernel_sizes").series[0].y) == account.launches["num_kernels"]
    top = one(every, Bars, "top_kernels")
    assert list(top.series[0].y) == account.top_kernels["total_ns"].head(12).to_list()
    assert len(set(top.labels)) == 12
