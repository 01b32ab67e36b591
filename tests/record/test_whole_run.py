"""The recorder's half of the whole run: blocks, events, files that stay small, and bad luck with disks and clocks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stepscope
from stepscope.recorder import files, wall, windows
from stepscope.recorder.history import history as recorded
from stepscope.recorder.history import writer as writers
from stepscope.recorder.history.clocks import Clocks
from stepscope.recorder.history.losses import LossSampler
from stepscope.recorder.history.samples import Samples
from stepscope.recorder.history.writer import Writer
from stepscope.recorder.machine.counters import CounterSums
from stepscope.session import history

MS = 1_000_000
SECOND = 1000 * MS


class FakeClocks(Clocks):
    """Clocks that stand still until they are set."""

    def __init__(self) -> None:
        self.ns, self.boot_ns, self.day_ns = 10 * SECOND, 10 * SECOND, 1_790_000_000 * SECOND
        super().__init__()

    def _read(self) -> tuple[int, int, int]:
        return self.ns, self.boot_ns, self.day_ns

    def passes(self, ns: int) -> None:
        self.ns, self.boot_ns, self.day_ns = self.ns + ns, self.boot_ns + ns, self.day_ns + ns


class Run:
    """A history that is driven by hand, without a thread."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clocks, self.num = folder, FakeClocks(), 0
        self.written = recorded.History(folder, Writer(), clocks=self.clocks)

    def step(self, ns: int, window: str = windows.FREE, times: dict[str, int] | None = None, **details: Any) -> None:
        host_ns = {"data": ns // 10, "unattributed": ns - ns // 10, **(times or {})}
        wall_ns = sum(host_ns.values())
        num_times = dict.fromkeys(times or {}, 1)
        places = dict.fromkeys(times or {}, "train.py:31 evaluate")
        batch = 100, 4, 1
        self.written.add(
            self.num, window, self.clocks.ns, wall_ns, host_ns, batch, num_times=num_times, places=places, **details
        )
        self.num += 1
        self.clocks.passes(wall_ns)

    def read(self) -> history.History:
        self.written.close("finished")
        found = history.load(self.folder)
        assert found.num_unread == 0
        return found


def test_blocks_hold_every_step_once_and_get_longer(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for _ in range(30_000):
        run.step(50 * MS)
    blocks = run.read().blocks
    assert [b.step for b in blocks[1:]] == [b.step + b.num_steps for b in blocks[:-1]]
    assert sum(b.num_steps for b in blocks) == 30_000
    assert {b.median_ns for b in blocks} == {b.max_ns for b in blocks} == {50 * MS}
    assert sum(b.num_tokens or 0 for b in blocks) == 3_000_000
    assert all(sum(b.host_ns.values()) == b.wall_ns == 50 * MS * b.num_steps for b in blocks)
    assert (blocks[0].num_steps, blocks[-2].num_steps) == (5, 150)  # 0.25 s, and 1/200 of 1,500 s
    assert blocks[-1].t == pytest.approx(1_790_000_000 + 1_500, abs=0.01)


def test_windows_and_pauses_begin_a_block(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for window, num in (("warmup", 2), ("clean", 3), ("free", 4), ("triggered", 3), ("free", 4)):
        for _ in range(num):
            run.step(10 * MS, window)
    run.clocks.passes(2 * SECOND)  # Stepscope's own work: no step is running
    run.step(10 * MS)
    found = [(b.window, b.num_steps) for b in run.read().blocks]
    assert found == [("warmup", 2), ("clean", 3), ("free", 4), ("triggered", 3), ("free", 4), ("free", 1)]


def test_blocks_end_where_the_times_of_the_cores_were_read(tmp_path: Path) -> None:
    run, on_ns, waited_ns = Run(tmp_path), 0, 0
    for i in range(1, 61):
        run.step(20 * MS)
        on_ns, waited_ns = on_ns + 5 * MS, waited_ns + (2 if i <= 30 else 10) * MS
        if i % 15 == 0:
            run.written.core_times(run.clocks.ns, on_ns, waited_ns)
    blocks = run.read().blocks
    assert [block.num_steps for block in blocks] == [13, 17, 15, 15]  # the first before anything was read
    assert [block.core_share for block in blocks] == [None, 0.25, 0.25, 0.25]
    assert [block.core_wait_share for block in blocks] == [None, 0.1, 0.5, 0.5]


def test_what_is_long_becomes_an_event_with_its_line(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for i in range(200):
        between = {100: {"evaluation": 3 * SECOND}, 120: {"checkpoint": 200 * MS}, 140: {"logging": 5 * MS}}.get(i)
        compiles = {"num_compiles": 2} if i == 160 else {}
        run.step(40 * SECOND if i == 180 else 5 * SECOND if i == 160 else 20 * MS, times=between, **compiles)
    found = run.read()
    events = [(e.event, e.step, round(e.ns / MS), e.place) for e in found.events]
    assert events == [
        ("evaluation", 100, 3000, "train.py:31 evaluate"),
        ("checkpoint", 120, 200, "train.py:31 evaluate"),
        ("compile", 160, 4980, None),
        ("stall", 180, 39_980, None),
        ("end", 199, 0, None),
    ]
    assert found.events[3].details == {"phase": "unattributed"}
    assert sum(b.num_times.get("logging", 0) for b in found.blocks) == 1
    assert sum(b.num_compiles for b in found.blocks) == 2


def test_events_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MOST_EVENTS", 5)
    run = Run(tmp_path)
    for _ in range(40):
        run.step(20 * MS, times={"logging": 2 * SECOND})
    run.step(20 * MS, times={"checkpoint": 2 * SECOND})
    events = run.read().events
    assert [e.event for e in events] == ["logging"] * 5 + ["checkpoint", "end"]
    assert events[-1].details["num_left_out"] == {"logging": 35}


def test_clocks_that_jump_and_machines_that_sleep(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step(100 * MS)
    run.written.tick()
    run.clocks.boot_ns += 3600 * SECOND  # asleep: the clock of steps stands still
    run.clocks.day_ns += 3600 * SECOND
    run.written.tick()
    run.step(100 * MS)
    run.clocks.day_ns -= 7200 * SECOND  # somebody sets the time of day
    run.written.tick()
    run.clocks.day_ns += SECOND // 2  # this is how a clock is kept right
    run.written.tick()
    found = run.read()
    events = [(e.event, e.step, e.ns, e.details.get("seconds")) for e in found.events[:-1]]
    assert events == [("suspended", 0, 3600 * SECOND, 3600.0), ("clock_jump", 1, 7200 * SECOND, -7200.0)]
    assert sum(b.num_steps for b in found.blocks) == 2


def test_a_job_that_is_started_again_continues_its_history(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step(300 * MS)
    run.step(300 * MS)
    run.written.tick()
    with (tmp_path / "history.jsonl").open("a") as stream:
        stream.write('{"step":2,"num_st')  # killed while it wrote
    files.write_json(tmp_path / "recording.json", {"schema_version": 1, "status": "interrupted"})
    (tmp_path / "samples.jsonl").write_text("")
    with pytest.raises(ValueError, match="already holds a recording"):
        files.prepare_folder(tmp_path, force=False)
    files.prepare_folder(tmp_path, force=False, resumes=True)
    assert [path.name for path in tmp_path.iterdir()] == ["history.jsonl"]
    again = Run(tmp_path)
    again.step(300 * MS)
    again.written.close("finished")
    found = history.load(tmp_path)
    assert (len(found.processes), found.num_unread) == (2, 1)
    assert [(block.process, block.step) for block in found.blocks] == [(0, 0), (0, 1), (1, 0)]
    files.write_json(tmp_path / "recording.json", {"schema_version": 1, "status": "finished"})
    files.prepare_folder(tmp_path, force=True)
    assert not [*tmp_path.iterdir()]


def test_losses_belong_to_their_steps(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for loss in (3.0, float("nan"), 2.0, 9.5, 1.5):
        run.written.losses.append((run.clocks.ns + MS, loss))
        run.step(100 * MS)
    blocks = run.read().blocks  # of three steps, and two
    assert [(b.loss, b.loss_step) for b in blocks] == [(2.0, 2), (1.5, 4)]
    assert blocks[0].max_loss != blocks[0].max_loss and blocks[0].max_loss_step == 1
    assert (blocks[1].max_loss, blocks[1].max_loss_step) == (9.5, 3)


def test_the_sampler_takes_scalars_when_they_are_due() -> None:
    found: Any = []
    sampler = LossSampler(found)
    sampler.look(0)
    assert sampler.is_due
    for loss in (torch.ones(3), None, "text", torch.empty((), device="meta")):
        sampler.take(loss)
    assert not found
    sampler.take(torch.tensor(2.5, requires_grad=True))
    sampler.look(time.perf_counter_ns())
    assert [value for _, value in found] == [2.5] and not sampler.is_due
    sampler.take(torch.tensor(1j))  # not a number that can be compared: no error, and no further samples
    sampler.look(time.perf_counter_ns() + 10 * SECOND)
    assert len(found) == 1 and not sampler.is_due


def test_counters_of_a_block() -> None:
    sums = CounterSums(first_energy=100.0)
    for clock, power, throttle in ((1980, 600.0, []), (1200, 300.0, ["sw_power_cap"])):
        sums.add(
            {"t_ns": 1, "sm_clock_mhz": clock, "power_watts": power, "gpu_busy_share": 1.0, "throttle": throttle}
        )
    sums.add({"t_ns": 2, "energy_joules": 145.0, "driver_memory_bytes": 7, "throttle": []})
    assert sums.values() == {
        **{"power_watts": 450.0, "sm_clock_mhz": 1590.0, "busy_share": 1.0, "min_sm_clock_mhz": 1200},
        **{"memory_bytes": 7, "energy_joules": 45.0, "throttle": ["sw_power_cap"]},
    }
    assert CounterSums().values() == {}


# --- files ----------------------------------------------------------------------------------------


def _simulate(folder: Path, num_steps: int) -> Samples:
    """Drive the writer as free running does, at 10 steps per second, with a save every 10,000 steps."""
    clocks, writer = FakeClocks(), Writer()
    gpu = {"power_watts": 612.123, "sm_clock_mhz": 1912.345, "min_sm_clock_mhz": 1755, "busy_share": 0.987}
    gpu |= {"memory_bytes": 71_234_567_890, "energy_joules": 36_001.5, "throttle": ["sw_power_cap"]}
    memory = dict.fromkeys(("allocated_bytes", "reserved_bytes", "peak_bytes", "total_bytes"), 81_234_567_890)
    read = {"num_collections": 12, **memory, "resident_bytes": 12_345_678_901, "gpu": gpu}
    written = recorded.History(folder, writer, read=lambda: dict(read), clocks=clocks)
    samples = Samples(folder, writer, written)
    samples.waits = True
    host_ns = {"data": 1_234_567, "before_forward": 345_678, "unattributed": 98_419_755}
    for step in range(num_steps):
        if step % 10_000 == 9_999:
            written.event("checkpoint", step, clocks.ns, 3 * SECOND, place="train.py:40 save")
        if step % 10 == 0:
            written.losses.append((clocks.ns, 2.345678))
        samples.add_usual(step, 1, iter([(clocks.ns, 100 * MS, host_ns, (8192, 8, 1))]), None)
        clocks.passes(100 * MS)
        if step % 1000 == 0:
            samples.digest()
            written.tick()
    samples.close()
    written.close("finished")
    return samples


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# counters.jsonl: 18,000 samples of 230 bytes each time their interval doubles, which it does 8.4 times in a week.
COUNTER_BYTES = round(18_000 * 230 * 8.4)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_week_stays_below_100_megabytes(tmp_path: Path) -> None:
    _simulate(tmp_path, 6_000_000)
    found = history.load(tmp_path)
    assert sum(block.num_steps for block in found.blocks) == 6_000_000 and found.num_unread == 0
    assert _num_bytes(tmp_path) + COUNTER_BYTES < 100e6
    assert len(history.recent_steps(tmp_path)) == 20_000


def test_exact_steps_go_on_in_files_that_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_SAMPLE_LINES", 3_000)
    monkeypatch.setattr(files, "MAX_RECENT_LINES", 2_000)
    samples = _simulate(tmp_path, 10_500)
    lines = {p.name: len(p.read_text().splitlines()) for p in tmp_path.glob("*.jsonl") if p.name != "history.jsonl"}
    assert max(lines.values()) <= 4_000 and len(lines) == 3
    assert samples.num_dropped == 10_500 - lines["samples.jsonl"]
    recent = [step.step for step in history.recent_steps(tmp_path, most=2_000)]
    assert recent == list(range(8_500, 10_500))


# --- the thread -----------------------------------------------------------------------------------


def test_a_disk_that_does_not_answer_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "MOST_WAITING", 100)
    os.mkfifo(tmp_path / "lines")  # a pipe that nobody empties blocks its writer, like a server that is gone
    reader = os.open(tmp_path / "lines", os.O_RDONLY | os.O_NONBLOCK)
    writer = Writer()
    file = files.LineFile(tmp_path / "lines")
    writer.start()
    for i in range(300):
        writer.append(file, [f"{i:06} " + "x" * 2000])
    writer.wake()
    assert file.num_dropped > 100  # and all calls have returned
    found = b""
    while file.num_lines + file.num_dropped < 300 or writer._num_waiting:
        try:
            found += os.read(reader, 1 << 16)
        except BlockingIOError:
            time.sleep(0.01)
    writer.close()
    while part := os.read(reader, 1 << 16) if file.num_lines * 2008 > len(found) else b"":
        found += part
    os.close(reader)
    assert [int(line[:6]) for line in found.splitlines()] == list(range(300 - file.num_dropped))
    assert writer.error is None


class SlowFile:
    """A file on a disk that answers when it is told to."""

    def __init__(self) -> None:
        self.answers, self.lines, self.num_dropped = threading.Event(), [], 0

    def append(self, line: str, num_lines: int) -> None:
        self.answers.wait()
        time.sleep(0.02)
        self.lines.append(line)


def test_a_slow_moment_of_the_disk_does_not_end_the_waiting_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "SETTLE_SECONDS", 0.01)
    writer, file = Writer(), SlowFile()
    writer.start()
    writer.append(file, ["first"])
    writer.settle()
    assert file.lines == []

    monkeypatch.setattr(writers, "SETTLE_SECONDS", 60)
    file.answers.set()
    writer.append(file, ["second"])
    writer.settle()
    assert file.lines == ["first", "second"]
    writer.close()


def test_all_waiting_for_a_slow_disk_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "SETTLE_SECONDS", 0.01)
    monkeypatch.setattr(writers, "MOST_SETTLE_SECONDS", 0.03)
    writer, file = Writer(), SlowFile()
    writer.start()
    writer.append(file, ["first"])
    for _ in range(20):
        writer.settle()
    assert 1 <= len(writer._settling) <= 3  # the others did not wait
    file.answers.set()
    writer.close()


def test_what_the_thread_just_digests_is_waited_for() -> None:
    writer, file, digests = Writer(), SlowFile(), threading.Event()
    file.answers.set()

    def digest() -> None:
        if not digests.is_set():
            digests.set()
            time.sleep(0.02)
            writer.append(file, ["step"])

    writer.ticks.append(digest)
    writer.start()
    digests.wait()
    writer.settle()
    assert file.lines == ["step"]
    writer.close()


def test_a_recording_that_cannot_end_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(writers, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(wall, "_stderr", wall.identity(2))
    writer, goes_on = Writer(), threading.Event()
    writer.start()
    writer.put(lambda: goes_on.wait() and None)
    writer.close()
    goes_on.set()
    assert writer.error is not None and "did not answer" in writer.error
    assert capfd.readouterr().err.count("the recording ended") == 1


def test_a_full_disk_is_said_once_and_its_lines_are_counted(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wall, "_stderr", wall.identity(2))
    monkeypatch.setattr(wall, "_told", set())
    file = files.LineFile(Path("/dev/full"))
    for _ in range(3):
        file.append("line\nline", 2)
    assert (file.num_lines, file.num_dropped) == (0, 6)
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "No space left on device" in err and "the script goes on" in err


def test_lines_that_were_dropped_are_an_event(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step(300 * MS)
    run.written.tick()
    assert run.written._file is not None
    run.written._file.num_dropped = 7  # as on a disk that was full for a while
    run.step(300 * MS)
    (dropped,) = (event for event in run.read().events if event.event == "dropped")
    assert dropped.details == {"num_lines": 7}


class Job:
    """A training loop in this process."""

    def __init__(self, num_micro_batches: int = 1) -> None:
        self.num_micro_batches = num_micro_batches
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.losses: list[float] = []

    def step(self) -> None:
        for number in range(self.num_micro_batches):
            loss = self.model(torch.ones(3, 4)).square().mean() + number
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())


SHORT = windows.Windows(warmup=2, clean=2, trace=0, memory=0)


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_a_run_in_this_process(num_micro_batches: int, tmp_path: Path) -> None:
    """The loss of a step is that of its last backward."""
    job, num_threads = Job(num_micro_batches), len(threading.enumerate())
    with stepscope.record(tmp_path / "run", windows=SHORT):
        until = time.monotonic() + 1.5
        while time.monotonic() < until or len(job.losses) < 100:
            job.step()
            assert len(threading.enumerate()) == num_threads
    found = history.load(tmp_path / "run")
    assert [process.pid for process in found.processes] == [os.getpid()]
    assert sum(block.num_steps for block in found.blocks) == len(job.losses)
    sampled = [b for b in found.blocks if b.loss is not None and b.loss_step is not None]
    assert sampled
    for block in sampled:
        assert block.loss == pytest.approx(job.losses[block.loss_step or 0], rel=1e-4)
    assert all(block.resident_bytes for block in found.blocks)
    assert found.events[-1].event == "end"
    assert not (tmp_path / "run" / "control").exists()


def test_the_thread_that_trains_opens_and_writes_no_file_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that does not answer for seconds holds up whoever asks it: never a step of free running."""
    trains, asked, is_free = threading.get_ident(), [], False
    run = str(tmp_path / "run")

    def audit(event: str, values: tuple[Any, ...]) -> None:
        if is_free and threading.get_ident() == trains and event in ("open", "os.listdir", "os.rename", "os.link"):
            asked.extend(str(value) for value in values if run in str(value))

    append = files.OwnFile.append

    def slow(file: files.OwnFile, data: bytes) -> None:
        asked.extend(["append"] if is_free and threading.get_ident() == trains else [])
        time.sleep(0.5)
        append(file, data)

    sys.addaudithook(audit)  # it cannot be removed, and then does nothing
    job = Job()
    with stepscope.record(tmp_path / "run", windows=SHORT):
        for _ in range(20):
            job.step()
        monkeypatch.setattr(files.OwnFile, "append", slow)
        is_free = True
        until = time.monotonic() + 1.5
        while time.monotonic() < until or len(job.losses) < 200:
            job.step()
        is_free = False
        monkeypatch.undo()
    assert asked == []
    assert sum(block.num_steps for block in history.load(tmp_path / "run").blocks) == len(job.losses)


def test_a_folder_that_is_deleted_ends_the_recording_not_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wall, "_stderr", None)
    job = Job()
    with stepscope.record(tmp_path / "run", windows=SHORT):
        for _ in range(50):
            job.step()
        shutil.rmtree(tmp_path / "run")
        until = time.monotonic() + 20
        while "was deleted" not in (err := capfd.readouterr().err) and time.monotonic() < until:
            job.step()
        num = len(job.losses)
        for _ in range(400):
            job.step()
    assert "the script goes on" in err and len(job.losses) == num + 400
    assert (err + capfd.readouterr().err).count("stepscope: ") == 1  # the end of the recording says nothing more
    assert not (tmp_path / "run").exists()


def test_a_killed_process_leaves_a_history_that_can_be_read(tmp_path: Path) -> None:
    pid = os.fork()
    if not pid:
        try:
            job = Job()
            stepscope.record(tmp_path / "run", windows=SHORT).__enter__()
            until = time.monotonic() + 30
            path = tmp_path / "run" / "history.jsonl"
            while time.monotonic() < until and (not path.exists() or path.read_text().count("median_ns") < 4):
                for _ in range(50):
                    job.step()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    found = history.load(tmp_path / "run")
    assert len(found.blocks) >= 3 and found.num_unread <= 1
    assert all(event.event != "end" for event in found.events)
    assert json.loads((tmp_path / "run" / "recording.json").read_text())["status"] == "interrupted"
