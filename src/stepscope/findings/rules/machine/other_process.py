"""Does another process use the same GPU?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepscope.findings.rule import Case, Evidence, Finding, Unavailable, one_finding, size

_SLACK_BYTES = 256 << 20  # the driver's figures per process and for the device differ by up to this


def check(case: Case) -> list[Finding]:
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
