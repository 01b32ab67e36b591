"""Do matrix products run in float32 where tensor cores would serve?

TF32 serves with float32 tensors as they are. Where a device has none, products must be in half precision.
"""

from __future__ import annotations

import polars as pl

from stepscope.analysis.costs.attainable_rates import gemm_ns
from stepscope.analysis.time.replay import Change
from stepscope.errors import Unavailable
from stepscope.findings.finding import Evidence, Finding
from stepscope.findings.gemms import by_shape, gemm_calls
from stepscope.formatting import duration, plural
from stepscope.session.case import Case

_FASTER = {
    "tf32": ("TF32", 'torch.set_float32_matmul_precision("high")  # further: torch.autocast("cuda", torch.bfloat16)'),
    "bf16": ("bfloat16", 'with torch.autocast("cuda", torch.bfloat16): …  # this device has no TF32'),
    "fp16": (
        "float16",
        'with torch.autocast("cuda", torch.float16): …, and torch.amp.GradScaler("cuda") for the backward  # this '
        "device has neither TF32 nor bfloat16",
    ),
}
"""What a device may have that is faster, the one that changes least first: its name, and how to ask for it."""


def check(case: Case) -> list[Finding]:
    peak = case.device.peak_flops
    faster = next((dtype for dtype in _FASTER if dtype in peak), None)
    if faster is None or "fp32" not in peak:
        raise Unavailable(f"{case.device.name} has nothing faster than float32, as far as is known")
    calls = gemm_calls(case)
    slow = calls.filter(pl.col("peak_dtype") == "fp32")
    if slow.is_empty():
        return []
    durations: dict[int, float] = {}
    for row in slow.iter_rows(named=True):
        expected = gemm_ns(case.device, faster, row["flops"], row["bytes"], row["alignment_bytes"] >= 16)
        durations |= case.scaled_to(min(expected, row["duration_ns"]), row["events"])
    saving_ns = case.saving_ns(Change(duration_ns=durations))
    if not case.is_worth(saving_ns):
        return []
    total_ns = float(slow["duration_ns"].sum()) / case.num_steps
    tflops = float(slow["flops"].sum()) / max(1, int(slow["duration_ns"].sum())) / 1e3
    name, fix = _FASTER[faster]
    return [
        Finding(
            sentence=f"{plural(slow.height / case.num_steps, 'matrix product')} a step run in float32 without "
            f"tensor cores: {duration(total_ns, 3)} of {duration(case.step_ns, 3)} at {tflops:.0f} TFLOP/s, where "
            f"the device has {peak['fp32'] / 1e12:.0f} in float32 and {peak[faster] / 1e12:.0f} in {name}.",
            fix=fix,
            saving_ns=saving_ns,
            upper_bound=faster != "tf32",
            derived=f"the step replayed with each product at 60 % of the {name} peak, 15 % where a dimension is no "
            "multiple of 16 bytes, and never slower than it is"
            + ("" if faster == "tf32" else "; the casts that it takes are not counted"),
            confidence="high" if faster == "tf32" else "medium",
            falsified_by=f"kernels named {faster} for these products, or a loss that {name} changes too much",
            places=case.places(slow["events"].explode()),
            is_provable=faster == "tf32",
            evidence=(Evidence("matrix products in float32", by_shape(slow, case.num_steps)),),
        )
    ]
