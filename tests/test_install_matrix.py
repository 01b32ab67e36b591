"""The install matrix: nothing of CUDA is downloaded, and sizes are those of the installed files."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def matrix(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("install_matrix", SCRIPTS / "install_matrix.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_torch_with_cuda_is_not_installed(matrix, monkeypatch, tmp_path):
    asked = []

    def run(*words, **_):
        asked.append(words)
        names = ("torch", "nvidia-cublas-cu12", "nvidia-nccl-cu12")
        return json.dumps({"install": [{"metadata": {"name": name}} for name in names]})

    monkeypatch.setattr(matrix, "run", run)
    monkeypatch.setattr(matrix, "environment", lambda folder, **_: folder / "bin" / "python")

    result, size = matrix.records("python3", tmp_path / "a.whl", "2.6.0", tmp_path, alone=True)

    assert result == "not run: pip brings 2 CUDA packages (nvidia-cublas-cu12, …)" and not size
    assert len(asked) == 1 and "--dry-run" in asked[0]


@pytest.mark.long
def test_sizes_are_of_files(matrix):
    polars = Path(importlib.util.find_spec("polars").origin).parent
    size = matrix.sizes(Path(sys.executable))["polars"]
    assert size >= sum(path.stat().st_size for path in polars.rglob("*.py")) / 1e6


def test_a_verb_that_fails_says_which(matrix, tmp_path):
    (tmp_path / "stepscope").write_text("#!/bin/sh\necho no >&2; exit 2\n")
    (tmp_path / "stepscope").chmod(0o755)
    with pytest.raises(matrix.Failed, match="show x: no"):
        matrix.use(tmp_path / "python", (("show", "x"),), tmp_path, tmp_path)
