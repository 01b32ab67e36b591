"""A run that goes on, in figures: every one from a history whose figures are known."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from pathlib import Path

import pytest

from handmade import MS, cpu_facts, sample, write_recording
from history_maker import Run, write_history
from hostile_names import NAMES
from stepscope import RunStatus, watch
from stepscope.document.run_status import line_of, run_document, verdict_of
from stepscope.errors import UsageError
from stepscope.findings.run_status import NUM_SPANS, WatchedRun
from stepscope.render.page.live import live_page
from stepscope.render.terminal import terminal_text

GPU = {"clock_mhz": lambda step: 1500.0, "total_bytes": 80 << 30}


def status(folder: Path, num_planned: int | None = None) -> RunStatus:
    return WatchedRun(folder, num_planned).status()


def made(folder: Path, **settings) -> Path:
    """A run of 1,000 steps of exactly 100 ms, which goes on."""
    return write_history(folder, Run(**{"num_steps": 1000, "noise": 0.0, "ends": None, **settings}))


def edit(folder: Path, **facts) -> None:
    path = folder / "recording.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def test_pace_throughput_and_parts_are_those_of_the_history(tmp_path):
    found = status(made(tmp_path, **GPU))

    assert (found.state, found.num_steps, found.elapsed_s) == ("running", 1000, 120.0)
    assert (found.step_ns, found.unit, found.per_s) == (100 * MS, "tokens", 81_920.0)
    assert {part.name: part.share for part in found.parts} == pytest.approx({"unattributed": 0.95, "data": 0.05})
    assert found.parts_s == sum(part.ns for part in found.parts) / 1e9 == 100.0
    assert (found.loss_step, found.loss) == (999, pytest.approx(2 + 8 / (1 + 9.99), abs=1e-4))
    rank = found.ranks[0]
    assert (rank.power_watts, rank.sm_clock_mhz, rank.gpu_busy_share) == (450.0, 1500.0, 0.97)
    assert (rank.memory_bytes, rank.total_bytes) == ((8 << 30) + (512 << 20), 80 << 30)
    assert found.goodput == pytest.approx(95 / 120) and found.lost_ns == {"start-up": 20e9, "data": 5e9}
    assert found.warnings == () and not found.is_over


def test_series_have_one_value_per_span_and_are_bounded(tmp_path):
    found = status(made(tmp_path, num_steps=20_000, slower=lambda step: 2.0 if step >= 10_000 else 1.0, **GPU))

    assert {len(values) for values in found.series.values()} == {NUM_SPANS}
    assert found.series["step_ns"][10] == pytest.approx(100 * MS) and found.series["step_ns"][-10] > 190 * MS
    assert found.series["per_s"][10] == pytest.approx(81_920)
    assert set(found.series) == {"per_s", "step_ns", "loss", "memory_bytes", "power_watts", "sm_clock_mhz"}
    assert [warning.id for warning in found.warnings] == ["drift"]


def test_the_time_left_is_known_only_if_the_number_of_steps_is(tmp_path):
    folder = made(tmp_path)
    unknown, typed = status(folder), status(folder, 5000)
    edit(folder, num_planned_steps=3000)
    noted = status(folder)

    assert (unknown.num_planned, unknown.left_s) == (None, None) and "left" not in verdict_of(unknown)
    assert (typed.num_planned, typed.left_s) == (5000, pytest.approx(400.0))
    assert (noted.num_planned, noted.left_s) == (3000, pytest.approx(200.0))
    assert verdict_of(noted).startswith("Step 1,000 of 3,000, 81.9 k tokens/s. About 3 min 20 s left.")
    assert status(folder, 10).left_s == 0
    edit(folder, status="finished")
    assert status(folder).left_s is None


def test_the_time_left_counts_what_lies_between_steps(tmp_path):
    found = status(made(tmp_path, save_every=100, save_ns=10_000 * MS), 2000)

    assert found.left_s == pytest.approx(200.0) and found.parts[0].name == "checkpoint"


def test_the_throughput_is_that_of_all_ranks_that_go_on(tmp_path):
    folder = made(tmp_path)
    made(folder / "rank1", step_ns=200 * MS)
    made(folder / "rank2", ends="failed")
    edit(folder, environment={"world_size": 5})
    edit(folder / "rank2", exception="ValueError: no data")
    found = status(folder)

    assert found.per_s == 81_920 + 40_960 and found.state == "running" and not found.is_over
    assert [(warning.id, warning.about) for warning in found.warnings] == [
        ("missing_ranks", ""),
        ("ended_rank", "rank 2"),
    ]
    assert "rank 3, 4 of 5" in found.warnings[0].text and "ValueError: no data" in found.warnings[1].text
    assert verdict_of(found).endswith("Rank 2 has failed.")
    table = next(part for part in run_document(found).sections[0].parts if getattr(part, "id", "") == "ranks")
    assert table.columns["rank"] == ["2", "0", "1"]


def test_many_ranks_in_trouble_are_one_warning_that_names_the_one_behind(tmp_path):
    folder = made(tmp_path, ends="failed")
    for rank in range(1, 20):
        made(folder / f"rank{rank}", ends="failed", num_steps=100 - (rank == 7))
    found = status(folder)

    assert [warning.id for warning in found.warnings] == ["ended_rank"] and found.is_over
    assert "furthest behind: rank 7" in found.warnings[0].text and "20 ranks failed" in found.warnings[0].text


def test_old_figures_are_not_taken_for_new_ones(tmp_path):
    folder = made(tmp_path)
    old = time.time() - 30
    for path in folder.iterdir():
        os.utime(path, (old, old))
    found = status(folder)

    assert found.state == "running" and re.search(r"k tokens/s\. The last step ended 3\d s ago\.$", verdict_of(found))
    assert re.search(r"last step 3\d s ago$", line_of(found))


def test_a_launcher_that_does_not_train_is_not_in_the_way(tmp_path):
    folder = write_recording(tmp_path, {"status": "interrupted"}, [])
    made(folder / "process4711", **GPU)
    found = status(folder)

    assert (found.num_steps, found.per_s, found.leading.name) == (1000, 81_920.0, "process4711")
    assert verdict_of(found).startswith("Step 1,000") and "GPU power" in terminal_text(run_document(found))


def test_a_restarted_run_counts_all_its_steps_and_the_time_between(tmp_path):
    found = status(made(tmp_path, restart_at=(600,)), 2000)

    assert (found.num_restarts, found.num_steps) == (1, 1000)
    assert found.elapsed_s == pytest.approx(20 + 60 + 300 + 20 + 40)
    assert found.left_s is not None and found.lost_ns["restarts"] == 300e9


def test_a_jump_of_the_clock_changes_no_time(tmp_path):
    folder = made(tmp_path)
    before = status(folder)
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    for line in lines[len(lines) // 2 :]:
        line["t"] -= 86_400
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    after = status(folder)

    assert (after.elapsed_s, after.per_s, after.parts, after.series) == (
        before.elapsed_s, before.per_s, before.parts, before.series,
    )  # fmt: skip


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_no_number_is_shown_and_valid_json(tmp_path, loss):
    found = status(made(tmp_path, loss=lambda step: loss if step > 900 else 2.0))

    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["loss"] == str(loss)
    assert str(loss) in terminal_text(run_document(found)) and str(loss) in line_of(found)
    assert "loss_anomaly" in [warning.id for warning in found.warnings]
    live_page(run_document(found), 2.0)


def test_before_the_first_step_and_at_the_end(tmp_path):
    folder = write_recording(tmp_path / "new", {"status": "interrupted", "pid": 1}, [])
    assert verdict_of(status(folder)) == "Waiting for the first step." and not status(folder).is_over
    finished = status(made(tmp_path / "done", ends="finished", save_every=300))
    assert [(event.kind, event.seconds, event.place) for event in finished.events] == [
        ("checkpoint", 3.0, "train.py:40 save")
    ] * 3
    finished = status(made(tmp_path / "other", ends="finished"))
    assert verdict_of(finished) == "The run finished after 2 min and 1,000 steps." and finished.is_over
    assert finished.per_s == 81_920.0 and finished.warnings == ()


def test_a_recording_without_a_history(tmp_path):
    facts = cpu_facts(status="interrupted", started_at="2026-01-01T00:00:00Z", pid=None)
    found = status(write_recording(tmp_path, facts, [sample(step, loss=1.5) for step in range(2000)]))

    assert (found.num_steps, found.step_ns, found.per_s) == (2000, 10 * MS, 51_200.0)
    assert {part.name: part.share for part in found.parts} == {
        "backward": 0.5, "forward": 0.3, "data": 0.1, "optimizer": 0.1,
    }  # fmt: skip
    assert terminal_text(run_document(found))


def test_names_are_never_printed_as_they_are(tmp_path):
    folder = made(tmp_path)
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    names = [name for name in NAMES if "\ud800" not in name]
    for name, line in zip(names, lines[1:]):
        line["host_ns"] = {name: line["wall_ns"]}
    lines[0]["host"] = names[5]
    event = {"event": names[0], "step": 3, "start_ns": 6 * 10**9, "t": 0.0, "ns": 10**9, "place": names[5]}
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, event]))
    edit(folder, command={"argv": names}, environment={"world_size": 2})
    found = status(folder)
    document = run_document(found)

    for text in (terminal_text(document, 100, color=False), line_of(found)):
        assert all(character.isprintable() or character == "\n" for character in text)
    page = live_page(document, 2.0)
    assert page.count("<script>") == 1 and "<img" not in page
    assert all(line.isprintable() for line in json.dumps(found.to_json()).splitlines())


def test_a_status_is_one_line_and_prints_as_the_screen(tmp_path):
    found = next(watch(made(tmp_path)))

    assert repr(found).startswith("<RunStatus: Step 1,000, 81.9 k tokens/s.")
    assert "throughput" in str(found) and "<table" in found._repr_html_()


def test_watching_ends_with_the_run(tmp_path):
    folder = made(tmp_path)
    states = []
    for found in watch(folder, num_steps=2000, every_s=0.01):
        states.append(found.state)
        if len(states) == 3:
            edit(folder, status="finished")
    assert states == ["running"] * 3 + ["finished"] and found.num_planned == 2000


def test_only_a_recording_can_be_watched(tmp_path):
    with pytest.raises(UsageError, match="nothing"):
        next(watch(tmp_path / "nothing"))
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    with pytest.raises(UsageError, match="folder of a run"):
        next(watch(tmp_path / "trace.json"))


def test_a_dead_process_is_the_end(tmp_path):
    folder = made(tmp_path)
    first, _, rest = (folder / "history.jsonl").read_text().partition("\n")
    begun = json.loads(first) | {"pid": 2**22 + 1, "host": socket.gethostname()}
    (folder / "history.jsonl").write_text(json.dumps(begun) + "\n" + rest)
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    found = status(folder)

    assert (found.state, found.is_over) == ("died", True)
    assert verdict_of(found) == "The run died after 2 min and 1,000 steps: its process is gone."


def test_blocks_that_are_not_in_order(tmp_path):
    path = made(tmp_path) / "history.jsonl"
    first, *lines = path.read_text().splitlines()
    early = json.dumps(json.loads(lines[20]) | {"start_ns": 5})
    path.write_text("\n".join([first, *lines[:20], early, *lines[:20:-1]]) + "\n")
    assert any(status(tmp_path).series["step_ns"])


def test_without_the_first_line_the_run_begins_with_its_first_step(tmp_path):
    path = made(tmp_path) / "history.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    found = status(tmp_path)
    assert found.elapsed_s == pytest.approx(100.0) and found.goodput == pytest.approx(0.95)
