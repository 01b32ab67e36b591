"""Several processes decoding one trace: the same result, and no harm when one dies or none can be started."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from written_traces import assert_same_tables, slice_of, text_of

from parametrized import parametrized
from stepscope.errors import TraceError
from stepscope.trace import pool, reader, source
from stepscope.trace.reader import read_trace


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    """A trace of some forty slices."""
    monkeypatch.setattr(source, "SLICE", 1 << 14)
    monkeypatch.setattr(reader, "WORTH_WORKERS", 0)
    monkeypatch.setattr(reader, "is_built", lambda: False)  # with the compiled scanner threads do it
    path = tmp_path / "trace.json"
    path.write_text(text_of([slice_of(f"op{i % 50}", ts=i, args={"External id": i}) for i in range(6_000)]))
    return path


@pytest.fixture
def started(monkeypatch) -> list[subprocess.Popen]:
    """Every process that was started."""
    processes = []
    original = subprocess.Popen

    def start(*args, **kwargs):
        processes.append(original(*args, **kwargs))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    return processes


def test_workers_are_used_and_gone_afterwards(path, started):
    alone, together = read_trace(path, workers=1), read_trace(path, workers=3)

    assert_same_tables(alone, together)
    assert len(started) == 3
    assert all(process.returncode is not None for process in started)


@parametrized("compress", [bytes, gzip.compress], quick=1, ids=["plain", "gz"])
def test_broken_and_misleading_events_are_the_same_to_one_and_to_many(path, monkeypatch, compress):
    """GIVEN arguments that hold what looks like events, and events that are broken THEN workers change nothing."""
    nested = json.dumps([{"ph": "X", "ts": 1, "name": "no event"}] * 30)
    events = [f'{{"ph": "X", "ts": {i}, "name": "op{i}", "args": {{"x": {nested}}}}}' for i in range(300)]
    events[50:250:20] = ['{"ph": "X", "ts": oops}'] * 10
    path.write_bytes(compress(f"[{', '.join(events)}]".encode()))
    monkeypatch.setattr(source, "SLICE", 5_000)
    monkeypatch.setattr(source, "_LARGEST_SLICES", 1)

    alone, together = read_trace(path, workers=1), read_trace(path, workers=2)

    assert [(p.what, p.num) for p in alone.problems] == [("not valid JSON", 10)]
    assert alone.num_events == 290
    assert_same_tables(alone, together)
    assert (alone.problems, alone.warnings) == (together.problems, together.warnings)


def test_a_small_file_is_not_worth_a_process(path, started, monkeypatch):
    monkeypatch.setattr(reader, "WORTH_WORKERS", 1 << 30)
    read_trace(path, workers=4)

    assert started == []


@pytest.mark.parametrize("victims", [1, 3])
@parametrized("when", [0.0, 0.3], quick=1)
def test_a_killed_worker_is_one_line(path, started, capfd, victims, when):
    """GIVEN workers that the system kills, as when memory is short THEN one line says so, and nothing hangs."""

    def kill(share: float) -> None:
        if share >= when:
            for process in started[:victims]:
                process.send_signal(signal.SIGKILL)

    with pytest.raises(TraceError, match=r"^A process that was decoding the trace at byte .* died \(exit code -9\)"):
        read_trace(path, kill, workers=3)
    assert all(process.returncode is not None for process in started)
    assert capfd.readouterr() == ("", "")


def test_a_worker_that_cannot_start_is_one_line(path, capfd, monkeypatch):
    monkeypatch.setattr(pool, "_START", "print('noise'); import no_such_module  # {path} {file} {file_id}")
    with pytest.raises(TraceError, match="process that was decoding the trace"):
        read_trace(path, workers=2)
    assert capfd.readouterr() == ("", "")


def test_what_a_worker_prints_comes_nowhere(path, capfd, monkeypatch):
    """GIVEN something that prints while a worker runs, as a library may THEN its answers are still understood."""
    noise = (
        "from stepscope.trace.columns import Builder; finish = Builder.finish; "
        "Builder.finish = lambda self: (print('noise', flush=True), finish(self))[1]; "
    )
    monkeypatch.setattr(
        pool, "_START", pool._START.replace("from stepscope.trace.decode", f"{noise}from stepscope.trace.decode")
    )

    assert read_trace(path, workers=2).num_events == 6_000
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("num_left", [0, 1])
def test_without_processes_to_spare_it_is_read_alone(path, monkeypatch, num_left):
    original, started = subprocess.Popen, []

    def start(*args, **kwargs):
        if len(started) == num_left:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(original(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)

    assert read_trace(path, workers=2).num_events == 6_000
    assert all(process.returncode is not None for process in started)


def test_no_interpreter_no_workers(monkeypatch):
    assert 1 <= pool.num_workers() <= pool.MOST_WORKERS
    monkeypatch.setattr(sys, "executable", "")
    assert pool.num_workers() == 1


def test_a_trace_replaced_while_it_is_read_is_told(path, monkeypatch):
    original = pool.identity
    monkeypatch.setattr(pool, "identity", lambda file: (original(file)[0], 0))

    with pytest.raises(TraceError, match=r"died \(exit code 1\)"):
        read_trace(path, workers=2)


def test_the_users_interruption_passes_through_and_leaves_no_process(path, started):
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_trace(path, interrupt, workers=2)
    assert all(process.returncode is not None for process in started)


SCRIPT = """
import os, sys
from pathlib import Path
{before}
from stepscope.trace import reader, source
source.SLICE, reader.WORTH_WORKERS = 1 << 14, 0
print(reader.read_trace(Path({path!r}), workers=2).num_events, file=open({out!r}, "w"))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "before",
    [
        "",
        "os.close(0)",
        "os.close(0); os.close(1); os.close(2)",
        "sys.path.insert(0, Path('odd \\'entry\\' é'))",
        "sys.path[:] = [entry for entry in sys.path if entry]; os.chdir('/')",
        "os.environ['PYTHONWARNINGS'] = 'always'; os.environ['PYTHONDEVMODE'] = '1'",
    ],
    ids=["as it is", "no stdin", "no streams", "odd path", "elsewhere", "development mode"],
)
def test_in_odd_surroundings(path, tmp_path, before):
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(before=before, path=str(path), out=str(out))],
        capture_output=True,
        text=True,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert out.read_text() == "6000\n"


def test_an_odd_file_name(path):
    odd = Path(os.fsdecode(os.fsencode(path.parent) + b"/it's {odd} \xff \xe2\x82\xac.json"))
    path.rename(odd)

    assert read_trace(odd, workers=2).num_events == 6_000
