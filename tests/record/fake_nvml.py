"""Builds a small shared library that answers like libnvidia-ml, so that the tests go through ctypes.

Environment variables steer it at run time: FAKE_NVML_INIT is what nvmlInit_v2 returns,
FAKE_NVML_CODE what every reading returns, FAKE_NVML_THROTTLE the throttle mask, FAKE_NVML_NAME
the product name, FAKE_NVML_SLEEP_MS how long the utilization call takes.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

UUID = "12345678-1234-1234-1234-123456789abc"
SOURCE = Path(__file__).with_name("fake_nvml.c")


def build_fake_nvml(folder: Path, *defines: str) -> str:
    """The path of the library, built into `folder`; skips the test where there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build a fake libnvidia-ml with")
    library = folder / "libfake-nvml.so"
    flags = [f"-D{define}" for define in defines]
    subprocess.run([compiler, "-shared", "-fPIC", *flags, "-o", str(library), str(SOURCE)], check=True)
    return str(library)
