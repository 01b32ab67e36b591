"""Are matrix products slow because a dimension is not a multiple of what tensor cores load?"""

from __future__ import annotations

import polars as pl

from stepscope.analysis.costs.attainable_rates import gemm_ns
from stepscope.findings.gemms import LOADED_BYTES, by_shape, gemm_calls
from stepscope.findings.rule import Case, Change, Evidence, Finding, one_finding, whole_percent


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
    saving_ns = case.saving_ns(Change(duration_ns=durations))
    if not case.is_worth(saving_ns):
        return []
    sizes = sorted(set(calls["odd_sizes"].explode().drop_nulls()), reverse=True)[:3]
    share = float(calls["flops"].sum()) / float(calls["duration_ns"].sum()) * 1e9 / peaks[calls["peak_dtype"][0]]
    return one_finding(
        sentence=f"{case.number_text(calls, 'matrix product per step has', 'matrix products per step have')} a "
        f"dimension ({', '.join(map(str, sizes))}) that is not a multiple of {LOADED_BYTES} bytes. This takes "
        f"{case.cost_text(calls)} at {whole_percent(share)} of the device's peak.",
        fix=f"pad the dimension to a multiple of 64: {sizes[0]} -> {-(-sizes[0] // 64) * 64}",
        saving_ns=saving_ns,
        derived="the step replayed with each of these products at 60 % of the peak",
        confidence="high" if share < 0.3 else "medium",
        falsified_by="pad the dimension; the finding is wrong if the products are not faster",
        places=case.places(calls["events"].explode()),
        evidence=(Evidence("misaligned matrix products", by_shape(case, calls)),),
    )
