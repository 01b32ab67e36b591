"""Figures of a step for tests: its time, and counts that need no clock; stored as a baseline, and compared with one.

Counts are those of one traced step: neither the first, in which the profiler starts, nor the last, in which it ends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from stepscope.analysis.comparison.compare import Gate, GateResult, Missing, Pair, decide, parse_gate
from stepscope.analysis.comparison.metrics import METRICS, THRESHOLD_SHARE, Change, Measure, Metric, change_of
from stepscope.border import AMOUNT, TEXT, TIME, NotOfSchema, check, read_json
from stepscope.errors import StepscopeError, Unavailable, UsageError, if_available
from stepscope.session import Session, open_session

SCHEMA_VERSION = 1
STEP_TIME = "step_time"
COUNTS = {
    metric.name: metric
    for metric in (
        Metric("ops", "ops per step", "count", True, ("fewer", "more")),
        METRICS["kernels"],
        Metric("synchronizations", "synchronizations", "count", True, ("fewer", "more")),
        Metric("copied_bytes", "bytes copied", "bytes", True, ("less", "more")),
        METRICS["peak_memory"],
        Metric("graph_breaks", "graph breaks", "count", True, ("fewer", "more")),
        Metric("recompiles", "recompiles", "count", True, ("fewer", "more")),
        Metric("flops", "FLOPs per step", "count", True, ("fewer", "more")),
    )
}
FIGURES = {STEP_TIME: METRICS[STEP_TIME], **COUNTS}
NUM_TRACED = 3
_ON_GPU = ("kernels", "synchronizations")
_SCHEMA = {"schema_version": "a count", "device": TEXT, "torch": TEXT, "step_time_ns": (TIME,)}
_SCHEMA |= {f"{name}?": AMOUNT for name in COUNTS}


@dataclass(frozen=True)
class StepFigures:
    """What was measured of a step."""

    device: str
    torch: str
    step_time_ns: tuple[int, ...]  # of every clean step, in order
    counts: Mapping[str, int]  # by name in `COUNTS`; what could not be counted is left out

    @staticmethod
    def of(folder: Path) -> tuple[StepFigures, dict[str, int]]:
        """Return the figures of a recording, and how often its step calls each op."""
        from stepscope.analysis.time.summary import clean_step_ns

        session = open_session(folder)
        environment = session.recording.facts.get("environment") or {}
        ops, counts = _counts(session)
        samples = clean_step_ns(session.recording)
        return StepFigures(str(environment.get("device_name")), str(environment.get("torch")), samples, counts), ops

    @staticmethod
    def read(path: Path) -> StepFigures:
        """Return the figures of a baseline; StepscopeError if it is not one."""
        try:
            values = read_json(path)
            check(values, _SCHEMA)
        except FileNotFoundError:
            raise UsageError(f"There is no baseline {path}. Write it with `pytest --stepscope-update`.") from None
        except (OSError, NotOfSchema, ValueError) as error:
            message = f"{path} is not a baseline: {error}. Write it again with `pytest --stepscope-update`."
            raise StepscopeError(message) from None
        counts = {name: values[name] for name in COUNTS if name in values}
        return StepFigures(values["device"], values["torch"], tuple(values["step_time_ns"]), counts)

    def write(self, path: Path) -> None:
        """Write a baseline: one figure per line, so that a change of it can be reviewed."""
        values = {"schema_version": SCHEMA_VERSION, "device": self.device, "torch": self.torch, **self.counts}
        values["step_time_ns"] = list(self.step_time_ns)
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in values.items())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")

    def count(self, name: str) -> int:
        """Return a count; Unavailable says why there is none."""
        if name not in self.counts:
            raise Unavailable(self._lacks(name))
        return self.counts[name]

    def measure(self, name: str) -> Measure | None:
        if name != STEP_TIME:
            return Measure(self.counts[name]) if name in self.counts else None
        from stepscope.analysis.time.statistics import describe

        if not self.step_time_ns:
            return None
        return Measure(describe(self.step_time_ns).median, tuple(map(float, self.step_time_ns)))

    def _lacks(self, name: str) -> str:
        if name in _ON_GPU:
            return f"{name} are counted on a GPU, and this step ran on {self.device}. On a CPU, count ops"
        if name == STEP_TIME:
            return "no step was timed (steps=0)"
        return f"{name} could not be counted in this step"

    def compare(self, base: StepFigures, limits: Mapping[str, str]) -> list[tuple[GateResult, Change | None]]:
        """Return the result of every limit, with the change if both sides have the figure.

        Without limits, no count may grow. The step time of another device or another torch is not compared.
        """
        every = {name: "0%" for name in COUNTS if name in base.counts and name in self.counts}
        gates = [_gate(name, limit) for name, limit in (limits or every).items()]
        place = [f"{each.device} with torch {each.torch}" for each in (base, self)]
        changes, missing = [], []
        for name in (gate.metric for gate in gates):
            before, after = base.measure(name), self.measure(name)
            if name == STEP_TIME and place[0] != place[1]:
                missing.append(Missing(name, f"the baseline is from {place[0]}, and this is {place[1]}"))
            elif before is None or after is None:
                reason = self._lacks(name) if after is None else "the baseline does not have it"
                missing.append(Missing(name, reason))
            else:
                changes.append(change_of(FIGURES[name], before, after, THRESHOLD_SHARE))
        pair = Pair(None, place[0], place[1], (), (), (), (), tuple(changes), (), tuple(missing), ())
        return [(result, pair.change(result.metric)) for result in decide(gates, [pair], ())]


def _gate(name: str, limit: str) -> Gate:
    if name not in FIGURES:
        raise UsageError(f"There is no figure {name!r} to compare. Choose from {', '.join(FIGURES)}.")
    try:
        return replace(parse_gate(f"{STEP_TIME}:{limit}"), metric=name)
    except UsageError:
        raise UsageError(f"{name}={limit!r} is not a limit. Write a share, such as {name}='3%'.") from None


def _counts(session: Session) -> tuple[dict[str, int], dict[str, int]]:
    """Return the calls of each op, and every count that this recording has."""
    import polars as pl

    from stepscope.analysis.compiler.compile_summary import compiler_summary
    from stepscope.analysis.kernels.copy_sources import copy_sources
    from stepscope.analysis.memory.account import OTHER, REMAINDER
    from stepscope.analysis.structure.nesting import is_aten_op, outermost
    from stepscope.analysis.time.syncs import syncs

    linked = session.linked
    numbers = linked.steps.table["step"]
    in_step = pl.col("step") == numbers[len(numbers) // 2]
    is_op = is_aten_op(linked.host)
    ops = linked.host.filter(is_op)
    ops = ops.filter(outermost(linked.host, ops["row"], is_op) == ops["row"]).filter(in_step)
    compiler = compiler_summary(session.recording.compiler or {})
    flops, memory = session.summary.flops, if_available(lambda: session.memory)
    owners = () if memory is None else memory.account.live_at_peak.by_owner
    found: dict[str, int | None] = {
        "ops": ops.height,
        "copied_bytes": int(copy_sources(linked).filter(in_step)["bytes"].sum()),
        # Tensors from before the step that are no part of it, and what libraries keep, may be from another test.
        "peak_memory": sum(part.bytes for part in owners if part.name not in (OTHER, REMAINDER)) or None,
        "graph_breaks": compiler.num_graph_breaks,
        "recompiles": compiler.num_recompiles,
        "flops": None if flops is None else flops.hardware_flops,
    }
    if linked.device.height:
        found["kernels"] = linked.device.filter(in_step, kind="kernel").height
        found["synchronizations"] = syncs(linked).filter(in_step, kind="host_wait").height
    names = ops["name"].cast(pl.String).value_counts(sort=True)
    return dict(names.iter_rows()), {name: value for name in COUNTS if (value := found.get(name)) is not None}
