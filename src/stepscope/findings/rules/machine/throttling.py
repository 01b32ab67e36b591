"""Is the GPU's clock reduced by power, heat or a setting?"""

from __future__ import annotations

import polars as pl

from stepscope.findings.rule import Case, Change, Evidence, Finding, Unavailable, duration, one_finding, whole_percent

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


def check(case: Case) -> list[Finding]:
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
