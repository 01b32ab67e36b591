"""What interrupts training: checkpoints, evaluations, garbage collections, and steps that hang."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from stepscope.analysis.run.series import FREE, Run, TimeBlock
from stepscope.analysis.time.loop_time import BETWEEN, DATA

LEAST_STALL_NS = 1_000_000_000
LEAST_STALL_STEPS = 5.0  # typical steps
LEAST_SHARE = 0.03  # of the wall-clock time; less is not worth a finding
STOPPED = "stopped"
COLLECTION = "garbage_collection"
UNKNOWN = "stall", STOPPED  # what has no other name, and is part of the time of steps
LONG_NS = 60_000_000_000  # a single stall that is always worth one


@dataclass(frozen=True)
class Interruption:
    """One kind of work between steps, over the whole run."""

    kind: str  # as recorded: `checkpoint`, `evaluation`, `garbage_collection`
    num: int
    total_ns: int
    share: float  # of the time since the run began
    step: int  # the first
    last_step: int
    longest_ns: int | None  # None if none was long enough to be noted by itself
    longest_step: int | None
    places: tuple[str, ...]

    @property
    def every(self) -> float | None:
        """How many steps lie between two of them; None if there is only one."""
        return (self.last_step - self.step) / (self.num - 1) if self.num > 1 else None


@dataclass(frozen=True)
class Stall:
    """One step, or one gap between steps, that took long for no known reason."""

    step: int
    ns: int  # above a typical step
    kind: str  # `stall`, `data` (it waited for a batch), `suspended` (the machine slept) or `stopped` (the process)


def interruption(run: Run, kind: str) -> Interruption | None:
    """Return what one kind of work between steps took; None if the run has none."""
    blocks = [block for block in run.blocks if block.host_ns.get(kind) and not block.num_compiles]
    noted = [each for each in run.happenings if each.kind == kind]
    if kind == COLLECTION:  # of what was made before the first steps, or by a probe
        theirs = [block for block in run.blocks if block.window in ("clean", FREE)]
        blocks = [block for block in blocks if block.window in ("clean", FREE)]
        noted = [each for each in noted if any(b.step <= each.step < b.step + b.num_steps for b in theirs)]
    tail_ns, num_last = run.tail_ns.get(kind, 0), run.tail_times.get(kind, 0)
    total_ns = sum(block.host_ns[kind] for block in blocks) + tail_ns
    if not total_ns:
        return None
    num = max(1, sum(block.num_times.get(kind, 0) for block in blocks) + num_last)
    longest = max(noted, key=lambda each: each.ns, default=None)
    last = run.last_step + 1
    return Interruption(
        kind=kind,
        num=num,
        total_ns=total_ns,
        share=total_ns / max(run.end_ns, total_ns),
        step=_in_block(blocks[0], kind) if blocks else last,
        last_step=last if num_last else _in_block(blocks[-1], kind),
        longest_ns=None if longest is None else longest.ns,
        longest_step=None if longest is None else longest.step,
        places=tuple(run.places.get(kind, ())) or tuple(dict.fromkeys(each.place for each in noted if each.place)),
    )


def _in_block(block: TimeBlock, kind: str) -> int:
    """Return the step before which it happened: the longest of the block, if it made that long."""
    usual = block.max_ns - block.median_ns
    return block.max_step if block.host_ns[kind] >= usual / 2 else block.step


def stalls(run: Run) -> tuple[Stall, ...]:
    """Return the stalls of a run in order: noted ones, and blocks with a step that is far above the typical one."""
    found = {each.step: Stall(each.step, each.ns, each.kind) for each in run.happenings if each.kind == "suspended"}
    stopped = sorted((each.start_ns, each.start_ns + each.ns) for each in run.happenings if each.kind == STOPPED)
    for each in run.happenings:
        if each.kind == "stall" and each.ns >= LEAST_STALL_NS:
            before = bisect_left(stopped, (each.start_ns + each.ns, 0)) - 1  # one process is stopped once at a time
            is_stop = before >= 0 and stopped[before][1] > each.start_ns
            ns = each.ns - waited_ns(run, each.start_ns + each.ns)
            if ns >= LEAST_STALL_NS:
                found[each.step] = Stall(each.step, ns, STOPPED if is_stop else each.kind)
    for begin, end in stopped:  # no stall is noted in steps that are probed: they may take long
        at = bisect_right(run.blocks, begin, key=lambda block: block.start_ns) - 1
        if at >= 0 and run.blocks[at].window not in (FREE, "clean") and begin < run.blocks[at].end_ns:
            step = run.blocks[at].max_step
            found[step] = Stall(step, end - begin, STOPPED)
    known = sorted(each.step for each in run.happenings if each.kind in (*UNKNOWN, "suspended"))
    for block in run.free:
        excess, why = _excess(block)
        excess -= waited_ns(run, block.end_ns) if excess >= LEAST_STALL_NS else 0
        is_noted = bisect_left(known, block.step) < bisect_left(known, block.step + block.num_steps)
        if excess >= max(LEAST_STALL_NS, LEAST_STALL_STEPS * block.median_ns) and not is_noted:
            found[block.max_step] = Stall(block.max_step, round(excess), why)
    return tuple(found[step] for step in sorted(found))


def waited_ns(run: Run, ns: int) -> int:
    """Return how long training waited for a CPU core between the two readings around a moment; 0 if unknown.

    Other processes had the cores: that is their doing, and the machine's, but no stall of the training.
    """
    waits = run.tracks.get("core_wait_share")
    at = bisect_left(waits.ns, ns) if waits is not None else 0
    if waits is None or not 0 < at < len(waits.ns):
        return 0
    return round(waits.values[at] * (waits.ns[at] - waits.ns[at - 1]))


def _excess(block: TimeBlock) -> tuple[float, str]:
    """Return by how much the longest step of a block exceeds the others without what has a name, and why.

    What is known of single steps in the block is their longest; of everything else there are only sums.
    """
    between = sum(block.host_ns.get(kind, 0) for kind in BETWEEN)
    excess = block.max_ns - block.median_ns - between
    data = block.host_ns.get(DATA, 0)
    return excess, DATA if data > excess / 2 else "stall"
