"""Columns kept beside a trace: the same trace comes back, and nothing wrong with them ever costs an answer."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest

from stepscope.errors import TraceError
from stepscope.trace import cache
from stepscope.trace.cache import FACTS_FILE, SUFFIX, open_trace
from stepscope.trace.reader import read_trace
from stepscope.trace.tables import DEVICE_TABLE, TABLES, Trace


def events(num: int = 40) -> list[dict]:
    rows = [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}}]
    for i in range(num):
        common = {"ph": "X", "ts": 10.5 + i, "dur": 0.25, "pid": 1, "tid": 7}
        rows.append({**common, "cat": "cpu_op", "name": f"aten::op{i % 3}", "args": {"External id": i}})
        rows.append({**common, "cat": "kernel", "name": f"gemm{i % 5}", "args": {"device": 0, "stream": 7}})
    return rows


def write(path: Path, num: int = 40) -> Path:
    fields = {"distributedInfo": {"rank": 3, "world_size": 8}, "deviceProperties": [{"name": "Ä\u202egpu"}]}
    path.write_text(json.dumps({**fields, "traceEvents": events(num)}))
    return path


def assert_same(one: Trace, other: Trace) -> None:
    for field in dataclasses.fields(Trace):
        first, second = getattr(one, field.name), getattr(other, field.name)
        if isinstance(first, pl.DataFrame):
            assert first.schema == second.schema and first.equals(second), field.name
        else:
            assert first == second, field.name


@pytest.fixture(autouse=True)
def everything_is_worth_keeping(monkeypatch, tmp_path):
    monkeypatch.setattr(cache, "WORTH_KEEPING", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user cache"))


@pytest.fixture
def trace(tmp_path) -> Path:
    (tmp_path / "traces").mkdir()
    return write(tmp_path / "traces" / "rank3.json")


@pytest.fixture
def reads(monkeypatch) -> list[Path]:
    """The paths of the traces that were read, and not taken from a cache."""
    seen: list[Path] = []

    def read(path, progress=None):
        seen.append(path)
        return read_trace(path, progress)

    monkeypatch.setattr(cache, "read_trace", read)
    return seen


def kept(trace: Path) -> Path:
    return trace.with_name(trace.name + SUFFIX)


def in_user_cache(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "user cache").glob("stepscope/traces/*"))


def test_what_was_kept_is_the_trace(trace, reads):
    first = open_trace(trace)
    second = open_trace(trace)

    assert reads == [trace]
    assert_same(first, second)
    assert second.facts.rank == 3 and second.facts.devices == ("Ä\u202egpu",)
    assert second.host.schema["name"] == pl.Categorical() and isinstance(second.host.schema["kind"], pl.Enum)
    assert second.syncs.height == 0 and second.syncs.schema == first.syncs.schema


def test_warnings_and_problems_are_kept_too(trace, reads):
    whole = trace.read_text()
    trace.write_text(whole.replace('"dur": 0.25', '"dur": "x"', 1)[:-40])

    first, second = open_trace(trace), open_trace(trace)

    assert len(reads) == 1 and second.warnings and second.num_problems
    assert_same(first, second)


def test_it_is_parquet_that_anything_reads(trace):
    whole = open_trace(trace)

    assert sorted(file.name for file in kept(trace).iterdir()) == sorted(
        [FACTS_FILE, *(f"{table.name}.parquet" for table in TABLES)]
    )
    assert pl.read_parquet(kept(trace) / "device.parquet").equals(whole.device)


def test_a_small_trace_is_not_kept(trace, reads, monkeypatch):
    monkeypatch.setattr(cache, "WORTH_KEEPING", read_trace(trace).num_events + 1)
    open_trace(trace)
    assert not kept(trace).exists()

    monkeypatch.setattr(cache, "WORTH_KEEPING", read_trace(trace).num_events)
    open_trace(trace)
    assert kept(trace).exists()


def test_without_cache_nothing_is_used_or_written(trace, reads):
    open_trace(trace, use_cache=False)
    assert not kept(trace).exists()

    open_trace(trace)
    open_trace(trace, use_cache=False)
    assert len(reads) == 3


def test_progress_is_told(trace):
    told: list[float] = []
    open_trace(trace, progress=told.append)

    assert told


def test_no_trace_is_the_reader_s_error(tmp_path):
    with pytest.raises(TraceError):
        open_trace(tmp_path / "nothing.json")
    (tmp_path / "empty.json").touch()
    with pytest.raises(TraceError):
        open_trace(tmp_path / "empty.json")
    assert not kept(tmp_path / "empty.json").exists()


def change_size(trace: Path) -> None:
    times = trace.stat()
    write(trace, num=41)
    os.utime(trace, ns=(times.st_atime_ns, times.st_mtime_ns))


def change_time(trace: Path) -> None:
    os.utime(trace, ns=(0, 1))


def change_start(trace: Path) -> None:
    times = trace.stat()
    trace.write_text(trace.read_text().replace("aten::op0", "aten::opX"))
    os.utime(trace, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("change", [change_size, change_time, change_start])
def test_a_trace_that_changed_is_read_again_and_kept_again(trace, reads, change):
    open_trace(trace)
    change(trace)

    again, once_more = open_trace(trace), open_trace(trace)

    assert len(reads) == 2
    assert_same(again, read_trace(trace))
    assert_same(again, once_more)


@pytest.mark.parametrize("place", [slice(0, 400), slice(-400, None)], ids=["start", "end"])
def test_both_ends_of_a_long_file_count(trace, reads, place):
    write(trace, num=2_000)
    text = trace.read_text()
    assert len(text) > 1 << 17
    open_trace(trace)
    times = trace.stat()
    trace.write_text(text.replace(text[place], text[place].replace("0.25", "0.75")))
    os.utime(trace, ns=(times.st_atime_ns, times.st_mtime_ns))

    changed = open_trace(trace)

    assert len(reads) == 2 and 750 in changed.host["duration_ns"].to_list() + changed.device["duration_ns"].to_list()


def test_another_reader_does_not_use_what_this_one_read(trace, reads, monkeypatch):
    open_trace(trace)
    monkeypatch.setattr(cache, "_reader_hash", lambda: "another")
    open_trace(trace)
    monkeypatch.setattr(cache, "SCHEMA_VERSION", 2)
    open_trace(trace)
    open_trace(trace)

    assert len(reads) == 3


def test_a_trace_that_changes_while_it_is_read_is_not_kept(trace, monkeypatch):
    def read(path, progress=None):
        whole = read_trace(path, progress)
        write(path, num=50)
        return whole

    monkeypatch.setattr(cache, "read_trace", read)
    open_trace(trace)

    assert not kept(trace).exists()


def set_facts(folder: Path, **changes: object) -> None:
    facts = json.loads((folder / FACTS_FILE).read_text())
    (folder / FACTS_FILE).write_text(json.dumps({**facts, **changes}))


def with_hash(folder: Path, data: bytes) -> None:
    """A file for the device table that somebody has also written into `trace.json`."""
    (folder / "device.parquet").write_bytes(data)
    hashes = json.loads((folder / FACTS_FILE).read_text())["hashes"]
    set_facts(folder, hashes={**hashes, "device": cache._hash_of(data)})


def flip_a_bit(folder: Path) -> None:
    data = bytearray((folder / "host.parquet").read_bytes())
    data[len(data) // 3] ^= 4
    (folder / "host.parquet").write_bytes(data)


def other_values(folder: Path) -> None:
    frame = pl.read_parquet(folder / "host.parquet")
    frame.with_columns(pl.col("duration_ns") + 1).write_parquet(folder / "host.parquet")


def other_columns(folder: Path, frame: pl.DataFrame) -> None:
    frame.write_parquet(folder / "other")
    with_hash(folder, (folder / "other").read_bytes())
    (folder / "other").unlink()


def a_pipe(folder: Path) -> None:
    (folder / FACTS_FILE).unlink()
    os.mkfifo(folder / FACTS_FILE)


DAMAGE = {
    "a flipped bit": flip_a_bit,
    "other values": other_values,
    "cut off": lambda folder: os.truncate(folder / "host.parquet", 100),
    "empty": lambda folder: os.truncate(folder / "counts.parquet", 0),
    "a table missing": lambda folder: (folder / "syncs.parquet").unlink(),
    "no facts": lambda folder: (folder / FACTS_FILE).unlink(),
    "facts cut off": lambda folder: os.truncate(folder / FACTS_FILE, 200),
    "facts of another kind": lambda folder: (folder / FACTS_FILE).write_text('{"displayTimeUnit": "ms"}'),
    "facts that are a list": lambda folder: (folder / FACTS_FILE).write_text("[1, 2]"),
    "facts nested deeply": lambda folder: (folder / FACTS_FILE).write_text("[" * 100_000),
    "facts with a wrong field": lambda folder: set_facts(folder, num_events="many"),
    "facts without hashes": lambda folder: set_facts(folder, hashes={}),
    "no Parquet": lambda folder: with_hash(folder, b"PAR1" + b"\xff" * 100 + b"PAR1"),
    "other columns": lambda folder: other_columns(folder, pl.DataFrame({"event": [1]})),
    "another type": lambda folder: other_columns(folder, DEVICE_TABLE.empty().cast({"event": pl.Int64})),
    "another order": lambda folder: other_columns(folder, DEVICE_TABLE.empty().select(reversed(DEVICE_TABLE.schema))),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_what_is_damaged_or_foreign_is_ignored_and_written_again(trace, reads, damage):
    whole = open_trace(trace)
    damage(kept(trace))

    assert_same(open_trace(trace), whole)
    assert len(reads) == 2
    assert_same(open_trace(trace), whole)
    assert len(reads) == 2


def test_a_pipe_in_the_folder_is_not_waited_for(trace, reads, tmp_path):
    whole = open_trace(trace)
    a_pipe(kept(trace))

    assert_same(open_trace(trace), whole)
    assert stat.S_ISFIFO((kept(trace) / FACTS_FILE).stat().st_mode)
    assert len(in_user_cache(tmp_path)) == 1


def test_a_folder_of_that_name_that_is_somebody_s_own_is_left_alone(trace, reads, tmp_path):
    kept(trace).mkdir()
    (kept(trace) / "notes.txt").write_text("mine")

    open_trace(trace)
    open_trace(trace)

    assert [file.name for file in kept(trace).iterdir()] == ["notes.txt"]
    assert len(reads) == 1 and len(in_user_cache(tmp_path)) == 1


def test_a_link_is_not_followed_when_writing(trace, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    kept(trace).symlink_to(tmp_path / "elsewhere")

    open_trace(trace)

    assert kept(trace).is_symlink() and not list((tmp_path / "elsewhere").iterdir())


def test_where_the_folder_cannot_be_written_the_user_s_cache_is_used(tmp_path, reads):
    # The name is as long as names may be, so the folder's cannot be.
    trace = write(tmp_path / ("x" * 250 + ".json"))

    first, second = open_trace(trace), open_trace(trace)

    assert len(reads) == 1
    assert_same(first, second)
    assert len(in_user_cache(tmp_path)) == 1 and not list(tmp_path.glob("*" + SUFFIX))


@pytest.mark.parametrize("home", ["a file", "relative", "none"])
def test_where_nothing_can_be_written_the_trace_is_read(tmp_path, reads, monkeypatch, home):
    trace = write(tmp_path / ("x" * 250 + ".json"))
    (tmp_path / "file").touch()
    if home == "a file":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "somewhere/else" if home == "relative" else "")
        monkeypatch.setattr(Path, "home", no_home if home == "none" else lambda: tmp_path / "file")
    monkeypatch.chdir(tmp_path)

    assert_same(open_trace(trace), open_trace(trace))
    assert len(reads) == 2
    assert {entry.name for entry in tmp_path.iterdir()} == {trace.name, "file"}


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def fail_at(monkeypatch, table_number: int, error: BaseException) -> None:
    """The write of one table fails; of all tables before it there is something on the disk by then."""
    calls = [0]
    real = pl.DataFrame.write_parquet

    def write_parquet(frame, file, **options):
        calls[0] += 1
        if calls[0] % len(TABLES) == table_number:
            raise error
        return real(frame, file, **options)

    monkeypatch.setattr(pl.DataFrame, "write_parquet", write_parquet)


def test_a_full_disk_is_no_error_and_leaves_nothing(trace, monkeypatch, tmp_path):
    fail_at(monkeypatch, 3, OSError(28, "No space left on device"))

    open_trace(trace)

    assert [entry.name for entry in trace.parent.iterdir()] == [trace.name]


def test_an_interrupt_is_not_swallowed_and_leaves_nothing(trace, monkeypatch):
    fail_at(monkeypatch, 3, KeyboardInterrupt())

    with pytest.raises(KeyboardInterrupt):
        open_trace(trace)

    assert [entry.name for entry in trace.parent.iterdir()] == [trace.name]


OPEN = """
import sys
from pathlib import Path
from stepscope.trace import cache
cache.WORTH_KEEPING = 1
{before}
print(cache.open_trace(Path(sys.argv[1])).device.height)
"""
KILLED = """
import os, signal
cache._put = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_leaves_no_columns_and_its_remains_go_in_time(trace, reads):
    done = subprocess.run([sys.executable, "-c", OPEN.format(before=KILLED), trace], capture_output=True)
    remains = [entry for entry in trace.parent.iterdir() if entry != trace]
    assert done.returncode == -signal.SIGKILL and len(remains) == 1 and remains[0].name.endswith(".tmp")

    open_trace(trace)
    assert remains[0].exists()  # whoever writes it may still be at it

    days_ago = time.time() - 3 * 24 * 3600
    os.utime(remains[0], (days_ago, days_ago))
    change_time(trace)
    open_trace(trace)
    assert {entry.name for entry in trace.parent.iterdir()} == {trace.name, kept(trace).name}


