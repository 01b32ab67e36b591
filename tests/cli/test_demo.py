"""`stepscope demo`: a first look without a script of one's own."""

import subprocess
import sys

import pytest


@pytest.mark.long
def test_a_built_in_script_is_measured_and_its_fault_is_found(tmp_path):
    words = [sys.executable, "-m", "stepscope", "demo", "--no-open"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert "waiting_for_data" in done.stdout
    assert (tmp_path / "runs" / "demo" / "report.html").is_file()
