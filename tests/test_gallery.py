"""The gallery: what a recording says becomes a section, and a model that failed is named."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def gallery():
    spec = importlib.util.spec_from_file_location("gallery", ROOT / "benchmarks" / "gallery.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_page_from_recordings(gallery, tmp_path):
    shutil.copytree(ROOT / "tests" / "compatibility" / "recording-1", tmp_path / "gpt2")
    assert gallery.pack(tmp_path / "gpt2", tmp_path / "gallery.tar") == []
    shutil.copytree(tmp_path / "gpt2", tmp_path / "vit")
    facts = json.loads((tmp_path / "vit" / "recording.json").read_text())
    (tmp_path / "vit" / "recording.json").write_text(json.dumps(facts | {"command": {"sha256": "0" * 64}}))
    gallery.pack(tmp_path / "vit", tmp_path / "gallery.tar")
    problem = {"problem": None}
    summary = {"gpt2": problem, "vit": problem, "t5": {"problem": "exit code 1: no transformers"}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))

    page = gallery.page(tmp_path)

    row = r"^\| \[gpt2\]\(#gpt2\) \| 2\.10 ms \| 1,90\d samples/s \| .* \[host_work_between_steps\]"
    assert re.search(row, page, re.M)
    assert "| slow steps | 0.983 ms | 46.7 % |" in page and "| **the step** | 2.10 ms | 100 % |" in page
    assert "| up to 0.154 ms |" in page and "No finding explains 1.11 ms" in page
    assert "stepscope run --exit-after -o runs/gpt2 benchmarks/gallery/gpt2.py" in page
    assert "Not measured: exit code 1: no transformers." in page
    assert "Not measured: the script has changed since." in page and "1 models" not in page
    assert "## What the rows mean" in page and "| slow steps | Some steps take longer" in page


def test_the_largest_files_are_left_out(gallery, tmp_path, monkeypatch):
    (tmp_path / "t5" / "trace").mkdir(parents=True)
    (tmp_path / "t5" / "recording.json").write_text("{}")
    (tmp_path / "t5" / "trace" / "rank0.json.gz").write_bytes(bytes(9000))
    monkeypatch.setattr(gallery, "MAX_BYTES", 5000)

    assert gallery.pack(tmp_path / "t5", tmp_path / "gallery.tar") == ["trace/rank0.json.gz"]
    with tarfile.open(tmp_path / "gallery.tar") as tar:
        assert tar.getnames() == ["t5/recording.json"]


def test_a_script_that_fails_stops_nothing(gallery, tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "command", lambda name, folder: ["stepscope", "run", "-o", folder, "missing.py"])
    ended = gallery.record("t5", tmp_path / "t5", 60.0, tiny=True)

    assert "missing.py" in ended["problem"]
    assert gallery.record("t5", tmp_path / "t5", 1.0, tiny=True)["problem"] == "not run: no time was left"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_script_trains(gallery, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr("sys.argv", ["gallery.py", str(tmp_path), "--tiny"])

    assert gallery.main() == 0, (tmp_path / "summary.json").read_text()
    page = gallery.page(tmp_path)
    assert all(f"## {name}\n" in page for name in gallery.SCRIPTS) and "Not measured" not in page
