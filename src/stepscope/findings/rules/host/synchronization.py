"""Does the host stop within a step to wait for the GPU: `.item()`, `.cpu()`, `nonzero`, a print?"""

from __future__ import annotations

import re
from dataclasses import replace

import polars as pl

from stepscope.analysis.time.waits import mask_indexing
from stepscope.findings.rule import LENGTH, Case, Change, Evidence, Finding, duration, one_finding, plural
from stepscope.findings.waiting import place, starts_within, waits_of

_VALUES = ["aten::item", "aten::is_nonzero", "aten::_local_scalar_dense"]
_ONE_LOOK_SHARE = 0.1  # reading the loss once per step is normal, unless it costs this share of the step
_LOOP = 4  # from this many values per step, each computed and read alone, it is a loop that could be one op
_FIXES = (
    (
        "item|is_nonzero|_local_scalar_dense|equal",
        "keep the value on the GPU: total += loss.detach(), and total.item() every 100 steps; torch.where instead of "
        "`if tensor`; for gradient norms torch.nn.utils.get_total_norm(grads), which returns one tensor",
    ),
    (
        "nonzero|masked_select|index|unique|where|bincount",
        "keep the shape fixed: torch.where(mask, x, 0) or x * mask instead of x[mask]; torch.nonzero_static(mask, "
        "size=n)",
    ),
    ("repeat_interleave", "torch.repeat_interleave(x, repeats, output_size=n)  # n known on the host"),
)
_TO_DEVICE = (
    'create it on the GPU, torch.zeros(n, device="cuda"), or copy it without waiting: x.pin_memory().to("cuda", '
    "non_blocking=True)"
)
_TO_HOST = 'x.to("cpu", non_blocking=True) into pinned memory, and read it one step later'
_BY_HAND = "remove torch.cuda.synchronize(); measure time with torch.cuda.Event(enable_timing=True)"


def check(case: Case) -> list[Finding]:
    waits = waits_of(case, "synchronization")
    if waits.is_empty():
        return []
    of_values = waits.filter(pl.col("outer_op").cast(pl.String).is_in(_VALUES))
    gone = of_values["copy"].drop_nulls()
    one_by_one = of_values.filter(pl.col("fed_by").is_not_null())
    if one_by_one.height >= _LOOP * case.num_steps:
        gone = pl.concat([gone, one_by_one["fed_by"].explode()])
    masks = case.within(mask_indexing(case.linked))
    change = replace(_of_fixed_shape(case.without(gone), masks), unwaited=frozenset(waits["event"].to_list()))
    saving_ns = min(case.saving_ns(change), case.starved_ns)
    count = waits["stop"].n_unique() / case.num_steps
    is_one_look = count <= 1 and bool(waits["is_closing"].all())
    if not case.is_worth(saving_ns) or (is_one_look and saving_ns < _ONE_LOOK_SHARE * case.step_ns):
        return []
    table = _by_caller(waits, case.num_steps)
    top = table.row(0, named=True)
    fix = next((text for pattern, text in _FIXES if re.search(pattern, str(top["op"]))), _TO_HOST)
    if not str(top["op"]).startswith("aten::"):
        fix = _BY_HAND
    elif top["what"] == "host_to_device":
        fix = _TO_DEVICE
    most = "" if table.height == 1 else f"{top['num_calls']:,.0f} of them "
    until = pl.max_horizontal("duration_ns", pl.col("wait_ns").fill_null(0) + pl.col("idle_after_ns"))
    stood = waits.select("start_ns", (pl.col("start_ns") + until).alias("end_ns"))
    wait_ns, idle_ns = (case.total_ns(waits, pl.col(name)) for name in ("wait_ns", "idle_after_ns"))
    by_mask = ""
    if masks.height:
        by_mask = (
            f" Indexing with a mask, {case.number_text(masks, 'time')} per step, keeps the host busy "
            f"for {duration(case.total_ns(masks, LENGTH), 3)} under the profiler."
        )
    return one_finding(
        sentence=f"The host stops {plural(count, 'time')} per step to wait for the GPU, {most}in {top['op']} in "
        f"{place(top)}. It waits {duration(wait_ns, 3)}, and then the GPU is idle for {duration(idle_ns, 3)} of the "
        f"{duration(case.step_ns, 3)} step.{by_mask}",
        fix=fix,
        saving_ns=saving_ns,
        upper_bound=True,
        derived="the step replayed without these waits, the copies of single values, and the ops that compute such "
        "values one by one in a loop; the host then runs ahead as far as the GPU's own work allows"
        + ("; each op that indexes with a mask becomes one kernel and takes as much host time as a typical op"
           if by_mask else ""),
        confidence="high" if count >= 2 else "medium",
        falsified_by="remove the calls; the finding is wrong if the step is not faster, or if the host needs a value "
        "before it can continue",
        places=case.host_places(stood),
        evidence=(Evidence("waits of the host, by op and caller", table.head(8).to_dicts()),),
    )  # fmt: skip


def _of_fixed_shape(change: Change, masks: pl.DataFrame) -> Change:
    """Return the change with the ops that count a mask's elements removed too."""
    if masks.is_empty():
        return change
    host = [masks.select("start_ns", "end_ns", "factor")]
    if change.host is not None:
        host.append(change.host.filter(~starts_within(change.host, masks)))
    gone = masks["events"].explode().drop_nulls().to_list()
    return replace(change, gone=change.gone | frozenset(gone), host=pl.concat(host).sort("start_ns"))


def _by_caller(waits: pl.DataFrame, num_steps: int) -> pl.DataFrame:
    keys = ("op", "what", "phase", "module", "caller")
    return (
        waits.with_columns(pl.coalesce(pl.col("outer_op", "call").cast(pl.String)).alias("op"))
        .with_columns(pl.col("what", "phase", "module").cast(pl.String))
        .group_by(keys, maintain_order=True)
        .agg(
            (pl.col("stop").n_unique() / num_steps).alias("num_calls"),
            *(pl.col(name).sum() / num_steps for name in ("wait_ns", "idle_after_ns")),
            pl.col("waited_for").cast(pl.String).drop_nulls().mode(maintain_order=True).first(),
        )
        .sort(pl.col("wait_ns") + pl.col("idle_after_ns"), "num_calls", descending=True)
    )
