"""Imports what a command needs next, while it waits for something else."""

import sys
from importlib import import_module
from threading import Thread


def import_beside(*modules: str) -> None:
    """Import modules in another thread: reading a trace releases the interpreter, and importing needs little else.

    They may not import a part of polars before polars itself: two threads inside it can end in a deadlock. Nothing
    happens under pytest, which parses every module: Python 3.11 cannot do that in two threads.
    """
    if "_pytest" not in sys.modules:
        Thread(target=lambda: [*map(import_module, modules)], daemon=True).start()
