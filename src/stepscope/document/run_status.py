"""A run that goes on, as `stepscope watch` shows it. Standard library only."""

from collections.abc import Iterator

from stepscope.analysis.time.loop_time import BETWEEN
from stepscope.document.model import Bars, Document, Fact, Facts, Notes, Part, Section, Series, Table, Trend, Trends
from stepscope.document.tables import columns_of, without_empty
from stepscope.findings.run_status import PACE_S, RankStatus, RunStatus
from stepscope.formatting import cell, count, duration, elapsed, plural, safe, significant, size, span, whole_percent

_PARTS = {
    "unattributed": "training step",
    "before_forward": "before forward",
    "before_backward": "before backward",
    "other": "rest of the loop",
    **BETWEEN,
}
_OVERDUE_S = 5.0
_MOST_PARTS, _MOST_LOST, _MOST_NOTES, _MOST_RANKS = 8, 4, 8, 8


def run_document(status: RunStatus) -> Document:
    """Return a run as it is now; every screen and page of `watch` is made from this."""
    parts: list[Part] = []
    if trends := tuple(_trends(status)):
        parts.append(Trends(trends, elapsed(status.span_s)))
    if status.warnings:
        more = len(status.warnings) - _MOST_NOTES
        texts = [warning.text for warning in status.warnings[:_MOST_NOTES]]
        parts.append(Notes((*texts, *([f"{plural(more, 'more warning')} in --json."] if more > 0 else []))))
    parts += [Facts(tuple(_facts(status)))]
    if status.parts:
        parts.append(_bars(status))
    if len(status.ranks) > 1:
        parts.append(_ranks(status))
    if status.events:
        parts.append(_events(status))
    return Document(safe(status.folder), verdict_of(status), (Section("run", "Run", tuple(parts)),))


def verdict_of(status: RunStatus) -> str:
    """Return the run in a sentence or two: a line of a log."""
    steps = f"{status.num_steps:,}" + (f" of {status.num_planned:,}" if status.num_planned else "")
    if not status.num_steps and status.state in ("starting", "running"):
        return "Waiting for the first step."
    after = f"after {elapsed(status.elapsed_s)} and {plural(status.num_steps, 'step')}"
    if status.state in ("finished", "failed", "died"):
        return f"The run {status.state} {after}{': its process is gone' if status.state == 'died' else ''}."
    if status.state == "silent":
        silent_s = min(rank.silent_s for rank in status.ranks)
        return f"No step has ended for {elapsed(silent_s)}. The last one was step {status.num_steps - 1:,}."
    pace = f", {throughput(status)}" if status.per_s else ""
    left = f" About {elapsed(status.left_s)} left." if status.left_s is not None else ""
    ago = f" The last step ended {_ago(status)}." if _ago(status) else ""
    return f"Step {steps}{pace}.{left}{ago}{_trouble(status)}"


def _ago(status: RunStatus) -> str:
    """Return when the last step ended if the next one is overdue, so that old figures are not taken for new ones."""
    silent_s = status.leading.silent_s
    return f"{elapsed(silent_s)} ago" if silent_s > max(_OVERDUE_S, 3e-9 * (status.step_ns or 0.0)) else ""


def _trouble(status: RunStatus) -> str:
    ranks = [rank for rank in status.ranks if rank.state not in ("running", "starting", "finished")]
    if len(ranks) > 1:
        return f" {len(ranks)} of {len(status.ranks)} ranks do not go on."
    texts = {"silent": "is silent", "died": "has died", "failed": "has failed"}
    return "".join(f" {safe(rank.name, 60).capitalize()} {texts[rank.state]}." for rank in ranks)


def throughput(status: RunStatus) -> str:
    """Return the throughput of all ranks: `81.2 k tokens/s`."""
    rate = status.per_s or 0.0
    return f"{count(rate) if rate >= 1e4 else significant(rate)} {status.unit}/s"


