"""The overview and the report around it: figures equal to the results', parts that sum, strange sources survived."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from section_parts import EVIL, facts_in, of

from handmade import WINDOWS, cpu_facts, cpu_recording, gpu_recording, sample, write_recording
from parametrized import parametrized
from stepscope import read, report
from stepscope.analysis.time import statistics
from stepscope.document.build import SECTIONS, section_of, title_of, verdict_of
from stepscope.document.card import Card
from stepscope.document.model import Bars, Facts, Findings, Missing, Table
from stepscope.document.sections import overview
from stepscope.document.tables import MOST_POINTS, thinned, thinning
from stepscope.errors import TraceError
from stepscope.findings.diagnose import diagnose
from stepscope.session import Session, open_session
from trace_builder import TRACES, TraceBuilder, needs_traces

MINE = ("overview", "steps", "compiler", "precision", "counters", "ranks")


@pytest.fixture(autouse=True)
def quick_and_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(statistics, "NUM_RESAMPLES", 5)


def parts_of(session: Session) -> tuple:
    return overview.parts(session, diagnose(session.case))


def step_trace(path: Path, name: str = "gemm", **fields) -> Path:
    trace = TraceBuilder(**fields).step(1, 0, 100).op("aten::mm", 10, 20, id=5)
    return trace.launch(name, 12, runs=(30, 40), id=5).launch(name, 50, runs=(90, 5)).write(path)


def test_where_a_step_goes_is_the_summarys_rows_and_sums_to_it(tmp_path):
    for folder in (cpu_recording(tmp_path / "cpu"), gpu_recording(tmp_path / "gpu")):
        source = open_session(folder)
        parts, summary = parts_of(source), source.summary
        chart, table = of(parts, Bars), of(parts, Table, "where_a_step_goes")

        whose = chart.labels[0].lower()
        shown = dict(zip(table.columns["part"], zip(table.columns[f"{whose}_ns"], table.columns[f"{whose}_share"])))
        assert {row.name: (row.ns, row.share) for row in summary.rows}.items() <= shown.items()
        assert "unattributed" in shown
        for number in range(len(chart.labels)):
            assert sum(series.y[number] for series in chart.series) == pytest.approx(1)
        assert sum(ns for ns, _ in shown.values()) == pytest.approx(summary.step_ns.median)


def test_the_idle_time_of_the_verdict_is_on_the_page(tmp_path):
    source = open_session(gpu_recording(tmp_path / "run"))
    table = of(parts_of(source), Table, "where_a_step_goes")
    waits = dict(zip(table.columns["part"], table.columns["gpu_waiting_ns"]))

    assert "idle 15.0 % of it, mostly in data" in Card.of(source).verdict
    assert max(waits, key=lambda part: waits[part] or 0) == "data" and waits["data"] == 500_000
    assert dict(zip(table.columns["part"], table.columns["gpu_share"]))["idle"] == 0.15


def test_the_lines_of_the_card_are_the_key_figures(tmp_path):
    source = open_session(gpu_recording(tmp_path / "run"))
    parts = parts_of(source)
    figures, measurement, _ = (part.rows for part in parts if isinstance(part, Facts))

    card = Card.of(source)
    assert (figures, measurement) == (card.figures, card.measurement)
    assert {"typical step", "throughput", "MFU", "HFU", "memory"} <= {fact.title for fact in figures}
    assert facts_in(parts)["MFU"] == "50.0 %"
    assert facts_in(parts)["command"] == "train.py --lr 0.1" and facts_in(parts)["torch"] == "2.11.0"
    assert of(parts, Findings).values == diagnose(source.case).to_json()


def test_a_traces_overview(tmp_path):
    source = open_session(step_trace(tmp_path / "trace.json"))
    parts, account = parts_of(source), source.analysis.ranks[0]
    chart, table = of(parts, Bars, "where_a_step_goes"), of(parts, Table, "where_a_step_goes")

    assert chart.labels == ["GPU", "host"]
    for number in range(2):
        assert sum(series.y[number] for series in chart.series) == pytest.approx(1)
    assert sum(table.columns["gpu_ns"]) == account.gpu_time.window_ns
    assert sum(ns or 0 for ns in table.columns["host_ns"]) == 100_000
    assert of(parts, Table, "idle_causes").columns["total_ns"] == [20_000]
    assert sum(of(parts, Table, "gpu_time").columns["share"]) == pytest.approx(1)
    assert facts_in(parts)["overhead"] == "unknown"
    assert all(card.prove is None for card in of(parts, Findings).cards)


def test_titles_that_a_colleague_knows(tmp_path):
    assert title_of(open_session(gpu_recording(tmp_path / "run"))) == "train.py on NVIDIA H200"
    command = {"argv": ["/torch/distributed/run.py", "ddp.py"], "script": "/home/me/ddp.py"}
    assert title_of(open_session(gpu_recording(tmp_path / "ranks", command=command))) == "ddp.py on NVIDIA H200"
    path = step_trace(tmp_path / "my_trace.json", deviceProperties=[{"name": "NVIDIA B200"}])
    assert title_of(open_session(path)) == "my_trace.json on NVIDIA B200"
    empty = write_recording(tmp_path / "empty", {"status": "interrupted"}, [])
    assert title_of(open_session(empty)) == "empty"


def strange(name: str, folder: Path) -> Path:
    if name == "empty":
        return write_recording(folder, {"status": "interrupted"}, [])
    if name == "no steps":
        return write_recording(folder, cpu_facts(trace=None, flops=None), [])
    if name == "interrupted in its warm-up":
        facts = {"status": "interrupted", "windows": WINDOWS, "environment": {"device": "cpu"}}
        return write_recording(folder, facts, [sample(0, "warmup")])
    if name == "one clean step":
        return write_recording(folder, cpu_facts(), [sample(0)])
    if name == "a step of no time":
        nothing = sample(0, host_ns={"forward": 0})
        return write_recording(folder, cpu_facts(), [nothing, nothing | {"step": 1}])
    if name == "trace without steps":
        return (
            TraceBuilder().op("aten::mm", 10, 20, id=5).launch("k", 12, runs=(30, 4), id=5).write(folder / "t.json")
        )
    if name == "trace of a CPU":
        return TraceBuilder().step(1, 0, 100).op("aten::mm", 10, 20).write(folder / "t.json")
    if name == "trace of nothing":
        return TraceBuilder().annotation("hello", 0, 1).write(folder / "t.json")
    if name == "cut off":
        whole = step_trace(folder / "t.json").read_bytes()
        (folder / "t.json").write_bytes(whole[: len(whole) * 2 // 3])
        return folder / "t.json"
    if name == "cut off and compressed":
        whole = gzip.compress(step_trace(folder / "t.json").read_bytes() * 1)
        (folder / "t.json.gz").write_bytes(whole[:-12])
        return folder / "t.json.gz"
    raise AssertionError(name)


STRANGE = (
    "empty", "no steps", "interrupted in its warm-up", "one clean step", "a step of no time", "trace without steps",
    "trace of a CPU", "trace of nothing", "cut off", "cut off and compressed",
)  # fmt: skip


@parametrized("name", STRANGE, quick=3)
def test_strange_sources_have_every_section(tmp_path, name):
    source = open_session(strange(name, tmp_path / "run"))
    for section in MINE:
        parts = section_of(source, section).parts
        assert parts, section
        for table in (part for part in parts if isinstance(part, Table)):
            assert len({len(values) for values in table.columns.values()}) == 1, table.id
        for missing in (part for part in parts if isinstance(part, Missing)):
            assert len(missing.text) > 20
    assert set(MINE) <= set(SECTIONS) and verdict_of(source) and title_of(source)


def test_a_trace_that_cannot_be_read_is_refused_in_one_line(tmp_path):
    with pytest.raises(TraceError, match="no events"):
        report(TraceBuilder().write(tmp_path / "t.json"))


def test_a_recording_without_clean_steps_says_so(tmp_path):
    parts = parts_of(open_session(strange("interrupted in its warm-up", tmp_path / "run")))

    assert "lower --warmup" in of(parts, Missing).text


def test_hostile_names_pass_through_unchanged(tmp_path):
    """Renderers escape; a section that did would do it twice."""
    facts = cpu_facts(
        command={"argv": [EVIL], "folder": EVIL},
        git={"revision": EVIL},
        environment={"device": "cpu", "device_name": EVIL, "variables": {"TORCH": EVIL}},
    )
    shown = facts_in(parts_of(open_session(write_recording(tmp_path / "run", facts, [sample(0)]))))

    assert shown["revision"] == shown["device"] == EVIL and EVIL in shown["settings"]
    assert title_of(open_session(tmp_path / "run")).isprintable()


def test_a_long_series_keeps_its_extremes_and_says_what_it_leaves_out():
    values = [float(i % 997) for i in range(50_000)]
    series = thinned("many", range(50_000), values)

    assert len(series.y) == len(series.x) <= MOST_POINTS
    assert (max(series.y), min(series.y)) == (max(values), min(values)) and list(series.x) == sorted(series.x)
    assert (series.x[0], series.x[-1]) == (0, 49_999)
    assert "of 50,000 points" in thinning([series], 50_000)
    assert thinning([thinned("few", [1.0, 2.0], [3.0, 4.0])], 2) == ""


@needs_traces
@pytest.mark.parametrize("name", ["h200/contiguous_copies.json.gz", "public/cpu_only_gloo.json.gz"])
def test_real_traces_add_up(name):
    chart = of(parts_of(open_session(TRACES / name, use_cache=False)), Bars, "where_a_step_goes")

    for number in range(len(chart.labels)):
        assert sum(series.y[number] for series in chart.series) == pytest.approx(1)


def test_the_whole_summary_is_the_cards(tmp_path):
    folder = gpu_recording(tmp_path / "run")

    assert open_session(folder).summary == read(folder).summary
