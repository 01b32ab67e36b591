"""The rows of a sweep (`results.jsonl`), read and checked in one place for whoever measures and whoever reads.

A row that passes has the types and ranges that analyses rely on. Fields without a check are read by nobody.
"""

import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

SCHEMA_VERSION = 1
SWEEP_FILE = "sweep.json"
RESULTS_FILE = "results.jsonl"
MOST_MIB = 1024
"""The most that is read of a file of rows; STEPSCOPE_MAX_ROWS_MIB raises it."""
KILLED, ATTEMPTS = "killed", "attempts"
"""Fields of a row: whether something outside ended its point, and how often the point was tried."""
MOST_ATTEMPTS = 3

Row = dict[str, Any]
_Check = Callable[[Any], bool]


class BadRow(Exception):
    """A line that is no row, or a file that holds none; the message says why."""


@dataclass(frozen=True)
class RowsFile:
    """The rows of a file as written, and how many of its bytes are whole lines."""

    rows: tuple[Row, ...]
    whole_bytes: int
    is_cut_off: bool  # whether a half-written line follows


def read_rows(path: Path) -> RowsFile:
    """Return every row of a file; OSError if it cannot be read, BadRow if a line is no row."""
    data = read_regular(path)
    whole = data[: data.rfind(b"\n") + 1]
    rows = tuple(_row(line, number) for number, line in enumerate(whole.split(b"\n"), 1) if line.strip())
    return RowsFile(rows, len(whole), len(whole) < len(data))


def read_regular(path: Path) -> bytes:
    """Return the bytes of a file; OSError for a pipe or device, which could block or never end."""
    most = _most_mib() << 20
    # Without blocking: opening a pipe would wait for its writer.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0)), "rb") as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(f"{path} is a pipe or a device, not a file")
        data = stream.read(most + 1)
    if len(data) > most:
        raise OSError(f"{path} has more than {most >> 20:,} MiB: set STEPSCOPE_MAX_ROWS_MIB to read more")
    return data


def read_facts(folder: Path) -> dict[str, Any]:
    """Return sweep.json with the environments that are what they must be; OSError or BadRow if it cannot be read."""
    try:
        facts = json.loads(read_regular(folder / SWEEP_FILE))
    except (ValueError, RecursionError) as error:
        raise BadRow(f"it is not JSON: {error}") from None
    environments = facts.get("environments") if isinstance(facts, dict) else None
    if not isinstance(environments, dict) or not isinstance(facts.get("schema_version"), int):
        raise BadRow("it does not belong to a sweep")
    return {**facts, "environments": {key: each for key, each in environments.items() if _is_environment(key, each)}}


def _is_environment(key: Any, value: Any) -> bool:
    if not (_is_text(key) and isinstance(value, dict) and _is_plain(value)):
        return False
    return all(value.get(name) is None or _is_text(value[name]) for name in ("device_name", "torch"))


def _most_mib() -> int:
    text = os.environ.get("STEPSCOPE_MAX_ROWS_MIB", "")
    return int(text) if text.isascii() and text.isdigit() else MOST_MIB


def is_tried_again(row: Mapping[str, Any]) -> bool:
    """Return whether `--resume` measures a row's point again: something outside ended it, and not too often."""
    return bool(row.get(KILLED)) and row.get(ATTEMPTS, 1) < MOST_ATTEMPTS