def _trends(status: RunStatus) -> Iterator[Trend]:
    found = status.series
    first = status.leading
    ranks = f"{len(status.ranks)} ranks; line: rank 0" if len(status.ranks) > 1 and status.unit != "steps" else ""
    if status.per_s is not None and "per_s" in found:
        yield Trend("throughput", throughput(status), found["per_s"], "per_s", ranks)
    if status.step_ns is not None and "step_ns" in found:
        yield Trend("step time", duration(status.step_ns, 3), found["step_ns"], "step_ns")
    if status.loss is not None and "loss" in found:
        at = f"step {status.loss_step:,}" if status.loss_step is not None else ""
        yield Trend("loss", significant(status.loss, 4), found["loss"], "loss", at, from_zero=False)
    if first.memory_bytes is not None and "memory_bytes" in found:
        name = "GPU memory" if first.total_bytes else "memory"
        of = f"of {size(first.total_bytes)}" if first.total_bytes else "resident"
        yield Trend(name, size(first.memory_bytes), found["memory_bytes"], "memory_bytes", of)
    if first.power_watts is not None and "power_watts" in found:
        busy = f"busy {cell('share', first.gpu_busy_share)}" if first.gpu_busy_share is not None else ""
        yield Trend("GPU power", cell("power_watts", first.power_watts), found["power_watts"], "power_watts", busy)
    if first.sm_clock_mhz is not None and "sm_clock_mhz" in found:
        yield Trend("GPU clock", cell("sm_clock_mhz", first.sm_clock_mhz), found["sm_clock_mhz"], "sm_clock_mhz")


def _facts(status: RunStatus) -> Iterator[Fact]:
    yield Fact("run", str(status.folder), status.script)
    restarts = plural(status.num_restarts, "restart") if status.num_restarts else ""
    yield Fact("ran for" if status.is_over else "running for", elapsed(status.elapsed_s), restarts)
    if status.goodput is not None:
        lost = [f"{name} {span(ns)}" for name, ns in list(status.lost_ns.items())[:_MOST_LOST]]
        yield Fact("goodput", whole_percent(status.goodput), f"lost: {', '.join(lost)}" if lost else "")
    if status.left_s is not None:
        pace = f"at the pace of the last {elapsed(min(PACE_S, status.span_s))}"
        yield Fact("time left", elapsed(status.left_s), pace)


def _bars(status: RunStatus) -> Bars:
    sums: dict[str, int] = {}
    for place, part in enumerate(status.parts):
        label = _PARTS.get(part.name, part.name) if place < _MOST_PARTS else "other"
        sums[label] = sums.get(label, 0) + part.ns
    labels, values = zip(*sorted(sums.items(), key=lambda each: -each[1]))
    title = f"where the last {elapsed(status.parts_s)} went"
    return Bars(id="parts", title=title, labels=labels, series=(Series("time", values),), unit="time_ns")


def _ranks(status: RunStatus) -> Table:
    """Return the ranks: those in trouble first, and of many the slowest next."""
    order = {"died": 0, "failed": 1, "silent": 2, "starting": 3}
    are_many = len(status.ranks) > _MOST_RANKS

    def place(rank: RankStatus) -> tuple[int, float]:
        return order.get(rank.state, 4), -(rank.step_ns or 0.0) if are_many else 0.0

    names = "rank state num_steps step_time_ns:step_ns data_share memory_bytes gpu_busy_share power_watts " \
            "sm_clock_mhz host"  # fmt: skip
    ranks = sorted(status.ranks, key=place)
    columns = columns_of(ranks, names, rank=lambda rank: rank.name.removeprefix("rank "))
    screen = ("rank", "state", "num_steps", "step_time_ns", "memory_bytes", "power_watts", "data_share",
              "sm_clock_mhz", "gpu_busy_share", "host")  # fmt: skip
    return Table("ranks", "ranks", without_empty(columns), num_shown=_MOST_RANKS, screen=screen)


def _events(status: RunStatus) -> Table:
    columns = columns_of(
        status.events[::-1],
        "time:clock step event took place",
        event=lambda event: _PARTS.get(event.kind, event.kind).replace("_", " "),
        took=lambda event: span(event.seconds * 1e9),
        place=lambda event: event.place or "",
    )
    return Table("events", "latest events", columns, num_shown=5)


def line_of(status: RunStatus) -> str:
    """Return the figures in one line, for a log."""
    first = status.leading
    if not status.num_steps or status.state not in ("running", "starting"):
        return verdict_of(status)
    of = f" of {status.num_planned:,}" if status.num_planned else ""
    found = [f"step {status.num_steps:,}{of}", throughput(status) if status.per_s else ""]
    found += [f"loss {significant(status.loss, 4)}" if status.loss is not None else ""]
    found += [size(first.memory_bytes) if first.memory_bytes else ""]
    found += [f"goodput {whole_percent(status.goodput)}" if status.goodput is not None else ""]
    found += [f"{elapsed(status.left_s)} left" if status.left_s is not None else ""]
    found += [f"last step {_ago(status)}" if _ago(status) else ""]
    return "  ".join(filter(None, found))
