"""Tables for a terminal of any width: columns in line, names that still differ when they are cut."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from stepscope.document.kernel_names import short_name
from stepscope.formatting import safe

LEAST_ROOM = 24
"""Characters that names should have, before a column is left out for them."""
_LONGEST_NAME = 1000


@dataclass(frozen=True)
class Column:
    """One column of figures."""

    title: str
    cells: Sequence[str]
    rank: int = 0
    """Where there is no room for all columns, those of the highest rank are left out first; those of 0 never."""


def table_lines(
    title: str, names: Sequence[str], columns: Sequence[Column], width: int, head: float = 0.5
) -> list[str]:
    """A header and a line a name; no line is wider than `width`, unless columns that must be there are.

    Of a name that is cut, such a share is its `head` and the rest its end.

    >>> table_lines("ops", ["aten::mm"], [Column("calls", ["80"]), Column("share", ["27.5 %"])], 60)
    ['ops         calls   share', '  aten::mm     80  27.5 %']
    """
    kept = list(columns)
    longest = max((len(name) for name in names), default=0)
    while (room := width - 2 - sum(_width(column) + 2 for column in kept)) < min(LEAST_ROOM, longest):
        extra = max(kept, key=lambda column: column.rank)
        if not extra.rank:
            break
        kept.remove(extra)
    room = max(1, min(room, max(longest, len(title) - 2)))
    titles = "".join(f"  {column.title:>{_width(column)}}" for column in kept)
    lines = [f"{title:<{room + 2}}{titles}"] if len(title) <= room + 2 else [title, " " * (room + 2) + titles]
    for place, name in enumerate(told_apart(names, room, head)):
        cells = "".join(f"  {column.cells[place]:>{_width(column)}}" for column in kept)
        lines.append(f"  {name:<{room}}{cells}")
    return lines


def _width(column: Column) -> int:
    return max(len(column.title), *(len(cell) for cell in column.cells), 0)


def told_apart(names: Sequence[str], room: int, head: float = 0.5) -> list[str]:
    """The names in so many characters, cut where it leaves different ones different.

    >>> told_apart(["model.layers.attention.query", "model.layers.attention.key"], 14, head=1.0)
    ['model.…n.query', 'model.…ion.key']
    """
    texts = [shortened(name, room, head) for name in names]
    for share in (0.5, 0.25, 0.75):
        for places in _alike(texts, names):
            for place in places:
                texts[place] = shortened(names[place], room, share)
    for places in _alike(texts, names):
        differ = _num_common([names[place] for place in places])
        for place in places:
            # What differs and a little before it, after the beginning of the name.
            begin = names[place][: room // 3]
            rest = names[place][max(len(begin), differ - 3) :]
            texts[place] = f"{begin}…{shortened(rest, room - len(begin) - 1, 1.0)}"
    return texts


def _alike(texts: Sequence[str], names: Sequence[str]) -> list[list[int]]:
    """The places of texts that are the same for different names."""
    places: dict[str, list[int]] = {}
    for place, text in enumerate(texts):
        places.setdefault(text, []).append(place)
    return [alike for alike in places.values() if len({names[place] for place in alike}) > 1]


def _num_common(texts: Sequence[str]) -> int:
    """How many characters all texts begin with alike."""
    lowest, highest = min(texts), max(texts)
    return next((i for i, (one, other) in enumerate(zip(lowest, highest)) if one != other), len(lowest))


def shortened(text: str, room: int, share: float = 0.5) -> str:
    """A text in so many characters: cut so that `share` of what is left is its beginning and the rest its end.

    >>> shortened("a_very_long_name", 9), shortened("a_very_long_name", 9, 1.0)
    ('a_ve…name', 'a_very_l…')
    """
    if len(text) <= room:
        return text
    head = round(share * (room - 1))
    tail = room - 1 - head
    return f"{text[:head]}…{text[len(text) - tail :]}" if room > 0 else ""


def kernel_titles(names: Sequence[str]) -> list[str]:
    """Kernels' names made short; where that makes two alike, with the first word in which they differ.

    >>> kernel_titles(["void f<MulFunctor<float>, 1>(int)", "void f<MulFunctor<float>, 2>(int)"])
    ['f[MulFunctor<float>] 1', 'f[MulFunctor<float>] 2']
    """
    whole = [safe(name, _LONGEST_NAME) for name in names]
    titles = [short_name(name, _LONGEST_NAME) for name in whole]
    for alike in _alike(titles, whole):
        differ = _num_common([whole[place] for place in alike])
        words = [_word_at(whole[place], differ) for place in alike]
        for number, (place, word) in enumerate(zip(alike, words), 1):
            titles[place] += f" {word}" if words.count(word) == 1 else f" ({number})"
    return titles


def _word_at(text: str, place: int) -> str:
    """The word that is at a place of a text, or the next one, in a few characters."""
    start = max((found.start() for found in re.finditer(r"\b\w", text[: place + 1])), default=place)
    word = re.search(r"\w+", text[start:])
    return word[0][:24] if word else ""
