"""A hang: the dumps in a folder, and of a recording where each rank was."""

import re
from collections.abc import Iterator
from pathlib import Path

from stepscope.analysis.ranks.hangs import Hang, RankState, hang_of
from stepscope.border import AMOUNT, COUNT, INTEGER, TEXT, check, read_json
from stepscope.trace.dumps.flight_recorder import Dumps, read_dumps

HANG_FILE = "hang.json"
HANG_FOLDER = "hang"
_SCHEMA = {"rank": COUNT, "host": TEXT, "step": INTEGER, "phase": TEXT, "stack": [TEXT], "silent_s": AMOUNT}


def open_hang(folder: Path) -> Hang:
    """Return the hang of a folder with dumps, or of a recording."""
    states = tuple(_states(folder))
    if not states:
        return hang_of(read_dumps(folder))
    dumps = folder / HANG_FOLDER
    return hang_of(read_dumps(dumps) if dumps.is_dir() else Dumps(folder, {}, set(), []), states)


def _states(folder: Path) -> Iterator[RankState]:
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
