"""Columns kept of a trace: the same trace comes back, nobody else's are believed, and no fault costs an answer."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import polars as pl
import pytest

from parametrized import parametrized
from stepscope.errors import TraceError
from stepscope.trace import cache
from stepscope.trace.cache import FACTS_FILE, open_trace
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
    monkeypatch.setattr(cache, "_SETTLED_NS", 0)
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "user cache"))


@pytest.fixture
def trace(tmp_path) -> Path:
    (tmp_path / "traces").mkdir()
    return write(tmp_path / "traces" / "rank3.json")


@pytest.fixture
def reads(monkeypatch) -> list[Path]:
    """The paths of the traces that were read, and not taken from a cache."""
    seen: list[Path] = []

    def read(path, progress=None, process=None):
        seen.append(path)
        return read_trace(path, progress, process=process)

    monkeypatch.setattr(cache, "read_trace", read)
    return seen


def kept(trace: Path) -> Path:
    return trace.parents[1] / "user cache" / "traces" / cache._name_of(trace)


def in_user_cache(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "user cache").glob("traces/*"))


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
    assert not in_user_cache(tmp_path)


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
    def read(path, progress=None, process=None):
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


@parametrized("damage", DAMAGE.values(), quick=7, ids=DAMAGE)
def test_what_is_damaged_or_foreign_is_ignored_and_written_again(trace, reads, damage):
    whole = open_trace(trace)
    damage(kept(trace))

    assert_same(open_trace(trace), whole)
    assert len(reads) == 2
    assert_same(open_trace(trace), whole)
    assert len(reads) == 2


def test_a_pipe_in_the_folder_is_not_waited_for(trace, reads):
    whole = open_trace(trace)
    a_pipe(kept(trace))

    assert_same(open_trace(trace), whole)
    assert len(reads) == 2


def test_what_lies_beside_a_trace_or_comes_with_it_is_never_believed(trace, reads, tmp_path):
    """GIVEN altered columns, packed with the trace WHEN it is unpacked THEN the trace itself is read."""
    honest = open_trace(trace)
    altered = honest.device.with_columns(pl.col("duration_ns") * 10)
    other_columns(kept(trace), altered)
    beside = trace.with_name(trace.name + ".stepscope")
    shutil.copytree(kept(trace), beside)
    with tarfile.open(tmp_path / "all.tar", "w") as packed:
        packed.add(trace.parent, "traces")
    shutil.rmtree(trace.parent)
    shutil.rmtree(tmp_path / "user cache")
    with tarfile.open(tmp_path / "all.tar") as packed:
        packed.extractall(tmp_path, filter="fully_trusted")

    assert beside.is_dir() and not honest.device.equals(altered)
    assert_same(open_trace(trace), honest)
    assert_same(open_trace(trace), honest)
    assert len(reads) == 2 and {entry.name for entry in trace.parent.iterdir()} == {trace.name, beside.name}


def test_a_trace_that_tar_or_touch_gave_the_old_time_is_read_again(trace, reads, tmp_path):
    """The same size, name, times and ends: only the time of change, which no program can set, tells."""
    write(trace, num=2_000)
    open_trace(trace)
    before, text = trace.stat(), trace.read_text()
    middle = len(text) // 2
    trace.write_text(text[:middle] + text[middle:].replace("0.25", "0.75", 1))
    os.utime(trace, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (trace.stat().st_size, trace.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)

    changed = open_trace(trace)

    assert len(reads) == 2 and 750 in changed.host["duration_ns"].to_list() + changed.device["duration_ns"].to_list()


def test_a_trace_that_was_just_written_is_not_kept(trace, reads, monkeypatch):
    """It could change again within the tick of the file system's clock, with the same times."""
    monkeypatch.setattr(cache, "_SETTLED_NS", 3_600 * 10**9)
    open_trace(trace)
    open_trace(trace)

    assert len(reads) == 2 and not kept(trace).exists()


def other_owner(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)


def a_link(folder: Path, monkeypatch) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


FOREIGN = {
    "another user's": other_owner,
    "writable by the group": lambda folder, _: folder.chmod(0o770),
    "writable by all": lambda folder, _: folder.chmod(0o707),
    "a link": a_link,
}


@pytest.mark.parametrize("change", FOREIGN.values(), ids=FOREIGN)
def test_a_folder_that_others_may_have_written_is_not_used(trace, reads, monkeypatch, change):
    whole = open_trace(trace)
    change(kept(trace).parent, monkeypatch)
    names = sorted(entry.name for entry in kept(trace).parents[1].rglob("*"))

    assert_same(open_trace(trace), whole)
    assert len(reads) == 2
    assert sorted(entry.name for entry in kept(trace).parents[1].rglob("*")) == names


def test_a_file_that_others_may_have_written_is_not_used(trace, reads):
    whole = open_trace(trace)
    (kept(trace) / "device.parquet").chmod(0o666)

    assert_same(open_trace(trace), whole)
    assert len(reads) == 2