def _row(line: bytes, number: int) -> Row:
    where = f"line {number}"
    try:
        row = json.loads(line, parse_constant=_refused)
    except (ValueError, RecursionError):
        raise BadRow(f"{where} is not a valid row") from None
    if not isinstance(row, dict):
        raise BadRow(f"{where} is not a valid row")
    version = row.get("schema_version", SCHEMA_VERSION)
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise BadRow(f"{where} was written by a newer version of stepscope. Use that version")
    for name in wrong_fields(row):
        raise BadRow(f"{where} is not a valid row (its {name!r})")
    return row


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def wrong_fields(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fields of a row that are missing or not what they must be."""
    for name, fits in _REQUIRED.items():
        if not fits(row.get(name)):
            yield name
    for name, fits in _OPTIONAL.items():
        if row.get(name) is not None and not fits(row[name]):
            yield name


# -- what a field must be -----------------------------------------------------------------------------------------

_HALF_A_CHARACTER = re.compile("[\ud800-\udfff]")
_LARGEST = 1e100  # arithmetic with such numbers does not overflow


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and (value.isascii() or not _HALF_A_CHARACTER.search(value))


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST


def _is_amount(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_time(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and _is_amount(value)


def _is_value(value: Any) -> bool:
    """Whether it can be the value of a knob."""
    return value is None or isinstance(value, bool) or _is_number(value) or _is_text(value)


def _is_plain(value: Any, depth: int = 10) -> bool:
    if isinstance(value, (list, dict)) and depth:
        inner = value if isinstance(value, list) else [*value, *value.values()]
        return all(_is_plain(each, depth - 1) for each in inner)
    return _is_value(value) or (isinstance(value, float) and math.isfinite(value))


def _is_place(value: Any) -> bool:
    """Whether it names a file of the sweep's own folder."""
    if not _is_text(value) or not value:
        return False
    path = PurePosixPath(value)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in value


def _list_of(fits: _Check, fewest: int = 0) -> _Check:
    return lambda value: isinstance(value, list) and len(value) >= fewest and all(map(fits, value))


def _dict_of(fits: _Check) -> _Check:
    return lambda value: isinstance(value, dict) and all(map(_is_text, value)) and all(map(fits, value.values()))


def _or_none(fits: _Check) -> _Check:
    return lambda value: value is None or fits(value)


def _is_run(value: Any) -> bool:
    named = (value.get(name) for name in ("mode", "dtype")) if isinstance(value, dict) else (0,)
    return all(name is None or _is_text(name) for name in named) and _dict_of(_is_value)(value)


def _is_tune(value: Any) -> bool:
    """The part of a row that `tune` adds."""
    if not isinstance(value, dict) or not _is_plain(value):
        return False
    texts, numbers = (value.get(name) for name in ("role", "of")), (value.get(name, 1) for name in ("round", "scale"))
    return all(map(_is_text, texts)) and all(map(_is_amount, numbers)) and isinstance(value.get("loss", {}), dict)


_REQUIRED: dict[str, _Check] = {
    "hash": _is_text,
    "workload": _is_text,
    "status": _is_text,
    "config": _dict_of(_is_value),
    "run": _is_run,
}
_OPTIONAL: dict[str, _Check] = {
    **dict.fromkeys(("preset", "reason", "stage", "signal", "started_at", "finished_at"), _is_text),
    **dict.fromkeys(("environment_hash", "flops_unseen"), _is_text),
    **dict.fromkeys(("trace", "recording"), _is_place),
    **dict.fromkeys(("loss", "final_loss", "exit_code"), _is_number),
    **dict.fromkeys(("num_tokens", "num_parameters", "num_active_parameters", "num_kernels"), _is_whole),
    **dict.fromkeys(("num_kernel_launches", "max_batch", "max_batch_budget_bytes", "schema_version"), _is_whole),
    **dict.fromkeys(("peak_allocated_bytes", "peak_reserved_bytes", "peak_resident_bytes"), _is_whole),
    **dict.fromkeys(("before_backward_bytes", "flops_counted", "flops_formula", "flops_executed"), _is_whole),
    **dict.fromkeys(("seconds", "first_call_ns", "compile_ns", "traced_ns", "gpu_busy_ns"), _is_amount),
    **dict.fromkeys(("samples_device_ns", "samples_host_ns"), _list_of(_is_time)),
    "flops_coverage": _is_amount,
    "samples_warmup_ns": _list_of(_is_amount),
    "samples_phase_ns": _dict_of(_list_of(_is_amount)),
    "flops_counted_by_dtype": _dict_of(_is_whole),
    "facts": _dict_of(_is_number),
    "compiler": _dict_of(_is_number),
    "proofs": _dict_of(_or_none(_is_text)),
    "reference": _dict_of(_is_value),
    "alternatives": _dict_of(_list_of(_list_of(_is_value, fewest=1), fewest=1)),
    "oom": _dict_of(_or_none(_is_amount)),
    "notes": _list_of(_is_text),
    "gate": _dict_of(_is_plain),
    "layers": _dict_of(_is_plain),
    "refused": _list_of(_is_text),
    "tries": _list_of(_dict_of(_is_plain)),
    "tune": _is_tune,
    KILLED: _is_flag,
    ATTEMPTS: _is_whole,
}
