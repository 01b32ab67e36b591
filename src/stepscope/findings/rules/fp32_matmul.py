"""Do matrix products run in float32 where tensor cores would serve?"""

from __future__ import annotations

import polars as pl

from stepscope.analysis.reach import gemm_ns
from stepscope.analysis.replay import Change
from stepscope.findings.case import Case
from stepscope.findings.finding import CannotCheck, Evidence, Finding
from stepscope.findings.gemms import by_shape, gemm_calls
from stepscope.findings.wording import milliseconds, several


def check(case: Case) -> list[Finding]:
    if not {"fp32", "tf32"} <= case.device.peak_flops.keys():
        raise CannotCheck(f"{case.device.name} has no TF32")
    calls = gemm_calls(case)
    slow = calls.filter(pl.col("peak_dtype") == "fp32")
    if slow.is_empty():
        return []
    durations: dict[int, float] = {}
    for row in slow.iter_rows(named=True):
        expected = gemm_ns(case.device, "tf32", row["flops"], row["bytes"], row["alignment_bytes"] >= 16)
        durations |= case.scaled_to(min(expected, row["duration_ns"]), row["events"])
    saving_ns = case.saving_ns(Change(duration_ns=durations))
    if not case.is_worth(saving_ns):
        return []
    total_ns = float(slow["duration_ns"].sum()) / case.num_steps
    tflops = float(slow["flops"].sum()) / max(1, int(slow["duration_ns"].sum())) / 1e3
    peak = case.device.peak_flops
    return [
        Finding(
            sentence=f"{several(slow.height / case.num_steps, 'matrix product')} a step run in float32 without "
            f"tensor cores: {milliseconds(total_ns)} of {milliseconds(case.step_ns)} at {tflops:.0f} TFLOP/s, where "
            f"the device has {peak['fp32'] / 1e12:.0f} in float32 and {peak['tf32'] / 1e12:.0f} in TF32.",
            fix='torch.set_float32_matmul_precision("high")  # further: torch.autocast("cuda", torch.bfloat16)',
            saving_ns=saving_ns,
            derived="the step replayed with each product at 60 % of the TF32 peak, 15 % where a dimension is no "
            "multiple of 16 bytes, and never slower than it is",
            falsified_by="kernels named tf32 or bf16 for these products, or a loss that TF32 changes too much",
            evidence=(Evidence("matrix products in float32", by_shape(slow, case.num_steps)),),
        )
    ]
