"""The training loop as a whole: the wall-clock time of a step, and what lies between steps."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from statistics import fmean, median, pvariance

from stepscope.analysis.time.after_trace import launch_cost_ns, without_launch_cost
from stepscope.analysis.time.pace import FEWEST, MEANS_DIFFER, change_of_pace, num_unsettled
from stepscope.analysis.time.statistics import quantile
from stepscope.formatting import duration, plural
from stepscope.trace.recording import Recording, StepSample

TRAINING = "training"
DATA = "data"
WARMUP = "warm-up"
MEASURING = "measuring"
OTHER = "other"
BETWEEN = {
    "loader_start": DATA,
    "evaluation": "evaluation",
    "rollout": "rollout",
    "checkpoint": "checkpoint",
    "logging": "logging",
    "garbage_collection": "garbage collection",
}
"""What a loop does between steps, as recorded, and the row that shows it."""
ROWS = (TRAINING, *dict.fromkeys(BETWEEN.values()), WARMUP, MEASURING, OTHER)
GAPS = ("before_forward", "before_backward", "other")  # between the passes of a step
LEAST_GAP = 0.05  # of the passes; smaller gaps are part of training, however much they differ
UNTIMED = "warmup"
WITHOUT_PROBES = (UNTIMED, "clean", "free")  # windows
COLLECTION = "garbage_collection"
_NO_WAIT = 0.01  # of the time
_MOST_LEAD, _LEAST_OF_USUAL = 4, 0.9  # steps by which a host may be ahead, and the share of others that they take
FENCE = 7.0  # distances from the first quartile to the median: Tukey's outer fence of a symmetric distribution
LEAST_EXCESS = 1.5  # of the median
NOT_DRAINED = "up to {} batches had been prefetched: more steps would show whether the DataLoader keeps up"


@dataclass(frozen=True)
class LoopRow:
    """An owner of a part of the loop's time."""

    name: str
    """`training`, `data`, `evaluation`, `rollout`, `checkpoint`, `logging`, `garbage collection`, `warm-up` (what the
    first steps took longer), `measuring` (Stepscope's own work and what probed steps took longer), `other` (what
    slow steps took longer than the rest, for no known reason)."""
    ns: int
    share: float
    num: int  # how many times; 0 for what is part of a step
    places: tuple[str, ...]  # the lines of the script that did it, most often first


@dataclass(frozen=True)
class LoopTime:
    """Where the wall-clock time of a training loop goes."""

    wall_ns: int  # from the beginning of the first step, or what led to it, to the end of the last
    num_steps: int
    rows: tuple[LoopRow, ...]  # add up to `wall_ns`
    goodput: float  # the share of training in `wall_ns` without `measuring`
    step_ns: (
        float  # wall-clock time per step, with its part of what lies between steps; without warm-up and measuring
    )
    num_measured: int  # the undisturbed steps behind `step_ns`
    between_ns: Mapping[str, float]  # the part of `step_ns` that lies between steps, and not in most of them, by row
    caveat: str | None  # why `step_ns` may not hold for a longer run; null if nothing speaks against it
    num_left_out: int = 0  # earlier undisturbed steps that took clearly longer or shorter, and are not measured
    launch_cost_ns: int = 0  # how much longer a free step was because of the trace before it; part of `measuring`
    in_step_ns: Mapping[str, float] = field(default_factory=dict)
    """What most steps have of the work between steps, by row: a part of them, and of a typical step."""

    def is_faster_than(self, timed_ns: float) -> bool:
        """Return whether steps took clearly less than those that were timed did on average."""
        return self.step_ns < (1 - MEANS_DIFFER) * timed_ns