@pytest.mark.parametrize("stale", [False, True], ids=["nothing there", "an old one there"])
def test_several_processes_at_once(trace, reads, stale):
    if stale:
        open_trace(trace)
        change_time(trace)
    command = [sys.executable, "-c", OPEN.format(before=""), trace]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(3)]
    results = [process.communicate() for process in processes]

    assert [output for output, _ in results] == [b"40\n"] * 3, results
    num_reads = len(reads)
    open_trace(trace)
    assert len(reads) == num_reads
    assert {entry.name for entry in trace.parent.iterdir()} == {trace.name, kept(trace).name}


@pytest.mark.parametrize(("mode", "expected"), [(0o600, 0o700), (0o640, 0o750), (0o644, 0o755), (0o444, 0o755)])
def test_who_may_not_read_the_trace_may_not_read_its_columns(trace, mode, expected):
    trace.chmod(mode)
    before = os.umask(0o022)
    try:
        open_trace(trace)
    finally:
        os.umask(before)

    assert stat.S_IMODE(kept(trace).stat().st_mode) == expected


# -- the user's cache -------------------------------------------------------------------------------------------


@pytest.fixture
def only_user_cache(monkeypatch, tmp_path) -> Path:
    """A trace's own folder cannot be written."""
    folder = tmp_path / "user cache" / "stepscope" / "traces"
    places = cache._places
    monkeypatch.setattr(cache, "_places", lambda path: (p for p in places(path) if p.parent == folder))
    return folder


