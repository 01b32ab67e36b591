"""Goodput: which share of the time since a run began was training, and what took the rest."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median

from stepscope.analysis.run.interruptions import UNKNOWN, stalls
from stepscope.analysis.run.series import FREE, RESTART, Run, TimeBlock
from stepscope.analysis.time.loop_time import (
    BETWEEN,
    COLLECTION,
    DATA,
    MEASURING,
    OTHER,
    ROWS,
    TRAINING,
    WARMUP,
    WITHOUT_PROBES,
)

STARTUP, STALLS, RESTARTS, REPEATED = "start-up", "stalls", "restarts", "repeated steps"
ALL_ROWS = (*ROWS[:-2], STARTUP, STALLS, RESTARTS, REPEATED, MEASURING, OTHER)
_CHECKPOINT, _FINISHED = "checkpoint", "finished"


@dataclass(frozen=True)
class Goodput:
    """The wall-clock time of a run, or of all runs of a job, without remainder."""

    wall_ns: int  # from the beginning of the first process to the last moment that is known
    rows: Mapping[str, int]
    """ns by what took them; they add up to `wall_ns`: the rows of the loop's time, `start-up` (before the first
    step), `stalls`, `restarts` (from the end of one process to the beginning of the next), `repeated steps` (after
    the last checkpoint before a restart)."""
    num_steps: int
    num_tokens: int
    num_samples: int
    num_runs: int = 1  # recordings of one job, one after the other
    share: float = field(init=False)  # training ÷ wall-clock time; Stepscope's own work is left out

    def __post_init__(self) -> None:
        rest = max(1, self.wall_ns - self.rows.get(MEASURING, 0))
        object.__setattr__(self, "share", self.rows.get(TRAINING, 0) / rest)

    def cost_per_million(self, price_per_hour: float) -> tuple[str, float]:
        """Return what is paid for, and its price per million: of tokens, otherwise samples, otherwise steps."""
        counts = {"tokens": self.num_tokens, "samples": self.num_samples, "steps": max(1, self.num_steps)}
        unit, num = next((unit, num) for unit, num in counts.items() if num)
        return unit, price_per_hour * self.wall_ns / 3.6e12 / num * 1e6


def goodput(run: Run) -> Goodput | None:
    """Return the goodput of a run; None before its first step."""
    if not run.blocks:
        return None
    rows = dict.fromkeys(ALL_ROWS, 0)
    _add_blocks(run, rows)
    _add_gaps(run, rows)
    return Goodput(
        wall_ns=sum(rows.values()),
        rows={name: ns for name, ns in rows.items() if ns},
        num_steps=run.num_steps,
        num_tokens=sum(block.num_tokens for block in run.blocks),
        num_samples=sum(block.num_samples for block in run.blocks),
    )


def _add_blocks(run: Run, rows: dict[str, int]) -> None:
    repeated = _repeated_starts(run)
    stalled = sorted((stall.step, stall.ns) for stall in stalls(run) if stall.kind in UNKNOWN)
    usual_ns = median(_rest_ns(block) / block.num_steps for block in run.free or run.blocks)
    at = 0
    for block in run.blocks:
        is_probed = block.window not in WITHOUT_PROBES
        for kind, ns in block.host_ns.items():
            if kind == DATA or kind in BETWEEN:
                # What probes allocate makes garbage.
                rows[MEASURING if is_probed and kind == COLLECTION else BETWEEN.get(kind, DATA)] += ns
        rest_ns = _rest_ns(block)
        stalled_ns = 0
        while at < len(stalled) and stalled[at][0] < block.step + block.num_steps:
            stalled_ns += stalled[at][1] if stalled[at][0] >= block.step else 0
            at += 1
        stalled_ns = min(stalled_ns, rest_ns)
        rows[STALLS] += stalled_ns
        lost_ns = 0
        if block.num_compiles or block.window != FREE:
            lost_ns = max(0, rest_ns - stalled_ns - round(usual_ns * block.num_steps))
            kind = OTHER if block.window == "clean" else MEASURING
            rows[WARMUP if block.num_compiles or block.window == "warmup" else kind] += lost_ns
        rows[REPEATED if block.start_ns in repeated else TRAINING] += rest_ns - stalled_ns - lost_ns


def _repeated_starts(run: Run) -> set[int]:
    """Return when blocks begin whose steps the next process of the run had to do again.

    A process that finished was not cut off after its last checkpoint.
    """
    restarts = _restarts(run)
    ends = [each.start_ns for each in run.happenings if each.kind == "end" and each.status == _FINISHED]
    finished = {bisect_right(restarts, end_ns) for end_ns in ends}
    return {
        block.start_ns
        for number, blocks in enumerate(_processes(run)[:-1])
        for block in _after_checkpoint(blocks)
        if number not in finished
    }


def _restarts(run: Run) -> list[int]:
    return sorted(each.start_ns for each in run.happenings if each.kind == RESTART)


def _processes(run: Run) -> list[list[TimeBlock]]:
    """Return the blocks of each process of the run, in order."""
    restarts = _restarts(run)
    found: list[list[TimeBlock]] = [[] for _ in range(len(restarts) + 1)]
    for block in run.blocks:
        found[bisect_right(restarts, block.start_ns)].append(block)
    return found


def _after_checkpoint(blocks: Sequence[TimeBlock]) -> Sequence[TimeBlock]:
    """Return the blocks of one process after its last checkpoint; none if it saved none."""
    saved = [number for number, block in enumerate(blocks) if block.host_ns.get(_CHECKPOINT)]
    return blocks[saved[-1] + 1 :] if saved else ()


def _rest_ns(block: TimeBlock) -> int:
    return block.wall_ns - sum(ns for kind, ns in block.host_ns.items() if kind == DATA or kind in BETWEEN)


def _add_gaps(run: Run, rows: dict[str, int]) -> None:
    """Add the time in which no step ran."""
    rows[STARTUP] += run.blocks[0].start_ns
    naps = sorted((each.start_ns - each.ns, each.ns) for each in run.happenings if each.kind == "suspended")
    begins, sums = [at for at, _ in naps], [0, *accumulate(ns for _, ns in naps)]
    restarts = _restarts(run)

    def slept(begin_ns: int, end_ns: int) -> int:
        return sums[bisect_left(begins, end_ns)] - sums[bisect_left(begins, begin_ns)]

    for block in run.blocks:
        inside_ns = max(0, block.end_ns - block.start_ns - block.wall_ns)
        slept_ns = min(inside_ns, max(0, slept(block.start_ns, block.end_ns)))
        rows[STALLS] += slept_ns
        rows[MEASURING] += inside_ns - slept_ns
    for earlier, later in zip(run.blocks, run.blocks[1:]):
        gap_ns = later.start_ns - earlier.end_ns
        if gap_ns <= 0:
            continue
        at = bisect_left(restarts, earlier.end_ns)
        if at < len(restarts) and (began := restarts[at]) <= later.start_ns:
            rows[RESTARTS] += began - earlier.end_ns
            rows[STARTUP] += later.start_ns - began
            continue
        slept_ns = min(gap_ns, slept(earlier.end_ns, later.start_ns))
        rows[STALLS] += slept_ns
        rows[MEASURING] += gap_ns - slept_ns
    rest_ns = max(0, run.end_ns - run.blocks[-1].end_ns)
    for kind, ns in run.tail_ns.items():
        if kind in BETWEEN:
            rows[BETWEEN[kind]] += min(ns, rest_ns)
            rest_ns -= min(ns, rest_ns)
    rows[OTHER] += rest_ns


def job_goodput(runs: Sequence[tuple[Run, Goodput]]) -> Goodput:
    """Return the goodput of all runs of one job, which follow one another.

    Training after the last checkpoint of a run that another one follows had to be repeated.
    """
    runs = sorted(runs, key=lambda each: each[0].began or 0.0)
    rows: dict[str, int] = dict.fromkeys(ALL_ROWS, 0)
    for number, (run, own) in enumerate(runs):
        for name, ns in own.rows.items():
            rows[name] += ns
        if number + 1 == len(runs):
            break
        following = runs[number + 1][0]
        gap_ns = round(((following.began or 0.0) - (run.began or 0.0)) * 1e9) - own.wall_ns
        rows[RESTARTS] += max(0, gap_ns)
        lost = _after_checkpoint(_processes(run)[-1])
        lost_ns = min(own.rows.get(TRAINING, 0), sum(_rest_ns(block) for block in lost))
        rows[REPEATED] += lost_ns
        rows[TRAINING] -= lost_ns
    return Goodput(
        wall_ns=sum(rows.values()),
        rows={name: ns for name, ns in rows.items() if ns},
        num_steps=sum(own.num_steps for _, own in runs),
        num_tokens=sum(own.num_tokens for _, own in runs),
        num_samples=sum(own.num_samples for _, own in runs),
        num_runs=len(runs),
    )
