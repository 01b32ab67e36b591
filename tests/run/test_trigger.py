"""`stepscope trigger`: windows from jobs that are running, also with bad luck."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stepscope
from forks import Forks
from stepscope.api import trigger_request
from stepscope.errors import RecordingError
from stepscope.recorder.history import control, requests
from stepscope.recorder.windows import Windows
from stepscope.session import history
from stepscope.trace.recording import read_recording
from verbs import run_verb

SHORT = Windows(warmup=2, clean=2, trace=0, memory=0)
FEWEST = {"trace": 1, "clean": 2}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "POLL_NS", 20_000_000)
    monkeypatch.setattr(trigger_request, "MARGIN_SECONDS", 0.3)


class Job:
    """A recorded training loop in this thread, while others ask for windows."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.num_steps, self.slow_s = folder, 0, 0.0
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self) -> None:
        time.sleep(self.slow_s)
        self.model(torch.ones(3, 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1

    def steps_while(self, goes_on: Callable[[], bool]) -> None:
        until = time.monotonic() + 60
        while goes_on():
            self.step()
            assert time.monotonic() < until, "no window within a minute"

    def during(self, *asked: Callable[[], Any]) -> list[Any]:
        """Train until each function has returned, and return what they did."""
        found: list[Any] = [None] * len(asked)

        def ask(i: int) -> None:
            try:
                found[i] = asked[i]()
            except Exception as error:
                found[i] = error

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(asked))]
        for thread in threads:
            thread.start()
        self.steps_while(lambda: any(thread.is_alive() for thread in threads))
        return found


@contextmanager
def job(folder: Path, **options: Any) -> Iterator[Job]:
    found = Job(folder)
    with stepscope.record(folder, windows=SHORT, **options):
        found.steps_while(lambda: not (folder / "history.jsonl").exists())
        yield found


def windows_of(folder: Path) -> list[tuple[int, int]]:
    """The first step and the number of steps of each window of a run."""
    events = history.load(folder).events
    return [(event.step, event.details["num_steps"]) for event in events if event.event == "window"]


@pytest.mark.long
def test_a_window_comes_sooner_if_steps_become_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trigger_request, "MARGIN_SECONDS", 1.5)
    run = tmp_path / "run"
    said: list[str] = []
    with job(run) as running:
        running.steps_while(lambda: running.num_steps < 300)

        def tell(line: str) -> None:
            said.append(line)
            running.slow_s = 0.3 if "begins" in line else running.slow_s

        (window,) = running.during(lambda: stepscope.trigger(run, **FEWEST, tell=tell))
    assert window == run / "window1"
    begins = [int(line.split()[-1]) for line in said if "begins at step" in line]
    assert "steps have become slower" in said[-1] and begins[-1] < begins[-2]
    assert windows_of(run)[0][0] == begins[-1]


