"""A recording's folder as typed data, complete or cut off; the counterpart of `recorder/files.py`."""

import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, cast

from stepscope.border import (
    COUNT,
    TEXT,
    NotOfSchema,
    Values,
    check,
    fields_that_fit,
    is_count,
    limit,
    lines_of,
    read_json,
)
from stepscope.errors import RecordingError
from stepscope.trace.compile_file import COMPILE_FILE, read_compile_file
from stepscope.trace.recording_facts import OF_A_GPU, SCHEMA, RecordingFacts

SCHEMA_VERSION = 1
RECORDING_FILE = "recording.json"
SAMPLES_FILE = "samples.jsonl"
COUNTERS_FILE = "counters.jsonl"
EVALUATION, ROLLOUT = "evaluation", "rollout"
_UNTRAINED = (EVALUATION, "forward_in_eval_mode", "forward_of_another_model", "forward_without_gradients")
Item = TypeVar("Item")


@dataclass(frozen=True)
class StepSample:
    """One finished step."""

    step: int
    window: str
    """`warmup`, `clean`, `trace_warmup`, `trace`, `memory`, `free` or `triggered` (by `stepscope trigger`)."""
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
    loss: float | None  # as passed to the last `backward`, including a scaler's factor
    num_times: Mapping[str, int] = field(default_factory=dict)  # how often each thing between steps was done
    loss_sum: float | None = None  # the sum over all `backward` calls, if there were several

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.wall_ns

    @property
    def total_loss(self) -> float | None:
        """The loss whose gradient the step is of: the sum over its micro-batches. None if it is not known."""
        return self.loss if self.loss_sum is None and self.num_micro_batches < 2 else self.loss_sum


@dataclass(frozen=True)
class Aside:
    """What a loop did before its first step, or after its last one."""

    start_ns: int
    wall_ns: int
    host_ns: Mapping[str, int]
    num_times: Mapping[str, int]

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.wall_ns


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
    facts: RecordingFacts  # the fields of `recording.json` that fit their schema
    samples: tuple[StepSample, ...]
    counters: tuple[CounterSample, ...]
    compiler: Mapping[str, Any] | None
    warnings: tuple[str, ...]
    lead: Aside | None = None
    tail: Aside | None = None
    num_unread: int = 0  # steps beyond the limit, which are only counted

    @property
    def script(self) -> str | None:
        """The words after `stepscope run` that record it again; None if they are unknown, as of ranks that something
        else started."""
        command = self.facts.get("command") or {}
        words = [str(word) for word in command.get("argv") or []]
        is_rank = (self.facts.get("environment") or {}).get("world_size", 1) > 1
        has_launcher = bool(command.get("script"))  # then the words begin with it
        if not words or not words[0] or (is_rank and not has_launcher):
            return None
        if command.get("module"):
            words = ["-m", str(command.get("program") or words[0]), *words[1:]]
        return shlex.join(words)

    def window(self, name: str) -> tuple[StepSample, ...]:
        return tuple(sample for sample in self.samples if sample.window == name)


def read_recording(folder: Path) -> Recording:
    """Return the recording in `folder`; RecordingError in one line if there is none."""
    if not folder.exists():
        raise RecordingError(f"{folder} not found")
    warnings: list[str] = []
    facts = read_facts(folder, warnings)
    steps = _Steps()
    try:
        for _ in _sound(folder / SAMPLES_FILE, steps.add, warnings):
            pass
        counters = _sound(folder / COUNTERS_FILE, partial(_counter, Values(), set()), warnings)
        kept = tuple(islice(counters, limit("STEPS")))
        for _ in counters:
            warnings.append(f"{COUNTERS_FILE}: only the first {len(kept):,} samples were read")
            break
    except OSError as error:
        raise RecordingError(f"{folder} cannot be read: {error.strerror or error}") from None
    compiled = folder / COMPILE_FILE
    compiler = read_compile_file(compiled, warnings) if os.path.lexists(compiled) else None
    return Recording(
        folder=folder,
        status=facts["status"],
        facts=facts,
        samples=_of_one_kind(steps.samples(warnings), facts.get("between") or {}),
        counters=kept,
        compiler=compiler,
        warnings=tuple(warnings),
        lead=steps.lead,
        tail=steps.tail,
        num_unread=steps.num_unread,
    )


