"""Ranks of a run that goes on: what is new, and which of them is silent, dead or done, on clocks that disagree."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from handmade import MS, cpu_facts, sample, write_recording
from history_maker import Run, write_history
from stepscope.errors import RecordingError
from stepscope.session import watch
from stepscope.session.blocks import blocks_of, merged, thinned
from stepscope.session.history import load
from stepscope.session.watch import Watch
from stepscope.trace.recording import step_of_line

HERE = socket.gethostname()


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self, start: float = 100.0) -> None:
        self.now = start

    def __call__(self) -> float:
        return self.now


def watched(folder: Path, skew_s: float = 0.0) -> tuple[Watch, Clock]:
    """A watch whose time of day is `skew_s` ahead of that of the files, which were written just now."""
    clock = Clock()
    newest = max(path.stat().st_mtime for path in folder.rglob("*.json*"))
    return Watch(folder, clock, lambda: newest + skew_s + clock.now - 100.0), clock


def grow(folder: Path, num: int = 1, half: bool = False) -> str:
    """Append blocks like the last one, `half` of the last line only, and return the rest of it."""
    path = folder / "history.jsonl"
    last = json.loads([line for line in path.read_text().splitlines() if "num_steps" in line][-1])
    lines = []
    for _ in range(num):
        last |= {"step": last["step"] + last["num_steps"], "start_ns": last["start_ns"] + last["wall_ns"]}
        lines.append(json.dumps(last) + "\n")
    text = "".join(lines)
    end = len(text) - 40 if half else len(text)
    with path.open("a") as stream:
        stream.write(text[:end])
    return text[end:]


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def set_process(folder: Path, pid: int, host: str = HERE) -> None:
    path = folder / "recording.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": pid, "host": host}))


def test_what_is_written_is_seen_and_half_a_line_is_not(tmp_path):
    folder = write_history(tmp_path, Run(ends=None))
    run, clock = watched(folder)
    before = run.update()[0]
    rest = grow(folder, 2, half=True)
    clock.now += 2
    during = run.update()[0]
    with (folder / "history.jsonl").open("a") as stream:
        stream.write(rest)
    after = run.update()[0]

    added = [len(rank.history.blocks) - len(before.history.blocks) for rank in (before, during, after)]
    assert added == [0, 1, 2] and after.history.num_unread == 0
    assert after.num_steps > before.num_steps and after.state == "running"


def test_a_rank_is_silent_by_our_clock_whatever_the_others_say(tmp_path):
    folder = write_history(tmp_path, Run(ends=None))
    for skew_s in (-7200.0, 0.0, 7200.0):  # the files are from the future, from now, from the past
        run, clock = watched(folder, skew_s)
        states = [run.update()[0].state]
        clock.now += 5
        grow(folder)
        states.append(run.update()[0].state)
        clock.now += watch.SILENT_S - 1
        states.append(run.update()[0].state)
        clock.now += 2
        last = run.update()[0]
        assert states == ["silent" if skew_s > 0 else "running", "running", "running"]
        assert last.state == "silent" and last.silent_s == watch.SILENT_S + 1


def test_a_file_from_the_future_does_not_stay_new(tmp_path):
    run, clock = watched(write_history(tmp_path, Run(ends=None)), -7200.0)
    run.update()
    clock.now += watch.SILENT_S + 1

    assert run.update()[0].state == "silent"


def test_long_steps_are_given_time(tmp_path):
    run, clock = watched(write_history(tmp_path, Run(num_steps=20, step_ns=90_000 * MS, ends=None)))
    run.update()
    clock.now += 200

    assert run.update()[0].state == "running"


def test_a_process_that_is_gone_has_died_and_one_elsewhere_is_only_silent(tmp_path):
    folder = write_history(tmp_path, Run(ends=None))
    pid = dead_pid()
    found = {}
    for host in (HERE, "another-host"):
        set_process(folder, pid, host)
        run, clock = watched(folder)
        states = [run.update()[0].state]
        clock.now += watch.DEAD_S + 1
        found[host] = [*states, run.update()[0].state], run.update()[0].is_alive
    assert found == {HERE: (["running", "died"], False), "another-host": (["running", "running"], None)}
    set_process(folder, os.getpid())
    assert Watch(folder).update()[0].is_alive is True
    os.utime(folder / "recording.json", (1e9, 1e9))  # before this process began, which got the number of another
    assert Watch(folder).update()[0].is_alive is False


def test_ended_ranks_say_how(tmp_path):
    folder = write_history(tmp_path, Run(ends="finished"))
    write_history(folder / "rank1", Run(ends="failed"))
    write_history(folder / "rank10", Run(ends=None))
    write_history(folder / "rank2", Run(ends=None))
    write_history(folder / "window1", Run())

    ranks = watched(folder)[0].update()

    assert [(rank.name, rank.state) for rank in ranks] == [
        ("rank 0", "finished"), ("rank 1", "failed"), ("rank 2", "running"), ("rank 10", "running"),
    ]  # fmt: skip


def test_a_rank_that_comes_later_is_found(tmp_path):
    folder = write_history(tmp_path, Run(ends=None))
    run, _ = watched(folder)
    assert len(run.update()) == 1
    write_history(folder / "rank1", Run(ends=None))

    assert len(run.update()) == 2


def test_a_deleted_folder_is_said_after_a_while(tmp_path):
    folder = write_history(tmp_path / "run", Run(ends=None))
    run, clock = watched(folder)
    before = run.update()[0]
    shutil.rmtree(folder)
    assert run.update()[0].num_steps == before.num_steps  # a file server may come back
    clock.now += watch.GONE_S

    with pytest.raises(RecordingError, match="deleted"):
        run.update()


def test_an_old_recording_has_blocks_of_its_steps_and_grows(tmp_path):
    lines = [sample(step) for step in range(3000)]
    folder = write_recording(tmp_path, cpu_facts(status="interrupted", started_at="2026-01-01T00:00:00Z"), lines)
    run, clock = watched(folder)
    before = run.update()[0]
    with (folder / "samples.jsonl").open("a") as stream:
        stream.write("".join(json.dumps(sample(step)) + "\n" for step in range(3000, 3010)))
    clock.now += 1
    after = run.update()[0]

    assert [block.num_steps for block in before.history.blocks] == [1000] * 3
    assert [block.num_steps for block in after.history.blocks] == [1000, 1000, 1000, 10]
    assert (before.num_steps, after.num_steps, after.silent_s) == (3000, 3010, 0)
    assert before.history.blocks[-1].t == pytest.approx(1_767_225_600 + 30)


def test_a_replaced_history_starts_over(tmp_path):
    folder = write_history(tmp_path, Run(ends=None))
    run, _ = watched(folder)
    run.update()
    shutil.move(folder / "history.jsonl", tmp_path / "old")
    write_history(folder, Run(num_steps=100, ends=None))
    rank = run.update()[0]

    assert rank.num_steps == 100 and len(rank.history.processes) == 1


def test_two_watchers_see_the_same(tmp_path):
    folder = write_history(tmp_path, Run(ends=None))
    one, other = watched(folder)[0], watched(folder)[0]
    one.update()
    grow(folder)

    assert one.update()[0].history == other.update()[0].history


def test_thinned_blocks_have_the_same_sums_in_bounded_number():
    steps = [replace(step, loss=float(step.step)) for step in map(step_of_line, map(sample, range(4000)))]
    blocks = [block for at in range(0, 4000, 4) for block in blocks_of(steps[at : at + 4], at / 100)]
    few = thinned(blocks, 200)

    assert len(blocks) == 1000 and len(few) < 200 and few[-50:] == blocks[-50:]
    for name in ("num_steps", "wall_ns", "num_tokens", "num_compiles"):
        assert sum(getattr(block, name) for block in few) == sum(getattr(block, name) for block in blocks)
    assert sum(block.host_ns["forward"] for block in few) == 4000 * 3 * MS
    assert [block.step for block in few[1:]] == [block.step + block.num_steps for block in few[:-1]]
    assert few[0].loss == few[0].num_steps - 1


def test_merged_blocks_keep_what_a_gpu_did(tmp_path):
    made = Run(
        num_steps=2,
        step_ns=1000 * MS,
        noise=0,
        clock_mhz=lambda step: 2000 - 1000 * step,
        total_bytes=1 << 30,
        collections=lambda step: 3,
    )
    first, second = load(write_history(tmp_path, made)).blocks
    both = merged([first, second])
    gpu = both.gpu

    assert gpu.power_watts == pytest.approx(450.0) and gpu.min_sm_clock_mhz == 985
    assert gpu.energy_joules == first.gpu.energy_joules + second.gpu.energy_joules
    assert (both.num_collections, both.loss_step, both.peak_bytes) == (6, 1, second.peak_bytes)


def test_a_long_run_of_several_ranks_is_kept_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "MOST_BLOCKS", 800)
    folder = write_history(tmp_path, Run(num_steps=50_000, step_ns=1000 * MS))
    for rank in (1, 2):
        (folder / f"rank{rank}").mkdir()
        for name in ("history.jsonl", "recording.json"):
            os.link(folder / name, folder / f"rank{rank}" / name)

    ranks = watched(folder)[0].update()

    assert len(load(folder).blocks) > 1000
    assert [len(rank.history.blocks) <= 400 for rank in ranks] == [True] * 3
    assert [sum(block.num_steps for block in rank.history.blocks) for rank in ranks] == [50_000] * 3


def test_a_launcher_is_no_rank_once_its_ranks_have_folders(tmp_path: Path) -> None:
    write_recording(tmp_path, {**cpu_facts(), "status": "interrupted"}, [])
    watch_, _ = watched(tmp_path)
    assert [(rank.name, rank.state) for rank in watch_.update()] == [("rank 0", "starting")]
    for number in (0, 1):
        write_history(tmp_path / f"rank{number}", Run(num_steps=100, host=HERE))
    assert [(rank.name, rank.num_steps) for rank in watch_.update()] == [("rank 0", 100), ("rank 1", 100)]


def test_a_glance_reads_a_part_of_the_blocks_and_the_next_look_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "MOST_GLANCE", 400)
    folder = write_history(tmp_path, Run(num_steps=20_000, save_every=5_000, restart_at=(8_000,), host=HERE))
    whole = load(folder)
    watch_, _ = watched(folder)
    (glanced,) = watch_.glance()
    blocks, last = glanced.history.blocks, whole.blocks[-1]
    assert len(whole.blocks) > 1_000 > 450 > len(blocks) and blocks[0] == whole.blocks[0]
    assert blocks[-200:] == whole.blocks[-200:] and glanced.num_steps == last.step + last.num_steps
    starts = [block.t for block in blocks[:-200]]
    assert max(later - earlier for earlier, later in pairwise(starts)) < (last.t - starts[0]) / 4  # a restart is long
    assert (glanced.history.processes, glanced.history.events) == (whole.processes, whole.events)
    (rank,) = watch_.update()
    assert rank.history == whole
