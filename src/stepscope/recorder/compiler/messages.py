"""What torch.compile writes about graph breaks, guards and errors, taken apart: the reason, and the user's line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

_PLACE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_TORCH = f"{Path(torch.__file__).parent}/"
_COMMENT = re.compile(r"\s+# (.*?)\s+# (\S+:\d+ in [^\s(]+)")
MAX_GUARDS = 8
UNKNOWN_PLACE = "unknown place"


def place_of(text: str) -> str | None:
    """The innermost line of a traceback that is not torch's own, `model.py:12 in forward`; else the innermost.

    >>> place_of('File "/me/model.py", line 12, in forward')
    '/me/model.py:12 in forward'
    """
    places = _PLACE.findall(text)
    users = [place for place in places if not place[0].startswith(_TORCH)] or places
    return "{}:{} in {}".format(*users[-1]) if users else None


def break_of(text: str) -> tuple[str, str]:
    """Why a graph broke, and where in the user's code."""
    # torch 2.7 and later explain; the explanation says more than the heading.
    match = re.search(r"Explanation: (.*)", text) or re.search(
        r"(?:Graph Break )?Reason: (?:Unsupported: )?(.*)", text
    )
    reason = match.group(1).strip() if match else first_line(text)
    user_code = text.split("User code traceback:")[-1].split("\nTraceback")[0]
    return reason, place_of(user_code) or UNKNOWN_PLACE


def gives_up(text: str) -> bool:
    """Whether a graph break ends the compiling of its function: all of it runs eagerly then."""
    return "falling back to eager" in text or "Skipping frame" in text


def reasons(payload: Any) -> list[str]:
    """The guards that failed, as torch writes them."""
    try:
        values = json.loads(payload) if isinstance(payload, str) else payload
    except ValueError:
        values = payload
    return [str(value).strip() for value in (values if isinstance(values, list) else [values])][:MAX_GUARDS]


def guard_of(reason: str) -> str:
    """The guard alone, without the line it stands for, hints and stacks.

    >>> guard_of("0/0: s.step == 0      # return s.a(x)  # me/model.py:29 in forward (HINT: make it a tensor)")
    '0/0: s.step == 0'
    """
    head = reason.split("\nUser stack trace:")[0].split(" (HINT:")[0]
    return _COMMENT.split(head)[0].strip() or first_line(reason)


def guard_place(reason: str) -> str | None:
    """The user's line that a guard stands for; None where this torch does not tell (2.6 tells none)."""
    head, _, stack = reason.partition("\nUser stack trace:")
    if stack:
        return place_of(stack)
    match = _COMMENT.search(head)
    # Without a stack only the innermost file is named, cut at its left: torch's own helps nobody.
    return None if match is None or "nn/modules/" in match.group(2) else match.group(2)


def first_line(text: Any) -> str:
    """The first line, and the next where the first only announces it ("backend='inductor' raised:")."""
    lines = [line.strip() for line in str(text).strip().splitlines() if line.strip()]
    return " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])


def useful_line(error: object) -> str:
    """What an error of the compiler says in one line.

    torch announces who raised, Triton gives a place in code that nobody wrote and says why in its last line.

    >>> useful_line("backend='inductor' raised:\\nLoweringException: AssertionError: no\\n  target: aten.mm")
    'LoweringException: AssertionError: no'
    """
    text = str(error).split("\nSet TORCHDYNAMO_VERBOSE=1")[0].split("\nfrom user code:")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        lines = lines[1:]
    if not lines:
        return type(error).__name__
    if match := re.search(r"Explanation: (.*)", text):  # torch 2.7 and later; the heading says little
        return match.group(1).rpartition("): got ")[2].strip()[:500]
    line = f"{lines[0]} {lines[-1]}" if "CompilationError: at " in lines[0] and len(lines) > 1 else lines[0]
    return line[:500]
