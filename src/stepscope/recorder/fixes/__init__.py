"""Applies fixes to a script from outside, for `stepscope verify` and `stepscope improve`.

`stepscope run` reads the fixes to apply from the environment. Only the fixes themselves import torch.
"""

import os

from stepscope.recorder.fixes.words import Regrouped, regroup

VARIABLE = "STEPSCOPE_FIX"  # set for a child process, and removed from its environment before the script starts
LOOK = "?"
"""Before the names of fixes, or alone: count what they would change, and change nothing."""
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"
MICRO_BATCH = "micro_batch"


def split(text: str) -> list[tuple[str, str | None]]:
    """Return the names and values of fixes that are applied together.

    >>> split("autocast+compile=max-autotune")
    [('autocast', None), ('compile', 'max-autotune')]
    """
    parts = [part.partition("=") for part in text.removeprefix(LOOK).split("+") if part]
    return [(name.strip(), value.strip() if equals else None) for name, equals, value in parts]


def set_variables(text: str) -> None:
    """Set the environment variables of fixes, which torch reads when it is imported."""
    is_set = any(name in os.environ for name in ALLOCATOR_VARIABLES)
    if not text.startswith(LOOK) and not is_set and any(name == "expandable_segments" for name, _ in split(text)):
        os.environ[ALLOCATOR_VARIABLES[0]] = EXPANDABLE


def change_words(text: str, argv: list[str]) -> Regrouped | None:
    """Change a script's command line in place if fixes can be made there; return what was or would be changed."""
    factor = next((value or "2" for name, value in split(text) if name == MICRO_BATCH), "")
    if not factor.isdecimal():
        return None
    words, regrouped = regroup(argv, int(factor))
    if not text.startswith(LOOK):
        argv[:] = words
    return regrouped
