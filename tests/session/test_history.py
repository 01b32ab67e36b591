import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from history_maker import Run, a_week, write_history
from stepscope.analysis.run.goodput import goodput
from stepscope.document.card import Card
from stepscope.errors import RecordingError
from stepscope.findings.rank_warnings import rank_warnings
from stepscope.session import history, open_session
from stepscope.session.run import run_of
from stepscope.session.watch import Watch
from stepscope.trace.history_file import Block


def test_every_step_is_in_one_block_and_every_fault_at_its_step(tmp_path: Path) -> None:
    run = Run(num_steps=5_000, save_every=500, evaluate_every=1_000, stall_at=(1_234,), window_at=(3_000,))
    found = history.load(write_history(tmp_path, run))
    assert found.num_unread == 0
    assert [block.step for block in found.blocks[1:]] == [b.step + b.num_steps for b in found.blocks[:-1]]
    assert found.blocks[-1].step + found.blocks[-1].num_steps == 5_000
    assert all(sum(block.host_ns.values()) == block.wall_ns for block in found.blocks)
    assert sum(block.num_times.get("checkpoint", 0) for block in found.blocks) == 10
    kinds = [event.event for event in found.events]
    assert (kinds.count("checkpoint"), kinds.count("evaluation"), kinds[-1]) == (10, 5, "end")
    (stall,) = (event for event in found.events if event.event == "stall")
    assert (stall.step, stall.ns) == (1_234, run.stall_ns)
    (window,) = (event for event in found.events if event.event == "window")
    assert (window.step, window.details["folder"]) == (3_000, "window1")


def test_a_restart_and_a_suspended_machine(tmp_path: Path) -> None:
    found = history.load(write_history(tmp_path, Run(num_steps=2_000, restart_at=(800,), suspend_at=(300,))))
    assert [process.pid for process in found.processes] == [4000, 4001]
    first = [block for block in found.blocks if block.process == 0]
    second = [block for block in found.blocks if block.process == 1]
    assert (sum(b.num_steps for b in first), second[0].step, sum(b.num_steps for b in second)) == (800, 0, 1_200)
    (suspended,) = (event for event in found.events if event.event == "suspended")
    gap = next(b.t for b in first if b.step >= 300) - max(b.t for b in first if b.step < 300)
    assert suspended.ns / 1e9 < gap < suspended.ns / 1e9 + 1


def test_losses_that_are_not_numbers(tmp_path: Path) -> None:
    run = Run(num_steps=200, loss=lambda step: float("nan") if 90 <= step < 100 else 1.0)
    blocks = history.load(write_history(tmp_path, run)).blocks
    bad = [b for b in blocks if b.loss != b.loss or (b.max_loss is not None and b.max_loss != b.max_loss)]
    assert bad and all(b.step < 100 and b.step + b.num_steps > 90 for b in bad)


def test_a_week_is_small_in_memory_and_on_disk(tmp_path: Path) -> None:
    folder = write_history(tmp_path, a_week())
    found = history.load(folder)
    assert sum(block.num_steps for block in found.blocks) == 6_000_000
    assert len(found.blocks) < 15_000
    assert (folder / "history.jsonl").stat().st_size < 20e6


def test_damaged_lines_are_counted(tmp_path: Path) -> None:
    write_history(tmp_path, Run(num_steps=100))
    path = tmp_path / "history.jsonl"
    whole = history.load(tmp_path)
    lines = path.read_text().splitlines()
    block = json.loads(lines[2])
    bad = [{**block, "wall_ns": -1}, {**block, "host_ns": {"data": 1}}, {**block, "t": "now"}, {**block, "gpu": 3}]
    bad += [{**block, "step": 1.5}, {**block, "loss": []}, {"event": 1}, {"event": "stall"}, {"began": 1}, 7, []]
    path.write_text("\n".join([*lines, *map(json.dumps, bad), '{"step": 3, "num_st']))
    found = history.load(tmp_path)
    assert (found.blocks, found.events, found.num_unread) == (whole.blocks, whole.events, len(bad) + 1)


def test_a_folder_without_a_history(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"has no history\.jsonl"):
        history.load(tmp_path)
    with pytest.raises(RecordingError, match=r"has no history\.jsonl"):
        history.load(tmp_path / "absent")


def test_following_reads_each_line_once_and_only_whole_ones(tmp_path: Path) -> None:
    follower = history.follow(tmp_path / "run")
    assert follower.read() == history.Update()
    folder = write_history(tmp_path / "made", Run(num_steps=300, restart_at=(200,)))
    data = (folder / "history.jsonl").read_bytes()
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "history.jsonl"
    blocks: list[Block] = []
    for start in range(0, len(data), 997):  # ends inside lines
        with path.open("ab") as stream:
            stream.write(data[start : start + 997])
        update = follower.read()
        assert update.num_unread == 0
        blocks += update.blocks
    assert blocks == list(history.load(folder).blocks)
    assert {block.process for block in blocks} == {0, 1}
    (folder / "history.jsonl").replace(path)  # a run that begins anew in the same folder
    update = follower.read()
    assert update.starts_over and list(update.blocks) == blocks


