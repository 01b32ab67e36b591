"""Answers of the study `tsmoe` about torch.compile: graphs, recompiles, CUDA graphs, and whether it pays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepscope.analysis.sweeps import OK
from stepscope.findings.finding import CannotCheck
from stepscope.report.parts import Text
from stepscope.report.text import plural, safe
from stepscope.studies import tsmoe_note as note
from stepscope.studies.figures import known, said, table
from stepscope.studies.stored import Stored
from stepscope.studies.tsmoe_training import step_of
from stepscope.studies.tsmoe_variants import TIME, name_of

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
        raise CannotCheck("no point was compiled: --full does (on a CPU compiling takes longer than all the rest)")
    whole = [r for r in records if r["status"] == OK and (r["num_graphs"], r["num_graph_breaks"]) == (1, 0)]
    sentences = [_whole_sentence(whole)] if whole else []
    sentences += [_other_sentence(record) for record in records if record not in whole]
    yield Text(" ".join(sentences))
    names = ("dispatch", "compile", TIME, "compile_ns", "num_break_even_steps", *COMPILER)
    yield table("compiled", "Compiled", records, *known(records, *names))
    yield from _recompiles(stored)


def _with_break_even(record: Mapping[str, Any], eager: Mapping[str, Any] | None) -> dict[str, Any]:
    """The row with its compiler's figures, and after how many steps the compiler's time is won back."""
    from stepscope.analysis.compiler import break_even

    figures = {name: int(record.get(f"compiler_{name}") or 0) for name in COMPILER}
    steps = None
    comparable = eager is not None and record["status"] == OK and record["optimizer"] == eager["optimizer"]
    if comparable and eager is not None and record.get("compile_ns"):
        steps = break_even(record["compile_ns"] / 1e9, record[TIME], eager[TIME])
    return {**record, **figures, "num_break_even_steps": steps if steps is None or math.isfinite(steps) else None}


def _whole_sentence(records: Sequence[Mapping[str, Any]]) -> str:
    """Those that are one graph."""
    times, steps = [r[TIME] for r in records], [r["num_break_even_steps"] for r in records]
    paid = [round(number) for number in steps if number is not None]
    again = sum(record["num_recompiles"] for record in records)
    text = (
        f"{', '.join(name_of(record) for record in records)}: one graph without a break, "
        f"{plural(again, 'recompile')}; {said(TIME, min(times))} to {said(TIME, max(times))} a step"
    )
    return f"{text}, paid back after {min(paid):,} to {max(paid):,} steps." if paid else f"{text}."


def _other_sentence(record: Mapping[str, Any]) -> str:
    text = (
        f"{name_of(record)}: {plural(record['num_graphs'], 'graph')}, {plural(record['num_graph_breaks'], 'break')}, "
        f"{plural(record['num_recompiles'], 'recompile')}"
    )
    if record["status"] != OK:
        return f"{text}; {record['status']}, {safe(str(record['reason']), 200)}."
    return f"{text}; {said(TIME, record[TIME])} a step."


def _recompiles(stored: Stored) -> Iterator[Any]:
    """What a router that sends every batch elsewhere makes of compiled code."""
    from stepscope.report.compiler import compiler_report

    records: list[dict[str, Any]] = []
    guards: list[dict[str, Any]] = []
    for recorded in stored.recordings("compiled"):
        axes = recorded.axes
        name = {"dispatch": axes["dispatch"], "compile": axes["compile"]}
        if recorded.status != OK:
            records.append({**name, "status": recorded.status, "what": safe(str(recorded.reason), 200)})
            continue
        summary = compiler_report(recorded.source.case).summary
        if summary is None:
            continue
        graphs = summary.cuda_graphs or {}
        records.append(
            {**name, "status": OK, "step_ns": step_of(recorded)["step_ns"], "num_graphs": summary.num_graphs,
             "num_graph_breaks": summary.num_graph_breaks, "num_recompiles": summary.num_recompiles,
             "num_limit_hits": len(summary.limit_hits), "compile_ns": summary.seconds * 1e9,
             "num_cuda_graphs": graphs.get("num_recorded"),
             "num_cuda_graph_sizes": graphs.get("num_distinct_sizes")}
        )  # fmt: skip
        for again in summary.recompiles:
            guards.append(
                {**name, "function": safe(again.frame, 100), "guard": safe(again.guard, 80), "num_times": again.count,
                 "values_seen": safe(", ".join(again.values), 100)}
            )  # fmt: skip
    if not records:
        raise CannotCheck("no compiled training run was recorded")
    sentences = [
        f"{r['dispatch']} ({r['compile']}) with a router that learns: {plural(r['num_recompiles'], 'recompile')}, "
        f"{plural(r['num_limit_hits'], 'function')} at the limit, "
        f"{plural(r.get('num_cuda_graphs') or 0, 'CUDA graph')} for {r.get('num_cuda_graph_sizes') or 0} sizes."
        for r in records
        if r["status"] == OK
    ]
    yield Text(
        f"{' '.join(sentences)} The note's loop met the limit of {note.RECOMPILE_LIMIT} recompiles, and recorded "
        f"CUDA graphs for {note.NUM_CUDA_GRAPH_SIZES} sizes."
    )
    names = ("dispatch", "compile", "step_ns", "num_graphs", "num_graph_breaks", "num_recompiles", "num_limit_hits",
             "compile_ns", "num_cuda_graphs", "num_cuda_graph_sizes", "what")  # fmt: skip
    yield table("compiled-training", "Compiled, with a router that learns", records, *known(records, *names))
    if guards:
        yield table("recompiles", "What was compiled again, and why", guards, *guards[0])
