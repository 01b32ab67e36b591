"""The card for people: key figures, where a step goes, what is wrong with it, what it ran on."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import polars as pl

from stepscope.analysis.ranks.rank_account import RankAccount
from stepscope.analysis.time.phases import IDLE, UNATTRIBUTED, Row
from stepscope.analysis.time.step_parts import gpu_rows_of_trace, gpu_split, host_rows, host_rows_of_trace, waiting_ns
from stepscope.document.card import Card
from stepscope.document.findings import findings_part
from stepscope.document.model import Bars, Fact, Facts, Missing, Series, Table, Text
from stepscope.document.sections.shared import known, mapping, plain
from stepscope.document.text.card_lines import Line
from stepscope.document.text.trace_text import PHASE_SOURCES, STEP_SOURCES
from stepscope.document.trace_facts import facts_of
from stepscope.document.trace_verdict import IDLE_MEANS
from stepscope.errors import Unavailable
from stepscope.findings.diagnose import Diagnosis
from stepscope.formatting import duration, percent, plural, size
from stepscope.session import Session

ABOUT = "about this measurement"
_ELSEWHERE = ("script", "on", "recording", "next")
"""Lines of the card that the report says at another place."""
_WORTH_SAYING = 0.1
"""Of the idle time: what causes less of it is among the kernels' tables."""


def parts(session: Session, diagnosis: Diagnosis) -> tuple[Any, ...]:
    """Return key figures, where a step goes, findings, the measurement, the environment."""
    if session.is_recording:
        card = Card.of(session)
        figures, about = _card_facts(card)
        where = _where_of_card(card)
        environment = _environment(session)
    else:
        figures, about = Facts(tuple(_trace_figures(session, diagnosis))), Facts(tuple(_trace_about(session)), ABOUT)
        where = _where_of_trace(session.analysis.ranks[0])
        environment = Facts(known(_trace_environment(session)), "environment")
    found = findings_part(diagnosis, str(session.path) if session.is_recording else None)
    binds = f"From the trace: {diagnosis.binds[:1].lower()}{diagnosis.binds[1:]}"
    bound = () if diagnosis.gpu_busy_share is None else (Text(binds),)
    seen = tuple(where)
    drawn = [part for part in seen if not isinstance(part, Table)]
    tables = [part for part in seen if isinstance(part, Table)]  # the same in figures: after what matters more
    every = (figures, *drawn, *bound, found, *tables, *_idle(session), about, environment)
    return tuple(part for part in every if not isinstance(part, Facts) or part.rows)


def _card_facts(card: Card) -> tuple[Facts, Facts]:
    """The lines of the card: what is measured, and how."""
    groups: dict[str, list[Fact]] = {"": []}
    heading = title = ""
    for line in card.lines:
        if line.is_heading:
            heading = line.title
            groups[heading] = []
            continue
        title = line.title or title
        if title not in _ELSEWHERE:
            groups[heading].append(_fact(line, title))
    return Facts(tuple(groups[""])), Facts(tuple(groups.get(ABOUT, ())), ABOUT)


def _fact(line: Line, title: str) -> Fact:
    return Fact(title, " · ".join(part.strip() for part in line.value.split("   ") if part.strip()), line.detail)


def _where_of_card(card: Card) -> Iterator[Any]:
    summary = card.summary
    if not summary.rows:
        yield Missing("where a step goes is not known: it takes clean steps; run longer, or lower --warmup")
        return
    on_gpu = summary.clock == "device"
    rows = {"GPU" if on_gpu else "host": list(summary.rows)}
    if on_gpu:
        rows["host"] = host_rows(summary.phases)
    waits = {phase.name: waiting_ns(phase) for phase in summary.phases}
    more = {"gpu_waiting_ns": waits} if IDLE in {row.name for row in summary.rows} else {}
    if IDLE in {row.name for row in summary.rows}:
        how = "GPU work by the phase that launched it"
    else:
        how = "time between the phases' CUDA events" if on_gpu else "host time by phase"
    note = f"{how}; the mean of the middle half of {plural(summary.num_clean, 'clean step')}"
    yield _where_chart("where a step goes", rows, note)
    yield _where_table("where a step goes", rows, more, note)


