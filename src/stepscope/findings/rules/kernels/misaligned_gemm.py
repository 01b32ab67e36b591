"""Are matrix products slow because a dimension is no multiple of what tensor cores load?"""

from __future__ import annotations

import polars as pl

from stepscope.analysis.costs.attainable_rates import gemm_ns
from stepscope.analysis.time.replay import Change
from stepscope.findings.finding import Evidence, Finding
from stepscope.findings.gemms import LOADED_BYTES, by_shape, gemm_calls
from stepscope.formatting import duration, plural
from stepscope.session.case import Case


def check(case: Case) -> list[Finding]:
    peaks = case.device.peak_flops
    calls = gemm_calls(case).filter(
        pl.col("alignment_bytes") < LOADED_BYTES, pl.col("peak_dtype").is_in(["bf16", "fp16", "tf32", "fp8"])
    )
    durations: dict[int, float] = {}
    for row in calls.iter_rows(named=True):
        if row["peak_dtype"] in peaks:
            expected = gemm_ns(case.device, row["peak_dtype"], row["flops"], row["bytes"])
            durations |= case.scaled_to(min(expected, row["duration_ns"]), row["events"])
    saving_ns = case.saving_ns(Change(duration_ns=durations)) if durations else 0.0
    if not case.is_worth(saving_ns):
        return []
    sizes = sorted(set(calls["odd_sizes"].explode().drop_nulls()), reverse=True)[:3]
    total_ns = float(calls["duration_ns"].sum()) / case.num_steps
    share = float(calls["flops"].sum()) / float(calls["duration_ns"].sum()) * 1e9 / peaks[calls["peak_dtype"][0]]
    return [
        Finding(
            sentence=f"{plural(calls.height / case.num_steps, 'matrix product')} a step with a dimension that is no "
            f"multiple of {LOADED_BYTES} bytes ({', '.join(map(str, sizes))}) take {duration(total_ns, 3)} of "
            f"{duration(case.step_ns, 3)} at {share:.0%} of the device's peak.",
            fix=f"pad the dimension to a multiple of 64: {sizes[0]} -> {-(-sizes[0] // 64) * 64}",
            saving_ns=saving_ns,
            derived="the step replayed with each of these products at 60 % of the peak",
            confidence="high" if share < 0.3 else "medium",
            falsified_by="products of the padded size that are as slow",
            places=case.places(calls["events"].explode()),
            evidence=(Evidence("misaligned matrix products", by_shape(calls, case.num_steps)),),
        )
    ]
