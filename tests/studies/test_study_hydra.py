"""The study `hydra`, its quick points really run: outputs, whole tables, sentences that follow the data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from study_checks import check_files, check_follows, check_report

import quick_study
from quick_study import first_text, table_of
from stepscope.document.model import Table, Text
from stepscope.studies.execute import plan_of
from stepscope.studies.hydra.recorded import all_copies, bottlenecks, copy_sources, data, ops
from stepscope.studies.hydra.study import STUDY, first_call, losses, micro, routing
from stepscope.studies.report import report_of_study
from stepscope.studies.stored import Stored

pytestmark = pytest.mark.long  # a quick study takes minutes; those of cs336 and nano run always


@pytest.fixture
def changed(studied, tmp_path):
    """The study with the rows of a measure changed: `changed(measure, change)`."""
    return lambda measure, change: quick_study.changed(studied, tmp_path / measure, measure, change)


def test_every_question_is_answered(report):
    check_report(STUDY, report)


def test_every_output_is_there_and_says_something(report, stored):
    check_files(STUDY, report, stored)


def test_no_sentence_is_canned(stored, tmp_path):
    check_follows(STUDY, stored, tmp_path / "other")


def test_bottlenecks_are_exclusive(stored):
    """Parents and children are never counted twice: own times add up to the whole, those with inner ones do not."""
    assert sum(table_of(bottlenecks, stored, "bottlenecks")["share"]) == pytest.approx(1)
    modules = table_of(bottlenecks, stored, "modules")
    assert sum(modules["own_share"]) == pytest.approx(1)
    assert sum(modules["with_inner_ns"]) > 1.5 * sum(modules["own_ns"])


def test_routing_follows_the_rows(stored, changed):
    def slow(row):
        if row["config"]["routing"] == "dynamic":
            row["samples_device_ns"] = [10 * max(row["samples_device_ns"])] * 10

    before, after = first_text(routing, stored), first_text(routing, changed("routing", slow))
    assert before != after and "times slower than static" in after
    executed = [row["facts"]["executed_fraction"] for row in stored.sweep("routing").rows]
    assert executed[0] == executed[2] == 1.0 and 0.3 < executed[1] < 0.9
    assert f"executes {100 * executed[1]:.1f} %" in before


def test_a_dynamic_step_that_is_host_bound_says_what_the_gpu_works(changed):
    def on_gpu(row):
        row["num_kernels"], row["gpu_busy_ns"] = (7 if row["config"]["routing"] == "dynamic" else 5), 4000
        row["samples_device_ns"] = [10_000 if row["config"]["routing"] == "dynamic" else 4000] * 10

    text = first_text(routing, changed("routing", on_gpu))
    assert "2.50 times slower than static with 4.00 µs instead of 4.00 µs of GPU work" in text


def test_two_sizes_are_no_comparison(changed):
    def larger(row):
        row["num_parameters"] += row["config"]["routing"] == "dynamic"

    assert "differ in the number of parameters" in first_text(routing, changed("routing", larger))


def test_the_losses_follow_the_rows(changed):
    def lean(row):
        row["peak_allocated_bytes"] = 100 << (10 if row["config"]["loss"] == "fused" else 11)

    text = first_text(losses, changed("losses", lean))
    assert "fused is" in text and text.endswith("with 50.0 % of its peak.")


def test_the_first_call_is_kept_apart_by_layer(stored, changed):
    (row,) = stored.sweep("first_call").rows
    names = ["embedding", "blocks.0", "blocks.1", "blocks.2", "norm"]
    assert list(row["layers"]["first_call_ns"]) == list(row["layers"]["warm_ns"]) == names
    assert sum(row["layers"]["first_call_ns"].values()) < row["first_call_ns"]
    assert "gate" not in row  # it would have warmed the process up

    def cold(row):
        others = row["layers"]["first_call_ns"]
        others["blocks.0"] = 20 * (others["blocks.1"] + others["blocks.2"])

    assert " 40.0 times the median of the other layers" in first_text(first_call, changed("first_call", cold))


def test_the_micro_benchmarks_follow_the_rows(changed):
    def slow(row):
        row["samples_device_ns"] = [9_000_000 if row["config"]["implementation"] == "contiguous" else 1_000_000] * 10

    assert "contiguous is 9.00 times slower than sliced" in first_text(micro, changed("contiguity", slow))


def test_micro_benchmarks_that_are_host_bound_say_what_the_gpu_works(studied, tmp_path):
    def on_gpu(row):
        row["gpu_busy_ns"] = 1000 * len(row["config"]["implementation"])
        row["samples_device_ns"] = [40_000] * 10

    stored = quick_study.changed(studied, tmp_path / "one", "contiguity", on_gpu)
    text = first_text(micro, quick_study.changed(stored.folder, tmp_path / "two", "value_shift", on_gpu))
    assert "host-bound" in text and "the GPU works 6.00 µs to 10.0 µs per convolution" in text


def test_the_data_is_of_one_point_in_two_ways(stored, studied, tmp_path):
    folder = shutil.copytree(studied, tmp_path / "slow")
    (samples,) = (folder / "text").glob("recordings/*/samples.jsonl")

    def wait(line):
        if "wall_ns" in line:
            line["host_ns"]["data"] = line["host_ns"].get("data", 0) + 900_000_000
            line["wall_ns"] += 900_000_000

    quick_study.change_lines(samples, wait)
    columns = table_of(data, stored, "data")
    assert columns["data"] == ["one batch", "text"]
    # A batch that is there already is not waited for, whatever the loop does before a forward.
    assert columns["data_wait_ns"][0] is None and columns["data_wait_ns"][1] > 0
    assert "text makes the host wait 9" in first_text(data, Stored(folder))


def test_the_notes_figures_stand_beside_ours_in_a_full_study(studied, tmp_path):
    """GIVEN rows that say they are of 100m, in a full study THEN each figure of the note is shown."""
    folder = shutil.copytree(studied, tmp_path / "noted")
    for path in folder.glob("*/results.jsonl"):
        quick_study.change_lines(
            path, lambda row: row.update(preset="100m" if row["preset"] == "tiny" else row["preset"])
        )
    facts = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps(facts | {"mode": "full"}))

    parts = report_of_study(STUDY, Stored(folder)).parts(Table)
    beside = {part.id: part for part in parts if part.id.startswith("published-")}
    assert beside.keys() == {
        f"published-{name}" for name in ("step_share", "step_ns", "memory_bytes", "own_share", "times_sliced",
                                         "call_ns", "times_static", "tokens_per_s", "beside_others", "time_share")
    }  # fmt: skip
    assert all("device not named" in table.title for table in beside.values())
    assert beside["published-step_share"].columns["published_step_share"] == [0.35, 0.62, 0.03]
    assert "withdrawn" in beside["published-tokens_per_s"].title


def test_a_quick_study_has_no_published_figures_but_the_claims(report):
    assert not [part for part in report.parts(Table) if part.id.startswith("published-")]
    claims = report.sections[0].parts[-1]
    assert any("62 M parameters" in fact.value for fact in claims.rows)


def test_the_full_study_has_the_three_sizes_and_equal_topologies():
    points = plan_of(STUDY, "full", "cuda").points

    assert [point.preset for point in points["step"]] == ["100m", "100m", "500m", "1b"]
    first_two = [point.hash for point in points["step"][:2]]
    assert [p.hash for p in points["text"]] == [p.hash for p in points["workers"]] == first_two
    routed = [point for point in points["routing"] if point.preset == "100m"]
    shape = ("dim", "blocks", "recursions", "heads", "kv_heads", "vocab", "batch", "seq_len")
    assert len({tuple(point.config[name] for name in shape) for point in routed}) == 1


def test_a_gpus_own_times_are_told():
    """The answers from a trace of an H200: its ops by the GPU's time, its copies by the replay."""
    path = Path(__file__).parents[2] / "../shared/traces/h200/contiguous_copies.json.gz"
    if not path.is_file():
        pytest.skip("../shared/traces is not there")
    from stepscope.session import open_session

    recorded = SimpleNamespace(source=open_session(path, use_cache=False), axes={"preset": "traced"})
    stored = SimpleNamespace(recording=lambda _measure: recorded)

    first = ops.rows(stored)[0]
    assert first["op"] == "aten::copy_" and first["share"] == pytest.approx(0.572, rel=1e-3)
    (whole,) = all_copies.rows(stored)
    assert whole["share"] == pytest.approx(0.572, rel=1e-3) and whole["saving_ns"] > 0
    assert next(iter(copy_sources.rows(stored)))["phase"] == "forward"


def test_the_first_sentence_is_the_verdict(report):
    assert report.verdict == next(part.text for part in report.sections[1].parts if isinstance(part, Text))