def test_only_its_user_can_read_the_cache(trace, reads):
    before = os.umask(0)
    try:
        open_trace(trace)
    finally:
        os.umask(before)

    folders = [kept(trace), *kept(trace).parents[:2]]
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [0o700] * 3
    assert {stat.S_IMODE(file.stat().st_mode) for file in kept(trace).iterdir()} == {0o600}
    open_trace(trace)
    assert len(reads) == 1


def test_a_link_of_the_user_s_own_to_a_larger_disk_is_fine(trace, reads, tmp_path):
    (tmp_path / "large disk").mkdir(mode=0o700)
    (tmp_path / "user cache").symlink_to(tmp_path / "large disk")

    open_trace(trace)
    open_trace(trace)

    assert len(reads) == 1


@pytest.mark.parametrize("home", ["a file", "relative", "none"])
def test_where_nothing_can_be_written_the_trace_is_read(trace, tmp_path, reads, monkeypatch, home):
    (tmp_path / "file").touch()
    monkeypatch.delenv("STEPSCOPE_CACHE")
    if home == "a file":
        monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "file"))
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "somewhere/else" if home == "relative" else "")
        monkeypatch.setattr(Path, "home", no_home if home == "none" else lambda: tmp_path / "file")
    monkeypatch.chdir(tmp_path)

    assert_same(open_trace(trace), open_trace(trace))
    assert len(reads) == 2
    assert {entry.name for entry in tmp_path.iterdir()} == {"traces", "file"}


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

    assert not in_user_cache(tmp_path)


def test_an_interrupt_is_not_swallowed_and_leaves_nothing(trace, monkeypatch, tmp_path):
    fail_at(monkeypatch, 3, KeyboardInterrupt())

    with pytest.raises(KeyboardInterrupt):
        open_trace(trace)

    assert not in_user_cache(tmp_path)


OPEN = """
import sys
from pathlib import Path
from stepscope.trace import cache
cache.WORTH_KEEPING, cache._SETTLED_NS = 1, 0
{before}
print(cache.open_trace(Path(sys.argv[1])).device.height)
"""
KILLED = """
import os, signal
cache._put = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_leaves_no_columns_and_its_remains_go_in_time(trace, reads):
    done = subprocess.run([sys.executable, "-c", OPEN.format(before=KILLED), trace], capture_output=True)
    remains = list(kept(trace).parent.iterdir())
    assert done.returncode == -signal.SIGKILL and len(remains) == 1 and remains[0].name.endswith(".tmp")

    open_trace(trace)
    assert remains[0].exists()  # whoever writes it may still be at it

    days_ago = time.time() - 3 * 24 * 3600
    os.utime(remains[0], (days_ago, days_ago))
    change_time(trace)
    open_trace(trace)
    assert list(kept(trace).parent.iterdir()) == [kept(trace)]


@parametrized("stale", [False, True], quick=1, ids=["nothing there", "an old one there"])
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
    assert list(kept(trace).parent.iterdir()) == [kept(trace)]


# -- what is removed --------------------------------------------------------------------------------------------


def age(folder: Path, days: float) -> None:
    then = time.time() - days * 24 * 3600
    os.utime(folder, (then, then))


@pytest.fixture
def traces(tmp_path) -> list[Path]:
    (tmp_path / "traces").mkdir()
    return [write(tmp_path / "traces" / f"{name}.json", num) for name, num in (("a", 10), ("b", 20), ("c", 30))]


def test_what_nobody_used_for_long_is_removed(traces):
    """GIVEN columns unused for 91 and for 89 days WHEN others are kept THEN the former are gone."""
    old, recent, new = traces
    open_trace(old)
    open_trace(recent)
    age(kept(old), 91)
    age(kept(recent), 89)
    note = kept(old).with_name("mine")
    note.mkdir()
    (note / "note.txt").write_text("not ours")
    age(note, 1000)

    open_trace(new)

    assert set(kept(old).parent.iterdir()) == {kept(recent), kept(new), note} and (note / "note.txt").exists()


def test_what_is_used_stays(traces, reads):
    open_trace(traces[0])
    age(kept(traces[0]), 1000)

    open_trace(traces[0])
    open_trace(traces[1])

    assert kept(traces[0]).exists() and len(reads) == 2


def test_what_all_take_is_limited_and_the_longest_unused_goes_first(traces, monkeypatch):
    for days, trace in enumerate(traces[:2], 1):
        open_trace(trace)
        age(kept(trace), days)
    num_bytes = sum(file.stat().st_size for trace in traces[:2] for file in kept(trace).iterdir())
    monkeypatch.setenv("STEPSCOPE_CACHE_GIB", str((num_bytes + 5_000) / (1 << 30)))

    open_trace(traces[2])  # of about the same size: the three do not fit

    assert [kept(trace).exists() for trace in traces] == [True, False, True]

    monkeypatch.setenv("STEPSCOPE_CACHE_GIB", "0")
    change_time(traces[2])
    open_trace(traces[2])
    assert not any(kept(trace).exists() for trace in traces)