def _where_of_trace(account: RankAccount) -> Iterator[Any]:
    num_steps = account.steps.height
    title = "where a step goes" if num_steps else "where the time goes"
    gpu, host = gpu_rows_of_trace(account), host_rows_of_trace(account)
    rows = {name: found for name, found in (("GPU", gpu), ("host", host)) if any(row.ns for row in found)}
    if not rows:
        yield Missing("the trace has neither ops nor GPU work to account for: record the steps of a training loop")
        return
    window = duration(account.gpu_time.window_ns, 3)
    what = [PHASE_SOURCES[account.phase_source]]
    if gpu:
        what.append(f"of the GPU's {window} from its first event to its last, by the phase that launched the work")
    if num_steps > 1:
        what.append(f"the mean of {num_steps} traced steps")
    counts = dict(account.phases.select("phase", pl.col("num_kernels") / max(1, num_steps)).iter_rows())
    more = {"num_kernels": counts} if gpu else {}
    yield _where_chart(title, rows, "; ".join(what))
    yield _where_table(title, rows, more, "; ".join(what))


def _where_chart(title: str, rows: dict[str, list[Row]], how: str) -> Bars:
    names = _parts_of(rows.values())
    shares = [{row.name: row.share for row in found} for found in rows.values()]
    series = tuple(
        Series(name, [of.get(name, 0.0) for of in shares], color=name)
        for name in names
        if any(of.get(name) for of in shares)
    )
    said = "; ".join(_largest(whose, found) for whose, found in rows.items())
    return Bars(
        id="where_a_step_goes",
        title=title,
        caption=f"{said[:1].upper()}{said[1:]}. Shown: {how}.",
        labels=list(rows),
        series=series,
        unit="share",
    )


def _largest(whose: str, rows: Sequence[Row]) -> str:
    """What most of a bar is, and how much of it is idle."""
    owned = [row for row in rows if row.name not in (IDLE, UNATTRIBUTED)]
    largest = max(owned or rows, key=lambda row: row.share)
    text = f"on the {whose} the largest part is {largest.name} ({percent(largest.share)})"
    idle = next((row.share for row in rows if row.name == IDLE), None)
    return text if idle is None else f"{text}, and nothing runs for {percent(idle)}"


def _where_table(title: str, rows: dict[str, list[Row]], more: dict[str, dict[str, Any]], note: str) -> Table:
    names = _parts_of([*rows.values(), [Row(UNATTRIBUTED, 0.0, 0.0)]])
    columns: dict[str, Sequence[Any]] = {"part": names}
    for whose, found in rows.items():
        of = {row.name: row for row in [Row(UNATTRIBUTED, 0.0, 0.0), *found]}
        columns[f"{whose.lower()}_ns"] = [of[name].ns if name in of else None for name in names]
        columns[f"{whose.lower()}_share"] = [of[name].share if name in of else None for name in names]
    columns |= {column: [plain(of.get(name)) for name in names] for column, of in more.items()}
    return Table("where_a_step_goes", title, columns, note=note)


def _parts_of(rows: Iterable[Sequence[Row]]) -> list[str]:
    """Every part once, phases first, then what is idle and what belongs to nobody."""
    names = list(dict.fromkeys(row.name for found in rows for row in found))
    return sorted(names, key=lambda name: (name == UNATTRIBUTED, name == IDLE))


def _idle(session: Session) -> Iterator[Any]:
    """What the GPU did in the trace, and why it stood."""
    try:
        account = session.analysis.ranks[0]
    except Unavailable as reason:
        if session.is_recording and session.summary.clock == "device":
            yield Missing(f"why the GPU was idle: {reason}")
        return
    split = gpu_split(account.gpu_time)
    if split:
        yield Table(
            "gpu_time",
            "where the GPU's time goes",
            {
                "part": [row.name for row in split],
                "total_ns": [row.ns for row in split],
                "share": [row.share for row in split],
            },
            note=f"of {duration(account.gpu_time.window_ns, 3)} from its first event to its last in the trace; "
            "communication and copies that no computing hid",
        )
    causes = account.idle_causes.filter(pl.col("share") >= _WORTH_SAYING).sort("total_ns", descending=True)
    if causes.height:
        said = [
            f"for {percent(row['share'])} of it {IDLE_MEANS[row['cause']]}" for row in causes.iter_rows(named=True)
        ]
        yield Text(f"Idle are {duration(account.gpu_time.idle_ns, 3)}: {'; '.join(said)}.")


