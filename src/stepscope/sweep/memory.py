"""How much memory is available, a limit for this process, and what out-of-memory errors say."""

import re
import resource
import sys
from pathlib import Path

from stepscope.errors import UsageError

UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
UNITS |= {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

# Reserved for the supervising processes and the kernel.
SPARE_SHARE = 0.05

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60


def bytes_of(amount: str | int | None) -> int | None:
    """Return the bytes in `40GiB`, `512M` or `1000000`, None for None; UsageError for anything else.

    >>> bytes_of("1.5GiB")
    1610612736
    """
    if amount is None:
        return None
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*", str(amount))
    num_bytes = float(match.group(1)) * UNITS.get(match.group(2).upper(), 0) if match else 0
    if not 1 <= num_bytes < _NO_LIMIT:
        raise UsageError(f"{str(amount)!r} is not an amount of memory: write 40GiB, 512MiB or a number of bytes")
    return int(num_bytes)


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Return the host memory still available in the machine and in all our control groups; None if unknown."""
    found = [_field(proc / "meminfo", "MemAvailable")]
    for folder, limit, usage in _cgroup_folders(proc, cgroups):
        most, used = _number(folder / limit), _number(folder / usage)
        if most is not None and used is not None and most < _NO_LIMIT:
            # The kernel drops the page cache before an allocation fails.
            found.append(most - used + (_field(folder / "memory.stat", "inactive_file", unit=1) or 0))
    known = [value for value in found if value is not None]
    return max(0, min(known)) if known else None


def num_oom_kills(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return how often the kernel has killed a process for lack of memory; compare two readings."""
    found = [_field(proc / "vmstat", "oom_kill", unit=1)]
    for folder, _, _ in _cgroup_folders(proc, cgroups):
        found += [_field(folder / name, "oom_kill", unit=1) for name in ("memory.events", "memory.oom_control")]
    return sum(value or 0 for value in found)


def limit_process(num_bytes: int) -> None:
    """Allow this process that many more bytes than it has now; beyond it allocations fail."""
    global _held_bytes
    _held_bytes = data_bytes()
    limit = num_bytes + _held_bytes
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def limit_to_machine() -> None:
    """Replace the limit of this process by what the machine and its control groups still have."""
    available = available_bytes()
    if available is not None:
        limit_process(int(available * (1 - SPARE_SHARE)))
        return
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def data_bytes(proc: Path = PROC) -> int:
    """Return the bytes of data this process has mapped, as RLIMIT_DATA counts them."""
    return _field(proc / "self" / "status", "VmData") or 0


def peak_resident_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


_held_bytes = 0  # what this process held when its limit was set; the limit is on top of it
_AMOUNT = r"([0-9.]+) (bytes|[KMGT]iB)"
_HOST_ERRORS = ("DefaultCPUAllocator", "Cannot allocate memory", "bad_alloc", "MemoryError", "bad allocation")
_DEVICE_ERRORS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "HIP out of memory",
)


def read_error(error: BaseException) -> dict[str, int | None] | None:
    """Return bytes asked, free and in total, as far as an out-of-memory error says; None for other errors."""
    text = f"{type(error).__name__}: {error}"
    if type(error).__name__ == "OutOfMemoryError" or any(part in text for part in _DEVICE_ERRORS):
        asked, free, total = (
            _amount(pattern, text)
            for pattern in (
                rf"[Tt]ried to allocate {_AMOUNT}", rf"of which {_AMOUNT} is free", rf"total capacity of {_AMOUNT}",
            )
        )  # fmt: skip
        return {"asked_bytes": asked, "free_bytes": free, "total_bytes": total}
    if isinstance(error, MemoryError) or any(part in text for part in _HOST_ERRORS):
        limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
        total = None if limit == resource.RLIM_INFINITY else limit - _held_bytes
        free = available_bytes() if total is None else min(total, max(0, limit - data_bytes()))
        asked = _amount(rf"tried to allocate {_AMOUNT}", text)
        if asked is not None and free is not None and free >= asked:
            free = None  # the step's memory was freed while the exception propagated
        return {"asked_bytes": asked, "free_bytes": free, "total_bytes": total}
    return None


def _amount(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return int(float(match.group(1)) * UNITS[match.group(2).upper().replace("BYTES", "B")]) if match else None


def _cgroup_folders(proc: Path, cgroups: Path) -> list[tuple[Path, str, str]]:
    """Return our control group and its parents, version 1 or 2, with the file names of limit and usage."""
    folders: list[tuple[Path, str, str]] = []
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = cgroups, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        inside = root / path.lstrip("/")
        folders += [(folder, *names) for folder in (inside, *inside.parents) if folder.is_relative_to(root)]
    return folders


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)[:1]).strip()
    return int(text) if text.isdigit() else None


def _field(path: Path, name: str, unit: int = 1024) -> int | None:
    for line in _lines(path):
        words = line.replace(":", " ").split()
        if words[:1] == [name] and words[1].isdigit():
            return int(words[1]) * unit
    return None
