"""Rules about work that is done for nothing: padding, and loss scaling that bfloat16 does not need."""

from dataclasses import replace

import polars as pl

from stepscope.findings.rule import Case, Change, Evidence, Finding, Unavailable, one_finding, rule
from stepscope.formatting import whole_percent

_LEAST_SHARE = 0.1  # of the positions; less is usual for texts of different length


@rule
def padding(case: Case) -> list[Finding]:
    """Is a large part of the batch padding that is computed like text?"""
    facts = case.recording.facts
    if "padding" not in facts:
        raise Unavailable("The recording does not have the values of its inputs. Record it again: `stepscope run`.")
    counted = facts["padding"]
    if not counted["num_positions"]:
        return []
    whole, used, to_longest = (counted[name] for name in ("num_positions", "num_used", "num_to_longest"))
    left = to_longest / whole
    if 1 - used / whole < _LEAST_SHARE:
        return []
    is_batch = 1 - left >= _LEAST_SHARE
    share = left if is_batch else used / whole
    saving_ns = _scaled(case, share)
    if not case.is_worth(saving_ns):
        return []
    if is_batch:
        fix = (
            "pad each batch to its own longest text, in the collate_fn: pad_sequence(texts, batch_first=True); in "
            "transformers: no padding in the tokenizer, and data_collator=DataCollatorWithPadding(tokenizer)"
        )
        derived = f"all work of forward and backward at {whole_percent(share)} of its positions, attention squared"
    else:
        fix = "batch texts of similar length (sort by length), or pack several into one row with a block mask"
        derived = f"all work of forward and backward at the {whole_percent(share)} of positions in use"
    return one_finding(
        sentence=f"{whole_percent(1 - used / whole)} of the {whole:,} positions of a step are padding, which is "
        f"computed like text. Padded to the longest text of its batch, a step would have {to_longest:,} positions.",
        fix=fix,
        saving_ns=saving_ns,
        upper_bound=not is_batch or not case.has_gpu_work,
        derived=f"{derived}; short tensors run at lower rates, which is not counted",
        confidence="high" if is_batch and case.has_gpu_work else "medium",
        falsified_by="look at the inputs; the finding is wrong if the repeated value at their ends has a meaning",
        evidence=(Evidence("positions of the inputs", [dict(counted)]),),
    )


def _scaled(case: Case, share: float) -> float:
    """Return what a step saves if forward and backward have this share of their positions."""
    if not case.has_gpu_work:
        names = ("forward", "backward")
        parts = {row.name: row.ns for row in case.summary.rows}
        return (1 - share) * sum(parts.get(name, 0.0) for name in names)
    passes = case.work.filter(pl.col("phase").cast(pl.String).is_in(["forward", "backward"]))
    is_attention = pl.col("class").cast(pl.String).str.starts_with("attention")
    rows = passes.select("event", "duration_ns", is_attention).iter_rows()
    return case.saving_ns(Change(duration_ns={event: ns * share ** (1 + squared) for event, ns, squared in rows}))


_SCALING = "_amp_foreach_non_finite_check_and_unscale_"


@rule
def loss_scaling(case: Case) -> list[Finding]:
    """Does a GradScaler scale the loss although nothing is computed in float16?"""
    case.with_shapes(and_dtypes=True)
    dtypes, ops = case.work["dtypes"].cast(pl.String), case.work["op"].cast(pl.String)
    checks = case.work.filter(ops.str.contains(_SCALING, literal=True).fill_null(False))
    if checks.is_empty() or dtypes.str.contains("c10::Half").any():
        return []
    reads = case.waits.filter(pl.col("outer_op").cast(pl.String) == "aten::item")
    after = reads.filter(pl.col("start_ns") > checks["start_ns"].min())
    change = case.without([*checks["event"], *after["copy"].drop_nulls()])
    saving_ns = case.saving_ns(replace(change, unwaited=frozenset(after["event"].to_list())))
    is_cheap = not case.is_worth(saving_ns)
    return one_finding(
        sentence=f"A GradScaler checks and scales all gradients in {case.cost_text(checks)}, and the host waits for "
        "the result, but nothing in this step is computed in float16. bfloat16 and float32 need no loss scaling.",
        fix="remove torch.amp.GradScaler: loss.backward(); optimizer.step()",
        saving_ns=None if is_cheap else saving_ns,
        derived="less than 3 % of the step" if is_cheap else "the step replayed without its kernels and waits",
        falsified_by="look for float16 in the step; the finding is wrong if the traced steps are not typical",
        places=case.places(checks["event"]),
        evidence=(Evidence("kernels of the GradScaler", case.grouped(checks, "num_kernels", "op").to_dicts()),),
    )
