"""Is memory nearly full while much of it is lost to fragmentation?"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stepscope.findings.memory_figures import retries_of
from stepscope.findings.rule import Case, Evidence, Finding, Unavailable, one_finding, plural, size, whole_percent

_FRAGMENTED_SHARE = 0.2  # of reserved memory unused at the peak; less is normal for the allocator
_FULL_SHARE = 0.7  # of the device's memory; below this, unused memory costs nothing
_EXPANDABLE = "expandable_segments:True"


@dataclass(frozen=True)
class _Figures:
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int  # 0 if unknown
    used_bytes: int  # by all processes on the device; 0 if unknown
    num_retries: int
    settings: str

    @property
    def idle_bytes(self) -> int:
        return max(0, self.reserved_bytes - self.allocated_bytes)


def check(case: Case) -> list[Finding]:
    found = _figures(case)
    reserved, idle, total, retries = found.reserved_bytes, found.idle_bytes, found.device_bytes, found.num_retries
    is_full = bool(retries) or (total > 0 and max(found.used_bytes, reserved) >= _FULL_SHARE * total)
    if not reserved or idle < _FRAGMENTED_SHARE * reserved or not is_full:
        return []
    if _EXPANDABLE in found.settings:
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
        evidence=(Evidence("memory", [asdict(found)]),),
    )


def _figures(case: Case) -> _Figures:
    try:
        facts: dict[str, Any] = dict(case.recording.facts)
    except Unavailable:
        memory = case.memory
        reserved = memory.peak_reserved_bytes
        if reserved is None:
            raise Unavailable("Reserved memory is unknown. Profile on a GPU with profile_memory=True.") from None
        allocated = reserved - (memory.fragmentation_bytes or 0)
        return _Figures(allocated, reserved, case.device.memory_bytes, 0, memory.num_retries or 0, "")
    counts = facts.get("memory") or {}
    if "peak_reserved_bytes" not in counts:
        raise Unavailable("The recording has no allocator figures. They are taken on a GPU after the clean steps.")
    variables = (facts.get("environment") or {}).get("variables") or {}
    settings = " ".join(str(value) for name, value in variables.items() if "ALLOC_CONF" in str(name))
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "driver_total_bytes", "driver_used_bytes",
             "num_allocator_retries")  # fmt: skip
    allocated, reserved, total, used, retries = (int(counts.get(name) or 0) for name in names)
    return _Figures(allocated, reserved, total, used, retries, settings)