def loop_time(recording: Recording, on_device: bool) -> LoopTime | None:
    """Return the time of a recorded loop; None if no step ended.

    `on_device` takes the clean steps by the GPU's clock.
    """
    cost_ns = launch_cost_ns(recording, _passes_ns)
    recording = _without_own_collections(without_launch_cost(recording, cost_ns))
    undisturbed = _undisturbed(recording)
    if not undisturbed:
        return None
    measured = _measured(recording, undisturbed, on_device)
    in_most = _in_most(undisturbed)
    settled = [_step_only_ns(sample, on_device, in_most) for sample in measured]
    num_prefetched = _num_prefetched(recording)
    is_drained = not num_prefetched or bool(_drained(undisturbed, num_prefetched))
    times = _other_times(measured, undisturbed, on_device, in_most)
    between = dict.fromkeys(BETWEEN.values(), 0.0)
    unknown = []
    in_step: Counter[str] = Counter()
    for kind, row in BETWEEN.items():
        if kind in in_most:
            in_step[row] += round(fmean(sample.host_ns.get(kind, 0) for sample in measured))
            continue
        ns, is_known = _per_step(recording, kind)
        between[row] += ns
        unknown += [row] if not is_known else []
    rows, wall_ns = _rows(recording, undisturbed)
    measuring = next((row.ns for row in rows if row.name == MEASURING), 0)
    training = next(row.ns for row in rows if row.name == TRAINING)
    return LoopTime(
        wall_ns=wall_ns,
        num_steps=len(recording.samples),
        rows=rows,
        goodput=training / max(1, wall_ns - measuring),
        step_ns=fmean(settled) + sum(between.values()),
        num_measured=len(settled),
        between_ns={row: ns for row, ns in between.items() if ns},
        caveat=_caveat(_at_mean_work(measured, settled), unknown)
        or _other_steps(measured, undisturbed, None if num_prefetched else times)  # ready batches came sooner
        or (None if is_drained else NOT_DRAINED.format(num_prefetched)),
        num_left_out=0 if times is None else len(undisturbed) - len(measured),
        launch_cost_ns=cost_ns,
        in_step_ns=dict(in_step),
    )


def _without_own_collections(recording: Recording) -> Recording:
    """Return a recording whose probed steps collect no garbage: what probes allocate made them, in passes that count
    as measuring."""
    samples = []
    for sample in recording.samples:
        own_ns = sample.host_ns.get(COLLECTION, 0) if sample.window not in WITHOUT_PROBES else 0
        if own_ns:
            times = {**sample.host_ns, COLLECTION: 0, "unattributed": sample.host_ns.get("unattributed", 0) + own_ns}
            sample = replace(sample, host_ns=times, num_times={**sample.num_times, COLLECTION: 0})
        samples.append(sample)
    return replace(recording, samples=tuple(samples))


def beside_ns(loop: LoopTime | None, typical_ns: float) -> tuple[float, float]:
    """Return what lies between steps, and what slow steps take longer than a typical one, per step."""
    between_ns = 0.0 if loop is None else sum(loop.between_ns.values())
    return between_ns, 0.0 if loop is None else max(0.0, loop.step_ns - between_ns - typical_ns)


def periods(recording: Recording) -> dict[str, float]:
    """Return how many steps lie between two evaluations, rollouts or checkpoints; of what happened at least twice."""
    found = {}
    for kind in ("evaluation", "rollout", "checkpoint"):
        steps = [sample.step for sample in recording.samples if sample.host_ns.get(kind)]
        if len(steps) > 1:
            found[BETWEEN[kind]] = (steps[-1] - steps[0]) / (len(steps) - 1)
    return found


def measured_steps(recording: Recording, on_device: bool) -> Sequence[StepSample]:
    """Return the steps that tell how long one takes in a long run."""
    recording = without_launch_cost(recording, launch_cost_ns(recording, _passes_ns))
    return _measured(recording, _undisturbed(recording), on_device)


