"""Rules about the machine: other processes, clocks, and figures that cannot be right."""

from collections.abc import Mapping
from typing import Any

import polars as pl

from stepscope.analysis.costs.flops import Utilization
from stepscope.devices import find_device
from stepscope.findings.rule import Case, Change, Evidence, Finding, Unavailable, one_finding, rule
from stepscope.findings.rules.cpu import core_waits
from stepscope.findings.rules.matrix_products import by_shape, gemm_calls
from stepscope.formatting import duration, size, whole_percent

_SLACK_BYTES = 256 << 20  # the driver's figures per process and for the device differ by up to this


@rule
def other_process(case: Case) -> list[Finding]:
    """Do other processes use the same GPU, or on a CPU the same cores?"""
    if case.is_on_cpu:
        return core_waits(case)
    facts = case.recording.facts
    processes = (facts.get("counters") or {}).get("other_processes")
    if processes is None:
        raise Unavailable("The recording does not list other processes on the GPU. This needs NVML during the run.")
    memory = facts.get("memory") or {}
    others = [process for process in processes if isinstance(process, dict) and not _is_self(process, memory)]
    if not others:
        return []
    sized = [process for process in others if isinstance(process.get("used_bytes"), int)]
    if not sized:
        raise Unavailable(
            f"The driver lists {len(others)} other processes without their memory, as in a container. One may be "
            "this run. Run `nvidia-smi` outside the container."
        )
    num_bytes = sum(process["used_bytes"] for process in sized)
    largest = max(sized, key=lambda process: process["used_bytes"])
    name = str(largest.get("name") or "an unnamed process")[:80]
    who = "Another process" if len(sized) == 1 else f"{len(sized)} other processes"
    return one_finding(
        sentence=f"{who} held {size(num_bytes)} of GPU memory when the run ended, {size(largest['used_bytes'])} of "
        f"it by {name} (pid {largest.get('pid')}). Work in other processes slows this run down.",
        fix=f"nvidia-smi  # then end it: kill {largest.get('pid')}; or use a free GPU: CUDA_VISIBLE_DEVICES=N",
        saving_bytes=num_bytes,
        derived="the memory held by other processes; to measure the time, record again without them",
        confidence="medium",
        falsified_by="stop the process; the finding is wrong if it is part of this run, or if the step is not faster",
        evidence=(Evidence("processes", [dict(process) for process in sized[:8]]),),
    )


def _is_self(process: Mapping[str, Any], memory: Mapping[str, Any]) -> bool:
    """Return whether this must be the run itself under another pid, as in a container: both would not fit."""
    used, reserved, driver = (
        process.get("used_bytes"),
        memory.get("peak_reserved_bytes"),
        memory.get("driver_used_bytes"),
    )
    if not isinstance(used, int) or not isinstance(reserved, int) or not isinstance(driver, int):
        return False
    return used + reserved > driver + _SLACK_BYTES


_COOLING = "nvidia-smi -q -d TEMPERATURE  # then check fans, airflow, dust and neighboring GPUs"
_REASONS = {
    "sw_thermal_slowdown": ("heat", _COOLING),
    "hw_thermal_slowdown": ("heat", _COOLING),
    "hw_power_brake_slowdown": ("the power supply", "check the machine's power supply: it makes the GPU slow down"),
    "hw_slowdown": ("the hardware (heat or power)", "nvidia-smi -q -d TEMPERATURE,POWER"),
    "sw_power_cap": ("its power limit", "sudo nvidia-smi -pl WATTS  # see nvidia-smi -q -d POWER"),
    "applications_clocks_setting": ("a clock setting", "sudo nvidia-smi -rac; sudo nvidia-smi -rgc"),
    "sync_boost": ("the slowest GPU of its group", "nvidia-smi -q -d CLOCK,PERFORMANCE  # on every GPU of the group"),
}
_OFTEN = 0.2  # of the samples; rarer reasons are ignored
_LEAST_LOST = 0.03
_LEAST_LOST_TO_POWER = 0.1  # every GPU lowers its clock somewhat at full load


