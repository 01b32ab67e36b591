"""Findings about what no rule explains: losses of the ledger that are worth a look."""

from typing import Any

import polars as pl

from stepscope.analysis.time.ledger import ROWS
from stepscope.findings.claims import Claims
from stepscope.findings.finding import Evidence, Finding
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
    "cpu_python": "a larger batch_size, torch.compile(model), or torch._foreach functions: fewer calls per sample",
    "between_steps": "do it less often, or in the background",
    "slow_steps": "see which steps are slow, in the section Steps of stepscope report",
    "unknown_work": "record with record_shapes=True; for a kernel of your own there is no formula",
}
_TRY_IDLE = "see what the host does then, on the timeline of stepscope report"


def unclaimed_time(case: Case, claims: Claims) -> list[Finding]:
    """Is time lost that no other finding explains?

    There is a finding for each row of the ledger that is worth a look; `claims` are those of all other findings.
    """
    return [
        _finding(case, claims, row, ns)
        for row, ns in claims.unclaimed().items()
        # A row that is mostly explained has a cause, even if its fix leaves some of it.
        if ns >= max(WORTH_A_LOOK * claims.step_ns, claims.held_ns(row) / 2)
    ]


def _finding(case: Case, claims: Claims, row: str, ns: float) -> Finding:
    work = claims.unclaimed_work(row)
    rows: list[dict[str, Any]] = [{"row": row, "duration_ns": ns, "share": ns / claims.step_ns}]
    most = ""
    places: Places = ()
    if not work.is_empty():
        keys = ("op", "module", "shapes", "phase")
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
        most = (
            f" Most of it is {safe(first['op'] or 'work without an op', 60)}{where}, at "
            f"{whole_percent(first['limit_share'])} of the device's limit."
        )
        places = case.places(work.sort("loss_ns", descending=True)["event"].head(20))
    # Of the average step, because some rows lie outside of a typical one.
    cost = f"{duration(ns, 3)} per step ({whole_percent(ns / claims.step_ns)} of {duration(claims.step_ns, 3)})"
    return Finding(
        sentence=f"{cost} is lost for a reason that no rule knows. {ROWS[row][1]}{most}",
        fix=_TRY.get(row, _TRY_IDLE),
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
