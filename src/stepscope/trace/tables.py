"""A trace as tables: the input of every analysis."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from stepscope.trace.scan import Problem
from stepscope.trace.values import integer


@dataclass(frozen=True)
class TraceFacts:
    """A trace's metadata."""

    rank: int | None = None
    world_size: int | None = None
    devices: tuple[str, ...] = ()  # names of the machine's devices, by index
    base_time_ns: int = 0  # add to the trace's clock to get nanoseconds since 1970, if known
    has_shapes: bool | None = None
    has_stacks: bool | None = None
    has_memory: bool | None = None
    versions: dict[str, str] = field(default_factory=dict)  # of driver, runtime and tracer, as recorded
    is_cut_off: bool = False  # whether the file ended, or became unreadable, before its list of events was closed


@dataclass(frozen=True)
class Trace:
    """One rank's trace."""

    path: Path
    facts: TraceFacts
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]
    num_events: int
    host: pl.DataFrame
    device: pl.DataFrame
    device_ranges: pl.DataFrame
    syncs: pl.DataFrame
    memory: pl.DataFrame
    collectives: pl.DataFrame
    threads: pl.DataFrame
    counts: pl.DataFrame
    compiler: Mapping[str, Any] | None = None  # `compile.json` of the trace's recording; None for other traces

    @property
    def num_problems(self) -> int:
        """Events, or stretches between events, that could not be read as they are."""
        return sum(problem.num for problem in self.problems)


def facts_of(fields: dict[str, Any]) -> TraceFacts:
    """Return the metadata from a trace's top-level fields; missing or malformed ones are omitted."""
    distributed = fields.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    properties = fields.get("deviceProperties")
    devices = [p for p in properties if isinstance(p, dict)] if isinstance(properties, list) else []
    return TraceFacts(
        rank=integer(distributed.get("rank")),
        world_size=integer(distributed.get("world_size")),
        devices=tuple(str(device.get("name", "unknown device"))[:200] for device in devices),
        base_time_ns=integer(fields.get("baseTimeNanoseconds")) or 0,
        has_shapes=_flag(fields.get("record_shapes")),
        has_stacks=_flag(fields.get("with_stack")),
        has_memory=_flag(fields.get("profile_memory")),
        versions={
            key: str(value)[:80] for key, value in fields.items() if key.endswith("_version") and len(key) < 80
        },
    )


def _flag(value: Any) -> bool | None:
    number = integer(value)
    return None if number is None else bool(number)
