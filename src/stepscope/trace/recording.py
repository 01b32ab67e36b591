"""A recording's folder as typed data, complete or cut off; the counterpart of `recorder/files.py`."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from stepscope.errors import RecordingError
from stepscope.trace.compile_file import COMPILE_FILE, read_compile_file

SCHEMA_VERSION = 1
RECORDING_FILE = "recording.json"
SAMPLES_FILE = "samples.jsonl"
COUNTERS_FILE = "counters.jsonl"
Item = TypeVar("Item")


class RecordingFacts(TypedDict, total=False):
    """`recording.json`. Fields are absent until known, so a killed run has only the first ones."""

    schema_version: int
    status: str  # `finished`, `failed`, or `interrupted` (killed, or still running)
    command: dict[str, Any]
    """`argv`, whether it ran as a `module`, the working `folder`, whether `--exit-after` was given, the `program` as
    named and the `sha256` of its file."""
    config: dict[str, Any]  # resolved settings: arguments, windows, tokens per step
    config_hash: str  # first 16 hex digits of the SHA-256 of `config`
    git: dict[str, Any] | None
    """Revision of the script's repository and whether it was modified; null without a repository."""
    started_at: str
    finished_at: str
    exit_code: int  # the script's exit code; absent for `stepscope.record()`
    exception: str
    num_child_processes: int  # processes the script started through multiprocessing
    pid: int
    environment: dict[str, Any]
    """Versions, device name, threads, float32 matmul setting, environment variables that affect speed."""
    precision: dict[str, Any]  # torch's precision settings at the end of the clean window (docs/precision.md)
    steps: dict[str, Any]
    """`source` of the step boundaries (`step()`, `optimizer`, `update`, `forward`), `num_sources`, `num_steps`,
    `num_earlier` steps of models that were trained before, batches that may be `num_prefetched`, and
    `num_lines_dropped` beyond the limit or on a full disk."""
    between: dict[str, dict[str, int]]
    """What the loop does between steps (`evaluation`, `checkpoint`, …): lines of the script, and how often each."""
    windows: dict[str, int]  # requested steps of each window
    roots: list[str]  # classes of the modules that the script calls itself
    parameters: dict[str, Any]  # `num_total`, `num_trainable`, `bytes_by_dtype`; shared parameters count once
    memory: dict[str, int]
    """Peaks at the end of the clean window: `peak_allocated_bytes`, `peak_reserved_bytes`, `driver_used_bytes`,
    `driver_total_bytes`, `num_allocator_retries`, `num_allocator_ooms` on a GPU; `peak_resident_bytes` always."""
    trace: dict[str, Any] | None
    """The trace's `file` and `bytes`, and what was `trimmed`; of its whole steps `num_steps`, `window_ns`, `num_ops`,
    `num_kernels`, `num_template_kernels`, `num_graph_launches`, `gpu_busy_ns`, `gpu_busy_ns_by_phase`; with
    `--repeat` the same for each further trace window under `repeated`.
    """
    flops: dict[str, Any]
    """One step's FLOPs `by_op` (op, phase, dtype, recomputed), `model_flops_by_dtype`, `uncounted` ops, and the
    `weights` with size and forward FLOPs."""
    attention: list[dict[str, Any]]
    """Distinct attention calls in the memory window: `query`, `key`, `value` and `mask` shapes, `dtype`, `is_causal`,
    `dropout`, `module`, `caller`, `num_calls`; the `backend` torch chose, `switched_off` ones, and torch's messages
    for those it `refused` (docs/attention.md).
    """
    counters: dict[str, Any]
    """`other_processes` on the GPU at the end of the run; `max_sm_clock_mhz`, `power_limit_watts`,
    `default_power_limit_watts` if the driver reports them."""
    fixes: list[dict[str, Any]]
    """For a run of `stepscope verify` with a fix: its `id` and `value`, what was `changed` and how often, what was
    `left` unchanged and why, and the message if `nothing_seen` could be changed."""
    notes: list[dict[str, str]]  # remarks for the reader: `about` and `text`