def _measured(recording: Recording, undisturbed: Sequence[StepSample], on_device: bool) -> Sequence[StepSample]:
    has_ranks = (recording.facts.get("environment") or {}).get("world_size", 1) > 1
    # Ranks wait for the one that is last to prepare a window.
    samples = _drained(undisturbed, max(_num_prefetched(recording), int(has_ranks))) or undisturbed
    if not has_ranks and sum(s.host_ns.get(DATA, 0) for s in samples) < _NO_WAIT * sum(s.wall_ns for s in samples):
        samples = undisturbed  # the workers keep up: steps that use up what is ready are like the others
    samples = _without_lead(samples) if on_device else samples
    in_most = _in_most(undisturbed)
    times = _at_mean_work(samples, [_step_only_ns(sample, on_device, in_most) for sample in samples])
    first = num_unsettled(times)
    # Steps that become faster use up batches that workers made during slow ones: they are not the pace alone.
    is_refilled = _num_prefetched(recording) and fmean(times[first:]) < fmean(times)
    return samples if is_refilled else samples[first:]


def _without_lead(samples: Sequence[StepSample]) -> Sequence[StepSample]:
    """Return steps without the first free ones, in which the host gets ahead of a GPU that probes have emptied."""
    free = [sample for sample in samples if sample.window == "free"]
    if len(free) < FEWEST:
        return samples
    least_ns = _LEAST_OF_USUAL * median(map(_passes_ns, free))
    lead = set(range(free[0].step, free[0].step + _MOST_LEAD))
    short = takewhile(lambda sample: sample.step in lead and _passes_ns(sample) < least_ns, free)
    left_out = {sample.step for sample in short}
    return [sample for sample in samples if sample.step not in left_out]


def _other_steps(
    measured: Sequence[StepSample], undisturbed: Sequence[StepSample], times: float | None
) -> str | None:
    """Return a caveat if the measured steps have other batches than all of them, or if those before them took `times`
    as long."""
    num = plural(len(measured), "step")
    work, all_work = (fmean([s.num_tokens or s.num_samples or 0 for s in some]) for some in (measured, undisturbed))
    if abs(work - all_work) > MEANS_DIFFER * all_work:
        return f"batches changed: only the last {num} are measured"
    if times is None:
        return None
    # Measuring begins at or after the change: which step that was is for drift to say.
    return f"earlier steps took {times:.2f} times as long on average: only the last {num} are measured"


def _other_times(
    measured: Sequence[StepSample], undisturbed: Sequence[StepSample], on_device: bool, in_most: frozenset[str]
) -> float | None:
    """Return how many times as long the steps before the measured ones took on average; None if they took as long."""
    earlier = [sample for sample in undisturbed if sample.step < measured[0].step]
    if len(earlier) < FEWEST:
        return None
    before, after = (fmean([_step_only_ns(s, on_device, in_most) for s in some]) for some in (earlier, measured))
    return before / after if abs(before - after) > MEANS_DIFFER * after else None


def _undisturbed(recording: Recording) -> list[StepSample]:
    samples = recording.samples
    found = [s for s in samples if s.window in ("clean", "free") and not s.num_compiles]
    return found or list(samples[1:] or samples)  # a run of a few steps has only warm-up


def _num_prefetched(recording: Recording) -> int:
    return (recording.facts.get("steps") or {}).get("num_prefetched") or 0


def _passes_ns(sample: StepSample) -> int:
    """Return a step's time without its wait for data and what lies between steps."""
    return sample.wall_ns - _between_ns(sample.host_ns) - sample.host_ns.get(DATA, 0)


def _at_mean_work(samples: Sequence[StepSample], times: Sequence[int]) -> Sequence[float]:
    """Return the times as they would be if all steps had the same work: batches may grow."""
    work = [sample.num_tokens or sample.num_samples or 0 for sample in samples]
    if not all(work):
        return times
    mean = fmean(work)
    return [ns * mean / num for ns, num in zip(times, work)]


