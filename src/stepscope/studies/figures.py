"""What answers are made of: tables and lines over rows, and the figures that sentences are made from."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from stepscope.analysis.comparison.sweeps import MIN_INTERVAL_SAMPLES, OK
from stepscope.document.model import Lines, Series, Table, Value
from stepscope.errors import Unavailable
from stepscope.formatting import cell, plural, safe
from stepscope.formatting import listed as listed  # also for who writes a study

Record = Mapping[str, Any]


def table(id: str, title: str, rows: Iterable[Record], *names: str, note: str = "", num_shown: int = 40) -> Table:
    """Columns of rows by name; those that failed say so in a column of their own."""
    records = list(rows)
    columns: dict[str, list[Value]] = {name: [record.get(name) for record in records] for name in names}
    if any(record.get("status", OK) != OK for record in records):
        columns["status"] = [record.get("status") for record in records]
    return Table(id, title, columns, num_shown, note)


def known(rows: Iterable[Record], *names: str) -> tuple[str, ...]:
    """Of some names, those that any row has a figure of: what a device does not offer is no column.

    >>> known([{"step_ns": 3, "mfu_share": None}], "step_ns", "mfu_share")
    ('step_ns',)
    """
    records = list(rows)
    return tuple(name for name in names if any(record.get(name) is not None for record in records))


LOG_FACTOR, LOG_FACTOR_ALONE = 4, 30
"""Between the ends of an axis that is logarithmic; the second of y where x is not: over a logarithmic x, what grows
linearly is a straight line only if y is logarithmic too."""


def lines(
    id: str, title: str, rows: Iterable[Record], x: str, y: str, by: str | Sequence[str] = (), caption: str = ""
) -> Lines:
    """y over x, a line for each value of `by`; a row that failed is a gap that says why."""
    records = [record for record in rows if isinstance(record.get(x), (int, float))]
    names = (by,) if isinstance(by, str) else tuple(by)
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(" ".join(safe(str(record.get(name)), 40) for name in names) or y, []).append(record)
    series = []
    for name, group in groups.items():
        group.sort(key=lambda record: float(record[x]))
        series.append(
            Series(
                name,
                [_valid(record, y) for record in group],
                [record[x] for record in group],
                gaps=["" if _valid(record, y) is not None else str(record.get("status")) for record in group],
            )
        )
    values = [value for record in records if (value := _valid(record, y))]
    log_x = _spans([float(record[x]) for record in records], LOG_FACTOR)
    return Lines(
        id=id,
        title=title,
        caption=caption,
        x=x,
        y=y,
        series=tuple(series),
        log_x=log_x,
        log_y=_spans(values, LOG_FACTOR if log_x else LOG_FACTOR_ALONE),
    )


def _spans(values: Sequence[float], factor: float) -> bool:
    return bool(values) and min(values) > 0 and max(values) / min(values) >= factor


def _valid(record: Record, name: str) -> Any:
    """A figure of a row that may be compared: one that is wrong or unproven has times too."""
    return record.get(name) if record.get("status", OK) == OK else None


def growth(rows: Iterable[Record], x: str, y: str) -> float:
    """The power of x that y grows with: the slope of a line through the logarithms (least squares).

    >>> round(growth([{"n": n, "t": 3 * n * n} for n in (1, 2, 4)], "n", "t"), 6)
    2.0
    """
    points = [(math.log(r[x]), math.log(r[y])) for r in rows if (r.get(x) or 0) > 0 and (r.get(y) or 0) > 0]
    if len({at for at, _ in points}) < 2:
        raise Unavailable(f"{y} is there for fewer than two values of {x}")
    middle_x = sum(at for at, _ in points) / len(points)
    middle_y = sum(value for _, value in points) / len(points)
    spread = sum((at - middle_x) ** 2 for at, _ in points)
    return sum((at - middle_x) * (value - middle_y) for at, value in points) / spread


def in_words(power: float) -> str:
    """A power of growth for people.

    >>> in_words(0.98), in_words(2.1), in_words(0.1)
    ('linearly (power 0.98)', 'quadratically (power 2.10)', 'by next to nothing (power 0.10)')
    """
    names = (
        (0.25, "by next to nothing"),
        (0.8, "slower than linearly"),
        (1.2, "linearly"),
        (1.8, "faster than linearly"),
    )
    name = next((word for limit, word in names if power < limit), "quadratically" if power < 2.2 else "steeply")
    return f"{name} (power {power:.2f})"


def compared(time: float, other_time: float, other: str) -> str:
    """How fast something is beside another: what follows "it is".

    >>> compared(2.0, 3.0, "GELU"), compared(3.0, 2.0, "GELU"), compared(1.0, 1.004, "GELU")
    ('1.50 times as fast as GELU', '1.50 times slower than GELU', 'as fast as GELU')
    """
    if abs(time / other_time - 1) < 0.01:
        return f"as fast as {other}"
    if time < other_time:
        return f"{other_time / time:.2f} times as fast as {other}"
    return f"{time / other_time:.2f} times slower than {other}"


def meet(record: Record, other: Record, time: str = "time") -> bool:
    """Whether the 95 % intervals of two medians meet; False also where there are too few samples for an interval."""
    low, high = f"{time}_ci_low_ns", f"{time}_ci_high_ns"
    return _have_intervals(record, other) and record[low] <= other[high] and other[low] <= record[high]


def _have_intervals(*records: Record) -> bool:
    return all(record["num_samples"] >= MIN_INTERVAL_SAMPLES for record in records)


HOST_SPREAD, GPU_SPREAD = 2.0, 1.01
"""Two processes of one point differ by up to so many times, though the interval of each is narrow: 10.7 and 19.7 ms,
60 and 102 ms were seen on one machine where the host sets the pace, 127.9 and 128.3 ms where the GPU does."""


def told_apart(record: Record, other: Record, time: str = "time") -> bool:
    """Whether a difference of two rows is more than noise, inside a process and from one to another."""
    return not _blurred(record, other, time)


def _blurred(record: Record, other: Record, time: str) -> str:
    """Why two rows cannot be told apart; nothing where they can."""
    times = sorted(each[f"{time}_median_ns"] for each in (record, other))
    if (paced(record) or paced(other)) and times[1] < HOST_SPREAD * times[0]:
        return "the host sets the pace, and differs from process to process"
    if times[1] < GPU_SPREAD * times[0]:
        return f"less than {100 * (GPU_SPREAD - 1):.0f} % apart, as two processes are"
    return "the 95 % intervals of the medians meet" if meet(record, other, time) else ""


def against(record: Record, other: Record, name: str, time: str = "time") -> str:
    """`compared` of two rows with intervals: where these meet, or the host sets the pace, that they are alike.

    >>> row = {"time_median_ns": 5, "time_ci_low_ns": 4, "time_ci_high_ns": 7, "num_samples": 10}
    >>> against(row, {**row, "time_median_ns": 6}, "GELU")
    'not to be told from GELU (the 95 % intervals of the medians meet)'
    >>> low, high = ({f"time_{what}_ns": ns for what in ("median", "ci_low", "ci_high")} for ns in (1000, 1020))
    >>> against({**row, **high}, {**row, **low}, "GELU")
    '1.02 times slower than GELU'
    >>> against({**row, **high, "gpu_busy_share": 0.4}, {**row, **low}, "GELU")
    'not to be told from GELU (the host sets the pace, and differs from process to process)'
    """
    if reason := _blurred(record, other, time):
        return f"not to be told from {name} ({reason})"
    return compared(record[f"{time}_median_ns"], other[f"{time}_median_ns"], name)


HOST_PACED = 0.75
"""Below this share of busy time a row's time is mostly the host's: another host, or a busier one, gives another."""


def paced(record: Record) -> str:
    """In brackets after a time: that the GPU waits for the host in it; nothing where it does not, or is not known.

    >>> paced({"gpu_busy_share": 0.412}), paced({"gpu_busy_share": 0.98}), paced({})
    (' (the GPU is busy for 41.2 % of it: the host sets the pace)', '', '')
    """
    share = record.get("gpu_busy_share")
    if share is None or share >= HOST_PACED:
        return ""
    return f" (the GPU is busy for {said('share', share)} of it: the host sets the pace)"


def busy_ns(record: Record) -> float:
    """For how long the GPU works in a row that tells it, whoever sets the pace."""
    return float(record["gpu_busy_share"] * record["time_median_ns"])


def host_paced(rows: Iterable[Record], where: str = "") -> list[str]:
    """`paced` of many rows in one sentence; none where the GPU waits for the host in none, or it is not known.

    >>> host_paced({"seq_len": n, "gpu_busy_share": share} for n, share in ((4, 0.09), (8, 0.412), (16, 0.98)))
    ['In 2 rows (at 4 and 8 tokens) the GPU is busy for 9.0 % to 41.2 % of the time: the host sets the pace there.']
    """
    records = list(rows)
    found = [record for record in records if paced(record)]
    if not found:
        return []
    telling = [record for record in records if record.get("gpu_busy_share") is not None]
    number = plural(len(found), "row")
    if len(telling) < len(records):
        number = f"{len(found)} of the {plural(len(telling), 'row')} that tell it, of {len(records)}"
    busy = span("share", [record["gpu_busy_share"] for record in found])
    lengths = listed(sorted({record["seq_len"] for record in found}))
    begin = f"{where}, in" if where else "In"
    return [
        f"{begin} {number} (at {lengths} tokens) the GPU is busy for {busy} of the time: the host sets the pace "
        "there."
    ]


def crossing(first: Sequence[Record], second: Sequence[Record], x: str, y: str) -> float | None:
    """The x from which the second is below the first and stays so; None where that never happens.

    Between two measured values it is where the lines through the logarithms meet.
    """
    lower = {record[x]: record[y] for record in first if record.get(y)}
    upper = {record[x]: record[y] for record in second if record.get(y)}
    shared = sorted(lower.keys() & upper.keys())
    gaps = [math.log(upper[at] / lower[at]) for at in shared]
    if not gaps or gaps[-1] >= 0:
        return None
    at = len(gaps) - 1
    while at > 0 and gaps[at - 1] < 0:
        at -= 1
    if at == 0:
        return float(shared[0])
    share = gaps[at - 1] / (gaps[at - 1] - gaps[at])
    begin, end = math.log(shared[at - 1]), math.log(shared[at])
    return math.exp(begin + share * (end - begin))


def beside(ours: Sequence[Record], published: Mapping[Any, float], key: str, name: str, where: str) -> Table:
    """A figure of ours beside one that somebody published, by a knob; `where` says on which device theirs is.

    >>> beside([{"op": "mm", "call_ns": 2}], {"mm": 3.0}, "op", "call_ns", "a note").columns["published_over_ours"]
    [1.5]
    """
    rows = [record for record in ours if record.get(key) in published and record.get(name)]
    columns: dict[str, list[Value]] = {
        key: [record[key] for record in rows],
        name: [record[name] for record in rows],
        f"published_{name}": [published[record[key]] for record in rows],
        "published_over_ours": [published[record[key]] / record[name] for record in rows],
    }
    return Table(f"published-{name}", f"Beside what was published ({where})", columns, 40)


def said(name: str, value: Any) -> str:
    """A figure as it stands in a sentence."""
    return cell(name, value)


def span(name: str, values: Collection[float]) -> str:
    """From the least to the most of some figures; one where they read the same.

    >>> span("share", [0.31, 0.092, 0.2]), span("share", [0.3, 0.3])
    ('9.2 % to 31.0 %', '30.0 %')
    """
    return " to ".join(dict.fromkeys(said(name, value) for value in (min(values), max(values))))


def loss_said(record: Record) -> str:
    """A row's loss with the digits that it has: bf16 has eight bits, so that one near 5.6 is a multiple of 1/32.

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
    """Paths by their last two parts: the folders before are of the machine where it ran.

    >>> without_folders("9/6: it failed  # /home/me/src/stepscope/workloads/gelu.py:23 in gelu_by")
    '9/6: it failed  # workloads/gelu.py:23 in gelu_by'
    """
    return re.sub(r"[^\s(]*/([^\s/]+/[^\s/]+)", r"\1", str(text))