def _trace_figures(session: Session, diagnosis: Diagnosis) -> Iterator[Fact]:
    account = session.analysis.ranks[0]
    if num := account.steps.height:
        if diagnosis.step_ns is not None:
            yield Fact("step", duration(diagnosis.step_ns, 3), "the trace's, without what the profiler adds")
        mean_ns = int(account.steps["duration_ns"].sum()) / num
        how = STEP_SOURCES[account.step_source]
        yield Fact("traced step", duration(mean_ns, 3), f"mean of {plural(num, 'step')}, {how}")
    else:
        yield Fact("step", "not known", "nothing in the trace says where a step ends")
    if diagnosis.gpu_busy_share is not None:
        yield Fact("GPU busy", percent(diagnosis.gpu_busy_share), "of a step without the profiler")
    for title, text in facts_of(session.analysis):
        if title not in ("not linked", "warning"):
            yield Fact(title, text)


def _trace_about(session: Session) -> Iterator[Fact]:
    account = session.analysis.ranks[0]
    yield Fact("events", f"{sum(rank.num_events for rank in session.analysis.ranks):,}")
    yield Fact("observer effect", "not known", "a trace alone does not tell: stepscope run times steps without it")
    if account.is_cut_off:
        yield Fact("cut off", "the file ends before its list of events", "GPU events come last: they may be missing")
    yield from (Fact(title, text) for title, text in facts_of(session.analysis) if title in ("not linked", "warning"))


def _environment(session: Session) -> Facts:
    facts = session.recording.facts
    found, command = mapping(facts.get("environment")), mapping(facts.get("command"))
    git, windows = mapping(facts.get("git")), mapping(facts.get("windows"))
    argv = command.get("argv")
    changed = "with changes that are not committed" if git.get("modified") else ""
    visible = found.get("num_visible_devices")
    rows = [
        Fact("command", shlex.join(map(str, argv)) if isinstance(argv, list) else "", _text(command.get("folder"))),
        Fact("status", _text(facts.get("status")), _text(facts.get("exception"))),
        Fact("device", _text(found.get("device_name")), f"of {visible} visible" if visible else ""),
        Fact("device memory", size(found["memory_bytes"]) if isinstance(found.get("memory_bytes"), int) else ""),
        *(Fact(title, _text(found.get(name))) for title, name in _VERSIONS.items()),
        Fact("float32 products", _text(found.get("float32_matmul"))),
        Fact("settings", ", ".join(f"{name}={value}" for name, value in mapping(found.get("variables")).items())),
        Fact("revision", _text(git.get("revision")), changed),
        Fact("windows", ", ".join(f"{name} {num}" for name, num in windows.items()), "steps asked for"),
        Fact("configuration", _text(facts.get("config_hash")), "the first digits of its SHA-256"),
        Fact("started", _text(facts.get("started_at"))),
    ]
    return Facts(known(rows), "environment")


_VERSIONS = {"torch": "torch", "CUDA": "cuda", "cuDNN": "cudnn", "driver": "driver", "Python": "python",
             "CPU threads": "num_threads", "ranks": "world_size", "platform": "platform"}  # fmt: skip


def _trace_environment(session: Session) -> Iterator[Fact]:
    facts, ranks = session.linked.trace.facts, session.analysis.ranks
    yield Fact("device", _text(ranks[0].device_name))
    yield Fact("ranks", ", ".join(str(rank.rank) for rank in ranks) if len(ranks) > 1 else "")
    yield Fact("world size", _text(facts.world_size))
    yield from (Fact(name.replace("_", " "), version) for name, version in facts.versions.items())
    flags = {"shapes": facts.has_shapes, "stacks": facts.has_stacks, "memory": facts.has_memory}
    yield Fact("recorded with", ", ".join(name for name, is_on in flags.items() if is_on))
    yield Fact("torch, git, command", "not known", "a trace does not say: stepscope run writes them down")


def _text(value: Any) -> str:
    return "" if value is None else str(value)
