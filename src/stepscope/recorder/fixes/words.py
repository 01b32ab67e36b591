"""Larger micro-batches by the options of a script's own command line: `--grad-accum 8 --batch-size 4`."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_BATCH = re.compile(r"batch[-_.]?size|(^|[-_.])(batch|bs|bsz|mbs)$|^b$")
_WHOLE = {"total", "global", "effective"}  # batches of a whole step
_UNTRAINED = {"eval", "evaluation", "val", "valid", "validation", "test", "predict", "generation"}
_EACH = {"micro", "device"}


class Regrouped(NamedTuple):
    """What was changed on a command line, or why nothing was."""

    new: str  # such as `--grad-accum 4 --batch-size 8`
    old: str
    size: int  # of a micro-batch before
    problem: str = ""


@dataclass(frozen=True)
class _Option:
    place: int  # of the word that ends with the number
    name: str
    number: int
    start: str  # of what was typed, before the number

    @property
    def words(self) -> set[str]:
        return set(re.split(r"[-_.+]+", self.name))

    def typed(self, number: int) -> str:
        return f"{self.start}{number}"


def regroup(argv: Sequence[str], factor: int) -> tuple[list[str], Regrouped | None]:
    """Return a command line with micro-batches `factor` times as large and as many fewer, and what was changed.

    Nothing is changed, and None returned, unless it names both numbers. A script that is given the batch of a whole
    step divides that itself. Whether the script does what its options say, its steps show.

    >>> regroup(["train.py", "--grad-accum", "8", "--batch-size=4"], 2)[0]
    ['train.py', '--grad-accum', '4', '--batch-size=8']
    """
    options = list(_options(argv))
    batches = [one for one in options if _BATCH.search(one.name) and not one.words & _UNTRAINED]
    numbers = [one for one in options if "accum" in one.name]
    batches = [one for one in batches if one not in numbers]
    whole = [one for one in batches if one.words & _WHOLE]
    each = [one for one in batches if one not in whole]
    each = [one for one in each if one.words & _EACH] or each
    if not each or not (numbers or whole):
        return list(argv), None
    for some in (each, numbers):
        if len(some) > 1:
            problem = f"the command line has several such options: {', '.join(one.name for one in some)}"
            return list(argv), Regrouped("", "", 0, problem)
    for one in numbers:
        if one.number % factor:
            return list(argv), Regrouped("", "", 0, f"{one.typed(one.number)} is not a multiple of {factor}")
    changed, words = {**{one: one.number // factor for one in numbers}, each[0]: each[0].number * factor}, list(argv)
    for one, number in changed.items():
        words[one.place] = words[one.place].removesuffix(str(one.number)) + str(number)
    new, old = (" ".join(one.typed(number) for one, number in some) for some in (
        changed.items(), ((one, one.number) for one in changed)))  # fmt: skip
    return words, Regrouped(new, old, each[0].number)


def _options(argv: Sequence[str]) -> Iterator[_Option]:
    """Yield the options with a whole number: `--name 8`, `--name=8` or `group.name=8`."""
    for place, word in enumerate(argv):
        name, equals, value = word.partition("=")
        plain = name.lstrip("-+").lower()
        if equals and value.isdecimal():
            yield _Option(place, plain, int(value), f"{name}=")
        elif place and word.isdecimal() and argv[place - 1].startswith("-") and "=" not in argv[place - 1]:
            before = argv[place - 1]
            yield _Option(place, before.lstrip("-").lower(), int(word), f"{before} ")