def _drained(samples: Sequence[StepSample], num_first: int) -> Sequence[StepSample]:
    """Return the steps without the first of each window, as they would be in a long run; empty if there are too few.

    While a window is prepared or slows steps down, workers fill their queue: so many batches come without a wait, and
    those that are made while they are used up.
    """
    by_window = [[s for s in samples if s.window == window] for window in ("clean", "free")]
    found = [s for window in by_window for s in window[num_first:]]
    if num_first > 1 and len(found) >= FEWEST:
        fast = median(s.wall_ns for window in by_window for s in window[:num_first])
        slow = fmean(s.wall_ns for s in found[len(found) // 2 :])
        if slow > LEAST_EXCESS * fast:  # the workers do not keep up
            num_first = round(num_first * slow / (slow - fast))
            found = [s for window in by_window for s in window[num_first:]] if num_first < len(samples) else []
    return found if len(found) >= FEWEST or not num_first else []


def _between_ns(times: Mapping[str, int], in_most: frozenset[str] = frozenset()) -> int:
    return sum(ns for name, ns in times.items() if name in BETWEEN and name not in in_most)


def _in_most(undisturbed: Sequence[StepSample]) -> frozenset[str]:
    """Return the kinds of work between steps that most steps have, such as the targets of an off-policy learner."""
    num = Counter(kind for sample in undisturbed for kind, ns in sample.host_ns.items() if ns and kind in BETWEEN)
    return frozenset(kind for kind, times in num.items() if 2 * times > len(undisturbed))


def _step_only_ns(sample: StepSample, on_device: bool, in_most: frozenset[str]) -> int:
    """Return a step's time without what lies between steps, on its clock; the host may be a step ahead of the GPU."""
    if on_device and sample.device_ns is not None:
        return sum(sample.device_ns.values()) - _between_ns(sample.device_ns, in_most)
    return sample.wall_ns - _between_ns(sample.host_ns, in_most)


def _per_step(recording: Recording, kind: str) -> tuple[float, bool]:
    """Return what a kind of work between steps takes per step, and whether that is known.

    If the script ran to its end, everything it did counts. Else the distance from the first time to the last tells
    how often it happens; of a single time, the steps before it, or those after it if they are more. What happens only
    before the first step is part of starting up. A DataLoader or a rollout after the last step feeds none, and what
    comes once after several epochs is the end of the run, however long that is.
    """
    num_steps = len(recording.samples)
    # Compiling collects garbage for seconds, and that happens once.
    samples = [sample for sample in recording.samples if not sample.num_compiles] or recording.samples
    times = Counter({sample.step: sample.host_ns[kind] for sample in samples if sample.host_ns.get(kind)})
    stopped_early = (recording.facts.get("command") or {}).get("exit_after")
    is_whole = recording.status == "finished" and not stopped_early
    tail = recording.tail if is_whole and kind not in ("loader_start", "rollout") else None
    for step, aside in ((0, recording.lead), (num_steps, tail)):
        if aside is not None and aside.host_ns.get(kind):
            times[step] += aside.host_ns[kind]
    if not times:
        return 0.0, True
    first, last = min(times), max(times)
    if first == last:
        if not first:
            return 0.0, is_whole or kind == "loader_start"
        if first == num_steps and _num_epochs(recording) > 1:
            return 0.0, True
        return times[first] / (num_steps if is_whole else max(first, num_steps - first)), True
    later_ns = times.total() - times[first]
    if is_whole:
        # The first time may open files. It may also be a short trial, as trainers make one. One other time does not
        # show how long the usual ones are.
        usual_ns = later_ns / (len(times) - 1) if len(times) > 2 else times[first]
        return (later_ns + min(times[first], usual_ns)) / num_steps, True
    return later_ns / (last - first), True


def _num_epochs(recording: Recording) -> int:
    """Return how many times a DataLoader has started for training."""
    times = [sample.host_ns for sample in recording.samples]
    times += [recording.lead.host_ns] if recording.lead is not None else []
    return sum(bool(each.get("loader_start")) for each in times)


def _rows(recording: Recording, undisturbed: Sequence[StepSample]) -> tuple[tuple[LoopRow, ...], int]:
    ns: Counter[str] = Counter()
    num: Counter[str] = Counter()
    # A step of free running is not split: its gaps are part of its passes.
    usual = {is_free: _usual_of(undisturbed, is_free) for is_free in (False, True)}
    end_ns = None
    for sample in recording.samples:
        middle, limit, usual_gap, gap_limit = usual[sample.window == "free"]
        passes, gap = _pass_ns(sample.host_ns), _gap_ns(sample.host_ns)
        excess = WARMUP if sample.window == UNTIMED else OTHER if sample.window in ("clean", "free") else MEASURING
        # A compiling step is a warm-up whenever it comes.
        excess = WARMUP if sample.num_compiles and excess == OTHER else excess
        regular = passes if excess == OTHER and passes <= limit else min(passes, middle)
        regular_gap = min(gap, usual_gap) if gap > gap_limit else gap
        ns[TRAINING] += regular + regular_gap
        ns[excess] += passes - regular
        ns[WARMUP if sample is recording.samples[0] else OTHER] += gap - regular_gap
        if end_ns is not None:
            ns[MEASURING] += max(0, sample.start_ns - end_ns)
        end_ns = sample.end_ns
        _add(sample.host_ns, sample.num_times, ns, num)
    for aside in (recording.lead, recording.tail):
        if aside is not None:
            _add(aside.host_ns, aside.num_times, ns, num)
    wall_ns = sum(ns.values())
    places = recording.facts.get("between") or {}
    rows = []
    for name in ROWS:
        if ns[name] or name == TRAINING:
            where = Counter({place: n for kind, row in BETWEEN.items() if row == name
                             for place, n in places.get(kind, {}).items()})  # fmt: skip
            found = tuple(place for place, _ in where.most_common())
            rows.append(LoopRow(name, ns[name], ns[name] / max(1, wall_ns), num[name], found))
    return tuple(rows), wall_ns


def _usual_of(undisturbed: Sequence[StepSample], is_free: bool) -> tuple[int, int, int, int]:
    """Return the usual passes and gaps of such steps, each with the limit above which it is unusual."""
    alike = [sample for sample in undisturbed if (sample.window == "free") == is_free] or undisturbed
    middle, limit = _usual([_pass_ns(sample.host_ns) for sample in alike])
    usual_gap, gap_limit = _usual([_gap_ns(sample.host_ns) for sample in alike])
    return middle, limit, usual_gap, max(gap_limit, round(LEAST_GAP * middle))


def _usual(times: Sequence[int]) -> tuple[int, int]:
    """Return the median, and the limit above which a time is unusual."""
    ordered = sorted(map(float, times))
    middle = median(ordered)
    # By the spread below the median: as many as half of the steps may be slow.
    fence = middle + FENCE * (middle - quantile(ordered, 0.25))
    return round(middle), round(max(fence, LEAST_EXCESS * middle))


def _add(times: Mapping[str, int], num_times: Mapping[str, int], ns: Counter[str], num: Counter[str]) -> None:
    for counted, into in ((times, ns), (num_times, num)):
        for kind, value in counted.items():
            if kind in BETWEEN:
                into[BETWEEN[kind]] += value
    ns[DATA] += times.get("data", 0)


def _pass_ns(times: Mapping[str, int]) -> int:
    return sum(ns for name, ns in times.items() if name not in BETWEEN and name not in (DATA, *GAPS))


def _gap_ns(times: Mapping[str, int]) -> int:
    return sum(times.get(name, 0) for name in GAPS)


def _caveat(settled: Sequence[float], unknown: Sequence[str]) -> str | None:
    if len(settled) < FEWEST:
        return f"only {plural(len(settled), 'step')} to go by"
    if change_of_pace(settled) is not None:
        return "step times were still changing"
    mean = fmean(settled)
    if (pvariance(settled) / len(settled)) ** 0.5 > MEANS_DIFFER * mean:
        fast, slow, average, usual = (duration(ns, 3) for ns in (min(settled), max(settled), mean, median(settled)))
        if mean <= (1 + MEANS_DIFFER) * median(settled):
            return f"steps take from {fast} to {slow}"
        return f"a few slow steps, up to {slow}, make the average {average}; most take {usual}"
    if unknown:
        return f"{' and '.join(unknown)} happened only before the first step: how often is unknown"
    return None