def read_facts(folder: Path, warnings: list[str]) -> RecordingFacts:
    """Return the fields of `recording.json` that fit; RecordingError in one line if it is not one."""
    path = folder / RECORDING_FILE
    try:
        written = read_json(path)
    except FileNotFoundError:
        raise RecordingError(f"{path.parent} is not a recording: it has no {RECORDING_FILE}") from None
    except (OSError, ValueError) as error:
        raise RecordingError(f"{path} is not a Stepscope recording: {getattr(error, 'strerror', error)}") from None
    try:
        names = {"schema_version": COUNT, "status": TEXT}
        check({name: written.get(name) for name in names} if isinstance(written, dict) else written, names)
    except NotOfSchema as error:
        raise RecordingError(f"{path} is not a Stepscope recording: {error}") from None
    version = written["schema_version"]
    if version > SCHEMA_VERSION:
        raise RecordingError(
            f"{path} has schema version {version}, but this Stepscope reads up to {SCHEMA_VERSION}. "
            "Run `pip install --upgrade stepscope`"
        )
    found = fields_that_fit(written, SCHEMA, RECORDING_FILE, warnings)
    trace = found.get("trace") or {}
    if trace.get("num_kernels") and not (trace.get("num_steps") and trace.get("gpu_busy_ns_by_phase") is not None):
        warnings.append(f"{RECORDING_FILE}: trace has kernels but no steps or busy times, so it was left out")
        del found["trace"]
    if (found.get("memory") or {}).keys() & OF_A_GPU not in (set(), OF_A_GPU):
        warnings.append(f"{RECORDING_FILE}: memory has only some of a GPU's figures, so it was left out")
        del found["memory"]
    return cast(RecordingFacts, found)


def began_s(facts: RecordingFacts) -> float:
    """Return when a recording began, in seconds since 1970; 0 if it does not say."""
    try:
        began = datetime.fromisoformat(facts.get("started_at", "").replace("Z", "+00:00"))
        return began.replace(tzinfo=timezone.utc).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def _aside(value: Any) -> Aside | None:
    try:
        times = _nanoseconds(value["host_ns"]), _nanoseconds(value.get("num_times") or {})
        return Aside(_integer(value["start_ns"]), _integer(value["wall_ns"]), *times)
    except (KeyError, TypeError, AttributeError):
        return None


def _sound(path: Path, convert: Callable[[Any], Item], warnings: list[str]) -> Iterator[Item]:
    """Yield the lines of a file converted, as they are read; a warning counts those that cannot be."""
    num_bad = 0
    for line in lines_of(path) if os.path.lexists(path) else ():
        try:
            yield convert(line)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
            num_bad += 1
    if num_bad:
        warnings.append(f"{path.name}: {num_bad} line(s) could not be read and were skipped")


def _object(values: Values, text: bytes) -> dict[str, Any]:
    value = values.parsed(text)
    if not isinstance(value, dict):
        raise TypeError("not an object")
    return value


class _Steps:
    """The lines of samples.jsonl, merged by step as they are read."""

    def __init__(self) -> None:
        self._lines: dict[int, dict[str, Any]] = {}
        self._most = limit("STEPS")
        self._values = Values()
        self.lead: Aside | None = None
        self.tail: Aside | None = None
        self.num_unread = 0

    def add(self, text: bytes) -> None:
        # A step's first line has its window; what is known later comes without it.
        if len(self._lines) >= self._most and b'"window"' in text and b'"restart"' not in text:
            self.num_unread += 1
            return
        line = _object(self._values, text)
        step = line.get("step")
        if "restart" in line:
            self._lines.clear()  # a better step source was found: earlier samples are not comparable
            self.num_unread = 0
        elif is_count(line.get("joined")) and line["joined"] > 1:
            self._join(line["joined"])
        elif is_count(step):
            if step in self._lines:
                self._lines[step].update(line)
            elif len(self._lines) < self._most:
                self._lines[step] = line
        if "lead" in line:
            self.lead = _aside(line["lead"])
        if "tail" in line:
            self.tail = _aside(line["tail"])

    def _join(self, num: int) -> None:
        """Replace the lines of the last steps, which turned out to be one, with a single line."""
        if self.num_unread:
            self.num_unread -= min(num - 1, self.num_unread)
            return
        # Only as many as there are: a search for more goes through all that were ever removed.
        indices = [*islice(reversed(self._lines), min(num, len(self._lines)))][::-1]
        lines = [self._lines.pop(index) for index in indices]
        try:
            for line in lines[1:]:  # into the first, which may be large and be joined with many
                _add_to(lines[0], line)
            self._lines[indices[0]] = lines[0]
        except (IndexError, KeyError, TypeError, AttributeError):
            return  # damaged: without these

    def samples(self, warnings: list[str]) -> tuple[StepSample, ...]:
        found, num_bad = [], 0
        for step in sorted(self._lines):
            try:
                found.append(step_of_line(self._lines.pop(step)))
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                num_bad += 1
        if num_bad:
            warnings.append(f"{SAMPLES_FILE}: {num_bad} step(s) have a missing or invalid field and were skipped")
        if self.num_unread:
            warnings.append(
                f"{SAMPLES_FILE}: only the first {self._most:,} steps were read, and {self.num_unread:,} more were "
                f"counted; set STEPSCOPE_MAX_STEPS={self._most + self.num_unread} to read all"
            )
        return tuple(found)


