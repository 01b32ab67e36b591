"""`stepscope analyze --memory` as people call it: every source, text, JSON and picture; a mistake is one line."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from analyze_verb import analyze, as_json, assert_mistake, training

from handmade import cpu_recording
from memories import S, a_step, snapshot, transformer, write_memory

DOCS = Path(__file__).parents[2] / "docs" / "memory.md"


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One of each: a recording, two lengths, a snapshot, a trace."""
    folder = tmp_path_factory.mktemp("memory")
    cpu_recording(folder / "run")
    write_memory(folder / "run" / "memory.json.gz", a_step())
    cpu_recording(folder / "run" / "rank1")
    write_memory(folder / "run" / "rank1" / "memory.json.gz", a_step(device="cpu"))
    write_memory(folder / "short.json.gz", transformer(S))
    write_memory(folder / "long.json.gz", transformer(2 * S))
    (folder / "s.pickle").write_bytes(pickle.dumps(snapshot()))
    training().memory(20, 512).memory(30, 1024).write(folder / "trace.json.gz")
    return folder


def keys_of(value: object) -> set[str]:
    if isinstance(value, list):
        return {key for item in value for key in keys_of(item)}
    if not isinstance(value, dict):
        return set()
    return set(value) | {key for item in value.values() for key in keys_of(item)}


def test_every_key_of_the_json_is_documented(folder):
    found = [
        as_json("--memory", folder / "run"),
        as_json("--memory", folder / "s.pickle"),
        as_json("--memory", folder / "trace.json.gz", "--no-cache"),
        as_json("--memory", folder / "short.json.gz", folder / "long.json.gz"),
    ]

    page = DOCS.read_text()
    keys = set().union(*map(keys_of, found)) - {"cpu"}  # the name of another device
    assert len(keys) > 80
    assert sorted(key for key in keys if f"`{key}`" not in page) == []
    assert [each["accounts"][0]["source"] for each in found] == ["recording", "snapshot", "trace", "recording"]
    assert found[1]["accounts"][0]["snapshot_end"]["ooms"] and found[3]["growth"]["rows"]


def test_a_recording_in_text_and_json(folder):
    done = analyze("--memory", folder / "run")
    found = as_json("--memory", folder / "run")["accounts"][0]

    assert (done.returncode, done.stderr) == (0, "")
    assert "4.00 KiB is allocated at the peak" in " ".join(done.stdout.split())
    assert found["peak_bytes"] == sum(part["bytes"] for part in found["live_at_peak"]["by_owner"]) == 4100
    assert [stage["after_bytes"] for stage in found["stages"]] == [1000, 1100, 2300, 1500, 1500]


def test_a_rank_of_a_recording(folder):
    found = as_json("--memory", folder / "run", "--rank", "1")["accounts"][0]

    assert (found["device"], found["peak_tracked_bytes"]) == ("cpu", 50_000)


def test_a_trace_says_that_it_knows_no_owners(folder):
    done = analyze("--memory", folder / "trace.json.gz", "--no-cache")

    assert done.returncode == 0 and "no owners" in done.stdout and "by owner" not in done.stdout


def test_top_is_the_number_of_rows(folder):
    found = as_json("--memory", folder / "short.json.gz", "--top", "2")["accounts"][0]

    assert len(found["largest"]) == len(found["live_at_peak"]["by_op"]) == 2
    assert sum(part["bytes"] for part in found["live_at_peak"]["by_owner"]) == found["peak_bytes"]


def test_the_picture_is_written_once(folder, tmp_path):
    picture = tmp_path / "memory.svg"

    assert analyze("--memory", folder / "run", "-o", picture).returncode == 0
    assert picture.read_text().startswith("<svg ")
    assert_mistake(analyze("--memory", folder / "run", "-o", picture), "memory.svg")
    assert_mistake(analyze("--memory", folder / "run", "-o", tmp_path / "m.png"), "m.svg")
    assert_mistake(analyze("--memory", folder / "run", "-o", tmp_path / "no" / "m.svg"), "m.svg")


def test_a_malicious_snapshot_is_one_line_and_does_nothing(tmp_path):
    canary = tmp_path / "canary"
    for protocol in (0, 2, 4):
        path = tmp_path / f"{protocol}.pickle"
        path.write_bytes(pickle.dumps(snapshot() | {"segments": [Canary(canary)]}, protocol))

        assert_mistake(analyze("--memory", path), "not a memory snapshot")
    assert not canary.exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("missing",), "does not exist"),
        (("short.json.gz", "long.json.gz", "run"), "one path, or two recordings"),
        (("short.json.gz", "s.pickle"), "two recordings"),
        (("short.json.gz", "short.json.gz"), "differ in nothing"),
        (("run", "--step", "3"), "--step does not go with --memory"),
        (("run", "--rank", "3"), "no rank 3: the ranks are 0, 1"),
        (("bare",), "--no-memory"),
        (("empty.json",), "empty.json"),
        (("quiet.json",), "profile_memory"),
    ],
)
def test_a_mistake_is_one_line(words, complaint, folder):
    (folder / "empty.json").write_text("")
    training().write(folder / "quiet.json")
    cpu_recording(folder / "bare")

    assert_mistake(
        analyze("--memory", *(word if word.startswith("-") or word == "3" else folder / word for word in words)),
        complaint,
    )


def test_the_picture_needs_memory(folder):
    assert_mistake(analyze(folder / "trace.json.gz", "-o", folder / "m.svg"), "--memory")


def test_recordings_and_snapshots_need_no_library(folder):
    blocked = "import sys; sys.modules.update(polars=None, msgspec=None, torch=None, numpy=None)\n"
    blocked += "from stepscope.cli.main import main\nsys.exit(main(['analyze', '--memory', sys.argv[1]]))"
    for name in ("run", "s.pickle", "trace.json.gz"):
        done = subprocess.run([sys.executable, "-c", blocked, folder / name], capture_output=True, text=True)
        if name == "trace.json.gz":
            assert done.returncode == 2 and "pip install polars" in done.stderr
        else:
            assert done.returncode == 0 and "allocated at the peak" in done.stdout, done.stderr


def test_the_help_names_the_sources():
    shown = analyze("--help").stdout

    assert "--memory" in shown and ".pickle" in shown and re.search(r"without\s+executing", shown)
