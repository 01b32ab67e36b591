"""Untrusted text in Markdown: it never becomes markup, a link, a mention or a second line."""

import html
import re
from collections.abc import Sequence

from stepscope.formatting import safe

# Markup, and what GitHub turns into links, emoji, formulas or references.
_SPECIAL = re.compile(r"[\\`*_\[\]<>|~&$]|:(?=[/\w])|(?<=www)\.")
_CALLING = re.compile(r"[@#]|\bGH-(?=\d)")
_OPENING = re.compile(r"^\s*([-+=]|\d+(?=[.)]))")
_CODE = re.compile(r"`([^`]+)`")
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = "▁▂▃▄▅▆▇█"


def escaped(text: object, most: int = 200) -> str:
    r"""Return text as plain text in a Markdown table: no markup, no link, no mention, no second line.

    >>> escaped("a|b `c` <img> @you") == "a\\|b \\`c\\` \\<img\\> @\u200byou"
    True
    """
    # A backslash does not stop a mention of @somebody: a zero-width space does.
    return _CALLING.sub("\\g<0>\u200b", _SPECIAL.sub(r"\\\g<0>", safe(text, most)))


def in_summary(text: object, most: int = 200) -> str:
    """Return text for a <summary> line, which is HTML.

    >>> in_summary("<b> & co")
    '&lt;b&gt; &amp; co'
    """
    return _CALLING.sub("\\g<0>\u200b", html.escape(safe(text, most)))


def code(text: object, most: int = 400) -> str:
    """Return text as a code span.

    >>> code("f(x)  # all"), code("a `b` c")
    ('`f(x)  # all`', '`` a `b` c ``')
    """
    cleaned = safe(text, most).strip()
    longest = max((len(run) for run in re.findall("`+", cleaned)), default=0)
    space = " " if longest else ""
    return f"{'`' * (longest + 1)}{space}{cleaned}{space}{'`' * (longest + 1)}" if cleaned else ""


def prose(text: str, most: int = 2000) -> str:
    r"""Return a paragraph: text between backticks stays code, the rest is plain text.

    >>> prose("run `stepscope run a_b.py` for a_b"), prose("- no list")
    ('run `stepscope run a_b.py` for a\\_b', '\\- no list')
    """
    # Cut first, so that every code span is closed.
    pieces = _CODE.split(safe(text, most))
    pieces[::2] = [escaped(piece, most) for piece in pieces[::2]]
    pieces[1::2] = [f"`{piece}`" for piece in pieces[1::2]]
    # Escape what would start a list, a heading or code.
    return _OPENING.sub(lambda sign: f"{sign[1]}\\" if sign[1].isdigit() else f"\\{sign[1]}", "".join(pieces))


def grid(titles: Sequence[str], rows: Sequence[Sequence[str]], aligned: Sequence[str]) -> list[str]:
    """Return a table of escaped cells; `aligned` has `:--` or `--:` per column."""
    lines = [f"| {' | '.join(titles)} |", f"|{'|'.join(aligned)}|"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def bar(share: float, width: int = 16) -> str:
    """Return a bar; it is `width` characters long at a share of 1.

    >>> bar(0.5, 4), bar(0.26, 4), bar(1.0, 2), bar(0.0)
    ('██', '█', '██', '')
    """
    eighths = round(8 * width * min(1.0, max(0.0, share)))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def sparkline(values: Sequence[float | None], width: int = 32) -> str:
    """Return a sparkline of the highest value of each stretch, with blanks for missing values.

    >>> sparkline([0.0, 1.0, None, 2.0, 4.0])
    '▁▃ ▅█'
    """
    size = max(1, -(-len(values) // width))
    stretches = [
        [value for value in values[at : at + size] if value is not None and value == value]
        for at in range(0, len(values), size)
    ]
    known = [max(stretch) for stretch in stretches if stretch]
    low = min(0.0, *known) if known else 0.0
    room = (max(known, default=0.0) - low) or 1.0
    return "".join(_LEVELS[round((len(_LEVELS) - 1) * (max(s) - low) / room)] if s else " " for s in stretches)
