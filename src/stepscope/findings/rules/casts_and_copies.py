"""Rules about work that only casts or copies tensors."""

import polars as pl

from stepscope.analysis.costs.attainable_rates import LEAST_KERNEL_NS, attention_ns, gemm_ns, traffic_ns
from stepscope.analysis.costs.op_costs import parsed_list
from stepscope.analysis.precision.casts import repeated
from stepscope.findings.rule import LENGTH, Case, Evidence, Finding, Unavailable, on_gpu, one_finding, rule
from stepscope.findings.rules.matrix_products import gemm_calls
from stepscope.formatting import duration, plural

_LOW_PEAKS = ("bf16", "fp16")
_LOW_TEXT = r"c10::(BFloat16|Half)"
_WIDER = 2.0  # float32 tensors have twice the bytes


@on_gpu
def autocast_cost(case: Case) -> list[Finding]:
    """Do autocast's casts cost more than lower precision saves?"""
    case.with_shapes(and_dtypes=True)
    casts = case.casts.filter("is_autocast")
    # Other ops cast internally too; only the cast of a weight shows that it is autocast.
    if not casts["is_weight"].any():
        return []
    # `repeated_weight_casts` reports casts repeated for each micro-batch, which have another fix.
    casts = casts.join(repeated(case.casts).select("event"), on="event", how="anti")
    if "fp32" not in case.device.peak_flops:
        raise Unavailable(f"The float32 peak of {case.device.name} is unknown.")
    in_float32 = _without_autocast(case, set(casts["event"].to_list()))
    cast_ns = case.total_ns(casts)
    known = case.work.filter(pl.col("event").is_in(list(in_float32)))
    gained_ns = sum(in_float32.values()) / case.num_steps - case.total_ns(known)
    # If the GPU gains, the casts only cost because the host is slow: `launch_bound` reports that.
    if gained_ns > cast_ns:
        return []
    saving_ns = case.saving_ns(case.without(casts["event"], in_float32))
    if not case.is_worth(saving_ns):
        return []
    table = case.grouped(casts, "num_casts", "root_op", "phase", "source", "target")
    table = table.sort("num_casts", "duration_ns", descending=True)
    return one_finding(
        sentence="Autocast costs more than it saves: "
        f"{case.number_text(casts, 'cast per step takes', 'casts per step take')} {duration(cast_ns, 3)} of "
        f"GPU time and {duration(case.total_ns(casts, LENGTH), 3)} of host time (under the profiler), and "
        f"lower precision saves only {duration(gained_ns, 3)} of GPU time elsewhere in the "
        f"{duration(case.step_ns, 3)} step.",
        fix='torch.set_float32_matmul_precision("high") instead of torch.autocast; or model.to(torch.bfloat16), '
        "which needs no casts either, if the optimizer may keep its state in bfloat16",
        saving_ns=saving_ns,
        derived="the step replayed without these casts, with matrix products and attention at the rates they reach "
        "in TF32 and float32, and other work in lower precision with twice its bytes; none of it gets faster",
        confidence="medium",
        falsified_by="turn autocast off and change nothing else; the finding is wrong if the step is not faster",
        places=case.places(casts["event"]),
        evidence=(Evidence("casts by op", table.head(8).to_dicts()),),
    )


def _without_autocast(case: Case, casts: set[int]) -> dict[int, float]:
    """Return the duration in float32 of work that runs in lower precision, in ns by event."""
    durations: dict[int, float] = {}
    dtype = "tf32" if "tf32" in case.device.peak_flops else "fp32"
    for row in gemm_calls(case).filter(pl.col("peak_dtype").is_in(_LOW_PEAKS)).iter_rows(named=True):
        is_aligned = row["alignment_bytes"] >= 8
        expected = gemm_ns(case.device, dtype, row["flops"], int(_WIDER * (row["bytes"] or 0)), is_aligned)
        durations |= case.scaled_to(_longer(row["duration_ns"], expected), row["events"])
    for row in case.attention.filter(pl.col("dtype").is_in(["bfloat16", "float16"])).iter_rows(named=True):
        flops = row["full_flops"] // (2 if row["is_causal"] else 1)
        expected = attention_ns(case.device, "fp32", flops, row["num_keys"])
        durations |= case.scaled_to(_longer(row["duration_ns"], expected), row["events"])
    low = case.work.filter(pl.col("dtypes").cast(pl.String).str.contains(_LOW_TEXT))
    for event, ns, moved in low.select("event", "duration_ns", "bytes").iter_rows():
        expected = ns * _WIDER if moved is None else traffic_ns(case.device, _WIDER * moved)
        durations.setdefault(event, _longer(ns, expected))
    return {event: ns for event, ns in durations.items() if event not in casts}


def _longer(now_ns: float, expected_ns: float) -> float:
    """Return the duration of a kernel in float32: at least as long as now, unchanged if launch time dominates."""
    return now_ns if expected_ns <= LEAST_KERNEL_NS else max(now_ns, expected_ns)