def _of_one_kind(samples: tuple[StepSample, ...], between: Mapping[str, Mapping[str, int]]) -> tuple[StepSample, ...]:
    """Return the steps with forwards of the same lines named alike: the first ones may have been called evaluations,
    before it was known what each step does there."""
    named: Counter[str] = sum((Counter(between.get(kind, {})) for kind in _UNTRAINED), Counter())
    rollouts = between.get(ROLLOUT, {})
    if not named or not named.keys() <= rollouts.keys() or named.total() >= sum(rollouts.values()):
        return samples
    return tuple(
        replace(
            sample,
            host_ns=_renamed(sample.host_ns),
            device_ns=None if sample.device_ns is None else _renamed(sample.device_ns),
            num_times=_renamed(sample.num_times),
        )
        for sample in samples
    )


def _renamed(values: Mapping[str, int]) -> dict[str, int]:
    found = {name: value for name, value in values.items() if name != EVALUATION}
    if EVALUATION in values:
        found[ROLLOUT] = found.get(ROLLOUT, 0) + values[EVALUATION]
    return found


def _add_to(line: dict[str, Any], following: Mapping[str, Any]) -> None:
    line["wall_ns"] += _integer(following["wall_ns"])
    for name in ("host_ns", "num_times"):
        total = line[name] = line.get(name) or {}
        for key, value in (following.get(name) or {}).items():
            total[key] = total.get(key, 0) + _integer(value)
    for name in ("num_tokens", "num_samples"):
        line[name] = max(line.get(name) or 0, following.get(name) or 0) or None


def step_of_line(line: dict[str, Any]) -> StepSample:
    """Return the step of a line of samples.jsonl; KeyError, TypeError or ValueError if it is not one."""
    wall_ns, window = _integer(line["wall_ns"]), line["window"]
    if not isinstance(window, str):
        raise TypeError("window is not a name")
    # Free-running steps of older recordings have only their duration.
    host_ns = _nanoseconds(line["host_ns"] if window != "free" else line.get("host_ns", {}))
    if rest_ns := wall_ns - sum(host_ns.values()):
        host_ns["unattributed"] = _integer(host_ns.get("unattributed", 0) + rest_ns)
    device_ns = None if line.get("device_ns") is None else _nanoseconds(line["device_ns"])
    if not wall_ns or (device_ns is not None and not sum(device_ns.values())):
        raise ValueError("a step takes time")
    return StepSample(
        step=line["step"],
        window=window,
        start_ns=_integer(line["start_ns"]),
        wall_ns=wall_ns,
        host_ns=host_ns,
        device_ns=device_ns,
        num_tokens=_integer_or_none(line.get("num_tokens")),
        num_samples=_integer_or_none(line.get("num_samples")),
        num_micro_batches=_integer(line.get("num_micro_batches", 0)),
        num_skipped=_integer(line.get("num_skipped", 0)),
        num_compiles=_integer(line.get("num_compiles", 0)),
        num_times=_nanoseconds(line.get("num_times") or {}),
        **{name: None if line.get(name) is None else float(line[name]) for name in ("loss", "loss_sum")},
    )


def _integer(value: Any) -> int:
    if not is_count(value):
        raise TypeError("not a count")
    return value


def _integer_or_none(value: Any) -> int | None:
    return None if value is None else _integer(value)


def _nanoseconds(values: Any) -> dict[str, int]:
    return {str(name): _integer(value) for name, value in values.items()}


def _counter(values: Values, reasons: set[str], text: bytes) -> CounterSample:
    """Return a line of counters; `reasons` collects what throttled, of which NVML knows at most 64."""
    line = _object(values, text)
    known = {name: line[name] for name in CounterSample.__dataclass_fields__ if line.get(name) is not None}
    throttle = known.pop("throttle", [])
    check(throttle, [TEXT])
    if not all(isinstance(value, (int, float)) and abs(value) < 2**63 for value in known.values()):
        raise TypeError("a counter is not a number")
    if len(reasons.union(throttle)) > 64:
        raise ValueError("too many reasons")
    reasons.update(throttle)
    known["t_ns"] = _integer(known["t_ns"])
    return CounterSample(**known, throttle=tuple(dict.fromkeys(throttle)))
