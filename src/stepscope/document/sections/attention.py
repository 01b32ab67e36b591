"""The section `attention`: the backend of every attention call, its time, and why it is not flash."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepscope.analysis.attention.reasons import BACKENDS, in_words, shape_of
from stepscope.document.model import Bars, Document, Missing, Part, Section, Series, Table, Text
from stepscope.document.tables import columns_of
from stepscope.errors import Unavailable
from stepscope.formatting import average, duration, percent, safe
from stepscope.session import Session
from stepscope.session.reports import AttentionReport

NONE = "no scaled_dot_product_attention or FlexAttention call found; handwritten attention shows as ordinary ops"
SOURCES = {"torch": "PyTorch's own message", "recorded": "seen while the script ran",
           "derived": "PyTorch's documented rules"}  # fmt: skip


def parts(session: Session) -> tuple[Part, ...]:
    """Return the verdict, the calls with their times, and the reasons."""
    report = session.attention
    if not report.rows:
        raise Unavailable(NONE)
    return (Text(_verdict(report)), *_parts(report))


def attention_document(report: AttentionReport) -> Document:
    verdict = _verdict(report) if report.rows else f"N{NONE[1:]}."
    section = Section("attention", "Attention", tuple(_parts(report)) if report.rows else ())
    return Document(f"Attention of {report.path}", verdict, (section,))


def _verdict(report: AttentionReport) -> str:
    calls: Counter[str] = Counter()
    for row in report.rows:
        calls[backend_name(row.call)] += row.call["num_calls"] or 0
    where = ", ".join(f"{average(num)} on {name}" for name, num in calls.items())
    mean = f" (mean of {report.num_steps})" if report.num_steps > 1 else ""
    per = f" per step{mean}" if report.num_steps else ""
    text = f"Attention calls{per}: {average(calls.total())} ({where})"
    if total := [row.call["total_ns"] for row in report.rows if row.call["total_ns"] is not None]:
        of = f", {percent(sum(total) / report.step_ns)} of a traced step" if report.step_ns else ""
        device = f" on {safe(report.device)}" if report.device else ""
        text += f". They take {duration(sum(total))} of {_whose(report)} time{device}{of}"
    return f"{text}."


def _whose(report: AttentionReport) -> str:
    return "GPU" if report.is_on_gpu else "host"


def _parts(report: AttentionReport) -> Iterator[Part]:
    calls = [row.call for row in report.rows]
    if timed := [call for call in calls if call["total_ns"]]:
        share = timed[0]["total_ns"] / sum(call["total_ns"] for call in timed)
        caption = f"{_name(timed[0])} takes {percent(share)} of the time in attention."
        colors = {"forward": "forward", "backward": "backward", "beside the kernel": "other"}
        columns = columns_of(timed, "forward_ns backward_ns beside_ns").values()
        series = tuple(Series(name, ns, color=color) for (name, color), ns in zip(colors.items(), columns))
        labels = [_name(call) for call in timed]
        yield Bars("attention", "Attention by call", labels, series, "total_ns", caption=caption, page_only=True)
    yield _calls(calls, _whose(report))
    if found := [(row.call, reason) for row in report.rows for reason in row.reasons]:
        said = [in_words(str(why.code), call) if why.said is None else why.said for call, why in found]
        reasons = {
            "call": [_name(call) for call, _ in found],
            "not_on": [BACKENDS[reason.backend] for _, reason in found],
            "because": [safe(text, 400) for text in said],
            "source": [reason.source for _, reason in found],
        }
        note = "Source: " + ", ".join(f"{name} = {text}" for name, text in SOURCES.items())
        yield Table("attention_reasons", "Why not flash", reasons, note=note, below=("because",))
    yield from map(Missing, report.notes)


def _calls(calls: Sequence[Mapping[str, Any]], whose: str) -> Table:
    columns = columns_of(
        calls,
        "back_end batch_heads_queries_keys_width dtype mask causal:is_causal dropout num_calls forward_ns "
        "backward_ns beside_ns module caller",
        back_end=backend_name,
        batch_heads_queries_keys_width=_sizes,
        mask=lambda call: shape_of(call["mask"]),
    )
    if not any(columns["dropout"]):
        del columns["dropout"]
    beside = ("beside_ns",) if any(columns["beside_ns"]) else ()
    sizes = "batch_heads_queries_keys_width"
    screen = ("back_end", sizes, "num_calls", "forward_ns", "backward_ns", "mask", *beside, "dtype", "causal")
    note = f"Per step, {whose} time. Sizes: batch × heads × queries × keys × head size."
    if beside:
        note += " Beside: work on top of the kernel, such as turning a mask into a bias."
    below = ("module", "caller")
    return Table("attention_calls", "Attention calls", columns, note=note, screen=screen, below=below)


def backend_name(call: Mapping[str, Any]) -> str:
    return BACKENDS.get(call["backend"], str(call["backend"]))


def _name(call: Mapping[str, Any]) -> str:
    return f"{backend_name(call)} {_sizes(call)}"


def _sizes(call: Mapping[str, Any]) -> str:
    """Return `8×16×4096×4096×64`: batch, heads, queries, keys, head size."""
    if call["batch"] is None:
        return "of unknown shape"
    own = "" if call["num_key_heads"] in (None, call["num_heads"]) else f"/{call['num_key_heads']}"
    return f"{call['batch']}×{call['num_heads']}{own}×{call['num_queries']}×{call['num_keys']}×{call['head_size']}"
