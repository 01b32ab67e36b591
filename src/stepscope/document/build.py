"""The report of a session, every section of it, and the document of `stepscope analyze`."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path, PurePath

from stepscope.analysis.ranks.all_ranks import NUM_ROWS, Analysis
from stepscope.document.card import Card
from stepscope.document.model import Document, Fact, Facts, Missing, Part, Section, Text
from stepscope.document.sections import kernels, modules, ranks
from stepscope.document.sections.time import STEP_SOURCES, gpu_time_parts, step_parts_of_trace
from stepscope.document.tables import mapping
from stepscope.document.trace_facts import caveats, trace_facts
from stepscope.document.verdict import trace_verdict
from stepscope.errors import WRONG_KIND, RecordingError, TraceError, Unavailable, wrong_kind
from stepscope.findings.diagnose import diagnose
from stepscope.formatting import duration, plural, safe
from stepscope.session import Kind, Session
from stepscope.version import __version__


def analysis_document(analysis: Analysis, num_rows: int = NUM_ROWS) -> Document:
    """Return where the time goes, in parts that the report has too; `num_rows` limits the lists of names."""
    first = analysis.ranks[0]
    has_gpu = bool(first.gpu_time.window_ns)
    parts: list[Part] = [Facts(tuple(_source(analysis))), *gpu_time_parts(first), *step_parts_of_trace(first)]
    if has_gpu:
        parts += [replace(kernels.kernel_table(first), num_shown=num_rows), Text(kernels.work_text(first))]
    if modules.say_more_than_ops(first):
        names = modules.group_table(first)
    else:
        names = replace(kernels.op_table(first), title="ops (the trace names no modules)")
    parts.append(replace(names, num_shown=num_rows))
    if analysis.across is not None:
        parts.append(ranks.rank_table(analysis.across))
    if facts := (*trace_facts(analysis), *caveats(analysis)):
        parts.append(Facts(facts))
    return Document(first.path, trace_verdict(first), (Section("time", "Time", tuple(parts)),))


def _source(analysis: Analysis) -> Iterator[Fact]:
    first, num_ranks = analysis.ranks[0], len(analysis.ranks)
    name = Path(first.path).name if num_ranks == 1 else f"{num_ranks} ranks"
    yield Fact("trace", name, plural(sum(rank.num_events for rank in analysis.ranks), "event"))
    yield Fact("device", first.device_name or ("unnamed GPU" if first.gpu_time.window_ns else "no GPU"))
    if num := first.steps.height:
        mean = f"{plural(num, 'step')} of {duration(int(first.steps['duration_ns'].sum()) / num)}"
        how = STEP_SOURCES[first.step_source]
        how = f"on average, {how}" if num > 1 else how.replace("each", "it")
        yield Fact("steps", mean, f"{how}; includes profiler overhead")
    else:
        yield Fact("steps", "none found", "nothing in the trace marks the end of a step")
    if num_ranks > 1:
        yield Fact("rank", f"{first.rank}", "tables without a rank are of this one; --rank selects another")


SECTIONS = ("overview", "timeline", "modules", "kernels", "attention", "copies", "roofline", "memory", "steps",
            "compiler", "precision", "counters", "ranks")  # fmt: skip
"""Files of `document/sections`, in the order of the page."""


def report_of(session: Session, ignored: Collection[str] = ()) -> Document:
    """Return the report of a recording, a trace, a folder of ranks or a sweep, without the findings of some rules."""
    if session.kind is Kind.SWEEP:
        from stepscope.document.sections.sweep import sweep_report

        try:
            return sweep_report(session.sweep)
        except WRONG_KIND as error:
            raise RecordingError(f"{session.path} has a row with {wrong_kind(error)}") from None
    # These two first: a recording that has no card is refused before any work is done.
    title, verdict = title_of(session), verdict_of(session)
    sections = tuple(section_of(session, name, ignored) for name in SECTIONS)
    return Document(title, verdict, sections, {"source": str(session.path), "stepscope": __version__})


def title_of(session: Session) -> str:
    """Return the script and its device, or the name of the trace."""
    name, device = session.path.resolve().name, None
    if session.is_recording:
        facts = session.recording.facts
        argv = mapping(facts.get("command")).get("argv")
        name = PurePath(str(argv[0])).name if isinstance(argv, list) and argv else name
        device = mapping(facts.get("environment")).get("device_name")
    else:
        device = session.analysis.ranks[0].device_name
        if (num := len(session.analysis.ranks)) > 1:
            name = f"{name}, {num} ranks"
    return safe(f"{name} on {device}" if device else name)


def section_of(session: Session, name: str, ignored: Collection[str] = ()) -> Section:
    """Return one section; if the source has nothing for it, why, and what to run."""
    try:
        build = import_module(f"stepscope.document.sections.{name}").parts
        parts = build(session, diagnose(session.case, ignored)) if name == "overview" else build(session)
    except (Unavailable, RecordingError, TraceError) as reason:
        parts = (Missing(str(reason)),)
    except WRONG_KIND as error:
        if not session.is_recording:
            raise
        parts = (Missing(f"the recording has {wrong_kind(error)}"),)
    return Section(name, name.capitalize(), parts)


def verdict_of(session: Session) -> str:
    """Return the verdict of the card, or of the trace's first rank."""
    return Card.of(session).verdict if session.is_recording else trace_verdict(session.analysis.ranks[0])
