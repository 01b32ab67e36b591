"""Findings about what no rule explains: losses of the ledger that are worth a look."""

from math import prod
from typing import Any

import polars as pl

from stepscope.analysis.costs.op_calls import Tensor
from stepscope.analysis.costs.op_costs import argument_place, is_depthwise, operands
from stepscope.analysis.time.ledger import ROWS
from stepscope.errors import if_available
from stepscope.findings.claims import Claims
from stepscope.findings.finding import Evidence, Finding
from stepscope.findings.op_lines import first_line, lines_of, lines_text, logged_of, ops_of, pauses_text, python_text
from stepscope.findings.rules.cpu import least_ns
from stepscope.formatting import duration, safe, whole_percent
from stepscope.session.case import Case
from stepscope.session.places import Places

UNCLAIMED = "unclaimed_time"
WORTH_A_LOOK = 0.05  # of a step
_TRY = {
    "slow_products": "try another dtype, sizes that are multiples of 64, a larger batch, or "
    'torch.compile(model, mode="max-autotune")',
    "layout": "model.to(memory_format=torch.channels_last), and the input too",
    "unfused": "torch.compile(model), or one op for the chain in the evidence",
    "copies": "remove .contiguous(), .to() and .clone() that the next op does not need, or torch.compile(model)",
    "scatters": "a product with one-hot rows for few rows, sorted indices, or nn.EmbeddingBag",
    "updates": "torch.optim.AdamW(..., fused=True), or torch._foreach functions for updates of your own",
    "recomputed": "checkpoint fewer layers, if memory allows",
    "communication": "overlap it with computation: larger buckets, or no synchronization in all but the last "
    "micro-batch",
    "transfers": "pin_memory=True and non_blocking=True; keep results on the GPU",
    "cpu_data": "DataLoader(..., num_workers=…), or data in memory",
    "cpu_ranks": "fewer and larger messages: with model.no_sync(): around all micro-batches but the last",
    "cpu_python": "a larger batch_size, torch.compile(model), or torch._foreach functions: fewer calls per sample",
    "cpu_between": "metrics and averages every N steps, batches in a DataLoader with workers",
    "between_steps": "do it less often, or in the background",
    "slow_steps": "see which steps are slow, in the section Steps of stepscope report",
    "unknown_work": "look at its sizes and its dtype; without shapes in the trace, record with record_shapes=True",
}
_TRY_FFT = "lengths whose only prime factors are 2, 3, 5 and 7, such as 8192 for 8191: others take far longer"
_TRY_SEPARABLE = (
    "x = F.conv2d(F.conv2d(x, column, groups=channels), row, groups=channels)  # if filter = column * row; else "
    "smaller filters, or a product in torch.fft"
)
_WIDE_FILTER = 4  # times as many multiply-adds as one-dimensional filters take
_TRY_IDLE = "see what the host does then, on the timeline of stepscope report"


def unclaimed_time(case: Case, claims: Claims) -> list[Finding]:
    """Is time lost that no other finding explains?

    There is a finding for each row of the ledger that is worth a look; `claims` are those of all other findings.
    """
    found = [
        _finding(case, claims, row, ns)
        for row, ns in claims.unclaimed().items()
        # A row that is mostly explained has a cause, even if its fix leaves some of it.
        if ns >= max(WORTH_A_LOOK * claims.step_ns, claims.held_ns(row) / 2)
    ]
    return found + (if_available(lambda: _slow_lines(case, claims)) or [] if case.is_on_cpu else [])


def _finding(case: Case, claims: Claims, row: str, ns: float) -> Finding:
    work = claims.unclaimed_work(row)
    rows: list[dict[str, Any]] = [{"row": row, "duration_ns": ns, "share": ns / claims.step_ns}]
    most, fix = "", _TRY.get(row, _TRY_IDLE)
    places: Places = ()
    if not work.is_empty():
        keys = ("op", "class", "module", "shapes", "phase")
        facts = case.work.select("event", *(pl.col(key).cast(pl.String) for key in keys))
        table = work.join(facts, on="event").group_by(keys).agg(
            (pl.len() / case.num_steps).alias("num_kernels"),
            pl.col("loss_ns", "ns", "least_ns").sum() / case.num_steps,
        )  # fmt: skip
        share = (pl.col("least_ns") / pl.col("ns")).alias("limit_share")
        table = table.with_columns(share).sort("loss_ns", *keys, descending=[True, *[False] * len(keys)])
        rows = table.head(8).to_dicts()
        first = rows[0]
        where = f" in {safe(first['module'], 60)}" if first["module"] else ""
        has_limit = not case.is_on_cpu and row != "unknown_work"
        rate = f", at {whole_percent(first['limit_share'])} of the device's limit" if has_limit else ""
        lines = if_available(lambda: _lines_of(case, work, first["op"]))
        line = f", at {first_line(lines)}" if lines is not None and lines.height else ""
        most = f" Most of it is {safe(first['op'] or 'work without an op', 60)}{where}{line}{rate}."
        if row == "scatters" and first["class"] == _SORTS:
            fix = _TRY_CLASS[_SORTS]
        fix = _TRY_FFT if str(first["op"]).startswith("aten::_fft") else fix
        if sizes := _wide_filter(first["op"], first["shapes"]):
            dense, apart = prod(sizes), sum(sizes)
            by = " × ".join(map(str, sizes))
            most += (
                f" It filters each channel by itself, with {dense:,} multiply-adds per pixel. If the {by} filter is "
                f"a product of one-dimensional ones, as a Gaussian is, these take {apart}."
            )
            fix = _TRY_SEPARABLE
        places = case.places(work.sort("loss_ns", descending=True)["event"].head(20))
    if row.startswith("cpu_"):
        most += pauses_text(case, ns / 10)
    if row == "idle_data":
        most += python_text(case, has_others=False)
    # Of the average step, because some rows lie outside of a typical one.
    cost = f"{duration(ns, 3)} per step ({whole_percent(ns / claims.step_ns)} of {duration(claims.step_ns, 3)})"
    return Finding(
        sentence=f"{cost} is lost for a reason that no rule knows. {ROWS[row][1]}{most}",
        fix=fix,
        evidence=(Evidence("time without an explanation", rows),),
        falsified_by="try it; the finding is wrong if the step stays as long",
        saving_ns=ns,
        derived="what the ledger has in this row and no other finding claims; a fix may reach only a part of it",
        upper_bound=True,
        confidence="low",
        places=places,
        claims={row: ns},
        id=UNCLAIMED,
    )


