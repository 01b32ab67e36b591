"""What the tests of a sweep share: the odd workloads by name, and the verb as a command."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

from stepscope.workloads.registry import find

ODD = str(Path(__file__).with_name("odd_workloads.py"))


def gated():
    """The workload with right and wrong variants, under a name that is the same on every machine."""
    return dataclasses.replace(find(f"{ODD}:GATED"), name="gated")


def bench_words(*words):
    return [sys.executable, "-m", "stepscope", "bench", *map(str, words)]


def quiet_environment():
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def rows_in(folder):
    return [json.loads(line) for line in (Path(folder) / "results.jsonl").read_text().splitlines()]


def exit_code(words=None):
    """The code that a verb ends with in this process, whether its parser or its work ends it."""
    from stepscope.cli.main import main

    try:
        return main(words)
    except SystemExit as ended:
        return ended.code
