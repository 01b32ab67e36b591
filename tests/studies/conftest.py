"""The study that a file of tests is about, really run: quick, on a CPU, once."""

import os
import subprocess
import sys

import pytest

pytest.register_assert_rewrite("study_checks")

from stepscope.studies.report import report_of_study
from stepscope.studies.stored import Stored


@pytest.fixture(scope="module")
def studied(request, tmp_path_factory):
    """The folder of the study that is STUDY in the file of tests, without its report."""
    folder = tmp_path_factory.mktemp("study") / "out"
    words = [sys.executable, "-m", "stepscope", "study", request.module.STUDY.name, "--quick", "--device", "cpu"]
    # One thread: tests run beside each other, and threads that wait for one that has no core wait long.
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    words += ["--no-report", "-o", str(folder)]
    done = subprocess.run(words, env=one_thread, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def stored(studied):
    """The same, opened: every answer is computed once."""
    return Stored(studied)


@pytest.fixture(scope="module")
def report(request, stored):
    """Its report."""
    return report_of_study(request.module.STUDY, stored)