@dataclass(frozen=True)
class StepSample:
    """One finished step."""

    step: int
    window: str  # `warmup`, `clean`, `trace_warmup`, `trace`, `memory` or `free`
    start_ns: int  # on the process's monotonic clock, like the counters
    wall_ns: int
    host_ns: Mapping[str, int]
    """By phase and by what lies between steps; adds up to `wall_ns`. The passes of free-running steps are
    `unattributed`."""
    device_ns: Mapping[str, int] | None
    """By phase, between CUDA events on the stream; adds up to the step on the device. None without a GPU."""
    num_tokens: int | None
    num_samples: int | None
    num_micro_batches: int
    num_skipped: int  # optimizer steps that a GradScaler skipped
    num_compiles: int
    loss: float | None  # as passed to `backward`, including a scaler's factor
    num_times: Mapping[str, int] = field(default_factory=dict)  # how often each thing between steps was done

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.wall_ns


@dataclass(frozen=True)
class Aside:
    """What a loop did before its first step, or after its last one."""

    start_ns: int
    wall_ns: int
    host_ns: Mapping[str, int]
    num_times: Mapping[str, int]


@dataclass(frozen=True)
class CounterSample:
    """One NVML sample; unsupported counters are None."""

    t_ns: int
    gpu_busy_share: float | None = None
    memory_controller_busy_share: float | None = None
    power_watts: float | None = None
    energy_joules: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    driver_memory_bytes: int | None = None
    throttle: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recording:
    """Everything a run left behind except its trace and allocations."""

    folder: Path
    status: str
    facts: RecordingFacts  # `recording.json` as written
    samples: tuple[StepSample, ...]
    counters: tuple[CounterSample, ...]
    compiler: Mapping[str, Any] | None
    warnings: tuple[str, ...]
    lead: Aside | None = None
    tail: Aside | None = None

    def window(self, name: str) -> tuple[StepSample, ...]:
        return tuple(sample for sample in self.samples if sample.window == name)


