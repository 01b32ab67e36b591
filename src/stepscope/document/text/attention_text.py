"""Calls of attention on one screen, and the words for why one did not run on flash."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stepscope.analysis.attention import reasons as analysis
from stepscope.analysis.attention.reasons import BACK_ENDS, Reason
from stepscope.document.text.trace_tables import Column, table_lines
from stepscope.formatting import average, duration, percent, plural, safe, shortened
from stepscope.session.attention_view import AttentionReport, AttentionRow

_GLUE = "\N{NO-BREAK SPACE}"


def attention_text(report: AttentionReport, most: int, width: int = 100) -> str:
    """The screen: a line for each different call, then what kept each off flash."""
    lines = [shortened(_head(report), width), "", *_wrapped(verdict(report), width)]
    rows = report.rows[:most]
    if rows:
        lines += ["", *_table(report, rows, width)]
        if len(report.rows) > most:
            lines.append(f"  {plural(len(report.rows) - most, 'more row')}: --top shows them, --json has all")
        lines += [line for row in rows for line in _why(row, report, width)]
    lines += [line for note in report.notes for line in ("", *_wrapped(note, width))]
    return "\n".join(line.rstrip() for line in lines).rstrip("\n")


def _head(report: AttentionReport) -> str:
    name = safe(Path(report.path).name or report.path)
    over = f"   {plural(report.num_steps, 'step')}" if report.num_steps else ""
    return f"{name}   {safe(report.device or 'device not known')}{over}"


def verdict(report: AttentionReport) -> str:
    """How many calls a step, on which back ends, and what they take of a step."""
    if not report.rows:
        return "No call of scaled_dot_product_attention or FlexAttention is in it."
    calls: dict[str, float] = {}
    for row in report.rows:
        backend = str(row.call["backend"])
        calls[backend] = calls.get(backend, 0.0) + float(row.call["num_calls"] or 0)
    where = ", ".join(f"{average(num)} on {BACK_ENDS.get(name, safe(name))}" for name, num in calls.items())
    num = sum(calls.values())
    caller = "A step" if report.num_steps else "The trace"
    text = f"{caller} calls attention {average(num)} time{'' if num == 1 else 's'}: {where}"
    total = [row.call["total_ns"] for row in report.rows if row.call["total_ns"] is not None]
    if total:
        of = f", {percent(sum(total) / report.step_ns)} of a traced step" if report.step_ns else ""
        whose = "of GPU work" if report.is_on_gpu else "of the host"
        text += f"; {duration(sum(total))} {whose}{of}"
    return f"{text}."


def _table(report: AttentionReport, rows: tuple[AttentionRow, ...], width: int) -> list[str]:
    calls = [row.call for row in rows]
    columns = [
        Column("dtype", [safe(call["dtype"] or "?", 20) for call in calls], rank=2),
        Column("mask", [shape_of(call["mask"]) for call in calls]),
        Column("causal", [_yes(call["is_causal"]) for call in calls], rank=3),
        Column("calls", [average(call["num_calls"] or 0) for call in calls]),
        Column("forward", [_time(call["forward_ns"]) for call in calls]),
        Column("backward", [_time(call["backward_ns"]) for call in calls]),
    ]
    if any(call["beside_ns"] for call in calls):
        columns.append(Column("beside", [_time(call["beside_ns"]) for call in calls], rank=1))
    names = [f"{BACK_ENDS.get(call['backend'], safe(call['backend']))} {sizes(call)}" for call in calls]
    lines = table_lines("a step's calls", names, columns, width)
    beside = "; beside: what a call does on top of its kernel, a mask made a bias" if len(columns) > 6 else ""
    return [*lines, *_wrapped(f"batch × heads × queries × keys × width of a head{beside}", width, "  ")]


def sizes(call: Mapping[str, Any]) -> str:
    """`8×16×4096×4096×64`: batch, heads, queries, keys, width of a head."""
    if call["batch"] is None:
        return "of a shape that is not known"
    heads = f"{call['num_heads']}"
    if call["num_key_heads"] is not None and call["num_key_heads"] != call["num_heads"]:
        heads += f"/{call['num_key_heads']}"
    return f"{call['batch']}×{heads}×{call['num_queries']}×{call['num_keys']}×{call['head_size']}"


def shape_of(mask: str | None) -> str:
    """A mask's shape, or that there is none."""
    return safe(analysis.shape_of(mask), 60)


def _yes(value: bool | None) -> str:
    return "?" if value is None else "yes" if value else "no"


def _time(ns: float | None) -> str:
    return "–" if ns is None else duration(ns, 3)


def _why(row: AttentionRow, report: AttentionReport, width: int) -> Iterator[str]:
    call = row.call
    where = [f"in {safe(call['module'], 200)}"] if call.get("module") else []
    where += [f"called at {safe(call['caller'], 200)}"] if call.get("caller") else []
    if not row.reasons and not where:
        return
    yield ""
    name = f"{BACK_ENDS.get(call['backend'], safe(call['backend']))} {sizes(call)}"
    yield from _wrapped(" ".join([name, *where]), width)
    for reason in row.reasons:
        title = f"not {BACK_ENDS[reason.backend]}"
        text = f"{in_words(reason, call)} ({_SOURCES[reason.source]})"
        for i, line in enumerate(textwrap.wrap(text, width - 22, break_on_hyphens=False)):
            yield f"  {title if not i else '':<20}{line}"


_SOURCES = {"torch": "PyTorch's words", "recorded": "seen in the process", "derived": "by PyTorch's documented rules"}


def in_words(reason: Reason, call: Mapping[str, Any]) -> str:
    """A reason in a sentence: torch's own, or one made from what the call was given."""
    return safe(analysis.in_words(str(reason.code), call) if reason.said is None else reason.said, 400)


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    glued = re.sub(r"(?<=\d) (?=%|(?:ns|µs|ms|s)\b)", _GLUE, text)
    lines = textwrap.wrap(glued, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return [line.replace(_GLUE, " ") for line in lines]
