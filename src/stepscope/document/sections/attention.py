"""The section `attention` of a report: the back end of every call, its time, and why it is not flash."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stepscope.analysis.attention.reasons import BACK_ENDS
from stepscope.document.model import Bars, Missing, Series, Table, Text
from stepscope.document.text.attention_text import in_words, shape_of, sizes, verdict
from stepscope.errors import Unavailable
from stepscope.formatting import percent
from stepscope.session import Session
from stepscope.session.attention import AttentionReport

NONE = "no call of scaled_dot_product_attention or FlexAttention is in it: attention written out by hand shows as ops"


def parts(session: Session) -> tuple[Any, ...]:
    """A sentence, time by call, the calls, and the reasons."""
    report = session.attention
    if not report.rows:
        raise Unavailable(NONE)
    texts = [verdict(report), *_first_reason(report)]
    return (*map(Text, texts), *_bars(report), _calls(report), *_reasons(report), *map(Missing, report.notes))


def _first_reason(report: AttentionReport) -> Iterator[str]:
    """What keeps the call that takes most time off flash."""
    for row in report.rows[:1]:
        for reason in row.reasons[:1]:
            because = in_words(reason, row.call).rstrip(".")
            yield f"{_name(row.call)} does not run on {BACK_ENDS[reason.backend]}: {because}."


def _bars(report: AttentionReport) -> Iterator[Bars]:
    rows = [row.call for row in report.rows if row.call["total_ns"]]
    if not rows:
        return
    first = rows[0]
    share = first["total_ns"] / sum(row["total_ns"] for row in rows)
    yield Bars(
        id="attention",
        title="Attention by call",
        caption=f"{_name(first)} takes {percent(share)} of attention's time.",
        labels=[_name(row) for row in rows],
        series=(
            Series("forward", [row["forward_ns"] for row in rows], color="forward"),
            Series("backward", [row["backward_ns"] for row in rows], color="backward"),
            Series("beside the kernel", [row["beside_ns"] for row in rows], color="other"),
        ),
        unit="total_ns",
    )


def _calls(report: AttentionReport) -> Table:
    calls = [row.call for row in report.rows]
    columns = {
        "back_end": [BACK_ENDS.get(call["backend"], call["backend"]) for call in calls],
        "batch_heads_queries_keys_width": [sizes(call) for call in calls],
        "dtype": [call["dtype"] for call in calls],
        "mask": [shape_of(call["mask"]) for call in calls],
        "causal": [call["is_causal"] for call in calls],
        "dropout": [call["dropout"] for call in calls],
        "num_calls": [call["num_calls"] for call in calls],
        "forward_ns": [call["forward_ns"] for call in calls],
        "backward_ns": [call["backward_ns"] for call in calls],
        "beside_ns": [call["beside_ns"] for call in calls],
        "module": [call["module"] for call in calls],
        "caller": [call["caller"] for call in calls],
    }
    if not any(columns["dropout"]):
        del columns["dropout"]
    where = "of GPU work" if report.is_on_gpu else "of the host"
    note = f"A step's, {where}; beside: what a call does on top of its kernel, such as a bias made of a mask."
    return Table("attention_calls", "Calls of attention", columns, note=note)


def _reasons(report: AttentionReport) -> Iterator[Table]:
    found = [(row.call, reason) for row in report.rows for reason in row.reasons]
    if found:
        columns = {
            "call": [_name(call) for call, _ in found],
            "not_on": [BACK_ENDS[reason.backend] for _, reason in found],
            "because": [in_words(reason, call) for call, reason in found],
            "source": [reason.source for _, reason in found],
        }
        note = (
            "Source: torch, its own words; recorded, seen in the process; derived, from PyTorch's documented rules."
        )
        yield Table("attention_reasons", "Why not flash", columns, note=note)


def _name(call: Any) -> str:
    return f"{BACK_ENDS.get(call['backend'], call['backend'])} {sizes(call)}"
