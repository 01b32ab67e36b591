"""Files made to fill a machine's memory: reading them takes a bounded part of it."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from written_traces import slice_of

MB = 1 << 20
MOST_MEMORY = 400 * MB

CHILD = """
import json, sys
from pathlib import Path
from stepscope.errors import TraceError
from stepscope.trace.reader import read_trace

try:
    trace = read_trace(Path(sys.argv[1]), workers=1)
    said = {"num_events": trace.num_events, "warnings": trace.warnings, "problems": [p.what for p in trace.problems]}
except TraceError as error:
    said = {"error": str(error)}
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"peak_bytes": int(peak.split()[1]) * 1024, **said}))
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="peak memory is read from /proc")


def read_in_child(path: Path) -> dict:
    done = subprocess.run([sys.executable, "-c", CHILD, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def write_bomb(path: Path, head: bytes, block: bytes, num_mb: int, tail: bytes) -> Path:
    """A small compressed file that holds `block` over and over."""
    block *= max(1, 4 * MB // len(block))
    path.write_bytes(gzip.compress(head) + gzip.compress(block) * (num_mb * MB // len(block)) + gzip.compress(tail))
    assert path.stat().st_size < 2 * MB
    return path


OP = json.dumps(slice_of("aten::mm", args={"External id": 2, "Input Dims": [[8, 16], [16, 4]], "Ev Idx": 7})).encode()
LAST = b'{"ph":"X","ts":2}]'
READ = {"num_events": 2, "warnings": [], "problems": []}
TOO_LARGE = {"num_events": 1, "problems": ["larger than 4 MiB"]}
BOMBS = {
    "white space": (b'[{"ph":"X","ts":1},', b" ", 220, LAST, READ),
    "commas": (b'[{"ph":"X","ts":1},', b",", 220, LAST, READ),
    "events": (b"[", OP + b",\n", 80, LAST, {"warnings": [], "problems": []}),
    "empty objects": (b"[", b"{},", 12, LAST, {"warnings": [], "problems": ["with no phase"]}),
    "one name": (b'[{"ph":"X","ts":1,"name":"', b"x", 100, b'"},' + LAST, TOO_LARGE),
    "one number": (b'[{"ph":"X","ts":', b"1", 60, b"}," + LAST, TOO_LARGE),
    "one list": (b'[{"ph":"X","args":{"x":[', b"0,", 40, b"0]}}," + LAST, TOO_LARGE),
    "numbers": (b"[", b"1,", 40, LAST, {"num_events": 1, "problems": ["not an event"]}),
    "one trailer": (b'{"traceEvents":[{"ph":"X","ts":1}],"a":[', b"[],", 40, b"0]}", {"num_events": 1}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_with_much_in_it(tmp_path, name):
    *content, expected = BOMBS[name]
    said = read_in_child(write_bomb(tmp_path / "bomb.json.gz", *content))

    assert said["peak_bytes"] < MOST_MEMORY
    assert expected.items() <= said.items()


@pytest.mark.long
def test_beyond_what_any_trace_expands_to_reading_stops(tmp_path):
    path = write_bomb(tmp_path / "bomb.json.gz", b'[{"ph":"X","ts":1},', b" ", 1500, LAST)
    said = read_in_child(path)

    assert said["peak_bytes"] < MOST_MEMORY
    assert said["num_events"] == 1
    assert said["warnings"][0].startswith(
        "the file expands more than 250 times, more than any trace: reading stopped"
    )


@pytest.mark.long
def test_a_header_beyond_all_reason_is_one_line(tmp_path):
    path = write_bomb(tmp_path / "bomb.json.gz", b'{"a":[', b"[],", 40, b'0],"traceEvents":[' + LAST + b"}")
    said = read_in_child(path)

    assert said["peak_bytes"] < MOST_MEMORY
    assert said["error"].endswith("has more than 8 MiB in a field outside its events (byte 5)")


@pytest.mark.long
@pytest.mark.parametrize("what", ["tid", "cat", "name"])
def test_as_many_threads_categories_or_names_as_events(tmp_path, what):
    """GIVEN 100,000 different ones THEN memory and time grow with their number and no faster."""
    path = tmp_path / "trace.json"
    path.write_text("[" + ",".join(f'{{"ph":"X","ts":{i},"{what}":"no. {i}"}}' for i in range(100_000)) + "]")
    said = read_in_child(path)

    assert said["num_events"] == 100_000
    assert said["peak_bytes"] < MOST_MEMORY
