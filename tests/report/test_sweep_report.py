"""The report of a sweep: axes chosen, statuses never drawn as numbers, one set of figures for page and charts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hostile_names import NAMES
from stepscope import report
from stepscope.analysis.comparison.sweeps import hash_of, sweep_of
from stepscope.document.model import Bars, Chart, Explorer, Facts, Heat, Lines, Missing, Scatter, Table, Text
from stepscope.document.sections.sweep import sweep_report
from stepscope.document.sections.sweep_charts import layout_of
from stepscope.errors import RecordingError
from stepscope.render.markdown.markdown import markdown_of
from stepscope.render.page.page import page_of
from stepscope.render.write import plain_of
from stepscope.trace.sweep_file import Sweep, read_sweep

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "h200"
ENVIRONMENT = {"e": {"device_name": "NVIDIA H200", "torch": "2.11"}}


def row(config, time_ms=None, status="ok", mode="step", **more):
    run = {"mode": mode, "dtype": "bf16", "compile": "off", "sdpa": "free", "optimizer": "adamw", "seed": 0}
    figures = {}
    if time_ms is not None:
        figures = {
            "samples_device_ns": [round(time_ms * 1e6 * factor) for factor in (0.99, 1.0, 1.0, 1.0, 1.0, 1.01)],
            "num_tokens": 4096, "num_parameters": 1000, "flops_formula": 10**12, "peak_allocated_bytes": 3 << 30,
        }  # fmt: skip
    key = "-".join(map(str, [*config.values(), mode]))
    reason = None if status == "ok" else f"why {key}"
    return {
        "hash": key, "workload": "w", "preset": "p", "config": config, "run": run, "status": status, "reason": reason,
        "reference": {"attention": "naive"}, "environment_hash": "e", **figures, **more,
    }  # fmt: skip


def sweep(*rows, environments=ENVIRONMENT):
    return Sweep(Path("runs/sizes"), tuple(rows), environments, ())


LENGTHS = sweep(
    *(row({"seq_len": length, "attention": "naive"}, length / 10) for length in (128, 256, 512)),
    row({"seq_len": 1024, "attention": "naive"}, None, "oom", stage="first call"),
    *(row({"seq_len": length, "attention": "sdpa"}, length / 20) for length in (128, 256, 512)),
    row({"seq_len": 1024, "attention": "sdpa"}, 1.0, "unproven"),
)


def parts(report, section):
    return next(one for one in report.sections if one.id == section).parts


def test_a_length_is_x_and_a_way_to_compute_is_the_series():
    line, heat = parts(sweep_report(LENGTHS), "time")

    assert isinstance(line, Lines) and line.x == "seq_len" and line.log_x
    assert [series.name for series in line.series] == ["naive", "sdpa"]
    assert list(line.series[0].x) == [128, 256, 512, 1024]
    assert isinstance(heat, Heat) and list(heat.x_labels) == ["128", "256", "512", "1,024"]


def test_what_is_not_ok_is_its_status_and_never_a_number():
    report = sweep_report(LENGTHS)
    line, heat = parts(report, "time")

    assert [series.y[3] for series in line.series] == [None, None]
    assert [series.low[3] for series in line.series] == [None, None]
    assert [series.gaps[3] for series in line.series] == ["oom", "unproven"]
    assert [texts[3] for texts in heat.texts] == ["oom", "unproven"] and [v[3] for v in heat.values] == [None, None]
    (explorer,) = report.parts(Explorer)
    failed = [at for at, status in enumerate(explorer.statuses) if status != "ok"]
    assert len(failed) == 2 and all(values[at] is None for values in explorer.figures.values() for at in failed)
    (points,) = parts(report, "points")
    assert [points.columns["time_median_ns"][at] for at in failed] == [None, None]
    (statuses,) = parts(report, "statuses")
    assert statuses.columns["reason"] == ["why 1024-naive-step", "why 1024-sdpa-step"]
    assert statuses.columns["unranked_time_ns"] == [None, 1e6] and statuses.columns["stage"] == ["first call", None]


def test_the_verdict_is_made_from_the_figures():
    verdict = sweep_report(LENGTHS).verdict
    for part in ("8 points: 6 ok, 1 oom, 1 unproven.", "sdpa is the fastest in 3 of 3 comparisons, 2.00 times",
                 "3.00 GiB (seq_len=128 attention=naive)"):  # fmt: skip
        assert part in verdict
    assert "12.80 ms (seq_len=128) to 51.20 ms (seq_len=512)" in sweep_report(sweep(*LENGTHS.rows[:3])).verdict
    failed = sweep_report(sweep(LENGTHS.rows[3]))
    assert failed.verdict.startswith("1 point: 1 oom.")
    assert isinstance(parts(failed, "time")[0], Missing)


def test_the_best_the_environment_and_the_configuration_are_in_the_overview():
    report = sweep_report(LENGTHS)
    facts, best = parts(report, "overview")

    assert isinstance(facts, Facts) and isinstance(best, Table)
    texts = {fact.title: fact.value for fact in facts.rows}
    assert texts["ran on"] == "NVIDIA H200" and texts["varied"] == "seq_len (4), attention (2)"
    summary = sweep_of(list(LENGTHS.rows), LENGTHS.environments)
    assert texts["configuration"] == hash_of(summary) == report.facts["configuration"]
    assert best.columns["attention"] == ["sdpa"] * 3 and best.columns["speedup"] == pytest.approx([2.0] * 3)


def test_a_further_axis_is_charts_apart_and_too_many_are_counted():
    rows = [
        row({"seq_len": length, "attention": name}, length / 100, mode=mode)
        for mode in ("forward", "step") for name in ("naive", "sdpa") for length in (128, 256)
    ]  # fmt: skip
    found = parts(sweep_report(sweep(*rows)), "time")
    assert [chart.title for chart in found if isinstance(chart, Lines)] == [
        "Time over seq_len, mode=forward", "Time over seq_len, mode=step"
    ]  # fmt: skip

    many = [row({"seq_len": length, "part": f"p{number}"}, 1.0) for number in range(9) for length in (1, 8)]
    rows = [{**one, "config": {**one["config"], "kind": kind}, "hash": f"{one['hash']}{kind}"} for one in many
            for kind in ("a", "b")]  # fmt: skip
    found = parts(sweep_report(sweep(*rows)), "time")
    charts = [part for part in found if isinstance(part, Lines)]
    assert (
        len(charts) == 6 and isinstance(found[-1], Text) and found[-1].text.startswith("3 more combinations of part")
    )


def test_without_numbers_there_are_bars_the_best_first():
    rows = [row({"attention": name}, ms) for name, ms in (("naive", 3.0), ("sdpa", 1.0))]
    rows.append(row({"attention": "flash"}, None, "crashed"))
    report = sweep_report(sweep(*rows))

    (time,) = parts(report, "time")
    assert isinstance(time, Bars) and list(time.labels) == ["sdpa *", "naive", "flash"]
    assert list(time.series[0].y) == [1e6, 3e6, None] and list(time.series[0].gaps) == ["", "", "crashed"]
    (tokens,) = parts(report, "tokens")
    assert list(tokens.labels) == ["sdpa", "naive", "flash"]


def test_an_axis_that_follows_from_another_is_said_and_not_drawn():
    rows = [row({"path": path, "warm": warm, "seq_len": n}, n) for path, warm in (("a", 5), ("b", 1)) for n in (1, 2)]
    summary = sweep_of(rows, {})
    layout = layout_of(summary, rows)

    assert layout.x is not None and layout.x.name == "seq_len"
    assert layout.follows == {"path": "warm"}
    assert len({*layout.series, *layout.facets}) == 1


def test_without_the_device_mfu_says_what_is_needed():
    (missing,) = parts(sweep_report(sweep(*LENGTHS.rows, environments={})), "mfu")
    assert isinstance(missing, Missing) and "sweep.json" in missing.text
    assert isinstance(parts(sweep_report(LENGTHS), "mfu")[0], Lines)


def test_one_point_has_figures_and_no_charts():
    report = sweep_report(sweep(LENGTHS.rows[0]))

    assert report.parts(Chart) == [] and parts(report, "points")[0].num_rows == 1
    (explorer,) = report.parts(Explorer)
    assert explorer.axes == () and explorer.x is None and len(explorer.statuses) == 1


def test_any_name_may_be_a_value_of_an_axis():
    rows = [row({"attention": name, NAMES[0]: other, "seq_len": n}, 1.0 + n) for n in (1, 8)
            for name in NAMES[:8] for other in NAMES[20:23]]  # fmt: skip
    rows += [row({"attention": "x", NAMES[0]: "y", "seq_len": 1}, None, "crashed") | {"reason": NAMES[1] * 100}]
    report = sweep_report(sweep(*rows))

    json.dumps(plain_of(report), allow_nan=False)
    assert "<script" not in markdown_of(report).replace("\\<script", "")
    assert all(chart.id.replace("-", "").replace("_", "").isalnum() for chart in report.parts(Chart))


@pytest.mark.parametrize("folder", sorted(RESULTS.glob("*/results.jsonl")), ids=lambda path: path.parent.name)
def test_every_sweep_that_was_measured_has_a_report(folder):
    found = read_sweep(folder)
    report = sweep_report(found)

    (explorer,) = report.parts(Explorer)
    assert len(explorer.statuses) == len(found.rows)
    assert all(len(column) == len(found.rows) for column in (*explorer.places, *explorer.figures.values()))
    for places, axis in zip(explorer.places, explorer.axes, strict=True):
        assert {axis.values[place] for place in places} == set(axis.values)
    for figure in explorer.shown:
        assert {figure.name, figure.low, figure.high} - {None} <= set(explorer.figures)
    ids = [part.id for part in report.parts((Chart, Table))]
    assert len(ids) == len(set(ids)) and report.parts(Chart)
    for heat in report.parts(Heat):
        assert [len(line) for line in heat.values] == [len(heat.x_labels)] * len(heat.y_labels)
        assert any(value is not None for line in heat.values for value in line)
    for scatter in report.parts(Scatter):
        assert len(scatter.points) == sum(status == "ok" for status in explorer.statuses)
    assert len(markdown_of(report)) < 60_000


@pytest.mark.parametrize(
    "wrong",
    [{"flops_formula": "x"}, {"notes": [1]}, {"samples_device_ns": [1e308, 1e308]}, {"environment_hash": []},
     {"reference": [1]}, {"config": {"seq_len": float("nan")}},
     {"peak_allocated_bytes": "much"}, {"config": {"seq_len": [1, 2]}}],
)  # fmt: skip
def test_a_field_of_the_wrong_kind_is_one_line(tmp_path, wrong):
    row = {"hash": "a1", "workload": "attention", "status": "ok", "config": {"seq_len": 64}, "num_tokens": 64,
           "run": {"mode": "step", "dtype": "fp32"}, "samples_device_ns": [1000, 1100]}  # fmt: skip
    (tmp_path / "results.jsonl").write_text(json.dumps(row | wrong) + "\n")
    with pytest.raises(RecordingError, match=r"is not a valid row"):
        page_of(report(tmp_path))
