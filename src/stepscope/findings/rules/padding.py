"""Rules about work that is done for nothing: padding, labels that the loss ignores, and loss scaling that bfloat16
does not need."""

from dataclasses import replace

import polars as pl

from stepscope.findings.rule import Case, Change, Evidence, Finding, Unavailable, one_finding, rule
from stepscope.findings.rules.memory import alive_bytes, freed_bytes, is_worth_bytes
from stepscope.formatting import whole_percent

_LEAST_SHARE = 0.1  # of the positions; less is usual for texts of different length
_LEAST_IGNORED = 0.3  # of the labels


@rule
def padding(case: Case) -> list[Finding]:
    """Is a large part of the batch padding that is computed like text?"""
    counted = _counted(case)
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


def _counted(case: Case) -> dict[str, int]:
    facts = case.recording.facts
    if "padding" not in facts:
        raise Unavailable("The recording does not have the values of its inputs. Record it again: `stepscope run`.")
    return facts["padding"]


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


@rule
def ignored_labels(case: Case) -> list[Finding]:
    """Are logits computed for the whole vocabulary where the loss ignores the label?"""
    case.with_shapes(and_dtypes=True)
    counted = _counted(case)
    num_labels, num_ignored = counted.get("num_labels", 0), counted.get("num_ignored", 0)
    if not num_labels or num_ignored < _LEAST_IGNORED * num_labels:
        return []
    share = 1 - num_ignored / num_labels
    work = case.logits
    left = {event: ns * share for event, ns in work.select("event", "duration_ns").iter_rows()}
    saving_ns = case.saving_ns(Change(duration_ns=left))
    held = alive_bytes(case, *work["num_elements"].unique())
    saving_bytes = freed_bytes(case, held, round((held or 0) * share))
    is_worth = case.is_worth(saving_ns)
    if work.is_empty() or not (is_worth or is_worth_bytes(case, saving_bytes)):
        return []
    one = work.sort(pl.col("num_tokens") * pl.col("vocabulary")).row(-1, named=True)
    table = case.grouped(work, "num_kernels", "op", "phase", "is_product")
    return one_finding(
        sentence=f"The loss ignores {whole_percent(num_ignored / num_labels)} of the {num_labels:,} labels, but "
        f"logits over {one['vocabulary']:,} words are computed for all positions: "
        f"{case.cost_text(float(work['duration_ns'].sum()) / case.num_steps)}, with the products of the last layer.",
        fix="keep = labels != -100; loss = F.cross_entropy(head(hidden[keep]), labels[keep])  # labels shifted first",
        saving_ns=saving_ns if is_worth else None,
        saving_bytes=saving_bytes,
        upper_bound=True,
        derived=f"the step replayed with all work on logits at {whole_percent(share)} of its positions; choosing "
        "them makes the host wait for the GPU once, unless their number is fixed",
        confidence="high",
        falsified_by="count labels != -100; the finding is wrong if another step has far more of them",
        places=case.places(work["event"]),
        evidence=(Evidence("kernels that read or write the logits", table.head(10).to_dicts()),),
    )


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
