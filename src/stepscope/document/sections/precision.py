"""The section `precision`: in which dtypes the step computes and stores tensors, and what it casts."""

from collections.abc import Iterator

import polars as pl

from stepscope.analysis.precision.casts import casts_by_use, flops_by_dtype, products_by_dtype
from stepscope.document.card_figures import precision_words
from stepscope.document.model import Bars, Fact, Facts, Missing, Part, Series, Table
from stepscope.document.sections.memory import live_table
from stepscope.document.tables import columns_of, known, mapping, table_of
from stepscope.errors import Unavailable
from stepscope.findings.rules.matrix_products import gemm_calls
from stepscope.formatting import average, duration, percent, size
from stepscope.session import Session

_MATMUL = {"fp32": "in float32, without TF32", "tf32": "may run in TF32, on tensor cores"}


def parts(session: Session) -> tuple[Part, ...]:
    """Return settings, FLOPs, matrix products, casts and memory by dtype."""
    settings = Facts(known(_settings(session)))
    found: list[Part] = [settings] if settings.rows else []
    for what, build in _TOPICS.items():
        try:
            found += build(session)
        except Unavailable as reason:
            found.append(Missing(f"{what}: {reason}"))
    return tuple(found)


def _settings(session: Session) -> Iterator[Fact]:
    if not session.is_recording:
        return
    facts = session.recording.facts
    environment = mapping(facts.get("environment"))
    if settings := mapping(facts.get("precision")):
        yield Fact("switches", *precision_words(settings, on_gpu=environment.get("device") == "cuda"))
    elif (setting := environment.get("float32_matmul")) is not None:
        yield Fact("float32 products", _MATMUL.get(str(setting), str(setting)), "torch.set_float32_matmul_precision")
    stored = mapping(mapping(facts.get("parameters")).get("bytes_by_dtype"))
    sizes = [f"{size(num)} {dtype}" for dtype, num in stored.items() if isinstance(num, (int, float))]
    yield Fact("parameters", ", ".join(sizes), "as the model keeps them")
    if (mfu := session.summary.mfu) is not None:
        yield Fact("limit", mfu.limit, mfu.source)


def _flops(session: Session) -> Iterator[Part]:
    if not session.is_recording:
        raise Unavailable("a trace does not have them; `stepscope run train.py` counts them op by op")
    flops = session.summary.flops
    if flops is None or not flops.hardware_flops:
        raise Unavailable("the run ended before its memory and FLOPs window")
    rows = flops_by_dtype(flops)
    if len(rows) > 1:
        caption = f"{percent(rows[0]['share'])} of the FLOPs per step are in {rows[0]['dtype']}."
        series = tuple(Series(row["dtype"], [row["share"]]) for row in rows)
        title = "executed FLOPs by dtype"
        yield Bars("flops_by_dtype", title, ["FLOPs per step"], series, "share", caption=caption)
    note = "per step, counted op by op; executed: recomputation included"
    if flops.hidden:
        note += f"; a lower bound: {flops.hidden}"
    columns = columns_of(rows, "dtype model_flops executed_flops share")
    yield Table("flops_by_dtype", "FLOPs by dtype", columns, note=note)


def _products(session: Session) -> Iterator[Part]:
    calls = gemm_calls(session.case)
    if calls.is_empty():
        raise Unavailable("the traced steps have none with known FLOPs")
    table = products_by_dtype(calls, session.case.num_steps)
    rows = table.to_dicts()
    names = [f"{row['dtype'] or 'an unknown dtype'}{', as tf32' * (row['peak_dtype'] == 'tf32')}" for row in rows]
    if len(rows) > 1:
        caption = f"{percent(rows[0]['time_share'])} of the time in matrix products is in {names[0]}."
        series = tuple(Series(name, [row["time_share"]]) for name, row in zip(names, rows))
        title = "time in matrix products by dtype"
        yield Bars("products_by_dtype", title, ["matrix products"], series, "share", caption=caption)
    note = "per typical traced step, without those inside attention; peak dtype: the unit that the kernel ran on"
    yield table_of(table, "products_by_dtype", "matrix products by dtype", note=note)


def _casts(session: Session) -> Iterator[Part]:
    session.case.with_shapes(and_dtypes=True)
    casts, num_steps = session.case.casts, session.case.num_steps
    by_autocast = casts.filter("is_autocast")
    weights = by_autocast.filter("is_weight", pl.col("source") == "float32")
    total_ns = int(casts["duration_ns"].sum()) / num_steps
    found = [Fact("autocast", "not seen", "no weight is cast before a matrix product")]
    if weights.height:
        targets = ", ".join(sorted(weights["target"].unique().drop_nulls()))
        of_weights = f"{average(weights.height / num_steps)} weights are cast to {targets} per step"
        found = [Fact("autocast", "on", of_weights)]
    many = f"{average(casts.height / num_steps)} per step, {duration(total_ns, 3)} of GPU time"
    of_autocast = f"{percent(by_autocast.height / casts.height)} by autocast" if casts.height else ""
    yield Facts((*found, Fact("casts", many if casts.height else "none", of_autocast)), "casts")
    if casts.height:
        note = "per typical traced step; between float32 and bfloat16 or float16, by a kernel of their own"
        yield table_of(casts_by_use(casts, num_steps), "casts", "casts by purpose", note=note)


def _memory(session: Session) -> Iterator[Part]:
    if session.is_recording and not session.has_memory_window:
        raise Unavailable("the run ended before its memory window")
    account = session.memory.account
    found = account.live_at_peak.by_dtype
    if session.memory.source != "recording" or not any(part.name for part in found):
        raise Unavailable("a trace does not have it; `stepscope run train.py` records it")
    title = f"alive at the peak of {size(account.peak_bytes)}, by dtype"
    yield from live_table("dtype", title, found, len(found), id="memory_by_dtype")


_TOPICS = {
    "FLOPs by dtype": _flops,
    "dtypes of matrix products": _products,
    "casts, and whether autocast was on": _casts,
    "memory by dtype": _memory,
}
