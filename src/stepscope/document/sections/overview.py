"""The section `overview`: key figures, where a step goes, what is wrong with it, what it ran on."""

import shlex
from collections.abc import Iterator
from typing import Any

from stepscope.document.card import Card
from stepscope.document.findings import findings_part
from stepscope.document.ledger import ledger_parts
from stepscope.document.model import Fact, Facts, Missing, Part, Text
from stepscope.document.sections.many_ranks import numbers
from stepscope.document.sections.time import STEP_SOURCES, gpu_time_parts, step_parts_of_summary, step_parts_of_trace
from stepscope.document.tables import known, mapping
from stepscope.document.trace_facts import not_attributed, trace_facts, warnings
from stepscope.errors import Unavailable
from stepscope.findings.diagnose import Diagnosis
from stepscope.formatting import duration, percent, plural, size
from stepscope.session import Session

ABOUT = "about this measurement"
_VERSIONS = {"torch": "torch", "CUDA": "cuda", "cuDNN": "cudnn", "driver": "driver", "Python": "python",
             "CPU threads": "num_threads", "ranks": "world_size", "platform": "platform"}  # fmt: skip


def parts(session: Session, diagnosis: Diagnosis) -> tuple[Part, ...]:
    """Return key figures, where a step goes, findings, GPU and idle time, the measurement, the environment."""
    if session.is_recording:
        card = Card.of(session)
        figures, measurement, environment = card.figures, card.measurement, _environment(session)
        chart, *tables = step_parts_of_summary(session.summary)
    else:
        figures = (*_trace_steps(session, diagnosis), *warnings(session.analysis), *trace_facts(session.analysis))
        measurement, environment = tuple(_trace_measurement(session)), _trace_environment(session)
        chart, *tables = step_parts_of_trace(session.analysis.ranks[0])
    every: list[Part] = [Facts(figures), chart]
    if diagnosis.gpu_busy_share is not None:
        every.append(Text(diagnosis.binds))
    every.append(findings_part(diagnosis, str(session.path) if session.is_recording else None))
    if diagnosis.ledger is not None:
        every += ledger_parts(diagnosis.ledger, diagnosis.later_ns is not None)
    every += tables
    try:
        every += gpu_time_parts(session.analysis.ranks[0])
    except Unavailable as reason:
        if session.is_recording and session.summary.clock == "device":
            every.append(Missing(f"why the GPU was idle: {reason}"))
    every += [Facts(measurement, ABOUT), Facts(known(environment), "environment")]
    return tuple(part for part in every if not isinstance(part, Facts) or part.rows)


def _trace_steps(session: Session, diagnosis: Diagnosis) -> Iterator[Fact]:
    account = session.analysis.ranks[0]
    if num := account.steps.height:
        if diagnosis.step_ns is not None:
            yield Fact("step", duration(diagnosis.step_ns, 3), "from the trace, less profiler overhead")
        mean = duration(int(account.steps["duration_ns"].sum()) / num, 3)
        yield Fact("traced step", mean, f"mean of {plural(num, 'step')}, {STEP_SOURCES[account.step_source]}")
    else:
        yield Fact("step", "unknown", "nothing in the trace marks the end of a step")
    if diagnosis.gpu_busy_share is not None:
        yield Fact("GPU busy", percent(diagnosis.gpu_busy_share), "of a step, less profiler overhead")


def _trace_measurement(session: Session) -> Iterator[Fact]:
    yield Fact("events", f"{sum(rank.num_events for rank in session.analysis.summaries):,}")
    yield Fact("overhead", "unknown", "`stepscope run` also times steps without the profiler")
    if session.analysis.ranks[0].is_cut_off:
        yield Fact("cut off", "the file ends early", "GPU events come last and may be missing")
    yield from not_attributed(session.analysis)


def _environment(session: Session) -> Iterator[Fact]:
    facts = session.recording.facts
    found, command = mapping(facts.get("environment")), mapping(facts.get("command"))
    git, windows = mapping(facts.get("git")), mapping(facts.get("windows"))
    argv, visible, memory = command.get("argv"), found.get("num_visible_devices"), found.get("memory_bytes")
    yield Fact("command", shlex.join(map(str, argv)) if isinstance(argv, list) else "", _text(command.get("folder")))
    yield Fact("status", _text(facts.get("status")), _text(facts.get("exception")))
    yield Fact("device", _text(found.get("device_name")), f"of {visible} visible" if visible else "")
    yield Fact("device memory", size(memory) if isinstance(memory, int) else "")
    yield from (Fact(title, _text(found.get(name))) for title, name in _VERSIONS.items())
    yield Fact("float32 products", _text(found.get("float32_matmul")))
    yield Fact("settings", ", ".join(f"{name}={value}" for name, value in mapping(found.get("variables")).items()))
    yield Fact("revision", _text(git.get("revision")), "with uncommitted changes" if git.get("modified") else "")
    yield Fact("windows", ", ".join(f"{name} {num}" for name, num in windows.items()), "steps requested")
    yield Fact("configuration", _text(facts.get("config_hash")), "first digits of its SHA-256")
    yield Fact("started", _text(facts.get("started_at")))


def _trace_environment(session: Session) -> Iterator[Fact]:
    facts, ranks = session.linked.trace.facts, [rank.rank for rank in session.analysis.summaries]
    yield Fact("device", _text(session.analysis.ranks[0].device_name))
    yield Fact("ranks", numbers(ranks) if len(ranks) > 1 else "")
    yield Fact("world size", _text(facts.world_size))
    yield from (Fact(name.replace("_", " "), version) for name, version in facts.versions.items())
    flags = {"shapes": facts.has_shapes, "stacks": facts.has_stacks, "memory": facts.has_memory}
    yield Fact("recorded with", ", ".join(name for name, is_on in flags.items() if is_on))
    yield Fact("torch, git, command", "unknown", "`stepscope run` records them")


def _text(value: Any) -> str:
    return "" if value is None else str(value)
