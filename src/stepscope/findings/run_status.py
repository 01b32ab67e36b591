"""A run that goes on, in figures: how fast it is now and was before, where its time goes, and what is wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepscope.analysis.run.bins import levels, over_time
from stepscope.analysis.run.goodput import Goodput, goodput
from stepscope.analysis.run.series import Run, TimeBlock, summed
from stepscope.analysis.time.loop_time import MEASURING, TRAINING
from stepscope.display import Shown
from stepscope.findings.over_time import findings_over_time
from stepscope.findings.rank_warnings import RunWarning, rank_warnings
from stepscope.session.run import run_of
from stepscope.session.watch import RECENT_NS, Rank, State, Watch
from stepscope.trace.history_file import Block

NUM_SPANS = 240  # values of each series
RECENT_S = 300.0  # what `parts` are of
PACE_S = 3600.0  # what the time left is estimated from
OUTSIDE = "outside steps"
MOST_EVENTS = 5
_TRACKS = ("loss", "reserved_bytes", "resident_bytes", "power_watts", "sm_clock_mhz")


@dataclass(frozen=True)
class Part:
    """A part of the last minutes."""

    name: str  # a phase, what lies between steps, or `outside steps`
    ns: int
    share: float


@dataclass(frozen=True)
class RankStatus:
    """One rank, now or when it last wrote."""

    name: str
    state: State
    num_steps: int
    step_ns: float | None  # wall-clock time per step
    data_share: float | None  # of its steps, in the last minute
    memory_bytes: int | None  # reserved on the GPU; without one, resident
    total_bytes: int | None  # of the GPU
    gpu_busy_share: float | None
    power_watts: float | None
    sm_clock_mhz: float | None
    silent_s: float  # since it last wrote
    is_alive: bool | None  # whether its process runs; None if it is on another machine
    host: str | None
    pid: int | None


@dataclass(frozen=True)
class Event:
    """Something that took long enough to be noted by itself."""

    kind: str  # as in history.jsonl (docs/recording.md)
    step: int
    seconds: float
    clock: str  # the local time of day when it began
    place: str | None  # the line of the script


@dataclass(frozen=True, repr=False)
class RunStatus(Shown):
    """A run at one moment. Figures are those of the first rank unless they say otherwise; None is unknown."""

    folder: Path
    script: str
    state: State
    """`starting`: no step has ended; `silent`: no step for longer than usual; `died`: the process is gone without a
    word; `finished` and `failed`: the recording has ended."""
    elapsed_s: float
    """Since the first process began."""
    num_steps: int
    num_planned: int | None
    """How many steps the run will have, if the trainer or you said so."""
    left_s: float | None
    """Time left at the pace of the last hour."""
    num_restarts: int
    step_ns: float | None
    """Wall-clock time per step in the last minute."""
    unit: str
    """Of the throughput: `tokens`, `samples` or `steps`."""
    per_s: float | None
    """Throughput of all ranks together in the last minute, without those that have ended."""
    loss: float | None
    loss_step: int | None
    goodput: float | None
    """The share of training in the time since the run began."""
    lost_ns: Mapping[str, int]
    """What the rest went to: `start-up`, `data`, `checkpoint` …, the largest first."""
    parts: tuple[Part, ...]
    """Where the last minutes went; adds up to all of it."""
    parts_s: float
    """How long that is."""
    ranks: tuple[RankStatus, ...]
    events: tuple[Event, ...]
    """The last ones."""
    warnings: tuple[RunWarning, ...]
    span_s: float
    """How long each series is."""
    series: Mapping[str, Sequence[float | None]]
    """By name, from the first step to the last: `per_s`, `step_ns`, `loss`, `memory_bytes`, `power_watts`,
    `sm_clock_mhz`."""

    @property
    def is_over(self) -> bool:
        """Whether all ranks have ended."""
        return all(rank.state in ("died", "finished", "failed") for rank in self.ranks)

    @property
    def leading(self) -> RankStatus:
        """The rank whose figures these are: the first that trains."""
        return next((rank for rank in self.ranks if rank.num_steps), self.ranks[0])

    def to_json(self) -> dict[str, Any]:
        """Return the object that `stepscope watch --json` prints (docs/watch.md); it has no series."""
        fields = {**asdict(self), "folder": str(self.folder)}
        del fields["series"], fields["span_s"]
        return {"schema_version": 1, **{name: _finite(value) for name, value in fields.items()}}


def _finite(value: Any) -> Any:
    """Return JSON's stand-in for a loss that is NaN or infinite: its name."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class WatchedRun:
    """Follows a run: `status()` reads what is new. What takes long is computed only if the history has grown."""

    def __init__(self, folder: Path, num_planned: int | None = None, watch: Watch | None = None) -> None:
        self._watch = watch or Watch(folder)
        self._num_planned = num_planned
        self._seen: object = None  # what the run was made from
        self._run = Run(())
        self._goodput: Goodput | None = None
        self._found: tuple[RunWarning, ...] = ()

    def glance(self) -> RunStatus:
        """Return the run now, sooner than `status`: of a part of its blocks, and without goodput and rules."""
        ranks = self._watch.glance()
        run = run_of(None, leading(ranks).history)
        return status_of(self._watch.folder, ranks, run, None, tuple(rank_warnings(ranks)), self._num_planned)

    def status(self) -> RunStatus:
        """Return the run now; RecordingError if its folder was deleted."""
        ranks = self._watch.update()
        first = leading(ranks).history
        key = first.blocks[-1:], first.events[-1:]
        if self._seen != key:
            self._seen, self._run = key, run_of(None, first)
            self._goodput = goodput(self._run)
            numbers: Counter[str] = Counter()
            found = []
            for each in findings_over_time(self._run):
                numbers[each.id] += 1
                found.append(RunWarning(each.id, str(numbers[each.id]), each.sentence))
            self._found = tuple(found)
        warnings = (*rank_warnings(ranks), *self._found)
        return status_of(self._watch.folder, ranks, self._run, self._goodput, warnings, self._num_planned)


