"""Does autocast cost more in casts than tensor cores give back?"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from stepscope.analysis.costs.attainable_rates import LEAST_KERNEL_NS, attention_ns, gemm_ns, traffic_ns
from stepscope.analysis.precision.casts import repeated
from stepscope.errors import Unavailable
from stepscope.findings.finding import Evidence, Finding
from stepscope.findings.gemms import gemm_calls
from stepscope.formatting import duration, plural
from stepscope.session.case import Case

_LOW_PEAKS = ("bf16", "fp16")
_LOW_TEXT = r"c10::(BFloat16|Half)"
_WIDER = 2.0
"""What a tensor in float32 takes longer to read and write."""


def check(case: Case) -> list[Finding]:
    case.with_shapes()
    casts = case.casts.filter("is_autocast")
    # Other ops cast inside too: a product whose weight is cast shows that it is autocast.
    if not casts["is_weight"].any():
        return []
    # What micro-batches cast again is `repeated_weight_casts`' to tell, and has another remedy.
    casts = casts.join(repeated(case.casts).select("event"), on="event", how="anti")
    if "fp32" not in case.device.peak_flops:
        raise Unavailable(f"the float32 peak of {case.device.name} is not known")
    in_float32 = _without_autocast(case, set(casts["event"].to_list()))
    cast_ns = float(casts["duration_ns"].sum()) / case.num_steps
    known = case.work.filter(pl.col("event").is_in(list(in_float32)))
    gained_ns = (sum(in_float32.values()) - float(known["duration_ns"].sum())) / case.num_steps
    # Where the GPU gains by it, casts only cost because the host is late: `launch_bound` tells of that.
    if gained_ns > cast_ns:
        return []
    saving_ns = case.saving_ns(replace(case.without(casts["event"]), duration_ns=in_float32))
    if not case.is_worth(saving_ns):
        return []
    host_ns = float((casts["end_ns"] - casts["start_ns"]).sum()) / case.num_steps
    table = (
        casts.group_by("root_op", "phase", "source", "target")
        .agg((pl.len() / case.num_steps).alias("num_casts"), pl.col("duration_ns").sum() / case.num_steps)
        .sort("num_casts", descending=True)
    )
    return [
        Finding(
            sentence=f"Autocast costs more than it gives: {plural(casts.height / case.num_steps, 'cast')} a step "
            f"take {duration(cast_ns, 3)} of the GPU and {duration(host_ns, 3)} of the host under the profiler, "
            f"and lower precision saves {duration(gained_ns, 3)} of the GPU on everything else, in a step of "
            f"{duration(case.step_ns, 3)}.",
            fix='torch.set_float32_matmul_precision("high") and no torch.autocast; or model.to(torch.bfloat16), '
            "which needs no casts either, where the optimizer may keep its state in bfloat16",
            saving_ns=saving_ns,
            derived="the step replayed without these casts, with products and attention at what they reach in TF32 "
            "and float32, and what else runs in lower precision with twice its bytes, none of it faster than now",
            confidence="medium",
            falsified_by="a step as long without autocast, in the same program with nothing else changed",
            places=case.places(casts["event"]),
            evidence=(Evidence("casts by the op they are for", table.head(8).to_dicts()),),
        )
    ]


def _without_autocast(case: Case, casts: set[int]) -> dict[int, float]:
    """How long each piece of work in lower precision would take in float32, by its event."""
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
    """What is expected of a kernel in float32: no less than now, and now where that is the least a kernel takes."""
    return now_ns if expected_ns <= LEAST_KERNEL_NS else max(now_ns, expected_ns)
