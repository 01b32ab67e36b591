"""A hang: the dumps in a folder, and of a recording where each rank was."""

from pathlib import Path

from stepscope.analysis.ranks.hangs import Hang, hang_of
from stepscope.trace.dumps.flight_recorder import Dumps, read_dumps
from stepscope.trace.dumps.rank_states import read_states

HANG_FOLDER = "hang"


def open_hang(folder: Path) -> Hang:
    """Return the hang of a folder with dumps, or of a recording."""
    states = tuple(read_states(folder))
    if not states:
        return hang_of(read_dumps(folder))
    dumps = folder / HANG_FOLDER
    return hang_of(read_dumps(dumps) if dumps.is_dir() else Dumps(folder, {}, set(), []), states)
