"""The search for graphs left alive looks at the whole process: its tests have one of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
def test_leaks_in_a_process_of_their_own():
    tests = Path(__file__).with_name("leaks_alone.py")
    command = [sys.executable, "-m", "pytest", str(tests), "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)

    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
