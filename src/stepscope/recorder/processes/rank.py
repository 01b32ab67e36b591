"""Which rank of a distributed job this process is."""

import os
import sys

_known: tuple[int, int] | None = None  # as torch.distributed last reported: scripts leave the group before they end


def rank_and_world_size() -> tuple[int | None, int]:
    """Return this process's rank, None if it is not in a distributed job, and the number of ranks."""
    global _known
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        _known = distributed.get_rank(), distributed.get_world_size()
    rank, world_size = _number("RANK"), _number("WORLD_SIZE")
    if _known is not None:
        return (_known[0] if rank is None else rank), max(_known[1], world_size or 1)
    return rank, world_size or 1


def forget() -> None:
    """Forget the rank: a forked child is not the rank that its parent is."""
    global _known
    _known = None


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None
