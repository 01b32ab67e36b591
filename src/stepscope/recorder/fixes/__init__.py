"""Applies fixes to a script from outside, for `stepscope verify`, which runs a script with and without them.

`stepscope run` reads the fixes to apply from the environment. Only the fixes themselves import torch.
"""

VARIABLE = "STEPSCOPE_FIX"  # set for a child process, and removed from its environment before the script starts


def split(text: str) -> list[tuple[str, str | None]]:
    """Return the names and values of fixes that are applied together.

    >>> split("autocast+compile=max-autotune")
    [('autocast', None), ('compile', 'max-autotune')]
    """
    parts = [part.partition("=") for part in text.split("+")]
    return [(name.strip(), value.strip() if equals else None) for name, equals, value in parts]