def _lines_of(case: Case, work: pl.DataFrame, op: str | None) -> pl.DataFrame:
    """Return the lines behind the calls of an op that do some of this work, those that lose most first."""
    ops = case.work.filter(pl.col("op").cast(pl.String).eq_missing(op)).join(work.select("event"), on="event")
    return lines_of(case, logged_of(case).filter(pl.col("row").is_in(ops["call"].implode())))


def _wide_filter(op: str | None, shapes: str | None) -> tuple[int, ...] | None:
    """Return the sizes of a depthwise convolution's filter if it has far more elements than rows and columns."""
    place = argument_place(op or "", "weight")
    given = operands(shapes, None)
    weight = given[place] if place is not None and place < len(given) else None
    if not isinstance(weight, Tensor) or not is_depthwise(op, shapes, None):
        return None
    sizes = weight.shape[2:]
    return sizes if prod(sizes) >= _WIDE_FILTER * sum(sizes) else None


_CPU_WORK = ("cpu_products", "cpu_ops")
_SLOW_SHARE = 0.1  # of a step, which a line takes beyond what its work needs
_SORTS = "sort_scan"
_TRY_CLASS = {
    "gemm": "fewer and larger products, sizes that are multiples of 16, a larger batch",
    "convolution": "fewer and larger convolutions, channels_last, groups=1",
    "copy_cast": "remove .contiguous(), .to(), .clone() and permutations that copy",
    "embedding_index": "index fewer elements, or once for all of them",
    _SORTS: "sort fewer elements, topk instead of sort, sums along the last dimension, or do it every N steps",
}


def _slow_lines(case: Case, claims: Claims) -> list[Finding]:
    """Return a finding about the lines whose ops are slower than the trace's own fast ops, for an unknown reason."""
    ops = ops_of(case).filter(pl.col("place").is_not_null())
    work = pl.concat([claims.unclaimed_work(row).select("event", "loss_ns") for row in _CPU_WORK])
    facts = case.work.select("event", "call", pl.col("op", "class").cast(pl.String), least_ns(case))
    lines = ops.select(pl.col("row").alias("call"), "place")
    beyond = (pl.col("loss_ns") - pl.col("least_ns").fill_null(0.0)).clip(0) / case.num_steps
    slow = work.join(facts, on="event").join(lines, on="call").with_columns(beyond.alias("beyond_ns"))
    sums = slow.group_by("place").agg(pl.col("beyond_ns").sum()).sort("beyond_ns", "place", descending=[True, False])
    sums = sums.filter(pl.col("beyond_ns") >= _SLOW_SHARE * claims.step_ns)
    if sums.is_empty():
        return []
    inside = ops.filter(pl.col("place").is_in(sums["place"].implode()))
    table = lines_of(case, inside)
    ns = float(sums["beyond_ns"].sum())
    own = slow.filter(pl.col("place") == sums["place"][0]).group_by("class").agg(pl.col("beyond_ns").sum())
    kind = own.sort("beyond_ns", "class", descending=[True, False])["class"][0]
    whole_ns = float(table["duration_ns"].sum())
    unknown = slow.filter(pl.col("place").is_in(sums["place"].implode()), pl.col("least_ns").is_null())
    unknown_ns = float(unknown["beyond_ns"].sum())
    names = unknown.group_by("op").agg(pl.col("beyond_ns").sum()).sort("beyond_ns", "op", descending=[True, False])
    also = (
        f"; what {duration(unknown_ns, 3)} of {', '.join(names['op'].head(3))} needs is unknown" if unknown_ns else ""
    )
    return [
        Finding(
            sentence=f"{lines_text(table)} {'takes' if table.height == 1 else 'take'} {duration(whole_ns, 3)} per "
            f"step ({whole_percent(whole_ns / claims.step_ns)} of {duration(claims.step_ns, 3)}), the backward "
            "included, for no reason that a rule knows. At the rates of this trace's fast ops, the work needs "
            f"{duration(max(0.0, whole_ns - ns), 3)}{also}.",
            fix=f"{_TRY_CLASS.get(kind, 'torch.compile, or one op for the chain of ops')}  # {first_line(table)}",
            evidence=(Evidence("slow lines", table.head(8).to_dicts()),),
            falsified_by="try it; the finding is wrong if the step stays as long",
            saving_ns=ns,
            derived="the time of these ops beyond what their FLOPs and bytes take at such rates, as far as no other "
            "finding claims it; a fix may reach only a part of it",
            upper_bound=True,
            confidence="low",
            places=case.places(slow.sort("beyond_ns", descending=True)["event"].head(20)),
            claims=claims.split(_CPU_WORK, ns, {}),
            id=UNCLAIMED,
        )
    ]