@pytest.mark.long
def test_a_condition_takes_its_window_sooner_if_steps_become_slower(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with job(run, when="every 300 steps", limit=1) as running:
        request = run / "control" / "request1.json"
        running.steps_while(lambda: not request.exists() or "step" not in (requests.read_object(request) or {}))
        proposed = (requests.read_object(request) or {})["step"]
        running.slow_s = 0.1
        running.steps_while(lambda: not (run / "window1" / "recording.json").exists())
    assert windows_of(run)[0][0] < proposed


def test_the_pace_is_that_of_the_last_steps(tmp_path: Path) -> None:
    from stepscope.recorder.history.history import History
    from stepscope.recorder.history.writer import Writer

    written = History(tmp_path, Writer())
    ends = [i * 1_000_000 for i in range(250)] + [3_250_000_000, 6_250_000_000]
    for step, (start_ns, end_ns) in enumerate(pairwise(ends)):
        written.add(step, "free", start_ns, end_ns - start_ns, {"unattributed": end_ns - start_ns}, (0, 0, 1))
    assert written.pace_ns(control.RECENT_NS) == 3_000_000_000
    assert History(tmp_path, Writer()).pace_ns(control.RECENT_NS) is None


def test_a_window_is_a_recording_of_its_own(tmp_path: Path) -> None:
    run = tmp_path / "run"
    said: list[str] = []
    with job(run) as running:
        (window,) = running.during(lambda: stepscope.trigger(run, **FEWEST, memory=True, tell=said.append))
    assert window == run / "window1"
    found = read_recording(window)
    # Tests before this one, in the same process, may have left graphs alive.
    notes = [note for note in found.facts.get("notes") or [] if "graphs are still alive" not in note["text"]]
    assert found.status == "finished" and notes == []
    assert [s.window for s in found.samples] == ["warmup", "clean", "clean", "trace_warmup", "trace", "memory"]
    first = found.samples[0].step
    assert windows_of(run) == [(first, 6)]
    assert said[-1].endswith(f"window 1 begins at step {first}")  # which may have taken more than one attempt
    assert found.facts["trace"]["num_steps"] == 1
    assert (window / "memory.json.gz").exists() and found.facts["flops"]["by_op"]
    assert {*found.samples[1].host_ns} >= {"forward", "backward", "optimizer"}
    card = stepscope.read(window)
    assert card.summary.num_clean == 2
    assert next(stepscope.watch(window)).num_steps == 6
    # The run has the same steps, marked, and its own figures as before.
    whole = read_recording(run)
    marked = [s.step for s in whole.samples if s.window == "triggered"]
    assert marked == [s.step for s in found.samples]
    assert len(whole.window("clean")) == 2 and whole.facts.get("trace") is None
    assert [s.step for s in whole.samples] == list(range(running.num_steps))


def test_the_window_of_the_command_line_has_stacks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with job(run) as running:
        words = ["trigger", str(run), "--trace", "1", "--clean", "1", "--stacks"]
        (done,) = running.during(lambda: run_verb(*words))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(run / "window1")
    (trace,) = (run / "window1" / "trace").iterdir()
    import gzip

    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(event.get("cat") == "python_function" for event in events)


@pytest.mark.long
def test_two_triggers_at_once_take_turns(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with job(run) as running:
        found = running.during(*[lambda: stepscope.trigger(run, **FEWEST)] * 2)
    assert all(isinstance(each, Path) for each in found) and found[0] != found[1]
    (first, num), (second, _) = sorted(windows_of(run))
    assert first + num <= second


def test_a_trigger_while_evaluating_waits_for_the_next_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with job(run) as running:
        found: list[Path | None] = []
        asks = threading.Thread(target=lambda: found.append(stepscope.trigger(run, **FEWEST)))
        running.model.eval()
        with torch.no_grad():
            asks.start()
            until = time.monotonic() + 30
            while not (answer := requests.read_object(requests.request_file(run, 1, "rank0"))):
                running.model(torch.ones(3, 4))
                assert time.monotonic() < until
            time.sleep(0.5)
        running.model.train()
        assert answer["state"] == "seen" and not found  # seen, and not answered inside the evaluation
        running.steps_while(asks.is_alive)
    assert found == [run / "window1"]


def test_conditions_take_windows_by_themselves(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with job(run, when="every 60 steps", limit=2) as running:
        running.steps_while(lambda: not (run / "window2" / "recording.json").exists())
        for _ in range(400):
            running.step()
    assert len(windows_of(run)) == 2 and not (run / "window3").exists()
    facts = read_recording(run / "window1").facts
    assert facts["triggered"]["reason"] == "every 60 steps"


def test_a_condition_can_be_given_to_a_job_that_runs(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with job(run) as running:
        assert stepscope.trigger(run, **FEWEST, when="every 0.1s", limit=1) is None
        running.steps_while(lambda: not (run / "window1").exists())
        for _ in range(100):
            running.step()
    assert len(windows_of(run)) == 1


# --- bad luck -------------------------------------------------------------------------------------


def test_folders_that_are_no_running_job(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"is not a run: it has no recording\.json"):
        stepscope.trigger(tmp_path)
    with job(tmp_path / "run") as running:
        running.step()
    with pytest.raises(RecordingError, match=r"has ended \(finished\)"):
        stepscope.trigger(tmp_path / "run")
    (tmp_path / "new").mkdir()
    facts = {"schema_version": 1, "status": "interrupted", "pid": os.getpid()}
    (tmp_path / "new" / "recording.json").write_text(json.dumps(facts))
    with pytest.raises(RecordingError, match="has not finished a step yet"):
        stepscope.trigger(tmp_path / "new")
    facts |= {"pid": 2**22 + 1, "host": platform.node()}  # a number that no process has
    (tmp_path / "new" / "recording.json").write_text(json.dumps(facts))
    with pytest.raises(RecordingError, match=r"has ended \(process 4194305 was killed\)"):
        stepscope.trigger(tmp_path / "new")
    done = run_verb("trigger", str(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


@pytest.mark.long
def test_an_interrupted_command_names_the_window_that_the_job_still_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, said, states = tmp_path / "run", list[str](), trigger_request._Ranks.states
    is_interrupted = threading.Event()

    def interrupt(ranks: Any) -> set[str]:
        if requests.RUNNING in (found := states(ranks)) and not is_interrupted.is_set():
            is_interrupted.set()
            raise KeyboardInterrupt
        return found

    def ask() -> str:
        running.slow_s = 0.05
        try:
            return str(stepscope.trigger(run, clean=20, trace=0, tell=said.append))
        except KeyboardInterrupt:
            return "interrupted"

    monkeypatch.setattr(trigger_request._Ranks, "states", interrupt)
    with job(run) as running:
        assert running.during(ask) == ["interrupted"]
        assert str(run / "window1") in said[-1]
        running.steps_while(lambda: not windows_of(run))
    assert windows_of(run)[0][1] == 21


def test_a_rank_that_died_is_left_out_and_named(tmp_path: Path) -> None:
    run, said = tmp_path / "run", list[str]()
    with job(run) as running:
        (run / "rank1").mkdir()
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        facts = {"schema_version": 1, "status": "interrupted", "pid": gone.pid}
        (run / "rank1" / "recording.json").write_text(json.dumps(facts))
        began = (run / "history.jsonl").read_text().splitlines()[0]
        (run / "rank1" / "history.jsonl").write_text(began + "\n")
        (found,) = running.during(lambda: stepscope.trigger(run, **FEWEST, tell=said.append))
    assert found == run / "window1"
    assert said[0] == f"rank1 has ended (process {gone.pid} was killed): the window is taken from the others"


def test_a_run_that_ends_before_its_window_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trigger_request, "MARGIN_SECONDS", 1e6)  # also if the pace is not known yet
    run, found = tmp_path / "run", list[Exception]()

    def ask() -> None:
        try:
            stepscope.trigger(run, **FEWEST)
        except RecordingError as error:
            found.append(error)

    asks = threading.Thread(target=ask)
    with job(run) as running:
        asks.start()
        answer = requests.request_file(run, 1, "rank0")
        running.steps_while(lambda: (requests.read_object(answer) or {}).get("state") != "armed")
    asks.join(30)
    assert "the run ended (finished) before step" in str(found[0])
    assert not (run / "window1").exists()


def test_requests_that_make_no_sense_are_ignored(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with job(run) as running:
        (run / "control").mkdir()
        bad = ["", "[]", '{"step": -3}', '{"step": 1e30}', '{"trace": "3"}', '{"trace": 100000000, "step": 90}']
        for number, text in enumerate(bad, 1):
            (run / "control" / f"request{number}.json").write_text(text)
        (run / "control" / "request90.json").mkdir()
        os.mkfifo(run / "control" / "request91.json")
        (run / "control" / "when1.json").write_text('{"when": "whenever", "limit": 1}')
        (found,) = running.during(lambda: stepscope.trigger(run, **FEWEST))
    assert found == run / "window92"
    assert len(history.load(run).events) == 2  # the window, and the end


def test_a_window_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with job(run) as running:
        for number in range(1, 10):
            (run / f"window{number}").write_text("")  # where its folder would be
        (error,) = running.during(lambda: stepscope.trigger(run, **FEWEST))
        for _ in range(50):
            running.step()
    assert "no window from rank0: cannot write" in str(error)
    assert [s.step for s in read_recording(run).samples] == list(range(running.num_steps))


RANKS = """
import os, sys, time
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn

def train(rank, store, stop):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    going = torch.ones(1)
    while going.item() == 1:
        time.sleep(0.005)
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        going = torch.tensor([0.0 if rank == 0 and os.path.exists(stop) else 1.0 if rank == 0 else 0.0])
        dist.all_reduce(going)
    # Gloo's thread needs the interpreter to release the last tensor, and the end of the model waits for the thread.
    time.sleep(0.3)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(train, args=sys.argv[1:3], nprocs=2, start_method="fork")
"""


@pytest.mark.long
def test_two_ranks_begin_at_the_same_step(forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trigger_request, "MARGIN_SECONDS", 3.0)
    run = tmp_path / "run"
    (tmp_path / "train.py").write_text(RANKS)
    options = ["--warmup", "2", "--clean", "2", "--trace", "0", "--no-memory", "--quiet"]
    words = [*options, "-o", str(run), "train.py", str(tmp_path / "store"), str(tmp_path / "stop")]
    with ThreadPoolExecutor(1) as pool:
        ranks = pool.submit(forks.run, ["-m", "stepscope", "run", *words], tmp_path, {})
        try:
            while not all((run / f"rank{i}" / "history.jsonl").exists() for i in range(2)):
                assert not ranks.done()
                time.sleep(0.1)
            windows = [stepscope.trigger(run, **FEWEST), stepscope.trigger(run, **FEWEST)]
        finally:
            (tmp_path / "stop").touch()
        exit_code, _, error = ranks.result()
        assert exit_code == 0, error
    for window in windows:
        assert window is not None
        both = [read_recording(window), read_recording(window / "rank1")]
        assert [rank.status for rank in both] == ["finished"] * 2
        steps = [[sample.step for sample in rank.samples] for rank in both]
        assert steps[0] == steps[1] and len(steps[0]) == 5
        assert (window / "rank1" / "trace" / "rank1.json.gz").exists()
