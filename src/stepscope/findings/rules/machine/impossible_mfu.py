"""Is anything faster than the hardware allows, so that a figure must be wrong?"""

from __future__ import annotations

import polars as pl

from stepscope.analysis.costs.flops import Utilization
from stepscope.devices import find_device
from stepscope.findings.gemms import by_shape, gemm_calls
from stepscope.findings.rule import Case, Evidence, Finding, Unavailable, duration, one_finding, whole_percent

_IMPOSSIBLE = 1.02  # of the limit; clocks and rounding may bring a figure just above it
_SURE_NS = 50_000  # shorter kernels are timed too coarsely


def check(case: Case) -> list[Finding]:
    reasons = []
    found: list[Finding] = []
    for look in (_of_the_step, _of_kernels):
        try:
            found += look(case)
        except Unavailable as reason:
            reasons.append(str(reason))
    if len(reasons) == 2:
        raise Unavailable(" ".join(reasons))
    return found


def _of_the_step(case: Case) -> list[Finding]:
    summary = case.summary
    if summary.flops is None or (summary.mfu is None and summary.hfu is None):
        name = (case.recording.facts.get("environment") or {}).get("device_name")
        raise Unavailable(f"The peak of {name} is unknown. Measure it with `stepscope doctor --measure`.")
    shares = {"MFU": summary.mfu, "HFU": summary.hfu}
    above = {name: used for name, used in shares.items() if used is not None and used.share > _IMPOSSIBLE}
    if not above:
        return []
    name, used = max(above.items(), key=lambda item: item[1].share)
    why, fix = _suspect(case, used)
    flops = summary.flops
    row = {
        "name": name, "share": used.share, "flops_per_s": used.flops_per_s, "limit": used.limit,
        "step_ns": case.step_ns, "clock": summary.clock, "model_flops": flops.model_flops,
        "hardware_flops": flops.hardware_flops, "formula_flops": flops.formula_flops,
    }  # fmt: skip
    return one_finding(
        sentence=f"{name} is {whole_percent(used.share)}, which is impossible: {used.flops_per_s / 1e12:,.3g} "
        f"TFLOP/s against a limit of {used.limit}. {why}",
        fix=fix,
        derived="no time is saved; a figure is wrong",
        falsified_by="look up the device; the finding is wrong if a datasheet gives a higher dense peak",
        evidence=(Evidence("utilization", [row]),),
    )


def _suspect(case: Case, used: Utilization) -> tuple[str, str]:
    """Return which figure is wrong (time, dtype, limit or FLOPs) and the fix."""
    summary, flops = case.summary, case.summary.flops
    environment = case.recording.facts.get("environment") or {}
    assert flops is not None
    if environment.get("device") == "cuda" and summary.clock == "host":
        return (
            f"The time is wrong: {duration(case.step_ns, 3)} is host time, and the host runs ahead of the GPU.",
            "torch.cuda.synchronize() before reading the clock, or CUDA events as in `stepscope run`",
        )
    device = find_device(str(environment.get("device_name")))
    by_dtype, peaks = flops.hardware_flops_by_dtype, {} if device is None else device.peak_flops
    is_mostly_fp32 = by_dtype.get("fp32", 0) > sum(by_dtype.values()) / 2
    if is_mostly_fp32 and {"fp32", "tf32"} <= peaks.keys() and used.share * peaks["fp32"] / peaks["tf32"] <= 1:
        return (
            "The dtype is wrong: the float32 products must have run in TF32, which can be this fast.",
            'torch.get_float32_matmul_precision()  # "high" means TF32: divide by the TF32 peak',
        )
    if flops.formula_flops and flops.model_flops > 1.1 * flops.formula_flops:
        return (
            f"The FLOPs are wrong: {flops.model_flops / flops.formula_flops:.1f} times 6·N·tokens.",
            "count 2 FLOPs per multiply-add, causal attention as half, and a layer called twice as two",
        )
    if used.is_measured:
        return (
            "The limit is too low: something else probably used the device while it was measured.",
            "stepscope doctor --measure  # with the device idle",
        )
    return (
        "The peak or the FLOPs are wrong: time, dtype and formula agree.",
        f"compare with the datasheet: {used.source}",
    )


def _of_kernels(case: Case) -> list[Finding]:
    """Return matrix products that ran faster than the device's peak."""
    if not case.has_gpu_work:
        raise Unavailable("There is no trace of GPU work. Record on a GPU.")
    peaks = case.device.peak_flops
    # Winograd and FFT convolutions need fewer multiplications than are counted.
    is_convolution = pl.col("op").str.contains("conv")
    calls = gemm_calls(case).filter(pl.col("duration_ns") >= _SURE_NS, ~is_convolution)
    peak = pl.col("peak_dtype").replace_strict(dict(peaks), default=None, return_dtype=pl.Float64)
    rate = pl.col("flops") * 1e9 / pl.col("duration_ns")
    above = calls.with_columns((rate / peak).alias("share")).filter(pl.col("share") > _IMPOSSIBLE)
    if above.is_empty():
        return []
    worst = above.sort("share", descending=True).row(0, named=True)
    return one_finding(
        sentence=f"{case.number_text(above, 'matrix product per step appears', 'matrix products per step appear')} "
        "faster than "
        f"{case.device.name} allows: {worst['op']} in {worst['peak_dtype']} at {whole_percent(worst['share'])} of "
        f"its {peaks[worst['peak_dtype']] / 1e12:,.0f} TFLOP/s. The dtype in the trace or the peak is wrong.",
        fix="the kernel's name in the evidence shows its real dtype; compare with the peak of that dtype",
        derived="no time is saved; a figure is wrong",
        confidence="medium",
        falsified_by="look at the kernel's name; the finding is wrong if it shows the same dtype as the trace",
        places=case.places(above["events"].explode()),
        evidence=(Evidence("matrix products above the peak", by_shape(case, above)),),
    )
