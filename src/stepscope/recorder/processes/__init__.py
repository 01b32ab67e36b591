"""Measures the processes that a script starts: each one that trains opens a recording of its own."""

import os

VARIABLE = "STEPSCOPE_CHILD"
"""Tells a child process where to record and how, as JSON. Its own `os.environ` does not show it."""

BOOTSTRAP_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bootstrap")  # noqa: PTH100, PTH118, PTH120
"""First on a child's PYTHONPATH, so that Python runs its `sitecustomize.py` when the child starts."""
