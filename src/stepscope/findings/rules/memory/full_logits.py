"""Are logits for the whole vocabulary held in memory for all tokens at once?"""

from __future__ import annotations

import polars as pl

from stepscope.analysis.costs.attainable_rates import loss_ns
from stepscope.findings.memory_figures import alive_bytes, is_worth_bytes
from stepscope.findings.rule import Case, Evidence, Finding, one_finding, size

_ONE_PASS = 1.5  # a loss faster than this many times a fused one is fused
_NUM_CHUNKS = 8
_SHORT_SHARE = 0.5  # of the device's memory; chunks trade time for memory, which is pointless below this
_COMPILED = (
    "loss = torch.compile(head_and_loss)(hidden, targets)  # compile once; def head_and_loss(hidden, targets): "
    "return F.cross_entropy(head(hidden).float(), targets)"
)
_IN_CHUNKS = f"compute head and loss for {_NUM_CHUNKS} chunks of the tokens, each under torch.utils.checkpoint"
# The matrix product that computes logits: one per loss.
_MAKES = pl.col("is_product") & pl.col("phase").ne_missing("backward")


def check(case: Case) -> list[Finding]:
    case.with_shapes()
    work = case.logits.filter(~_is_in_chunks(case.logits))
    if not work["is_loss"].any():
        return []
    durations: dict[int, float] = {}
    gone: list[int] = []
    held: int | None = 0
    kept_bytes = total_fused_ns = 0.0
    for (num_tokens, vocabulary, item_bytes), part in work.group_by("num_tokens", "vocabulary", "item_bytes"):
        num_elements = int(num_tokens) * int(vocabulary)
        passes = part.filter(~pl.col("is_product"))
        num_losses = max(1, part.filter(_MAKES).height)
        kept = passes.filter("is_loss").sort("duration_ns", descending=True)["event"].head(num_losses)
        fused_ns = loss_ns(case.device, num_elements * int(item_bytes))
        now_ns = float(passes["duration_ns"].sum()) / num_losses
        durations |= dict.fromkeys(kept.to_list(), min(fused_ns, now_ns))
        gone += passes.filter(~pl.col("event").is_in(kept.implode()))["event"].to_list()
        total_fused_ns += fused_ns * num_losses
        alive = alive_bytes(case, num_elements)
        held = None if held is None or alive is None else held + alive
        kept_bytes += num_elements * int(item_bytes)
    total_ns = float(work.filter(~pl.col("is_product"))["duration_ns"].sum())
    is_fused = total_ns < _ONE_PASS * total_fused_ns
    saving_ns: float | None = None
    if not is_fused:
        saving_ns = case.saving_ns(case.without(gone, durations))
    elif not held or case.memory.peak_bytes < _SHORT_SHARE * (case.device.visible_bytes or case.device.memory_bytes):
        return []
    saving_bytes = _saved(case, held, held // _NUM_CHUNKS if held and is_fused else int(kept_bytes))
    if not (case.is_worth(saving_ns or 0.0) or is_worth_bytes(case, saving_bytes)):
        return []
    one = work.sort(pl.col("num_tokens") * pl.col("vocabulary")).row(-1, named=True)
    passes = work.filter(~pl.col("is_product"))
    logits_bytes = one["num_tokens"] * one["vocabulary"] * one["item_bytes"]
    holding = f", or {size(held)} of the {size(case.memory.peak_bytes)} peak with all copies" if held else ""
    table = case.grouped(work, "num_kernels", "op", "phase", "is_product")
    in_chunks = (
        f"bytes: tensors of that size alive at the peak, minus one of {_NUM_CHUNKS} chunks; the product that "
        "computes the logits runs twice, which costs time"
    )
    compiled = (
        "the step replayed with one pass over the logits in the forward and one in the backward, at half of the "
        "device's bandwidth; bytes: tensors of that size alive at the peak, minus one copy of the logits"
    )
    return one_finding(
        sentence=f"The full logits ({one['num_tokens']:,} tokens × {one['vocabulary']:,} vocabulary) take "
        f"{size(logits_bytes)}{holding}. Besides the matrix products, reading and writing "
        f"them in {case.number_text(passes, 'kernel')} takes {case.cost_text(total_ns / case.num_steps)}.",
        fix=_IN_CHUNKS if is_fused else _COMPILED,
        saving_ns=saving_ns if saving_ns is not None and case.is_worth(saving_ns) else None,
        saving_bytes=saving_bytes,
        upper_bound=True,
        derived=in_chunks if is_fused else compiled,
        confidence="medium",
        falsified_by="look at the memory timeline; the finding is wrong if the peak is elsewhere in the step, or if "
        "the program needs all logits at once",
        places=case.places(passes["event"]),
        evidence=(Evidence("kernels that read or write the logits", table.head(10).to_dicts()),),
    )


def _is_in_chunks(work: pl.DataFrame) -> pl.Series:
    """Return for each row whether its logits are already computed in chunks: several times before a backward."""
    backwards = (pl.col("phase") == "backward").cum_sum()
    sizes = ("num_tokens", "vocabulary")
    made = work.select(*sizes, backwards.over(sizes).alias("backward"), _MAKES.cast(pl.Int64).alias("made"))
    most = made.group_by(*sizes, "backward").agg(pl.col("made").sum()).group_by(sizes).agg(pl.col("made").max())
    return work.select(sizes).join(most, on=sizes, how="left", maintain_order="left")["made"] > 1


def _saved(case: Case, held: int | None, kept: int) -> int | None:
    """Return the bytes that need not be held, at most the difference to the peak in other stages of the step."""
    if not held:
        return None
    elsewhere = [stage.peak_bytes for stage in case.memory.stages if stage.name not in ("forward", "backward")]
    return max(0, min(held - kept, case.memory.peak_bytes - max(elsewhere, default=0))) or None