def leading(ranks: Sequence[Rank]) -> Rank:
    """Return the rank whose figures are shown: the first that trains, as a launcher may come before it."""
    return next((rank for rank in ranks if rank.history.blocks), ranks[0])


def status_of(
    folder: Path,
    ranks: Sequence[Rank],
    run: Run,
    goodput: Goodput | None,
    warnings: tuple[RunWarning, ...],
    num_planned: int | None,
) -> RunStatus:
    """Return the status of a run: `ranks` as they are now, `run` and `goodput` of the leading one."""
    first = leading(ranks)
    unit, _ = _work(first)
    working = [rank for rank in ranks if first.is_over or not rank.is_over]
    rates = [rate for rank in working if (rate := _rate(rank, unit)) is not None]
    losses = ((block.loss, block.loss_step) for block in reversed(first.history.blocks) if block.loss is not None)
    loss, loss_step = next(losses, (None, None))
    parts, parts_s = _parts(run)
    num_steps = first.num_steps
    if first.history.blocks:  # steps count from 0 in every process
        last = first.history.blocks[-1]
        num_steps += run.last_step + 1 - last.step - last.num_steps
    planned, left = _left(first, run, num_steps, num_planned)
    command = first.facts.get("command") or {}
    return RunStatus(
        folder=folder,
        script=" ".join(map(str, command.get("argv") or ())),
        state=_state(ranks),
        elapsed_s=run.end_ns / 1e9,
        num_steps=num_steps,
        num_planned=planned,
        left_s=left,
        num_restarts=max(0, len(first.history.processes) - 1),
        step_ns=_step_ns(first),
        unit=unit,
        per_s=(rates[0] if unit == "steps" else sum(rates)) if rates else None,
        loss=loss,
        loss_step=loss_step,
        goodput=goodput.share if goodput else None,
        lost_ns=_lost(goodput),
        parts=parts,
        parts_s=parts_s,
        ranks=tuple(map(_rank_status, ranks)),
        events=tuple(
            Event(each.kind, each.step, each.ns / 1e9, run.clock_text(each.start_ns), each.place)
            for each in [each for each in run.happenings if each.kind != "end"][-MOST_EVENTS:]
        ),
        warnings=warnings,
        span_s=(run.blocks[-1].end_ns - run.blocks[0].start_ns) / 1e9 if run.blocks else 0.0,
        series=_series(run, unit),
    )


def _state(ranks: Sequence[Rank]) -> State:
    """Return the state of the run: of the rank that goes on if there is one, else of the one that ended worst."""
    order: tuple[State, ...] = ("running", "silent", "starting", "failed", "died", "finished")
    return next(state for state in order if any(rank.state == state for rank in ranks))


def _step_ns(rank: Rank) -> float | None:
    """Return the wall-clock time per step, by the exact steps of the last minute, else by the last block."""
    blocks, steps = rank.history.blocks, rank.steps
    if len(steps) > 1 and (not blocks or steps[-1].step + 1 >= blocks[-1].step + blocks[-1].num_steps):
        return (steps[-1].end_ns - steps[0].start_ns) / (steps[-1].step - steps[0].step + 1)
    recent = _last_minute(rank)
    return (recent[-1].end_ns - recent[0].start_ns) / sum(block.num_steps for block in recent) if recent else None


def _last_minute(rank: Rank) -> list[Block]:
    """Return the blocks of the last minute of a rank's last process, at least one if there is any."""
    found: list[Block] = []
    for block in reversed(rank.history.blocks):
        if found and (block.process != found[0].process or block.start_ns < found[0].end_ns - RECENT_NS):
            break
        found.append(block)
    return found[::-1]


