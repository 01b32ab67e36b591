"""The throughput of a job: the work of all its ranks together. Standard library only, for the card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankWork:
    """What one rank did in the steps that count."""

    rank: int
    work_per_step: float | None  # tokens or samples; None if no model input was seen
    num_steps: int
    wall_ns: int  # of these steps together


@dataclass(frozen=True)
class JobThroughput:
    """The work of the recorded ranks together."""

    world_size: int
    recorded: tuple[int, ...]  # ranks with a recording, in order
    missing: tuple[int, ...]  # ranks without one: their work is in no figure
    per_step: float | None  # tokens or samples per step of the recorded ranks; None if one of them has none
    per_s: float | None  # tokens or samples per second of the recorded ranks; None if one of them has none

    @property
    def is_complete(self) -> bool:
        """Whether every rank was recorded. If not, say so next to the figures."""
        return not self.missing


def job_throughput(ranks: Sequence[RankWork], world_size: int) -> JobThroughput:
    """Return what all ranks of a job do per step and per second.

    Each rank has its own clock, so the rates are added and not the times. A rank without a recording is not guessed:
    the figures are those of the recorded ranks, and `missing` names the others. A rank that was recorded but has no
    work or no steps makes both figures None. If `world_size` is too small for the recorded ranks, it is raised.

    >>> job = job_throughput([RankWork(0, 8, 20, 1_000_000_000), RankWork(2, 8, 20, 2_000_000_000)], world_size=3)
    >>> job.per_step, job.per_s, job.recorded, job.missing
    (16, 240.0, (0, 2), (1,))
    """
    recorded = tuple(sorted({each.rank for each in ranks}))
    world_size = max([world_size, *(rank + 1 for rank in recorded)])
    per_step: float | None = 0
    per_s: float | None = 0.0
    for each in ranks:
        if not each.work_per_step or not each.num_steps or not each.wall_ns or per_step is None or per_s is None:
            per_step = per_s = None
            break
        per_step += each.work_per_step
        per_s += each.work_per_step * each.num_steps / (each.wall_ns / 1e9)
    known = per_step is not None and bool(ranks)
    return JobThroughput(
        world_size=world_size,
        recorded=recorded,
        missing=tuple(rank for rank in range(world_size) if rank not in recorded),
        per_step=per_step if known else None,
        per_s=per_s if known else None,
    )