def age(folder: Path, days: float) -> None:
    then = time.time() - days * 24 * 3600
    os.utime(folder, (then, then))


def test_what_nobody_used_for_long_is_removed_from_the_user_s_cache(tmp_path, only_user_cache):
    """GIVEN columns unused for 91 and for 89 days WHEN others are kept THEN the former are gone."""
    old, recent, new = (write(tmp_path / name, num) for name, num in (("a.json", 10), ("b.json", 20), ("c.json", 30)))
    open_trace(old)
    (of_old,) = only_user_cache.iterdir()
    open_trace(recent)
    (of_recent,) = set(only_user_cache.iterdir()) - {of_old}
    age(of_old, 91)
    age(of_recent, 89)
    note = only_user_cache / "mine"
    note.mkdir()
    (note / "note.txt").write_text("not ours")
    age(note, 1000)

    open_trace(new)

    assert not of_old.exists() and of_recent.exists() and len(list(only_user_cache.iterdir())) == 3
    assert (note / "note.txt").exists()


def test_what_is_used_stays(tmp_path, only_user_cache, reads):
    trace = write(tmp_path / "a.json", 10)
    open_trace(trace)
    (folder,) = only_user_cache.iterdir()
    age(folder, 1000)

    open_trace(trace)
    open_trace(write(tmp_path / "b.json", 20))

    assert folder.exists() and len(reads) == 2


def test_columns_beside_a_trace_are_left_alone(tmp_path):
    trace, other = write(tmp_path / "a.json", 10), write(tmp_path / "b.json", 20)
    open_trace(trace)
    age(kept(trace), 1000)

    open_trace(other)

    assert kept(trace).exists() and kept(other).exists()
