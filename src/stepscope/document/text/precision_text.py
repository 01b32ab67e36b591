"""A comparison of dtypes, for a terminal: a table each of time, memory and exactness, and the reason in sentences."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from stepscope.analysis.precision.dtype_comparison import CAST, REFERENCE, DtypeComparison, DtypeRow
from stepscope.formatting import duration, plural, safe, significant, size

NUM_CLASSES = 4
# The names of classes as they stand in a sentence.
_CLASSES = {
    "gemm": "products", "attention_forward": "attention forward", "attention_backward": "attention backward",
    "elementwise": "elementwise ops", "reduction": "reductions", "copy_cast": "copies", CAST: "casts",
    "norm": "norms", "embedding_index": "lookups", "memset_memcpy": "fills and transfers",
    "other": "unclassified work",
}  # fmt: skip
_OWNERS = {
    "parameter": "weights", "gradient": "gradients", "optimizer_state": "optimizer", "activation": "activations",
    "autocast_weight_cast": "weight casts", "temporary": "temporaries",
}  # fmt: skip
# A GPU that works less of a step than this waits for its host.
BUSY_SHARE = 0.85


def precision_text(comparisons: Sequence[DtypeComparison], width: int = 100) -> str:
    """All comparisons."""
    return "\n\n\n".join("\n".join(_lines(one, width)) for one in comparisons)


def _lines(comparison: DtypeComparison, width: int) -> Iterator[str]:
    where = safe(comparison.device_name or comparison.device)
    name = " ".join(safe(word) for word in (comparison.workload, comparison.preset) if word)
    yield from _wrapped(f"{name} · {comparison.mode} · {where}", width)
    for table in (_times(comparison), _memory(comparison, width), _exactness(comparison)):
        if table:
            yield ""
            yield from table
    lost = [row for row in comparison.rows if row.status != "ok"]
    if lost:
        yield ""
    for row in lost:
        yield from _wrapped(f"{row.dtype}: {row.status}: {safe(row.reason or 'no reason was given', 400)}", width)
    yield ""
    for sentence in sentences(comparison):
        yield from _wrapped(sentence, width)


def _times(comparison: DtypeComparison) -> list[str]:
    measured = [row for row in comparison.rows if row.time is not None]
    phases = list(dict.fromkeys(name for row in measured for name in row.phase_ns))
    rows = [("time", "a step", "÷ fp32", *phases)]
    for row in measured:
        assert row.time is not None
        ratio = comparison.slowdown(row)
        figures = [duration(row.phase_ns[name], 3) if name in row.phase_ns else "–" for name in phases]
        rows.append((row.dtype, duration(row.time.median, 3), "–" if ratio is None else f"{ratio:.2f}", *figures))
    return _table(rows) if measured else []


def _memory(comparison: DtypeComparison, width: int) -> list[str]:
    """What is alive at the peak; where that is too wide, without the least of it."""
    measured = [row for row in comparison.rows if row.memory_bytes]
    most = {name: max((row.memory_bytes.get(name, 0) for row in measured), default=0) for name in _OWNERS}
    owners = [name for name in _OWNERS if most[name]]
    while measured:
        rows = [("memory", "peak", *(_OWNERS[name] for name in owners))]
        for row in measured:
            total = sum(row.memory_bytes.values()) if row.peak_bytes is None else row.peak_bytes
            rows.append((row.dtype, size(total), *(size(row.memory_bytes.get(name, 0)) for name in owners)))
        lines = _table(rows)
        if not owners or max(map(len, lines)) <= width:
            return lines
        owners.remove(min(owners, key=lambda name: most[name]))
    return []


def _exactness(comparison: DtypeComparison) -> list[str]:
    rows: list[tuple[str, ...]] = [("from fp32", "loss", "difference", "gradient", "largest element")]
    for row in comparison.rows:
        gradient = row.gradient_deviation if row.gradient_deviation is not None else row.output_deviation
        if row.loss is None and gradient is None:
            continue
        difference = "–" if row.loss_difference is None else _signed(row.loss_difference)
        figures = [_share(gradient), _share(row.gradient_largest)]
        rows.append((row.dtype, "–" if row.loss is None else f"{row.loss:.6g}", difference, *figures))
    return _table(rows) if len(rows) > 1 else []


def sentences(comparison: DtypeComparison) -> Iterator[str]:
    """What the numbers say, a sentence a dtype: how much faster or slower, and which work made it so."""
    reference = comparison.reference
    if reference is None:
        yield f"{REFERENCE} was not measured: there is nothing to hold the others against."
        return
    for row in comparison.rows:
        if row.num_not_finite:
            yield f"{plural(row.num_not_finite, 'element')} of {row.dtype}'s results are not finite."
        ratio = comparison.slowdown(row)
        if row is reference or ratio is None:
            continue
        times = significant(max(ratio, 1 / ratio), 3)
        pace = f"{times}× {'faster' if ratio < 1 else 'slower'} than {REFERENCE}"
        if times == "1.00":
            pace = f"as fast as {REFERENCE}"
        doubt = "" if comparison.is_different(row) else " (their 95 % intervals meet: no difference that counts)"
        changes = comparison.changes(row)[:NUM_CLASSES]
        told = ", ".join(f"{_CLASSES.get(one.name, one.name)} {_signed_time(one.change_ns)}" for one in changes)
        casts = f"; it casts {plural(row.num_casts, 'time')} a step" if row.num_casts else ""
        yield f"{row.dtype} is {pace}{doubt}{': ' + told if told else ''}{casts}.{_waiting(comparison, row)}"


def _waiting(comparison: DtypeComparison, row: DtypeRow) -> str:
    """Why less work is no shorter step: a GPU that waits for its host."""
    work_ns = sum(row.class_ns.values())
    if comparison.device != "cuda" or not work_ns or row.time is None or work_ns > BUSY_SHARE * row.time.median:
        return ""
    return (
        f" The GPU works for {duration(work_ns, 3)} of its {duration(row.time.median, 3)} and waits for the host in "
        "the rest: less work is no shorter step there."
    )


def _signed(value: float) -> str:
    return f"{value:+.2e}" if value else "0"


def _signed_time(ns: int) -> str:
    return f"{'+' if ns >= 0 else '−'}{duration(abs(ns), 2)}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}" if value else "0"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    ]
