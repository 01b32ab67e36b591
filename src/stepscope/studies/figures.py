"""Building blocks of answers: tables and lines over rows, and the phrases that sentences are made from."""

import math
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stepscope.analysis.comparison.significance import MIN_SAMPLES
from stepscope.analysis.comparison.sweeps import OK
from stepscope.document.model import Bars, Lines, Series, Table, Value
from stepscope.errors import Unavailable
from stepscope.formatting import cell, safe, title_of
from stepscope.formatting import listed as listed  # for authors of studies
from stepscope.studies.study import BarsOf, Record, TableOf

if TYPE_CHECKING:
    from stepscope.studies.stored import Rows, Stored

said = cell  # returns a figure with the unit that its name ends in
TIME, PEAK, BUSY = "time_median_ns", "peak_allocated_bytes", "gpu_busy_share"
LOG_FACTOR, LOG_FACTOR_ALONE = 4, 30
"""An axis whose ends are this far apart is logarithmic. The second is for y over a linear x: over a logarithmic x,
linear growth is a straight line only if y is logarithmic too."""
HOST_SPREAD, GPU_SPREAD = 2.0, 1.01
"""How far two processes of one point can be apart although each has a narrow interval. Seen on one machine: 10.7 and
19.7 ms, 60 and 102 ms if the host limits the speed; 127.9 and 128.3 ms if the GPU does."""
ByKey = Callable[["Stored"], Mapping[Any, float]]
HOST_PACED = 0.75  # below this share of GPU busy time, a row's time mostly measures the host


def table(id: str, title: str, rows: Iterable[Record], *names: str, note: str = "", num_shown: int = 40) -> Table:
    """Return columns of rows by name, without empty ones. Rows that failed say so in a column of their own."""
    records = list(rows)
    every: dict[str, list[Value]] = {name: [record.get(name) for record in records] for name in names}
    columns = {name: values for name, values in every.items() if not records or not set(values) <= {None, ""}}
    if any(record.get("status", OK) != OK for record in records):
        columns["status"] = [record.get("status") for record in records]
    return Table(id, title, columns, num_shown, note)


def lines(id: str, title: str, rows: Iterable[Record], x: str, y: str, by: Sequence[str] = ()) -> Lines:
    """Return y over x, one line per value of `by`. A row that failed is a gap that says why."""
    records = [record for record in rows if isinstance(record.get(x), (int, float))]
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(" ".join(safe(str(record.get(name)), 40) for name in by) or y, []).append(record)
    series = []
    for name, group in groups.items():
        group.sort(key=lambda record: float(record[x]))
        values = [_valid(record, y) for record in group]
        gaps = ["" if value is not None else str(record.get("status")) for value, record in zip(values, group)]
        series.append(Series(name, values, [record[x] for record in group], gaps=gaps))
    log_x = _spans([float(record[x]) for record in records], LOG_FACTOR)
    log_y = _spans([v for r in records if (v := _valid(r, y))], LOG_FACTOR if log_x else LOG_FACTOR_ALONE)
    return Lines(id=id, title=title, x=x, y=y, series=tuple(series), log_x=log_x, log_y=log_y)


def bars(declared: BarsOf, rows: Iterable[Record]) -> Bars:
    """Return one bar per row with one part per value."""
    sort, names = declared.sort, declared.values.split()
    records = sorted(rows, key=lambda row: -(row[sort] or 0)) if sort else list(rows)
    shown = records[: declared.num_shown]
    return Bars(
        id=declared.id,
        title=declared.title,
        unit=names[0],
        labels=[", ".join(str(row[name]) for name in declared.label.split()) for row in shown],
        series=tuple(Series(title_of(name), [row.get(name) for row in shown]) for name in names),
        caption=f"The first {len(shown)} of {len(records)}." if len(shown) < len(records) else "",
    )


def _valid(record: Record, name: str) -> Any:
    """Return a figure that may be compared: rows that are wrong or unproven have times too."""
    return record.get(name) if record.get("status", OK) == OK else None


def _spans(values: Sequence[float], factor: float) -> bool:
    return bool(values) and min(values) > 0 and max(values) / min(values) >= factor


