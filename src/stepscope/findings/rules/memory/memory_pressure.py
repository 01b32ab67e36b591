"""Is memory that is nearly full lost in pieces that no tensor uses?"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stepscope.errors import Unavailable
from stepscope.findings.finding import Evidence, Finding
from stepscope.findings.retries import retries_of
from stepscope.formatting import plural, size
from stepscope.session.case import Case

_FRAGMENTED_SHARE = 0.2
"""Of what is reserved, what no tensor uses at the peak: below this it is the allocator's ordinary slack."""
_FULL_SHARE = 0.7
"""Of the device: with more room left than that, what lies idle costs nothing."""
_EXPANDABLE = "expandable_segments:True"


@dataclass(frozen=True)
class _Figures:
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    """0 where nobody says."""
    used_bytes: int
    """By everybody on the device; 0 where nobody says."""
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
        fix = "fewer different shapes (pad to a few lengths): expandable segments are on already"
    else:
        fix = f"PYTORCH_CUDA_ALLOC_CONF={_EXPANDABLE} python train.py"
    counted = retries_of(case)
    is_told = counted is not None and counted.are_in_every_step  # by allocator_churn
    again = ""
    if retries and not is_told:
        again = f"; the allocator gave its cache back {plural(retries, 'time')} to find room"
    of = f" of the device's {size(total)}" if total else ""
    return [
        Finding(
            sentence=f"{size(reserved)}{of} are reserved, and {size(idle)} ({idle / reserved:.0%}) of that "
            f"is in no tensor even at the peak{again}.",
            fix=fix,
            saving_bytes=idle,
            upper_bound=True,
            derived="reserved without allocated, each at its peak",
            confidence="high" if retries else "medium",
            falsified_by=f"as much reserved, and as many retries, with {_EXPANDABLE}",
            evidence=(Evidence("memory", [asdict(found)]),),
        )
    ]


def _figures(case: Case) -> _Figures:
    try:
        facts: dict[str, Any] = dict(case.recording.facts)
    except Unavailable:
        memory = case.memory
        reserved = memory.peak_reserved_bytes
        if reserved is None:
            raise Unavailable("nothing says what was reserved: it takes a GPU and profile_memory=True") from None
        allocated = reserved - (memory.fragmentation_bytes or 0)
        return _Figures(allocated, reserved, case.device.memory_bytes, 0, memory.num_retries or 0, "")
    counts = facts.get("memory") or {}
    if "peak_reserved_bytes" not in counts:
        raise Unavailable("the recording has no allocator's figures: they are a GPU's, after the clean steps")
    variables = (facts.get("environment") or {}).get("variables") or {}
    settings = " ".join(str(value) for name, value in variables.items() if "ALLOC_CONF" in str(name))
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "driver_total_bytes", "driver_used_bytes",
             "num_allocator_retries")  # fmt: skip
    allocated, reserved, total, used, retries = (int(counts.get(name) or 0) for name in names)
    return _Figures(allocated, reserved, total, used, retries, settings)