def _work(rank: Rank) -> tuple[str, float]:
    """Return the unit of throughput, and how many of it a step has."""
    block = rank.history.blocks[-1] if rank.history.blocks else None
    for unit in ("tokens", "samples"):
        if block is not None and (num := getattr(block, f"num_{unit}")):
            return unit, num / block.num_steps
    return "steps", 1.0


def _rate(rank: Rank, unit: str) -> float | None:
    step_ns, (own_unit, num) = _step_ns(rank), _work(rank)
    return num / step_ns * 1e9 if step_ns and own_unit == unit else None


def _left(rank: Rank, run: Run, num_steps: int, typed: int | None) -> tuple[int | None, float | None]:
    """Return the planned number of steps, and the time left at the pace of the last hour."""
    own = None if rank.facts.get("triggered") else rank.facts.get("num_planned_steps")
    planned = typed or (own + num_steps - rank.num_steps if own else None)
    blocks = [block for block in run.blocks if block.end_ns > run.end_ns - PACE_S * 1e9]
    if planned is None or not blocks or rank.is_over:
        return planned, None
    num = sum(block.num_steps for block in blocks)
    pace_s = (blocks[-1].end_ns - blocks[0].start_ns) / num / 1e9
    return planned, max(0, planned - num_steps) * pace_s


def _lost(goodput: Goodput | None) -> dict[str, int]:
    rows = goodput.rows if goodput else {}
    lost = ((name, ns) for name, ns in rows.items() if name not in (TRAINING, MEASURING) and ns)
    return dict(sorted(lost, key=lambda row: -row[1]))


def _parts(run: Run) -> tuple[tuple[Part, ...], float]:
    """Return where the last minutes went, the largest part first, and how long they were."""
    blocks = [each for each in run.blocks if each.end_ns > run.end_ns - RECENT_S * 1e9] or run.blocks[-1:]
    if not blocks:
        return (), 0.0
    whole_ns = max(1, blocks[-1].end_ns - blocks[0].start_ns)
    sums = summed(block.host_ns for block in blocks)
    if (outside_ns := whole_ns - sum(sums.values())) > 0:
        sums[OUTSIDE] = outside_ns
    ordered = sorted(sums.items(), key=lambda item: -item[1])
    whole_ns = max(whole_ns, sum(sums.values()))
    return tuple(Part(name, ns, ns / whole_ns) for name, ns in ordered if ns), whole_ns / 1e9


def _series(run: Run, unit: str) -> dict[str, list[float | None]]:
    if not run.blocks:
        return {}
    num = min(NUM_SPANS, len(run.blocks))

    def per_s(blocks: Sequence[TimeBlock]) -> float:
        num: int = sum(getattr(block, f"num_{unit}") for block in blocks)
        return num / sum(block.wall_ns for block in blocks) * 1e9

    def step_ns(blocks: Sequence[TimeBlock]) -> float:
        return sum(block.wall_ns for block in blocks) / sum(block.num_steps for block in blocks)

    found = {"per_s": over_time(run.blocks, num, per_s), "step_ns": over_time(run.blocks, num, step_ns)}
    ends = run.blocks[0].start_ns, run.blocks[-1].end_ns
    for name in _TRACKS:
        if (track := run.tracks.get(name)) is not None:
            found[name] = levels(track, *ends, num)
    memory = found.pop("reserved_bytes", None), found.pop("resident_bytes", None)
    return found | ({"memory_bytes": memory[0] or memory[1] or []} if any(memory) else {})


def _rank_status(rank: Rank) -> RankStatus:
    block = rank.history.blocks[-1] if rank.history.blocks else None
    process = rank.history.processes[-1] if rank.history.processes else None
    gpu, recent = block.gpu if block else None, _last_minute(rank)
    whole_ns = sum(each.wall_ns for each in recent)
    memory = (block.reserved_bytes or block.resident_bytes) if block else None
    return RankStatus(
        name=rank.name,
        state=rank.state,
        num_steps=rank.num_steps,
        step_ns=_step_ns(rank),
        data_share=sum(each.host_ns.get("data", 0) for each in recent) / whole_ns if whole_ns else None,
        memory_bytes=memory,
        total_bytes=block.total_bytes if block else None,
        gpu_busy_share=gpu.busy_share if gpu else None,
        power_watts=gpu.power_watts if gpu else None,
        sm_clock_mhz=gpu.sm_clock_mhz if gpu else None,
        silent_s=rank.silent_s,
        is_alive=rank.is_alive,
        host=process.host if process else None,
        pid=process.pid if process else rank.facts.get("pid"),
    )