@rule
def repeated_weight_casts(case: Case) -> list[Finding]:
    """Are weights cast to lower precision again for every micro-batch?"""
    case.with_shapes(and_dtypes=True)
    again = repeated(case.casts)
    saving_ns = case.saving_ns(case.without(again["event"]))
    if not case.is_worth(saving_ns):
        return []
    num_micro_batches = max(again["num_micro_batches"])
    num_weights = again.height / case.num_steps / (num_micro_batches - 1)
    table = case.grouped(again, "num_casts", "root_op", "shape", "target")
    return one_finding(
        sentence=f"{plural(num_weights, 'weight is', 'weights are')} cast to {again['target'][0]} in each of "
        f"{num_micro_batches} micro-batches per step. Repeating {case.number_text(again, 'cast')} takes "
        f"{case.cost_text(again)}.",
        fix='with torch.autocast("cuda", torch.bfloat16): around the loop over micro-batches, so that inner regions '
        "reuse the casts; or weights in bfloat16 with float32 copies in the optimizer",
        saving_ns=saving_ns,
        derived="the step replayed without the casts of every micro-batch except the first, and the host's time for "
        "them",
        falsified_by="put one autocast region around all micro-batches; the finding is wrong if there are as many "
        "casts",
        places=case.places(again["event"]),
        evidence=(Evidence("repeated casts of weights", table.head(8).to_dicts()),),
    )


_COPYING = ["aten::contiguous", "aten::clone", "aten::copy_"]
_MOVING = ["aten::copy_", "aten::clone", "aten::_to_copy", "aten::fill_", "aten::zero_"]
_CASTING = ["aten::to", "aten::_to_copy", "aten::type_as", "aten::float", "aten::half", "aten::bfloat16"]


@rule
def needless_copies(case: Case) -> list[Finding]:
    """Are tensors copied, cast back and forth, or made contiguous for no reason?"""
    root = pl.col("root_op").cast(pl.String)
    is_training = pl.col("phase").is_in(["forward", "backward"])
    # The program cannot remove a copy in compiled code.
    moved = case.work.filter(
        is_training, pl.col("class").is_in(["copy_cast", "memset_memcpy"]), ~pl.col("is_compiled")
    )
    is_inside = (pl.col("kind") == "kernel") | pl.col("name").cast(pl.String).str.contains("(?i)DtoD")
    moved = moved.filter(is_inside)
    copied = moved.filter(root.is_in(_COPYING))
    # Fusing elementwise ops removes the casts among them: `unfused_elementwise` reports those.
    fused = case.segments.filter(pl.col("ops").list.set_difference(_MOVING).list.len() > 1)["events"].explode()
    casts = moved.filter(root.is_in(_CASTING), ~pl.col("event").is_in(fused.implode()))
    # A checkpoint recomputes a forward: its casts in the backward do not undo earlier ones.
    again = case.recomputed["events"].explode()
    needless = pl.concat(
        [copied, _round_trips(casts.with_columns(pl.col("event").is_in(again.implode()).alias("again")))]
    )
    saving_ns = case.saving_ns(case.without(needless["event"]))
    if not case.is_worth(saving_ns):
        return []
    has_backward = bool((needless["phase"] == "backward").any())
    keys = ("root_op", "op", "phase", "module", "shapes")
    table = case.grouped(needless.with_columns(pl.col(*keys).cast(pl.String)), "num_kernels", *keys)
    names = table.group_by("root_op").agg(pl.col("duration_ns").sum()).sort("duration_ns", descending=True)
    called = ", ".join(str(name).removeprefix("aten::") for name in names["root_op"].head(3))
    return one_finding(
        sentence=f"{case.number_text(needless, 'kernel per step only copies', 'kernels per step only copy')} "
        f"tensors, because the program calls {called}. This takes {case.cost_text(needless)}"
        f"{', including the backward,' if has_backward else ''} and computes nothing.",
        fix="remove .contiguous(), .clone() and dtype round trips (.float().to(…)) if the next op accepts the "
        "strides and dtype as they are: linear layers, matmul and SDPA do",
        saving_ns=saving_ns,
        upper_bound=True,
        derived="the step replayed without these copies and the host's time for them; a copy that the next op needs "
        "would reappear inside it",
        confidence="medium",
        falsified_by="remove the call; the finding is wrong if the copy reappears under another op (aten::reshape)",
        places=case.places(needless["event"]),
        evidence=(Evidence("copies by called op", table.head(8).to_dicts()),),
    )


def _round_trips(casts: pl.DataFrame) -> pl.DataFrame:
    """Return casts that are undone: as many of one shape to a dtype as from it, in one phase of a step."""
    texts = casts["dtypes"].cast(pl.String).to_list()
    pairs = {text: [each for each in parsed_list(text) or () if isinstance(each, str)][:2] for text in set(texts)}
    casts = casts.with_columns(
        pl.Series(name, [pairs[text][place] if len(pairs[text]) == 2 else None for text in texts], dtype=pl.String)
        for place, name in enumerate(("to", "from"))
    )
    casts = casts.filter(pl.col("to") != pl.col("from")).with_columns(
        pl.min_horizontal("to", "from").alias("low"), pl.max_horizontal("to", "from").alias("high")
    )
    keys = ("step", "phase", "again", "shapes")
    num = pl.len().over(*keys, "to", "from")
    num_back = pl.len().over(*keys, "low", "high") - num
    place = pl.int_range(pl.len()).over(*keys, "to", "from")
    return casts.filter(place < pl.min_horizontal(num, num_back)).drop("to", "from", "low", "high", "again")
