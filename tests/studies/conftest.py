"""Tests that run a whole study are marked: `make test` leaves them out, `make test-studies` runs them."""

from pathlib import Path

import pytest

ALWAYS = ("test_study_core.py",)


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here and item.path.name not in ALWAYS:
            item.add_marker(pytest.mark.study)
