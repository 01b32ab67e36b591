"""The section `attention`: the backend of every attention call, its time, and why it is not flash."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stepscope.analysis.attention import reasons as analysis
from stepscope.analysis.attention.reasons import BACKENDS, Reason
from stepscope.document.model import Bars, Document, Missing, Part, Section, Series, Table, Text
from stepscope.errors import Unavailable
from stepscope.formatting import average, duration, percent, safe
from stepscope.session import Session
from stepscope.session.attention import AttentionReport

NONE = "no scaled_dot_product_attention or FlexAttention call found; handwritten attention shows as ordinary ops"
SOURCES = {
    "torch": "PyTorch's own message",
    "recorded": "seen while the script ran",
    "derived": "PyTorch's documented rules",
}

_SAME = ("num_calls", "forward_ns", "backward_ns", "beside_ns", "module", "caller")
"""Fields of a call that are columns as they are."""


def parts(session: Session) -> tuple[Part, ...]:
    """Return the verdict, the calls with their times, and the reasons."""
    report = session.attention
    if not report.rows:
        raise Unavailable(NONE)
    return (Text(_verdict(report)), *_parts(report))


def attention_document(report: AttentionReport) -> Document:
    """Return the attention calls of a session, or of one step of it."""
    verdict = _verdict(report) if report.rows else f"N{NONE[1:]}."
    section = Section("attention", "Attention", tuple(_parts(report)) if report.rows else ())
    return Document(f"Attention of {report.path}", verdict, (section,))


def _verdict(report: AttentionReport) -> str:
    """Return how many calls there are per step, on which backends, and what they take of a step."""
    calls: dict[str, float] = {}
    for row in report.rows:
        backend = backend_name(row.call)
        calls[backend] = calls.get(backend, 0.0) + float(row.call["num_calls"] or 0)
    where = ", ".join(f"{average(num)} on {name}" for name, num in calls.items())
    per = (
        f" per step (mean of {report.num_steps})" if report.num_steps > 1 else " per step" if report.num_steps else ""
    )
    text = f"Attention calls{per}: {average(sum(calls.values()))} ({where})"
    total = [row.call["total_ns"] for row in report.rows if row.call["total_ns"] is not None]
    if total:
        of = f", {percent(sum(total) / report.step_ns)} of a traced step" if report.step_ns else ""
        device = f" on {safe(report.device)}" if report.device else ""
        text += f". They take {duration(sum(total))} of {_whose(report)} time{device}{of}"
    return f"{text}."


def _whose(report: AttentionReport) -> str:
    return "GPU" if report.is_on_gpu else "host"


def _parts(report: AttentionReport) -> Iterator[Part]:
    yield from _bars(report)
    yield _calls(report)
    yield from _reasons(report)
    yield from map(Missing, report.notes)


def _bars(report: AttentionReport) -> Iterator[Bars]:
    rows = [row.call for row in report.rows if row.call["total_ns"]]
    if not rows:
        return
    share = rows[0]["total_ns"] / sum(row["total_ns"] for row in rows)
    yield Bars(
        id="attention",
        title="Attention by call",
        caption=f"{_name(rows[0])} takes {percent(share)} of the time in attention.",
        labels=[_name(row) for row in rows],
        series=(
            Series("forward", [row["forward_ns"] for row in rows], color="forward"),
            Series("backward", [row["backward_ns"] for row in rows], color="backward"),
            Series("beside the kernel", [row["beside_ns"] for row in rows], color="other"),
        ),
        unit="total_ns",
        page_only=True,
    )


def _calls(report: AttentionReport) -> Table:
    calls = [row.call for row in report.rows]
    columns = {
        "back_end": [backend_name(call) for call in calls],
        "batch_heads_queries_keys_width": [_sizes(call) for call in calls],
        "dtype": [call["dtype"] for call in calls],
        "mask": [analysis.shape_of(call["mask"]) for call in calls],
        "causal": [call["is_causal"] for call in calls],
        "dropout": [call["dropout"] for call in calls],
        **{name: [call[name] for call in calls] for name in _SAME},
    }
    if not any(columns["dropout"]):
        del columns["dropout"]
    beside = ("beside_ns",) if any(columns["beside_ns"]) else ()
    sizes = "batch_heads_queries_keys_width"
    screen = ("back_end", sizes, "num_calls", "forward_ns", "backward_ns", "mask", *beside, "dtype", "causal")
    note = f"Per step, {_whose(report)} time. Sizes: batch × heads × queries × keys × head size."
    if beside:
        note += " Beside: work on top of the kernel, such as turning a mask into a bias."
    below = ("module", "caller")
    return Table("attention_calls", "Attention calls", columns, note=note, screen=screen, below=below)


def _reasons(report: AttentionReport) -> Iterator[Table]:
    found = [(row.call, reason) for row in report.rows for reason in row.reasons]
    if found:
        columns = {
            "call": [_name(call) for call, _ in found],
            "not_on": [BACKENDS[reason.backend] for _, reason in found],
            "because": [_because(reason, call) for call, reason in found],
            "source": [reason.source for _, reason in found],
        }
        note = "Source: " + ", ".join(f"{name} = {text}" for name, text in SOURCES.items())
        yield Table("attention_reasons", "Why not flash", columns, note=note, below=("because",))


def _because(reason: Reason, call: Mapping[str, Any]) -> str:
    """Return a reason in a sentence: PyTorch's own, or one made from what the call was given."""
    return safe(analysis.in_words(str(reason.code), call) if reason.said is None else reason.said, 400)


def backend_name(call: Mapping[str, Any]) -> str:
    """Return the backend of a call as it is written."""
    return BACKENDS.get(call["backend"], str(call["backend"]))


def _name(call: Mapping[str, Any]) -> str:
    return f"{backend_name(call)} {_sizes(call)}"


def _sizes(call: Mapping[str, Any]) -> str:
    """Return `8×16×4096×4096×64`: batch, heads, queries, keys, head size."""
    if call["batch"] is None:
        return "of unknown shape"
    heads = f"{call['num_heads']}"
    if call["num_key_heads"] is not None and call["num_key_heads"] != call["num_heads"]:
        heads += f"/{call['num_key_heads']}"
    return f"{call['batch']}×{heads}×{call['num_queries']}×{call['num_keys']}×{call['head_size']}"