@rule
def throttling(case: Case) -> list[Finding]:
    """Is the GPU's clock reduced by power, heat or a setting?"""
    counters = case.summary.counters
    if counters is None or counters.sm_clock_mhz is None:
        raise Unavailable("The recording has no GPU clocks. This needs NVML during the run.")
    limits = case.recording.facts.get("counters") or {}
    seen_mhz = max((sample.sm_clock_mhz or 0 for sample in case.recording.counters), default=0)
    highest_mhz = float(limits.get("max_sm_clock_mhz") or seen_mhz)
    mean_mhz = counters.sm_clock_mhz.mean
    lost = 1 - mean_mhz / highest_mhz if highest_mhz else 0.0
    shares = {reason: share for reason, share in counters.throttle_shares if reason in _REASONS and share >= _OFTEN}
    if not shares:
        return []
    # Heat and hardware come first: the power cap is often reported with them.
    reason = min(shares, key=lambda name: (name == "sw_power_cap", -shares[name]))
    limit, default = limits.get("power_limit_watts"), limits.get("default_power_limit_watts")
    is_power = reason == "sw_power_cap"
    is_lowered = bool(limit and default and limit < default)
    if lost < (_LEAST_LOST_TO_POWER if is_power and not is_lowered else _LEAST_LOST):
        return []
    if is_power and limit and default and not is_lowered:
        return []  # this is the default limit, so only the load slows the GPU down
    ratio = mean_mhz / highest_mhz
    saving_ns = case.step_ns * (1 - ratio)
    if case.has_gpu_work:
        kernels = case.work.filter(pl.col("kind") == "kernel").select("event", "duration_ns")
        saving_ns = case.saving_ns(Change(duration_ns={event: ns * ratio for event, ns in kernels.iter_rows()}))
    if not case.is_worth(saving_ns):
        return []
    why, fix = _REASONS[reason]
    if is_power and is_lowered:
        why = f"its power limit of {limit:.0f} W (default: {default:.0f} W)"
        fix = f"sudo nvidia-smi -pl {default:.0f}"
    of = "the device's" if limits.get("max_sm_clock_mhz") else "the highest observed,"
    watts = f" at {counters.power_watts.mean:.0f} W" if counters.power_watts else ""
    powers = {name: limits.get(name) for name in ("power_limit_watts", "default_power_limit_watts")}
    clocks = {"mean_sm_clock_mhz": mean_mhz, "highest_sm_clock_mhz": highest_mhz, **powers}
    return one_finding(
        sentence=f"The GPU ran at {mean_mhz:,.0f} MHz{watts} in the clean steps, {whole_percent(lost)} below {of} "
        f"{highest_mhz:,.0f} MHz. Its clock was limited by {why} in {whole_percent(shares[reason])} of "
        f"{counters.num_samples} samples.",
        fix=fix,
        saving_ns=saving_ns,
        upper_bound=True,
        derived=f"the step of {duration(case.step_ns, 3)} with all GPU work faster by the lost clock; work limited "
        "by memory bandwidth gains less",
        confidence="high" if reason != "sw_power_cap" or is_lowered else "medium",
        falsified_by="run at the full clock; the finding is wrong if the step is not faster",
        evidence=(
            Evidence("clocks", [clocks]),
            Evidence("reasons", [{"reason": name, "share": share} for name, share in counters.throttle_shares]),
        ),
    )


_IMPOSSIBLE = 1.02  # of the limit; clocks and rounding may bring a figure just above it
_SURE_NS = 50_000  # shorter kernels are timed too coarsely


@rule
def impossible_mfu(case: Case) -> list[Finding]:
    """Is anything faster than the hardware allows, so that a figure must be wrong?"""
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
    if summary.flops is None:
        raise Unavailable("The step's FLOPs were not counted: the run ended before that, or with --no-memory.")
    if summary.mfu is None and summary.hfu is None:
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