def published(id: str, what: str, ours: ByKey, theirs: Mapping[Any, float], key: str, name: str) -> TableOf:
    """Return the table of our figures beside published ones, by `key`. Only a full study has it."""

    def rows(stored: "Stored") -> list[dict[str, Any]]:
        found = ours(stored) if stored.mode == "full" else {}
        both = [(at, value) for at, value in found.items() if at in theirs and value]
        return [
            {key: at, name: value, f"published_{name}": theirs[at], "published_over_ours": theirs[at] / value}
            for at, value in both
        ]

    return TableOf(id, f"Beside what was published ({what})", rows, is_optional=True)


def growth(rows: Iterable[Record], x: str, y: str) -> float:
    """Return the power of x that y grows with: the slope of a least-squares line through the logarithms.

    >>> round(growth([{"n": n, "t": 3 * n * n} for n in (1, 2, 4)], "n", "t"), 6)
    2.0
    """
    points = [(math.log(r[x]), math.log(r[y])) for r in rows if (r.get(x) or 0) > 0 and (r.get(y) or 0) > 0]
    if len({at for at, _ in points}) < 2:
        raise Unavailable(f"{y} has fewer than two values of {x}")
    return statistics.linear_regression(*zip(*points)).slope


def in_words(power: float) -> str:
    """Return a power of growth in words.

    >>> in_words(0.98), in_words(2.1), in_words(0.1)
    ('linearly (power 0.98)', 'quadratically (power 2.10)', 'hardly at all (power 0.10)')
    """
    names = (
        (0.25, "hardly at all"), (0.8, "slower than linearly"), (1.2, "linearly"), (1.8, "faster than linearly")
    )  # fmt: skip
    name = next((word for limit, word in names if power < limit), "quadratically" if power < 2.2 else "steeply")
    return f"{name} (power {power:.2f})"


def compared(time: float, other_time: float, other: str) -> str:
    """Return how fast something is beside another: what follows "it is".

    >>> compared(2.0, 3.0, "GELU"), compared(3.0, 2.0, "GELU"), compared(1.0, 1.004, "GELU")
    ('1.50 times as fast as GELU', '1.50 times slower than GELU', 'as fast as GELU')
    """
    if abs(time / other_time - 1) < 0.01:
        return f"as fast as {other}"
    if time < other_time:
        return f"{other_time / time:.2f} times as fast as {other}"
    return f"{time / other_time:.2f} times slower than {other}"


def meet(record: Record, other: Record) -> bool:
    """Return whether the 95 % intervals of two medians overlap; False with too few samples for one."""
    low, high = "time_ci_low_ns", "time_ci_high_ns"
    enough = all(each["num_samples"] >= MIN_SAMPLES for each in (record, other))
    return enough and record[low] <= other[high] and other[low] <= record[high]


def told_apart(record: Record, other: Record) -> bool:
    """Return whether two rows differ by more than noise, within a process and between two."""
    return not _blurred(record, other)


def _blurred(record: Record, other: Record) -> str:
    """Return why two rows cannot be told apart; "" if they can."""
    times = sorted(each[TIME] for each in (record, other))
    if (is_host_bound(record) or is_host_bound(other)) and times[1] < HOST_SPREAD * times[0]:
        return "host-bound, which varies between processes"
    if times[1] < GPU_SPREAD * times[0]:
        return f"less than {100 * (GPU_SPREAD - 1):.0f} % apart"
    return "the 95 % intervals overlap" if meet(record, other) else ""


def against(record: Record, other: Record, name: str) -> str:
    """Return `compared` of two rows, or that they do not differ beyond noise.

    >>> row = {"time_median_ns": 5, "time_ci_low_ns": 4, "time_ci_high_ns": 7, "num_samples": 10}
    >>> against(row, {**row, "time_median_ns": 6}, "GELU")
    'not measurably different from GELU (the 95 % intervals overlap)'
    >>> low, high = ({f"time_{what}_ns": ns for what in ("median", "ci_low", "ci_high")} for ns in (1000, 1020))
    >>> against({**row, **high}, {**row, **low}, "GELU")
    '1.02 times slower than GELU'
    >>> against({**row, **high, "gpu_busy_share": 0.4}, {**row, **low}, "GELU")
    'not measurably different from GELU (host-bound, which varies between processes)'
    """
    if reason := _blurred(record, other):
        return f"not measurably different from {name} ({reason})"
    return compared(record[TIME], other[TIME], name)