def read_recording(folder: Path) -> Recording:
    """Return the recording in `folder`; RecordingError in one line if there is none."""
    path = folder / RECORDING_FILE
    if not folder.exists():
        raise RecordingError(f"{folder} not found")
    if not path.is_file():
        raise RecordingError(f"{folder} is not a recording: it has no {RECORDING_FILE}")
    try:
        facts = json.loads(path.read_bytes())
        version = facts["schema_version"]
        status = str(facts["status"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecordingError(f"{path} is not a Stepscope recording: {error}") from None
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise RecordingError(
            f"{path} has schema version {version}, but this Stepscope reads up to {SCHEMA_VERSION}: upgrade Stepscope"
        )
    warnings: list[str] = []
    lines, counters = (_lines(folder / name, warnings) for name in (SAMPLES_FILE, COUNTERS_FILE))
    return Recording(
        folder=folder,
        status=status,
        facts=facts,
        samples=_samples(lines, warnings),
        counters=_sound(counters, _counter, COUNTERS_FILE, "sample(s) have an invalid field", warnings),
        compiler=_compiler(folder / COMPILE_FILE, warnings),
        warnings=tuple(warnings),
        lead=_aside(lines, "lead"),
        tail=_aside(lines, "tail"),
    )


def _aside(lines: Sequence[dict[str, Any]], which: str) -> Aside | None:
    found = [line[which] for line in lines if which in line]
    try:
        last = found[-1]
        times = _nanoseconds(last["host_ns"]), _nanoseconds(last.get("num_times") or {})
        return Aside(_integer(last["start_ns"]), _integer(last["wall_ns"]), *times)
    except (IndexError, KeyError, TypeError, AttributeError):
        return None


def _compiler(path: Path, warnings: list[str]) -> Mapping[str, Any] | None:
    if not path.exists():
        return None
    report = read_compile_file(path)
    if report is None:
        warnings.append(f"{path.name} could not be read and was skipped")
    return report


def _lines(path: Path, warnings: list[str]) -> tuple[dict[str, Any], ...]:
    """Return the JSON objects of a lines file, without a line cut off by a kill."""
    if not path.exists():
        return ()
    with path.open("rb") as stream:
        return _sound(stream, _object, path.name, "line(s) could not be read", warnings)


def _sound(
    items: Iterable[Any], convert: Callable[[Any], Item], name: str, problem: str, warnings: list[str]
) -> tuple[Item, ...]:
    """Return the items of a file converted; a warning counts those that cannot be."""
    found, num_bad = [], 0
    for item in items:
        try:
            found.append(convert(item))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
            num_bad += 1
    if num_bad:
        warnings.append(f"{name}: {num_bad} {problem} and were skipped")
    return tuple(found)


def _object(text: bytes) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise TypeError("not an object")
    return value


def _samples(lines: Sequence[dict[str, Any]], warnings: list[str]) -> tuple[StepSample, ...]:
    steps: dict[int, dict[str, Any]] = {}
    for line in lines:
        if "restart" in line:
            steps.clear()  # a better step source was found: earlier samples are not comparable
        elif isinstance(line.get("joined"), int) and line["joined"] > 1:
            _join(steps, sorted(steps)[-line["joined"] :])
        elif isinstance(line.get("step"), int):
            steps.setdefault(line["step"], {}).update(line)
    ordered = (steps[index] for index in sorted(steps))
    return _sound(ordered, _sample, SAMPLES_FILE, "step(s) have a missing or invalid field", warnings)


def _join(steps: dict[int, dict[str, Any]], indices: list[int]) -> None:
    """Replace the lines of steps that turned out to be one with a single line."""
    lines = [steps.pop(index) for index in indices]
    try:
        joined = {**lines[0], "wall_ns": sum(line["wall_ns"] for line in lines)}
        for name in ("host_ns", "num_times"):
            joined[name] = dict(sum((Counter(line.get(name) or {}) for line in lines), Counter()))
        for name in ("num_tokens", "num_samples"):
            joined[name] = max((line.get(name) or 0 for line in lines), default=0) or None
        steps[indices[0]] = joined
    except (IndexError, KeyError, TypeError, ValueError):
        return  # damaged: without these


def _sample(line: dict[str, Any]) -> StepSample:
    wall_ns, window, loss = _integer(line["wall_ns"]), line["window"], line.get("loss")
    if not isinstance(window, str):
        raise TypeError("window is not a name")
    device_ns = line.get("device_ns")
    return StepSample(
        step=line["step"],
        window=window,
        start_ns=_integer(line["start_ns"]),
        wall_ns=wall_ns,
        # Free-running steps of older recordings have only their duration.
        host_ns=_nanoseconds(line["host_ns"] if window != "free" else line.get("host_ns", {"unattributed": wall_ns})),
        device_ns=_nanoseconds(device_ns) if device_ns is not None else None,
        num_tokens=_integer_or_none(line.get("num_tokens")),
        num_samples=_integer_or_none(line.get("num_samples")),
        num_micro_batches=_integer(line.get("num_micro_batches", 0)),
        num_skipped=_integer(line.get("num_skipped", 0)),
        num_compiles=_integer(line.get("num_compiles", 0)),
        loss=float(loss) if loss is not None else None,
        num_times=_nanoseconds(line.get("num_times") or {}),
    )


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise TypeError(f"{value!r} is not a count")
    return value


def _integer_or_none(value: Any) -> int | None:
    return None if value is None else _integer(value)


def _nanoseconds(values: Any) -> dict[str, int]:
    return {str(name): _integer(value) for name, value in values.items()}


def _counter(line: dict[str, Any]) -> CounterSample:
    known = {name: line[name] for name in CounterSample.__dataclass_fields__ if name in line}
    throttle = known.pop("throttle", [])
    if not all(isinstance(value, (int, float)) and abs(value) < 2**63 for value in known.values()):
        raise TypeError("a counter is not a number")
    known["t_ns"] = _integer(known["t_ns"])
    return CounterSample(**known, throttle=tuple(str(reason) for reason in throttle))
