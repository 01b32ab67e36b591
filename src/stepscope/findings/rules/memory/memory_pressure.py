"""Is memory nearly full while much of it is lost to fragmentation?"""

from __future__ import annotations

from stepscope.findings.memory_figures import retries_of
from stepscope.findings.rule import Case, Evidence, Finding, Unavailable, one_finding, plural, size, whole_percent

_FRAGMENTED_SHARE = 0.2  # of reserved memory unused at the peak; less is normal for the allocator
_FULL_SHARE = 0.7  # of the device's memory; below this, unused memory costs nothing
_EXPANDABLE = "expandable_segments:True"
_FIGURES = ("allocated_bytes", "reserved_bytes", "device_bytes", "used_bytes", "num_retries", "settings")


def check(case: Case) -> list[Finding]:
    figures = _figures(case)
    allocated, reserved, total, used, retries, settings = figures
    idle = max(0, reserved - allocated)
    is_full = bool(retries) or (total > 0 and max(used, reserved) >= _FULL_SHARE * total)
    if not reserved or idle < _FRAGMENTED_SHARE * reserved or not is_full:
        return []
    if _EXPANDABLE in settings:
        fix = "use fewer different shapes (pad to a few lengths): expandable segments are already on"
    else:
        fix = f"PYTORCH_CUDA_ALLOC_CONF={_EXPANDABLE} python train.py"
    counted = retries_of(case)
    is_reported = counted is not None and counted.are_in_every_step  # allocator_churn reports it
    again = ""
    if retries and not is_reported:
        again = f" The allocator returned its cache {plural(retries, 'time')} to make room."
    of = f" (of {size(total)} on the device)" if total else ""
    return one_finding(
        sentence=f"{size(idle)} ({whole_percent(idle / reserved)}) of {size(reserved)} reserved memory{of} is not "
        f"used by any tensor, even at the peak.{again}",
        fix=fix,
        saving_bytes=idle,
        upper_bound=True,
        derived="peak reserved memory minus peak allocated memory",
        confidence="high" if retries else "medium",
        falsified_by=f"set {_EXPANDABLE}; the finding is wrong if reserved memory and retries stay the same",
        evidence=(Evidence("memory", [dict(zip(_FIGURES, figures))]),),
    )


def _figures(case: Case) -> tuple[int, int, int, int, int, str]:
    """Return the values of `_FIGURES`; 0 for those of the device that are unknown."""
    if not case.has_recording:
        memory, reserved = case.memory, case.memory.peak_reserved_bytes
        if reserved is None:
            raise Unavailable("Reserved memory is unknown. Profile on a GPU with profile_memory=True.")
        allocated = reserved - (memory.fragmentation_bytes or 0)
        return allocated, reserved, case.device.memory_bytes, 0, memory.num_retries or 0, ""
    facts = case.recording.facts
    counts = facts.get("memory") or {}
    if "peak_reserved_bytes" not in counts:
        raise Unavailable("The recording has no allocator figures. They are taken on a GPU after the clean steps.")
    variables = (facts.get("environment") or {}).get("variables") or {}
    settings = " ".join(str(value) for name, value in variables.items() if "ALLOC_CONF" in str(name))
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "driver_total_bytes", "driver_used_bytes",
             "num_allocator_retries")  # fmt: skip
    allocated, reserved, total, used, retries = (int(counts.get(name) or 0) for name in names)
    return allocated, reserved, total, used, retries, settings