def test_a_better_step_source_starts_over(tmp_path: Path) -> None:
    write_history(tmp_path, Run(num_steps=100))
    follower = history.follow(tmp_path)
    assert follower.read().blocks
    block = history.load(tmp_path).blocks[0]
    line = (tmp_path / "history.jsonl").read_text().splitlines()[1]
    with (tmp_path / "history.jsonl").open("a") as stream:
        stream.write(json.dumps({"restart": "steps are now ended by optimizer"}) + "\n" + line + "\n")
    update = follower.read()
    assert update.starts_over and update.blocks == (block,)
    assert history.load(tmp_path).blocks == (block,)


def test_recent_steps_across_files(tmp_path: Path) -> None:
    def lines(first: int, last: int) -> str:
        each = {"window": "free", "start_ns": 5, "wall_ns": 10, "host_ns": {"data": 10}}
        return "".join(json.dumps({"step": i, **each}) + "\n" for i in range(first, last))

    (tmp_path / "samples.jsonl").write_text(lines(0, 50) + '{"step": 49, "loss": 1.0}\n')
    assert [s.step for s in history.recent_steps(tmp_path)] == list(range(50))
    (tmp_path / "recent.old.jsonl").write_text(lines(50, 70))
    (tmp_path / "recent.jsonl").write_text(lines(70, 75))
    assert [s.step for s in history.recent_steps(tmp_path)] == list(range(75))
    assert [s.step for s in history.recent_steps(tmp_path, most=10)] == list(range(65, 75))
    follower = history.follow(tmp_path)
    assert [s.step for s in follower.read().steps] == [*range(50), *range(70, 75)]
    (tmp_path / "recent.jsonl").replace(tmp_path / "recent.old.jsonl")
    (tmp_path / "recent.jsonl").write_text(lines(75, 77))
    assert [s.step for s in follower.read().steps] == [75, 76]


def test_the_folders_of_ranks_in_order(tmp_path: Path) -> None:
    for name in ("", "rank2", "rank10", "process17", "rank1", "window1", "rankx"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "recording.json").write_text("{}")
    (tmp_path / "rank3").mkdir()
    found = [path.name for path in history.rank_folders(tmp_path)]
    assert found == [tmp_path.name, "rank1", "rank2", "rank10", "process17"]


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 3))
def test_any_bytes_are_read_without_an_error(tmp_path_factory: pytest.TempPathFactory, data: bytes, at: int) -> None:
    folder = tmp_path_factory.mktemp("any")
    lines = write_history(folder, Run(num_steps=20)).joinpath("history.jsonl").read_bytes().splitlines()
    lines[at] = lines[at][: len(data)] + data
    (folder / "history.jsonl").write_bytes(b"\n".join(lines))
    history.load(folder)
    history.follow(folder).read()


def test_of_very_many_lines_the_last_are_read_and_it_is_said(tmp_path, monkeypatch):
    folder = write_history(tmp_path, Run(num_steps=2_000))
    whole = history.load(folder)
    num_lines = len((folder / "history.jsonl").read_text().splitlines())
    monkeypatch.setenv("STEPSCOPE_MAX_HISTORY_LINES", "50")
    found = history.load(folder)
    assert found.processes == whole.processes
    assert found.blocks == whole.blocks[-48:]  # and the first line, and the end
    assert found.events == whole.events and found.num_left_out == num_lines - 50
    (problem,) = found.problems
    assert f"the last 50 of {num_lines} lines" in problem
    assert any(problem in str(fact.value) for fact in Card.of(open_session(folder)).measurement)
    (rank,) = Watch(folder).update()
    assert rank.history.problems == (problem,)
    assert [warning.id for warning in rank_warnings([rank])] == ["damaged_history"]


@pytest.mark.long
def test_many_naps_and_restarts_take_no_longer_each(tmp_path):
    """As many of both as blocks: what is counted for each block must not look at all of them."""
    folder = write_history(tmp_path, Run(num_steps=2_000))
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    block = next(line for line in lines if line.get("step") == 0)
    written = lines[:1]
    for i in range(3_000):
        start_ns = block["start_ns"] + 2 * i * block["wall_ns"]
        written.append(block | {"step": i * block["num_steps"], "start_ns": start_ns, "max_step": 0})
        written.append({"event": "suspended", "step": 0, "start_ns": start_ns, "t": block["t"] + i, "ns": 1_000_000})
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))
    run = run_of(None, history.load(folder))
    calls = 0

    def count(*_):
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        goodput(run)
    finally:
        sys.setprofile(None)
    assert calls < 1_000 * 3_000  # 18 million if each looked at all


def test_a_block_with_an_impossible_step_is_not_read(tmp_path):
    folder = write_history(tmp_path, Run(num_steps=500, save_every=100))
    lines = (folder / "history.jsonl").read_text().splitlines()
    block = next(json.loads(line) for line in lines if '"checkpoint":' in line and "num_steps" in line)
    block |= {"step": 10**18, "max_step": 10**18}
    (folder / "history.jsonl").write_text("\n".join([*lines[:-1], json.dumps(block), lines[-1]]) + "\n")
    found = history.load(folder)
    assert found.num_unread == 1
    whole = goodput(run_of(None, found))
    assert min(whole.rows.values()) > 0 and whole.num_steps == 500
