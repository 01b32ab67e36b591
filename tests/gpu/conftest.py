"""What the tests on a GPU share."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """The torch of a GPU machine is whatever is installed there: what it warns of is not ours to mend."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True)
def _compiles_afresh():
    """Nothing compiled before: after some sizes of one function the compiler gives up and runs it as it is."""
    torch = pytest.importorskip("torch")
    torch._dynamo.reset()
