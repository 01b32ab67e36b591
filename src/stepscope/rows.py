"""The rows of a sweep (`results.jsonl`), read and checked in one place for whoever measures and whoever reads.

A row that passes has the types and ranges that analyses rely on. Fields without a check are read by nobody.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.border import (
    AMOUNT,
    COUNT,
    FLAG,
    NUMBER,
    PLACE,
    PLAIN,
    SCALAR,
    TEXT,
    TIME,
    NotOfSchema,
    Values,
    check,
    read_file,
    read_json,
)

SCHEMA_VERSION = 1
SWEEP_FILE = "sweep.json"
RESULTS_FILE = "results.jsonl"
KILLED, ATTEMPTS = "killed", "attempts"
"""Fields of a row: whether something outside ended its point, and how often the point was tried."""
MOST_ATTEMPTS = 3
LOST = "lost"
"""Status of a row whose point an engine lost each time it was tried: it says nothing about the point."""

Row = dict[str, Any]


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
    try:
        data = read_file(path, "ROWS_MIB", is_raw=True)
    except ValueError as error:
        raise BadRow(str(error)) from None
    whole = data[: data.rfind(b"\n") + 1]
    values = Values("ROWS_VALUES")
    rows = tuple(_row(values, line, number) for number, line in enumerate(whole.split(b"\n"), 1) if line.strip())
    return RowsFile(rows, len(whole), len(whole) < len(data))


def read_facts(folder: Path) -> dict[str, Any]:
    """Return sweep.json with the environments that are what they must be; OSError or BadRow if it cannot be read."""
    try:
        facts = read_json(folder / SWEEP_FILE)
        check(facts, {"schema_version": COUNT, "environments": {"*": PLAIN}})
    except NotOfSchema:
        raise BadRow("it does not belong to a sweep") from None
    except ValueError as error:
        raise BadRow(f"it is not JSON: {error}") from None
    return {**facts, "environments": {key: each for key, each in facts["environments"].items() if _fits(each)}}


def _fits(environment: Any) -> bool:
    try:
        check(environment, {"device_name~": TEXT, "torch~": TEXT, "*": PLAIN})
    except NotOfSchema:
        return False
    return True


def is_tried_again(row: Mapping[str, Any]) -> bool:
    """Return whether `--resume` measures a row's point again: it was lost, or ended from outside not too often."""
    return row["status"] == LOST or (bool(row.get(KILLED)) and row.get(ATTEMPTS, 1) < MOST_ATTEMPTS)


def _row(values: Values, line: bytes, number: int) -> Row:
    where = f"line {number}"
    try:
        row = values.parsed(line, parse_constant=_refused)
    except ValueError as error:
        raise BadRow(f"{where} is not a valid row" + f" ({error})" * ("STEPSCOPE" in str(error))) from None
    if not isinstance(row, dict):
        raise BadRow(f"{where} is not a valid row")
    version = row.get("schema_version", SCHEMA_VERSION)
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise BadRow(f"{where} was written by a newer Stepscope. Run `pip install --upgrade stepscope`")
    try:
        check(row, _SCHEMA)
    except NotOfSchema as error:
        raise BadRow(f"{where} is not a valid row ({error})") from None
    return row


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_SCHEMA: dict[str, Any] = {
    **dict.fromkeys(("hash", "workload", "status"), TEXT),
    "config": {"*": SCALAR},
    "run": {"mode~": TEXT, "dtype~": TEXT, "*": SCALAR},
    **dict.fromkeys(("preset~", "reason~", "stage~", "signal~", "started_at~", "finished_at~"), TEXT),
    **dict.fromkeys(("environment_hash~", "flops_unseen~", "node~", "stepscope~"), TEXT),
    **dict.fromkeys(("trace~", "recording~"), PLACE),
    **dict.fromkeys(("loss~", "final_loss~", "exit_code~"), NUMBER),
    **dict.fromkeys(("num_tokens~", "num_parameters~", "num_active_parameters~", "num_kernels~"), COUNT),
    **dict.fromkeys(("num_kernel_launches~", "max_batch~", "max_batch_budget_bytes~", "schema_version~"), COUNT),
    **dict.fromkeys(("peak_allocated_bytes~", "peak_reserved_bytes~", "peak_resident_bytes~"), COUNT),
    **dict.fromkeys(("before_backward_bytes~", "flops_counted~", "flops_formula~", "flops_executed~"), COUNT),
    **dict.fromkeys(("seconds~", "first_call_ns~", "compile_ns~", "traced_ns~", "gpu_busy_ns~"), AMOUNT),
    "samples_device_ns~": [TIME],
    "samples_host_ns~": [TIME],
    "flops_coverage~": AMOUNT,
    "samples_warmup_ns~": [AMOUNT],
    "samples_phase_ns~": {"*": [AMOUNT]},
    "flops_counted_by_dtype~": {"*": COUNT},
    "facts~": {"*": NUMBER},
    "compiler~": {"*": NUMBER},
    "proofs~": {"*~": TEXT},
    "reference~": {"*": SCALAR},
    "alternatives~": {"*": ((SCALAR,),)},
    "oom~": {"*~": AMOUNT},
    "notes~": [TEXT],
    "gate~": {"*": PLAIN},
    "layers~": {"*": PLAIN},
    "refused~": [TEXT],
    "tries~": [{"*": PLAIN}],
    "tune~": {"role": TEXT, "of": TEXT, "round?": AMOUNT, "scale?": AMOUNT, "loss?": {"*": PLAIN}, "*": PLAIN},
    f"{KILLED}~": FLAG,
    f"{ATTEMPTS}~": COUNT,
    "num_neighbors~": COUNT,
}
