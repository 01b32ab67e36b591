"""The section `run`: the whole run as series over its steps, with changes, windows and events marked."""

from collections.abc import Iterator, Sequence
from typing import Any

from stepscope.analysis.run.drift import step_changes, step_series
from stepscope.analysis.run.series import RESTART, Run, TimeBlock
from stepscope.analysis.time.loop_time import BETWEEN, DATA, OTHER, TRAINING
from stepscope.document.model import Facts, Lines, Mark, Part, Series, Table, Text
from stepscope.document.tables import MOST_POINTS, columns_of, thinned, thinning
from stepscope.document.whole_run import WholeRun, goodput_bars
from stepscope.errors import Unavailable
from stepscope.formatting import cell, percent, plural
from stepscope.session import Session

_MOST_MARKS = 8
_NO_MARK = ("end", "dropped")
_MOST_AREAS = 400  # stretches whose time is split: areas hide single blocks anyway
_CHARTS = (
    ("run_memory", "memory", "memory_bytes",
     {"allocated": "allocated_bytes", "reserved": "reserved_bytes", "resident on the host": "resident_bytes"}),
    ("run_clock", "SM clock of the GPU", "clock_mhz", {"SM clock": "sm_clock_mhz"}),
    ("run_power", "power of the GPU", "power_watts", {"power": "power_watts"}),
    ("run_busy", "how busy the GPU was", "busy_share", {"kernel running": "gpu_busy_share"}),
    ("run_core_wait", "waiting for a CPU core", "core_wait_share", {"waiting": "core_wait_share"}),
)  # fmt: skip


def parts(session: Session, price_per_hour: float | None = None) -> tuple[Part, ...]:
    """Return goodput, step time, throughput, loss, memory and counters of the run, its changes and its events."""
    if not session.is_recording:
        raise Unavailable("a trace has only its own steps: `stepscope run train.py` records the whole run")
    run = session.run
    if run.began is None or not run.blocks:
        raise Unavailable("the recording has no history of its run: record it again with this version of Stepscope")
    whole = WholeRun.of(session, price_per_hour)
    marks = tuple(_marks(run))
    found: list[Part] = [Facts((*whole.facts(), *whole.problems))]
    found += [goodput_bars(whole.job or whole.goodput)] if whole.goodput is not None else []
    found += [*_step_time(run, marks), *_areas(run, marks), *_throughput(run, marks), *_loss(run, marks)]
    found += _tracks(run, marks)
    return (*found, *_changes(run), *_events(run), _blocks(run))


def _marks(run: Run) -> Iterator[Mark]:
    for change, step, _ in step_changes(run):
        yield Mark(step, f"{'+' if change.share > 0 else '−'}{percent(abs(change.share))}")
    always = [each for each in run.happenings if each.kind in (RESTART, "window")]
    others = [each for each in run.happenings if each not in always and each.kind not in (*_NO_MARK, *BETWEEN)]
    others = sorted(others, key=lambda each: -each.ns)[: max(0, _MOST_MARKS - len(always))]
    for each in sorted((*always[:_MOST_MARKS], *others)):
        yield Mark(each.step, each.kind)


def _step_time(run: Run, marks: tuple[Mark, ...]) -> Iterator[Part]:
    blocks = run.blocks
    steps = [block.step for block in blocks]
    series = [thinned("typical", steps, [block.median_ns for block in blocks])]
    num = len(blocks)
    if "core_wait_share" in run.tracks:
        first, values = step_series(run)
        series.append(thinned("without waiting for a CPU core", first, values))
        num += len(values)
    caption = f"Median step of {plural(len(blocks), 'block')} of steps.{thinning(series, num)}"
    longest = thinned("longest", steps, [block.max_ns for block in blocks])
    yield Lines("run_step_time", "step time", "step", "step_time_ns", tuple(series), marks, caption=caption)
    worst = max(blocks, key=lambda block: block.max_ns)
    caption = f"The longest step of each block: up to {cell('time_ns', worst.max_ns)}, at {run.when(worst.max_step)}."
    is_log = worst.max_ns > 5 * min(block.max_ns for block in blocks)
    id, title = "run_longest", "longest steps"
    yield Lines(id, title, "step", "step_time_ns", (longest,), marks, "dots", log_y=is_log, caption=caption)


