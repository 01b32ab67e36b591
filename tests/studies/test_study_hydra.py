"""The study `hydra`, its quick points really run: outputs, whole tables, sentences that follow the data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import quick_study
from quick_study import canned
from quick_study import first_text as said
from stepscope.document.model import Bars, Missing, Table, Text
from stepscope.errors import Unavailable
from stepscope.studies.build import report_of_study
from stepscope.studies.execute import plan_of
from stepscope.studies.hydra import data as hydra_data
from stepscope.studies.hydra import ops as hydra_ops
from stepscope.studies.hydra import variants as hydra_variants
from stepscope.studies.hydra.study import STUDY
from stepscope.studies.stored import Stored

NOT_NOTED = "the note's figures are of 100m"


@pytest.fixture
def changed(studied, tmp_path):
    """The study with the rows of a measure changed: `changed(measure, change)`."""
    return lambda measure, change: quick_study.changed(studied, tmp_path / measure, measure, change)


def test_every_output_is_there_and_says_something(studied):
    for name in STUDY.files:
        assert (studied / name).stat().st_size > 60, name
    for name in ("first_call.png", "memory_timeline.png", "step_shares.png"):
        assert (studied / name).read_bytes().startswith(b"\x89PNG")


def test_every_question_is_answered_and_no_table_has_an_empty_column(report):
    for section in report.sections[1:-1]:
        assert isinstance(section.parts[0], Text), section.title
    missing = [part.text for section in report.sections for part in section.parts if isinstance(part, Missing)]
    assert len(missing) == 1 and NOT_NOTED in missing[0]
    tables = [part for section in report.sections for part in section.parts if isinstance(part, Table)]
    assert len({table.id for table in tables}) == len(tables) >= 12
    for table in tables:
        assert table.num_rows, table.id
        for name, values in table.columns.items():
            assert any(value not in (None, "") for value in values), (table.id, name)


def test_no_sentence_is_canned(stored, tmp_path):
    assert canned(STUDY, stored, tmp_path / "other") == []


def test_bottlenecks_are_exclusive(stored):
    """Parents and children are never counted twice: own times add up to the whole, those with inner ones do not."""
    tables = {part.id: part for part in stored.parts(hydra_ops.bottlenecks) if isinstance(part, Table)}

    assert sum(tables["bottlenecks"].columns["share"]) == pytest.approx(1)
    modules = tables["modules"].columns
    assert sum(modules["own_share"]) == pytest.approx(1)
    assert sum(modules["with_inner_ns"]) > 1.5 * sum(modules["own_ns"])


def test_routing_follows_the_rows(studied, changed):
    def slow(row):
        if row["config"]["routing"] == "dynamic":
            row["samples_device_ns"] = [10 * max(row["samples_device_ns"])] * 10

    before = said(hydra_variants.routing, Stored(studied))
    after, others = (p.text for p in hydra_variants.routing(changed("routing", slow)) if isinstance(p, Text))
    assert before != after and "times slower than static" in after
    assert others.startswith("dynamic (mask) executes 100.0 % of the MLP's rows") and "(mask) executes" not in after
    executed = [row["facts"]["executed_fraction"] for row in Stored(studied).sweep("routing").rows]
    assert executed[0] == executed[2] == 1.0 and 0.3 < executed[1] < 0.9
    assert f"executes {100 * executed[1]:.1f} %" in before


def test_a_dynamic_step_says_what_it_launches_and_who_sets_its_pace(changed):
    def on_gpu(row):
        row["num_kernels"], row["gpu_busy_ns"] = (7 if row["config"]["routing"] == "dynamic" else 5), 4000
        row["samples_device_ns"] = [10_000 if row["config"]["routing"] == "dynamic" else 4000] * 10

    text = said(hydra_variants.routing, changed("routing", on_gpu))
    assert "takes 10.0 µs (the GPU is busy for 40.0 % of it: the host sets the pace), 2.50 times slower" in text
    assert " fewer FLOPs and 7 kernels instead of 5; each of 3 blocks waits for the GPU" in text
    assert "; the GPU's work is 4.00 µs instead of 4.00 µs." in text


def test_rows_that_compute_the_same_are_told_by_their_loss(changed):
    def losses(row):
        is_dynamic = row["config"]["routing"] == "dynamic"
        row["loss"], row["facts"] = (
            (12.5 if is_dynamic else 11.5),
            {"executed_fraction": 0.334 if is_dynamic else 1.0},
        )
        row["samples_device_ns"] = [3000 if row["config"]["dispatch"] == "gather" else 2000] * 10

    texts = [part.text for part in hydra_variants.routing(changed("routing", losses)) if isinstance(part, Text)]
    assert texts[0].startswith("All at 2 × 64 tokens, fp32. tiny")
    assert "the floor is 1 ÷ 3 recursions of the rows" in texts[1]
    assert "At tiny the rows are at the floor" in texts[1]
    assert "compute the same: dynamic (gather) and dynamic (mask) at tiny (12.5000). Static and dynamic" in texts[1]
    assert "Of one function, dynamic (gather) is 1.50 times slower than dynamic (mask), 3.00 µs and 2.00" in texts[1]


def test_a_time_that_spreads_says_how_far(changed):
    def noisy(row):
        row["samples_device_ns"] = [1000, 2000, 3000, 4000, 5000] * 4

    assert "static takes 3.00 µs (p10 to p90: 1.00 µs to 5.00 µs)" in said(
        hydra_variants.routing, changed("routing", noisy)
    )


def test_launches_explain_no_more_than_the_eager_step_is_idle(monkeypatch):
    monkeypatch.setattr(hydra_variants, "step_record", lambda _recorded: {"gpu_idle_share": 0.2})
    row = {"preset": "100m", "batch": 4, "seq_len": 8, "dtype": "fp32", "routing": "static", "capacity": 1.0}
    eager = {**row, "time_median_ns": 3000, "num_kernels": 30, "compile": "off"}
    compiled = {**row, "time_median_ns": 1200, "num_kernels": 12, "compile": "reduce-overhead"}
    stored = SimpleNamespace(recording=lambda _measure, **_knobs: None)

    text = hydra_variants._why_compiled(stored, compiled, eager)
    assert "is 2.50 times as fast as eager" in text and "launches explain 1.25 times at most; the other 2.00" in text
    assert "12 instead of 30: fewer and fused kernels are the most of it" in text


def test_two_sizes_are_no_comparison(changed):
    def larger(row):
        row["num_parameters"] += row["config"]["routing"] == "dynamic"

    with pytest.raises(Unavailable, match="another number of parameters"):
        list(hydra_variants.routing(changed("routing", larger)))


def test_the_losses_follow_the_rows(studied, changed):
    def lean(row):
        if row["config"]["loss"] == "fused":
            row["peak_allocated_bytes"] //= 10

    assert said(hydra_variants.losses, Stored(studied)) != said(hydra_variants.losses, changed("losses", lean))


def test_the_first_call_is_kept_apart_by_layer(studied, changed):
    (row,) = Stored(studied).sweep("first_call").rows
    names = ["embedding", "blocks.0", "blocks.1", "blocks.2", "norm"]
    assert list(row["layers"]["first_call_ns"]) == list(row["layers"]["warm_ns"]) == names
    assert sum(row["layers"]["first_call_ns"].values()) < row["first_call_ns"]
    assert "gate" not in row  # it would have warmed the process up

    def cold(row):
        others = row["layers"]["first_call_ns"]
        others["blocks.0"] = 20 * (others["blocks.1"] + others["blocks.2"])

    assert " 40.0 times the median of the other layers" in said(hydra_data.first_call, changed("first_call", cold))


def test_another_time_of_the_same_step_is_told(changed):
    def fast(row):
        row["samples_device_ns"] = [1000] * 10

    assert "The same step, recorded, takes" in said(hydra_data.first_call, changed("first_call", fast))


def test_the_micro_benchmarks_follow_the_rows(changed):
    def slow(row):
        row["samples_device_ns"] = [9_000_000 if row["config"]["implementation"] == "contiguous" else 1_000_000] * 10

    assert "A contiguous copy first is 9.00 times slower than that" in said(
        hydra_ops.micro, changed("contiguity", slow)
    )


def test_a_micro_benchmark_that_the_host_paces_says_so(changed):
    def on_gpu(row):
        row["num_kernels"] = len(row["config"]["implementation"])
        row["gpu_busy_ns"] = 1000 * row["num_kernels"]
        row["samples_device_ns"] = [40_000 if row["config"]["implementation"] == "sliced" else 100_000] * 10

    text = said(hydra_ops.micro, changed("contiguity", on_gpu))
    assert "copy first is" not in text  # 2.5 times slower, on the host's clock
    assert (
        "the GPU is busy for 6.0 % to 15.0 % of the time. Its work is 6.00 µs as sliced (6 kernels), 6.00 µs as "
        "padded (6 kernels) and 10.0 µs as contiguous (10 kernels)."
    ) in text


def test_the_data_is_of_one_point_in_two_ways(studied, tmp_path):
    folder = shutil.copytree(studied, tmp_path / "slow")
    (samples,) = (folder / "text").glob("recordings/*/samples.jsonl")
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    for line in lines:
        if "wall_ns" in line:
            line["host_ns"]["data"] = line["host_ns"].get("data", 0) + 900_000_000
            line["wall_ns"] += 900_000_000
    samples.write_text("".join(json.dumps(line) + "\n" for line in lines))

    table = next(part for part in hydra_data.data(Stored(studied)) if isinstance(part, Table))
    assert table.columns["data"] == ["one batch", "text"]
    # A batch that is there already is not waited for, whatever the loop does before a forward.
    assert table.columns["data_wait_ns"][0] is None and table.columns["data_wait_ns"][1] > 0
    after = said(hydra_data.data, Stored(folder))
    assert "times slower than that" in after and "the host waits 9" in after
    assert "of the difference" in after and "The rest" not in after  # all but what the two processes differ by


def test_what_the_wait_does_not_explain_is_the_hosts_pace():
    def step(data, step_ns, idle, **wait):
        times = {f"{name}_ns": step_ns for name in ("step", "time_median", "time_ci_low", "time_ci_high")}
        return {"batch": 4, "seq_len": 8, "data": data, "num_samples": 10, **times, **wait,
                "gpu_idle_share": idle, "gpu_busy_share": 1 - idle}  # fmt: skip

    text = step("text", 80_000_000, 0.5, data_wait_ns=600_000, wait_share=0.0075)
    near = hydra_data._data_sentence(step("one batch", 90_000_000, 0.6), text)
    assert "80.0 ms, not to be told from that" in near and "of the difference" not in near
    paced = hydra_data._data_sentence(step("one batch", 200_000_000, 0.6), text)
    assert "2.50 times as fast as that; the wait is none of the difference" in paced
    assert "the host's pace: the GPU has nothing to do for 60.0 % and 50.0 % of these steps" in paced
    assert "do not say that text makes a step faster or slower" in paced
    busy = hydra_data._data_sentence(step("one batch", 79_000_000, 0.02), text | {"gpu_busy_share": 0.98})
    assert "tokens, where the GPU sets the pace, a step takes" in busy
    assert "the wait is 60.0 % of the difference" in busy and "The rest" not in busy
    assert "The GPU has nothing to do for 1.58 ms of a step on one batch, 1.60 ms on text: at most 20.0 µs of" in busy
    assert "these waits are the GPU's too, the rest passes while it works." in busy
    assert "at most" not in near and "at most" not in paced


def test_the_notes_figures_stand_beside_ours_where_it_is_the_same_preset(studied, tmp_path):
    """GIVEN rows that say they are of 100m THEN each figure of the note is shown, its device named as not known."""
    folder = shutil.copytree(studied, tmp_path / "noted")
    for path in folder.glob("*/results.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({**row, "preset": _noted(row["preset"])}) + "\n" for row in rows))

    sections = [section.parts for section in report_of_study(STUDY, Stored(folder)).sections]
    for section in sections:  # the difference is explained after the last of them
        if any(getattr(part, "id", "").startswith("published-") for part in section):
            assert isinstance(section[-1], Text), section[-1]
    parts = [part for section in sections for part in section]
    beside = {part.id: part for part in parts if isinstance(part, Table) and part.id.startswith("published-")}
    assert beside.keys() == {
        f"published-{name}" for name in ("step_share", "step_ns", "memory_bytes", "own_share", "time_share",
                                         "times_sliced", "call_ns", "times_static", "tokens_per_s", "beside_others")
    }  # fmt: skip
    assert all("device not named" in table.title for table in beside.values())
    assert beside["published-step_share"].columns["published_step_share"] == [0.35, 0.62, 0.03]
    assert "withdrawn" in beside["published-tokens_per_s"].title
    assert "routing switched off" in beside["published-times_static"].title
    assert any(isinstance(part, Text) and "had 62 M" in part.text for part in parts)


def _noted(preset: str) -> str:
    return "100m" if preset == "tiny" else preset


def test_the_full_study_has_the_three_sizes_and_equal_topologies():
    points = plan_of(STUDY, "full", "cuda").points

    assert [point.preset for point in points["step"]] == ["100m", "100m", "500m", "1b"]
    first_two = [point.hash for point in points["step"][:2]]
    assert [p.hash for p in points["text"]] == [p.hash for p in points["workers"]] == first_two
    routed = [point for point in points["routing"] if point.preset == "100m"]
    shape = ("dim", "blocks", "recursions", "heads", "kv_heads", "vocab", "batch", "seq_len")
    assert len({tuple(point.config[name] for name in shape) for point in routed}) == 1


def test_a_gpus_own_times_are_told(monkeypatch):
    """The answers from a trace of an H200: its ops by the GPU's time, its copies by the replay."""
    path = Path(__file__).parents[2] / "../shared/traces/h200/contiguous_copies.json.gz"
    if not path.is_file():
        pytest.skip("../shared/traces is not there")
    pytest.importorskip("polars")
    from stepscope.session import open_session

    recorded = SimpleNamespace(source=open_session(path, use_cache=False), axes={"preset": "traced"})
    stored = SimpleNamespace(recording=lambda _measure: recorded)

    assert "aten::copy_ 57.2 %" in said(hydra_ops.bottlenecks, stored)
    text = said(hydra_ops.copies, stored)
    assert "57.2 % of the GPU's busy time" in text and "is contiguous (forward)" in text
    assert ", 0.0 % in optimizer" in text  # a phase without copies is told too
    chart = next(part for part in hydra_ops.copies(stored) if isinstance(part, Bars))
    assert chart.series[0].y == sorted(chart.series[0].y, reverse=True) and max(map(len, chart.labels)) <= 40
    recorded.axes |= {"preset": "100m"}
    monkeypatch.setattr(hydra_ops, "other_model", lambda _recorded: "it is another")
    *_, beside, verdict = hydra_ops.copies(stored)
    assert beside.columns["op"] == ["aten::copy_"] and round(beside.columns["time_share"][0], 3) == 0.572
    assert "the optimizer has 0.0 % of their time" in verdict.text and "does not follow from our" in verdict.text
    assert hydra_variants._patterns(recorded.source)["largest_op"] == "aten::copy_"
