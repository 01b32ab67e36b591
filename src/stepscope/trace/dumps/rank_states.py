"""Reads where each rank of a recording was when no step ended any more."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stepscope.border import AMOUNT, COUNT, INTEGER, TEXT, check, read_json

HANG_FILE = "hang.json"
_SCHEMA = {"rank": COUNT, "host": TEXT, "step": INTEGER, "phase": TEXT, "stack": [TEXT], "silent_s": AMOUNT}


@dataclass(frozen=True)
class RankState:
    """Where a rank under `stepscope run` was when no step ended any more."""

    rank: int
    host: str
    step: int  # the last that ended
    phase: str
    """`collective`, `data`, `forward`, `backward`, `optimizer`, `checkpoint` or `other`."""
    stack: tuple[str, ...]  # the script's lines, innermost first
    silent_s: float  # since the last step ended


def read_states(folder: Path) -> Iterator[RankState]:
    """Yield where each rank of a recording was; a file that does not fit is left out."""
    ranks = [path for path in folder.glob("rank*") if re.fullmatch(r"rank\d+", path.name)]
    for each in (folder, *sorted(ranks, key=lambda path: int(path.name[4:]))):
        try:
            state = read_json(each / HANG_FILE)
            check(state, _SCHEMA)
        except (OSError, ValueError):
            continue
        fields = {name: state[name] for name in _SCHEMA if name != "stack"}
        yield RankState(**fields, stack=tuple(state["stack"][:100]))