def _areas(run: Run, marks: tuple[Mark, ...]) -> Iterator[Lines]:
    """Yield the time per step by what takes it, averaged over stretches."""
    length = -(-len(run.blocks) // _MOST_AREAS)
    groups = [run.blocks[i : i + length] for i in range(0, len(run.blocks), length)]
    names = [DATA, *dict.fromkeys(BETWEEN.values())]
    rows = [_split(group) for group in groups]
    shown = [name for name in (TRAINING, *dict.fromkeys(names), OTHER) if any(row.get(name) for row in rows)]
    steps = [float(group[0].step) for group in groups]
    series = tuple(Series(name, [row.get(name, 0.0) for row in rows], steps) for name in shown)
    if len(groups) > 1:
        title, y = "time per step, with what lies between steps", "time_per_step_ns"
        yield Lines("run_time", title, "step", y, series, marks, "areas", caption="Averages of stretches of the run.")


def _split(blocks: Sequence[TimeBlock]) -> dict[str, float]:
    found: dict[str, float] = {}
    num = sum(block.num_steps for block in blocks)
    for block in blocks:
        for kind, ns in block.host_ns.items():
            name = DATA if kind == DATA else BETWEEN.get(kind, TRAINING)
            found[name] = found.get(name, 0.0) + ns / num
    return found


def _throughput(run: Run, marks: tuple[Mark, ...]) -> Iterator[Lines]:
    unit = "tokens" if any(block.num_tokens for block in run.blocks) else "samples"
    known = [block for block in run.blocks if getattr(block, f"num_{unit}")]
    if known:
        values = [getattr(block, f"num_{unit}") / block.wall_ns * 1e9 for block in known]
        series = thinned(unit, [block.step for block in known], values)
        caption = f"{unit.capitalize()} of this rank per second of wall-clock time.{thinning([series], len(known))}"
        yield Lines("run_throughput", "throughput", "step", f"{unit}_per_s", (series,), marks, caption=caption)


def _loss(run: Run, marks: tuple[Mark, ...]) -> Iterator[Lines]:
    if (track := run.tracks.get("loss")) is None:
        return
    finite = [(step, y) for step, y in zip(track.steps, track.values) if abs(y) < float("inf")]
    if len(finite) > 1:
        series = thinned("loss", *zip(*finite))
        left = len(track.values) - len(finite)
        caption = f"Sampled, as passed to backward.{thinning([series], len(finite))}"
        caption += f" {plural(left, 'loss is', 'losses are')} not finite." if left else ""
        yield Lines("run_loss", "loss", "step", "loss", (series,), marks, caption=caption)


def _tracks(run: Run, marks: tuple[Mark, ...]) -> Iterator[Lines]:
    for id, title, y, names in _CHARTS:
        known = {name: run.tracks[track] for name, track in names.items() if track in run.tracks}
        series = tuple(thinned(name, track.steps, track.values) for name, track in known.items())
        if series and any(any(one.y) for one in series):
            caption = thinning(series, sum(len(track.values) for track in known.values())).strip()
            yield Lines(id, title, "step", y, series, marks, caption=caption)


def _changes(run: Run) -> Iterator[Part]:
    found = step_changes(run)
    if not found:
        yield Text("The step time does not change in the course of the run by more than its noise and 5 %.")
        return
    rows: list[dict[str, Any]] = [
        {"step": step, "time_of_day": run.clock_text(run.ns_of(step)), "until_step": end - 1, "kind": change.kind,
         "before_ns": change.before, "after_ns": change.after, "change_share": change.share}
        for change, step, end in found
    ]  # fmt: skip
    columns = columns_of(rows, " ".join(rows[0]))
    yield Table("run_changes", "changes of the step time", columns, note="drift: the level at its end")


def _events(run: Run) -> Iterator[Table]:
    if run.happenings:
        columns = columns_of(
            sorted(run.happenings, key=lambda each: -each.ns),
            "event:kind step time_of_day duration_ns:ns place",
            time_of_day=lambda each: run.clock_text(each.start_ns),
        )
        yield Table("run_events", "events, the longest first", columns)


def _blocks(run: Run) -> Table:
    names = (
        "step num_steps window time_ns:start_ns wall_ns median_ns max_ns max_step num_tokens num_samples num_compiles"
    )
    columns = columns_of(run.blocks[-MOST_POINTS:], names)
    note = "the last of them" if len(run.blocks) > MOST_POINTS else "time: since the start"
    return Table("run_blocks", "blocks of steps", columns, num_shown=0, note=note, page_only=True)
