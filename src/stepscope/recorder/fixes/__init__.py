"""Changes to a script from outside, one a file: `stepscope verify` runs a script with and without them.

`stepscope run` looks into the environment for the ones to make. Nothing here imports torch but the fixes themselves.
"""

from __future__ import annotations

VARIABLE = "STEPSCOPE_FIX"
"""Set for a child process, and taken out of its environment before the script sees it."""


def split(text: str) -> list[tuple[str, str | None]]:
    """Names and values of changes that are made together.

    >>> split("autocast+compile=max-autotune")
    [('autocast', None), ('compile', 'max-autotune')]
    """
    parts = [part.partition("=") for part in text.split("+")]
    return [(name.strip(), value.strip() if equals else None) for name, equals, value in parts]
