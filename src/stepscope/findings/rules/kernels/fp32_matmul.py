"""Do matrix products run in float32 where tensor cores would be faster?

TF32 takes float32 tensors as they are. On devices without TF32, the products must run in half precision.
"""

from __future__ import annotations

import polars as pl

from stepscope.analysis.costs.attainable_rates import gemm_ns
from stepscope.findings.gemms import by_shape, gemm_calls
from stepscope.findings.rule import Case, Change, Evidence, Finding, Unavailable, one_finding

_FASTER = {
    "tf32": ("TF32", 'torch.set_float32_matmul_precision("high")  # further: torch.autocast("cuda", torch.bfloat16)'),
    "bf16": ("bfloat16", 'with torch.autocast("cuda", torch.bfloat16): …  # this device has no TF32'),
    "fp16": (
        "float16",
        'with torch.autocast("cuda", torch.float16): …, and torch.amp.GradScaler("cuda") for the backward  # this '
        "device has neither TF32 nor bfloat16",
    ),
}  # faster formats with their names and fixes; the one that changes least comes first


def check(case: Case) -> list[Finding]:
    peak = case.device.peak_flops
    faster = next((dtype for dtype in _FASTER if dtype in peak), None)
    if faster is None or "fp32" not in peak:
        raise Unavailable(f"No format faster than float32 is known for {case.device.name}.")
    slow = gemm_calls(case).filter(pl.col("peak_dtype") == "fp32")
    durations: dict[int, float] = {}
    for row in slow.iter_rows(named=True):
        expected = gemm_ns(case.device, faster, row["flops"], row["bytes"], row["alignment_bytes"] >= 16)
        durations |= case.scaled_to(min(expected, row["duration_ns"]), row["events"])
    saving_ns = case.saving_ns(Change(duration_ns=durations))
    if not case.is_worth(saving_ns):
        return []
    tflops = float(slow["flops"].sum()) / max(1, int(slow["duration_ns"].sum())) / 1e3
    name, fix = _FASTER[faster]
    return one_finding(
        sentence=f"{case.number_text(slow, 'matrix product per step runs', 'matrix products per step run')} in "
        f"float32 without tensor cores. This takes {case.cost_text(slow)} at {tflops:.0f} TFLOP/s. The device's peak "
        f"is {peak['fp32'] / 1e12:.0f} TFLOP/s in float32 and {peak[faster] / 1e12:.0f} TFLOP/s in {name}.",
        fix=fix,
        saving_ns=saving_ns,
        upper_bound=faster != "tf32",
        derived=f"the step replayed with each product at 60 % of the {name} peak, 15 % if a dimension is not a "
        "multiple of 16 bytes, and never slower than now"
        + ("" if faster == "tf32" else "; the casts it needs are not counted"),
        confidence="high" if faster == "tf32" else "medium",
        falsified_by=f"look at the kernels of these products; the finding is wrong if they are named {faster}, or if "
        f"{name} changes the loss too much",
        places=case.places(slow["events"].explode()),
        is_provable=faster == "tf32",
        evidence=(Evidence("matrix products in float32", by_shape(case, slow)),),
    )
