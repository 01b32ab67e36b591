"""Answers of the study `tsmoe` about torch.compile: graphs, recompiles, CUDA graphs, and whether it pays."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stepscope.analysis.comparison.sweeps import OK
from stepscope.document.model import Text
from stepscope.errors import Unavailable
from stepscope.formatting import plural, safe
from stepscope.studies.figures import known, listed, said, table, without_folders
from stepscope.studies.stored import Recorded, Stored
from stepscope.studies.tsmoe import note
from stepscope.studies.tsmoe.variants import TIME, name_of, size_said

if TYPE_CHECKING:
    from stepscope.analysis.compiler.compile_summary import CompilerSummary, Recompiled
    from stepscope.session.source import Source

COMPILER = ("num_graphs", "num_graph_breaks", "num_recompiles", "num_recompile_limit_hits", "num_cuda_graphs")


def compiled(stored: Stored) -> Iterator[Any]:
    """Graphs, breaks, recompiles, CUDA graphs, and whether it pays."""
    rows = stored.rows("dispatch")
    eager = {record["dispatch"]: record for record in rows.ok.where(compile="off")}
    records = [
        _with_break_even(record, eager.get(record["dispatch"]))
        for record in rows
        if record["compile"] != "off" and record.get("compiler_num_graphs")
    ]
    if not records:
        raise Unavailable("no point was compiled: --full does (on a CPU compiling takes longer than all the rest)")
    whole = [r for r in records if r["status"] == OK and (r["num_graphs"], r["num_graph_breaks"]) == (1, 0)]
    sentences = [_whole_sentence(whole)] if whole else []
    sentences += [_other_sentence(record) for record in records if record not in whole]
    yield Text(f"Measured on {size_said(records[0])}. {' '.join(sentences)}")
    names = ("dispatch", "compile", TIME, "compile_ns", "num_break_even_steps", *COMPILER)
    yield table("compiled", "Compiled", records, *known(records, *names))
    yield from _recompiles(stored)


def _with_break_even(record: Mapping[str, Any], eager: Mapping[str, Any] | None) -> dict[str, Any]:
    """The row with its compiler's figures, and after how many steps the compiler's time is won back."""
    from stepscope.analysis.compiler.compile_summary import break_even

    figures = {name: int(record.get(f"compiler_{name}") or 0) for name in COMPILER}
    steps = None
    comparable = eager is not None and record["status"] == OK and record["optimizer"] == eager["optimizer"]
    if comparable and eager is not None and record.get("compile_ns"):
        steps = break_even(record["compile_ns"] / 1e9, record[TIME], eager[TIME])
    return {**record, **figures, "num_break_even_steps": steps if steps is None or math.isfinite(steps) else None}


def _whole_sentence(records: Sequence[Mapping[str, Any]]) -> str:
    """Those that are one graph."""
    times = [record[TIME] for record in records]
    paid = [record for record in records if record["num_break_even_steps"] is not None]
    again = sum(record["num_recompiles"] for record in records)
    text = (
        f"{', '.join(name_of(record) for record in records)}: one graph without a break, "
        f"{plural(again, 'recompile')}; {said(TIME, min(times))} to {said(TIME, max(times))} a step"
    )
    if not paid:
        return f"{text}."
    steps = [round(record["num_break_even_steps"]) for record in paid]
    text += (
        f"; paid back after {' to '.join(dict.fromkeys(f'{number:,}' for number in (min(steps), max(steps))))} steps"
    )
    others = [name_of(record) for record in records if record not in paid]
    if not others:
        return f"{text}."
    return (
        f"{text}: {listed(map(name_of, paid))}. For {listed(others)} there is no slower eager row with the same "
        "optimizer."
    )


def _other_sentence(record: Mapping[str, Any]) -> str:
    text = (
        f"{name_of(record)}: {plural(record['num_graphs'], 'graph')}, {plural(record['num_graph_breaks'], 'break')}, "
        f"{plural(record['num_recompiles'], 'recompile')}"
    )
    if record["status"] != OK:
        return f"{text}; {record['status']}: {safe(without_folders(record['notes'] or record['reason']), 200)}."
    return f"{text}; {said(TIME, record[TIME])} a step."


def _recompiles(stored: Stored) -> Iterator[Any]:
    """What a router that sends every batch elsewhere makes of compiled code, to the end or to the crash."""
    from stepscope.session.compiler_view import compiler_report

    records: list[dict[str, Any]] = []
    guards: list[dict[str, Any]] = []
    for recorded in stored.recordings("compiled"):
        name = {"dispatch": recorded.axes["dispatch"], "compile": recorded.axes["compile"]}
        record = {**name, "status": recorded.status}
        if recorded.status != OK:
            record["what"] = safe(without_folders(recorded.reason), 200)
        source = _source_of(recorded)
        summary = None if source is None else compiler_report(source.case).summary
        if source is not None and summary is not None:
            again = [{**name, **_guard_record(each)} for each in summary.recompiles]
            record |= _figures(source, summary, str(recorded.axes["device"])) | _most_often(again)
            guards += again
        if summary is not None or recorded.status != OK:
            records.append(record)
    if not records:
        raise Unavailable("no compiled training run was recorded")
    yield Text(
        f"With a router that learns ({size_said(stored.recordings('compiled')[0].axes)}): "
        f"{' '.join(_recompiles_sentences(records))} The note's loop met the limit of "
        f"{note.RECOMPILE_LIMIT} recompiles, and recorded CUDA graphs for {note.NUM_CUDA_GRAPH_SIZES} sizes."
    )
    names = ("dispatch", "compile", "num_steps", "step_ns", "num_graphs", "num_graph_breaks", "num_recompiles",
             "num_limit_hits", "compile_ns", "num_cuda_graphs", "num_cuda_graph_sizes", "what")  # fmt: skip
    yield table("compiled-training", "Compiled, with a router that learns", records, *known(records, *names))
    if guards:
        yield table("recompiles", "What was compiled again, and why", guards, *guards[0])


def _source_of(recorded: Recorded) -> Source | None:
    """The recording, also that of a run that crashed: what was compiled until then is in it."""
    from stepscope.session.source import Source

    if recorded.status == OK:
        return recorded.source
    return None if recorded.folder is None or not recorded.folder.exists() else Source(recorded.folder)


def _figures(source: Source, summary: CompilerSummary, device: str) -> dict[str, Any]:
    card, graphs = source.card, summary.cuda_graphs or {}
    step = card.summary.step_ns
    # Where the GPU's clock was not read, the host's tells only how long it took to launch.
    is_timed = step is not None and card.summary.clock == ("device" if device == "cuda" else "host")
    return {
        "num_steps": len(card.recording.samples), "step_ns": step.median if step and is_timed else None,
        "num_graphs": summary.num_graphs, "num_graph_breaks": summary.num_graph_breaks,
        "num_recompiles": summary.num_recompiles, "num_limit_hits": len(summary.limit_hits),
        "compile_ns": summary.seconds * 1e9, "num_cuda_graphs": graphs.get("num_recorded"),
        "num_cuda_graph_sizes": graphs.get("num_distinct_sizes"),
    }  # fmt: skip


def _guard_record(again: Recompiled) -> dict[str, Any]:
    return {
        "function": safe(without_folders(again.frame), 100), "guard": safe(again.guard, 80), "num_times": again.count,
        "values_seen": safe(", ".join(again.values), 100),
    }  # fmt: skip


def _most_often(guards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The function that was compiled again most often, and how often."""
    counts: Counter[str] = Counter()
    for each in guards:
        counts[each["function"]] += each["num_times"]
    return dict(zip(("most_often", "num_most_often"), counts.most_common(1)[0])) if counts else {}


def _recompiles_sentences(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What became of each run; of those that went alike, once."""
    names: dict[str, list[str]] = {}
    for record in records:
        names.setdefault(_fate(record), []).append(f"{record['dispatch']} ({record['compile']})")
    yield from (f"{listed(of)}{fate}" for fate, of in names.items())


def _fate(record: Mapping[str, Any]) -> str:
    if "num_recompiles" not in record:
        return f" {record['status']}: {record['what']}."
    again = plural(record["num_recompiles"], "recompile")
    if "most_often" in record:
        most = record["num_most_often"]
        part = "" if most == record["num_recompiles"] else f", {most} of them"
        again += f"{part} of {record['most_often']}"
    if record["status"] != OK:
        after, why = plural(record["num_steps"], "step"), ".".join(record["what"].split(".")[:2])
        return f" {record['status']} after {after} with {again}: {why}."
    text = f": {again}, {plural(record['num_limit_hits'], 'function')} at the limit"
    if record["num_cuda_graphs"]:
        text += f", {plural(record['num_cuda_graphs'], 'CUDA graph')} for "
        text += plural(record["num_cuda_graph_sizes"], "size")
    return f"{text}." if record["step_ns"] is None else f"{text}, {said('step_ns', record['step_ns'])} a step."