def speeds(rows: "Rows", same: str = "", more: Callable[[Record, Record], str] | None = None, **base: Any) -> str:
    """Return how fast each other row is beside the base row with equal knobs `same`; Unavailable without a pair."""
    (knob, value), pairs = next(iter(base.items())), rows.beside(same.split(), **base)
    if not pairs:
        raise Unavailable(f"nothing of {rows.about} was measured beside {knob}={value}")
    return listed(
        f"{row[knob]} is {against(row, one, str(value))}{more(row, one) if more else ''}" for row, one in pairs
    )


def shares(rows: Iterable[Record], label: str, name: str, num: int | None = None) -> str:
    """Return a figure of the first rows, each with its label.

    >>> shares([{"op": "mm", "share": 0.4}, {"op": "add", "share": 0.1}], "op", "share")
    'mm 40.0 % and add 10.0 %'
    """
    return listed(f"{row[label]} {said(name, row[name])}" for row in list(rows)[:num])


def is_host_bound(record: Record) -> bool:
    """Return whether the GPU waits for the host in a row. False if it is not known.

    >>> is_host_bound({"gpu_busy_share": 0.412}), is_host_bound({"gpu_busy_share": 0.98}), is_host_bound({})
    (True, False, False)
    """
    share = record.get(BUSY)
    return share is not None and share < HOST_PACED


def busy_ns(record: Record) -> float:
    """Return how long the GPU works in a row that has its busy share."""
    return float(record[BUSY] * record[TIME])


def crossing(first: Sequence[Record], second: Sequence[Record], x: str, y: str) -> float | None:
    """Return the x from which the second stays below the first; None if that never happens.

    Between two measured values it is where the lines through the logarithms meet.
    """
    lower, upper = ({row[x]: row[y] for row in rows if row.get(y)} for rows in (first, second))
    shared = sorted(lower.keys() & upper.keys())
    gaps = [math.log(upper[at] / lower[at]) for at in shared]
    if not gaps or gaps[-1] >= 0:
        return None
    end = max((at + 1 for at, gap in enumerate(gaps) if gap >= 0), default=0)
    if end == 0:
        return float(shared[0])
    share = gaps[end - 1] / (gaps[end - 1] - gaps[end])
    return float(shared[end - 1] * (shared[end] / shared[end - 1]) ** share)


def span(name: str, values: Collection[float]) -> str:
    """Return the least and the most of some figures; one if they read the same.

    >>> span("share", [0.31, 0.092, 0.2]), span("share", [0.3, 0.3])
    ('9.2 % to 31.0 %', '30.0 %')
    """
    return " to ".join(dict.fromkeys(said(name, value) for value in (min(values), max(values))))


def ratios(values: Iterable[float]) -> str:
    """Return the least and the most of some ratios, two decimals.

    >>> ratios([2.0, 1.5]), ratios([1.0])
    ('1.50 to 2.00', '1.00')
    """
    found = sorted(values)
    return " to ".join(dict.fromkeys(f"{value:.2f}" for value in (found[0], found[-1])))


def loss_said(record: Record) -> str:
    """Return a row's loss with the digits that its dtype has: bf16 has eight bits, so 5.6 is a multiple of 1/32.

    >>> loss_said({"loss": 5.625, "dtype": "bf16"}), loss_said({"loss": 5.6266, "dtype": "fp32"})
    ('5.62 ± 0.02', '5.627')
    """
    loss = float(record["loss"])
    if record["dtype"] != "bf16" or not loss:
        return f"{loss:.3f}"
    error = 2.0 ** (math.floor(math.log2(abs(loss))) - 8)
    decimals = max(0, -math.floor(math.log10(error)))
    return f"{loss:.{decimals}f} ± {error:.{decimals}f}"


def without_folders(text: object) -> str:
    """Return the text with paths cut to their last two parts.

    >>> without_folders("9/6: it failed  # /home/me/src/stepscope/workloads/gelu.py:23 in gelu_by")
    '9/6: it failed  # workloads/gelu.py:23 in gelu_by'
    """
    return re.sub(r"[^\s(]*/([^\s/]+/[^\s/]+)", r"\1", str(text))
