"""Do autocast's casts cost more than lower precision saves?"""

from __future__ import annotations

import polars as pl

from stepscope.analysis.costs.attainable_rates import LEAST_KERNEL_NS, attention_ns, gemm_ns, traffic_ns
from stepscope.analysis.precision.casts import repeated
from stepscope.findings.gemms import gemm_calls
from stepscope.findings.rule import LENGTH, Case, Evidence, Finding, Unavailable, duration, one_finding

_LOW_PEAKS = ("bf16", "fp16")
_LOW_TEXT = r"c10::(BFloat16|Half)"
_WIDER = 2.0  # float32 tensors have twice the bytes


def check(case: Case) -> list[Finding]:
    case.with_shapes()
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
