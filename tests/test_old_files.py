"""Files of the first 0.1 are read by every verb, and files of a future release are refused with what to do."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepscope.rows import read_rows
from verbs import run_verb

OLD = Path(__file__).parent / "compatibility"
RECORDING, SWEEP = OLD / "recording-1", OLD / "sweep-1"


def keys(value: Any, path: str = "") -> Iterator[str]:
    """Yield the path of every key of a JSON value."""
    for key, each in value.items() if isinstance(value, dict) else [("[]", each) for each in value]:
        yield f"{path}.{key}"
        if isinstance(each, dict | list):
            yield from keys(each, f"{path}.{key}")


@pytest.mark.parametrize(
    "words",
    [
        ("show", RECORDING),
        ("show", SWEEP),
        ("analyze", RECORDING),
        ("analyze", "--memory", RECORDING),
        ("diagnose", RECORDING),
        ("compare", RECORDING, RECORDING),
        ("compare", SWEEP, SWEEP),
        ("watch", RECORDING, "--once"),
        ("report", RECORDING, "-o", "page.html"),
        ("report", SWEEP, "-o", "sweep.md"),
        ("export", RECORDING, "perfetto", "-o", "trace.json.gz"),
    ],
    ids=lambda words: " ".join(getattr(word, "name", str(word)) for word in words),
)
def test_a_verb_reads_them(words, tmp_path):
    done = run_verb(*words, cwd=tmp_path)
    said = done.stdout + done.stderr + "".join(path.read_text() for path in tmp_path.glob("*.md"))

    assert done.returncode == 0, done.stderr
    assert "left out" not in said and "is not a" not in said and "damaged" not in said


def test_json_keeps_every_key_and_figure():
    old, new = json.loads((OLD / "card-1.json").read_text()), json.loads(run_verb("show", RECORDING, "--json").stdout)
    assert set(keys(old)) <= set(keys(new))
    for name in (
        "schema_version",
        "num_steps",
        "step_ns",
        "warmup_ns",
        "memory",
        "parameters",
        "flops",
        "environment",
    ):
        assert old[name] == new[name]

    done = run_verb("analyze", RECORDING / "trace" / "rank0.json.gz", "--json")
    old, new = json.loads((OLD / "analyze-1.json").read_text()), json.loads(done.stdout)
    assert set(keys(old)) <= set(keys(new))
    for name in ("gpu_time", "steps", "events", "step_source"):
        assert old["ranks"][0][name] == new["ranks"][0][name]


def test_a_sweep_keeps_its_rows():
    shown = json.loads(run_verb("show", SWEEP, "--json").stdout)

    assert shown["num_by_status"] == {"ok": 2}
    assert len(read_rows(SWEEP / "results.jsonl").rows[0]["samples_host_ns"]) == 10


def test_files_of_the_future_name_the_command(tmp_path):
    future = shutil.copytree(RECORDING, tmp_path / "run")
    facts = json.loads((future / "recording.json").read_text())
    (future / "recording.json").write_text(json.dumps(facts | {"schema_version": 99}))
    memory = json.loads(gzip.decompress((RECORDING / "memory.json.gz").read_bytes())) | {"schema_version": 99}
    (tmp_path / "memory.json.gz").write_bytes(gzip.compress(json.dumps(memory).encode()))
    sweep = shutil.copytree(SWEEP, tmp_path / "sweep")
    rows = (sweep / "results.jsonl").read_text()
    (sweep / "results.jsonl").write_text(rows.replace('"schema_version":1', '"schema_version":99'))

    for words in (("show", future), ("analyze", "--memory", tmp_path / "memory.json.gz"), ("show", sweep)):
        done = run_verb(*words)
        assert done.returncode == 2 and "pip install --upgrade stepscope" in done.stderr
        assert len(done.stderr.splitlines()) == 1
