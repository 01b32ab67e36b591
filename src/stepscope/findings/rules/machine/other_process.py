"""Does another process use the same GPU?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepscope.errors import Unavailable
from stepscope.findings.finding import Evidence, Finding
from stepscope.formatting import size
from stepscope.session.case import Case

_SLACK_BYTES = 256 << 20
"""Between what the driver counts for a process and what it counts for the device."""


def check(case: Case) -> list[Finding]:
    facts = case.recording.facts
    processes = (facts.get("counters") or {}).get("other_processes")
    if processes is None:
        raise Unavailable("the recording does not say who else is on the GPU: it takes NVML beside the run")
    memory = facts.get("memory") or {}
    others = [process for process in processes if isinstance(process, dict) and not _is_self(process, memory)]
    if not others:
        return []
    sized = [process for process in others if isinstance(process.get("used_bytes"), int)]
    if not sized:
        raise Unavailable(
            f"the driver names {len(others)} beside this process without their memory, as in a container: one may be "
            "the run itself. `nvidia-smi` outside of it tells"
        )
    num_bytes = sum(process["used_bytes"] for process in sized)
    largest = max(sized, key=lambda process: process["used_bytes"])
    name = str(largest.get("name") or "a process that has no name here")[:80]
    return [
        Finding(
            sentence=f"{'Another process' if len(sized) == 1 else f'{len(sized)} other processes'} held "
            f"{size(num_bytes)} of the GPU's memory when the run ended, {name} (pid {largest.get('pid')}) "
            f"{size(largest['used_bytes'])} of it: what it ran there meanwhile, this run waited for.",
            fix=f"nvidia-smi  # then end it: kill {largest.get('pid')}; or CUDA_VISIBLE_DEVICES=N for a GPU alone",
            saving_bytes=num_bytes,
            derived="the memory that it holds; the time that it takes shows in a second recording without it",
            confidence="medium",
            falsified_by="a process that is a part of this run, or a step as long without it",
            evidence=(Evidence("processes", [dict(process) for process in sized[:8]]),),
        )
    ]


def _is_self(process: Mapping[str, Any], memory: Mapping[str, Any]) -> bool:
    """Whether it can only be the run itself under another number, as in a container: no room for both."""
    used, reserved, driver = (
        process.get("used_bytes"),
        memory.get("peak_reserved_bytes"),
        memory.get("driver_used_bytes"),
    )
    if not isinstance(used, int) or not isinstance(reserved, int) or not isinstance(driver, int):
        return False
    return used + reserved > driver + _SLACK_BYTES
