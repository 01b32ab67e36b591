"""Parses torch.compile's messages about graph breaks, guards and errors into reasons and lines of the user's code."""

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
    """Return the innermost line of a traceback outside torch, else the innermost line.

    >>> place_of('File "/me/model.py", line 12, in forward')
    '/me/model.py:12 in forward'
    """
    places = _PLACE.findall(text)
    users = [place for place in places if not place[0].startswith(_TORCH)] or places
    return "{}:{} in {}".format(*users[-1]) if users else None


def break_of(text: str) -> tuple[str, str]:
    # torch 2.7 and later add an explanation, which says more than the heading.
    match = re.search(r"Explanation: (.*)", text) or re.search(
        r"(?:Graph Break )?Reason: (?:Unsupported: )?(.*)", text
    )
    reason = match.group(1).strip() if match else first_line(text)
    user_code = text.split("User code traceback:")[-1].split("\nTraceback")[0]
    return reason, place_of(user_code) or UNKNOWN_PLACE


def gives_up(text: str) -> bool:
    """Return whether a graph break ends compilation of the function, so that all of it runs eagerly."""
    return "falling back to eager" in text or "Skipping frame" in text


def reasons(payload: Any) -> list[str]:
    """Return the guards that failed, as torch writes them."""
    try:
        values = json.loads(payload) if isinstance(payload, str) else payload
    except ValueError:
        values = payload
    return [str(value).strip() for value in (values if isinstance(values, list) else [values])][:MAX_GUARDS]


def guard_of(reason: str) -> str:
    """Return only the guard, without its source line, hints and stacks.

    >>> guard_of("0/0: s.step == 0      # return s.a(x)  # me/model.py:29 in forward (HINT: make it a tensor)")
    '0/0: s.step == 0'
    """
    head = reason.split("\nUser stack trace:")[0].split(" (HINT:")[0]
    return _COMMENT.split(head)[0].strip() or first_line(reason)


def guard_place(reason: str) -> str | None:
    """Return the user's line that a guard refers to, or None if this torch does not report it (2.6 does not)."""
    head, _, stack = reason.partition("\nUser stack trace:")
    if stack:
        return place_of(stack)
    match = _COMMENT.search(head)
    # Without a stack, torch names only the innermost file, with its path cut off. Its own files are no help.
    return None if match is None or "nn/modules/" in match.group(2) else match.group(2)


def first_line(text: Any) -> str:
    """Return the first line, plus the second if the first only announces it ("backend='inductor' raised:")."""
    lines = [line.strip() for line in str(text).strip().splitlines() if line.strip()]
    return " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])


def useful_line(error: object) -> str:
    """Return a compiler error as one line.

    torch's first line only says who raised. Triton's gives a place in generated code, and its last line the reason.
    >>> useful_line("backend='inductor' raised:\\nLoweringException: AssertionError: no\\n  target: aten.mm")
    'LoweringException: AssertionError: no'
    """
    text = str(error).split("\nSet TORCHDYNAMO_VERBOSE=1")[0].split("\nfrom user code:")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        lines = lines[1:]
    if not lines:
        return type(error).__name__
    if match := re.search(r"Explanation: (.*)", text):  # torch 2.7 and later
        return match.group(1).rpartition("): got ")[2].strip()[:500]
    line = f"{lines[0]} {lines[-1]}" if "CompilationError: at " in lines[0] and len(lines) > 1 else lines[0]
    return line[:500]
