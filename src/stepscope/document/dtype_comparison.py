"""Builds the document of a dtype comparison: time, memory, exactness, and why one dtype is faster or slower."""

from collections.abc import Iterator, Sequence

from stepscope.analysis.precision.dtype_comparison import CAST, REFERENCE, DtypeComparison, DtypeRow
from stepscope.document.model import Document, Fact, Facts, Part, Section, Table, Text
from stepscope.document.tables import columns_of
from stepscope.formatting import duration, plural, safe, significant

NUM_CLASSES = 4
BUSY_SHARE = 0.85  # a GPU that is busy for less of a step than this waits for its host
_CLASSES = {
    "gemm": "products", "attention_forward": "attention forward", "attention_backward": "attention backward",
    "elementwise": "elementwise ops", "reduction": "reductions", "copy_cast": "copies", CAST: "casts",
    "norm": "norms", "embedding_index": "lookups", "memset_memcpy": "fills and transfers",
    "other": "unclassified work",
}  # fmt: skip
"""Classes of work as a sentence names them."""
_OWNERS = {
    "parameter": "weights", "gradient": "gradients", "optimizer_state": "optimizer", "activation": "activations",
    "autocast_weight_cast": "weight casts", "temporary": "temporaries",
}  # fmt: skip


def dtypes_document(comparisons: Sequence[DtypeComparison]) -> Document:
    sections = []
    for one in comparisons:
        name = " ".join(safe(word) for word in (one.workload, one.preset) if word)
        title = f"{name} · {one.mode} · {safe(one.device_name or one.device)}"
        sections.append(Section("dtypes", title, tuple(_parts(one))))
    return Document("Dtypes", sections[0].title if len(sections) == 1 else "", tuple(sections))


def _parts(comparison: DtypeComparison) -> Iterator[Part]:
    yield from map(Text, sentences(comparison))
    if lost := [row for row in comparison.rows if row.status != "ok"]:
        yield Facts(tuple(Fact(row.dtype, row.status, safe(row.reason or "no reason given", 400)) for row in lost))
    yield from (_times(comparison), _memory(comparison), _exactness(comparison))


def _times(comparison: DtypeComparison) -> Table:
    rows = [row for row in comparison.rows if row.time is not None]
    phases = dict.fromkeys(name for row in rows for name in row.phase_ns)
    columns = columns_of(rows, "dtype step_ns", step_ns=lambda row: row.time.median)
    columns[f"÷ {REFERENCE}"] = [comparison.slowdown(row) for row in rows]
    columns |= {f"{name}_ns": [row.phase_ns.get(name) for row in rows] for name in phases}
    return Table("dtype_times", "Time per step", columns)


def _memory(comparison: DtypeComparison) -> Table:
    """Return what is alive at the peak; a narrow terminal leaves out the smallest owners."""
    rows = [row for row in comparison.rows if row.memory_bytes]
    owners = {f"{title}_bytes": [row.memory_bytes.get(name, 0) for row in rows] for name, title in _OWNERS.items()}
    peaks = [sum(row.memory_bytes.values()) if row.peak_bytes is None else row.peak_bytes for row in rows]
    columns = columns_of(rows, "dtype") | {"peak_bytes": peaks}
    columns |= {name: sizes for name, sizes in owners.items() if any(sizes)}
    screen = ("dtype", "peak_bytes", *sorted(owners, key=lambda name: -max(owners[name], default=0)))
    return Table("dtype_memory", "Alive at the peak", columns, screen=screen)


def _exactness(comparison: DtypeComparison) -> Table:
    columns = columns_of(
        (row for row in comparison.rows if row.loss is not None or _deviation(row) is not None),
        "dtype loss difference gradient largest_element",
        loss=lambda row: "–" if row.loss is None else f"{row.loss:.6g}",
        difference=lambda row: _exponent(row.loss_difference, "+.2e"),
        gradient=lambda row: _exponent(_deviation(row)),
        largest_element=lambda row: _exponent(row.gradient_largest),
    )
    return Table("dtype_exactness", f"Deviation from {REFERENCE}", columns)


def _deviation(row: DtypeRow) -> float | None:
    return row.gradient_deviation if row.gradient_deviation is not None else row.output_deviation


def sentences(comparison: DtypeComparison) -> Iterator[str]:
    """Yield a sentence per dtype: how much faster or slower it is, and which work made it so."""
    reference = comparison.reference
    if reference is None:
        yield f"{REFERENCE} was not measured: the other dtypes cannot be compared with it."
        return
    for row in comparison.rows:
        if row.num_not_finite:
            of = f"of the {row.dtype} results"
            yield f"{plural(row.num_not_finite, f'element {of} is', f'elements {of} are')} not finite."
        ratio = comparison.slowdown(row)
        if row is reference or ratio is None:
            continue
        times = significant(max(ratio, 1 / ratio), 3)
        pace = f"{times}× {'faster' if ratio < 1 else 'slower'} than {REFERENCE}"
        if times == "1.00":
            pace = f"as fast as {REFERENCE}"
        doubt = "" if comparison.is_different(row) else " (not significant: the 95 % intervals overlap)"
        changes = comparison.changes(row)[:NUM_CLASSES]
        told = ", ".join(f"{_CLASSES.get(one.name, one.name)} {_signed_time(one.change_ns)}" for one in changes)
        casts = f"; {plural(row.num_casts, 'cast')} per step" if row.num_casts else ""
        yield f"{row.dtype} is {pace}{doubt}{': ' + told if told else ''}{casts}.{_waiting(comparison, row)}"


def _waiting(comparison: DtypeComparison, row: DtypeRow) -> str:
    """Return why less work does not make a shorter step: the GPU waits for its host."""
    work_ns = sum(row.class_ns.values())
    if comparison.device != "cuda" or not work_ns or row.time is None or work_ns > BUSY_SHARE * row.time.median:
        return ""
    return (
        f" The GPU is busy for {duration(work_ns, 3)} of {duration(row.time.median, 3)} and waits for the host "
        "otherwise, so less GPU work does not shorten the step."
    )


def _signed_time(ns: int) -> str:
    return f"{'+' if ns >= 0 else '−'}{duration(abs(ns), 2)}"


def _exponent(value: float | None, form: str = ".1e") -> str:
    return "–" if value is None else f"{value:{form}}" if value else "0"
