"""Answers of the study `hydra` about ops: the bottlenecks, the copies, and what copies are worth alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from stepscope.document.model import Bars, Series, Table, Text
from stepscope.errors import Unavailable
from stepscope.studies.figures import Record, against, beside, busy_ns, known, listed, paced, said, span, table
from stepscope.studies.hydra import note
from stepscope.studies.hydra.step import PARTS, is_noted, main_point, other_model, step_record
from stepscope.studies.stored import Recorded, Rows, Stored

if TYPE_CHECKING:
    from stepscope.session.copies_view import CopiesReport
    from stepscope.session.source import Source

TIME, PEAK = "time_median_ns", "peak_allocated_bytes"
LEAST_SHARE = 0.001
"""What has less of the copies' time is not told by name, the phases of a step aside."""
WORTH_SHARE = 0.05
"""Of a step: what would save more is worth a change."""
NUM_SOURCES = 12
"""Of copies, in the chart."""


def own_times(source: Source) -> tuple[list[tuple[str | None, int, int]], str]:
    """Every op with its calls and its own time, most first, and whose time it is; nothing is counted twice."""
    rank = source.analysis.ranks[0]
    where = "device" if rank.gpu_time.window_ns else "host"
    rows = rank.ops.sort(f"{where}_self_ns", descending=True).select("op", "num_calls", f"{where}_self_ns")
    return [row for row in rows.iter_rows() if row[2]], where


def bottlenecks(stored: Stored) -> Iterator[Any]:
    """Ops and modules by their own time, without what lies inside them."""
    from stepscope.analysis.kernels.ops import module_groups

    recorded = main_point(stored)
    rows, where = own_times(recorded.source)
    rank = recorded.source.analysis.ranks[0]
    steps = max(1, rank.steps.height)
    whole_ns = sum(ns for _, _, ns in rows)
    if not whole_ns:
        raise Unavailable("the trace has no op with a time of its own")
    of = "the GPU's work" if where == "device" else "the host's time in ops"
    first = ", ".join(f"{op} {said('share', ns / whole_ns)}" for op, _, ns in rows[:3])
    modules = rank.modules.filter(rank.modules["module"].is_not_null())
    own_ns, inclusive_ns = (int(modules[f"{where}_{kind}_ns"].sum()) for kind in ("self", "total"))
    text = f"By its own time: {first} of {of}. The own times of all {len(rows)} ops are 100 % of it."
    if own_ns:
        text += (
            f" A table of modules with what lies inside each adds up to {inclusive_ns / own_ns:.2f} times the time "
            f"there is: that is what counting parents and their children gives."
        )
    yield Text(text)
    columns: dict[str, Any] = {
        "op": [op or "no op" for op, _, _ in rows],
        "num_calls": [calls / steps for _, calls, _ in rows],
        "own_ns": [ns / steps for _, _, ns in rows],
        "share": [ns / whole_ns for _, _, ns in rows],
    }
    shown = slice(12)
    yield Bars(
        id="bottlenecks", title="Ops by their own time", labels=columns["op"][shown], unit="own_ns",
        series=(Series("own time", columns["own_ns"][shown]),),
        caption=f"Together {said('share', sum(columns['share'][shown]))} of {of}.",
    )  # fmt: skip
    yield Table("bottlenecks", "Ops by their own time", columns, 15, f"a traced step's; the share is of {of}")
    groups = module_groups(modules).sort(f"{where}_self_ns", descending=True)
    by_module = {
        "module": groups["module"].to_list(),
        "num_modules": groups["num_modules"].to_list(),
        "own_ns": [ns / steps for ns in groups[f"{where}_self_ns"]],
        "own_share": [ns / max(1, own_ns) for ns in groups[f"{where}_self_ns"]],
        "with_inner_ns": [ns / steps for ns in groups[f"{where}_total_ns"]],
    }
    remark = "own: without modules inside; the column adds up to 100 %, that of with inner does not"
    yield Table("modules", "Modules by their own time", by_module, 15, remark)
    if is_noted(recorded):
        ours = [{"op": op, "own_share": ns / whole_ns} for op, _, ns in rows]
        yield beside(ours, note.OPS, "op", "own_share", note.NOTE)
        yield Text(f"The note does not say what its share is of; ours is of {of}. And {other_model(recorded)}.")


def copies(stored: Stored) -> Iterator[Any]:
    """Where every copy comes from, and what a step would be without it."""
    from stepscope.document.sections import copies as section
    from stepscope.document.text.copies_text import source_name

    recorded = main_point(stored)
    parts = section.parts(recorded.source)
    report = recorded.source.copies
    total_ns = sum(row["total_ns"] for row in report.rows)
    by_phase = ", ".join(f"{said('share', share)} in {name}" for name, share in _by(report, "phase", PARTS).items())
    largest = max(report.rows, key=lambda row: row["saving_ns"] or 0.0)
    yield Text(
        f"{parts[0].text}{_more_than_its_time(report, total_ns)} Of their time {by_phase}. The source whose removal "
        f"would save most, {said('time_ns', largest['saving_ns'])}, is {source_name(largest)} ({largest['phase']}). "
        "A copy that the next op needs would come back inside it: the micro-benchmarks of the next section measure "
        "that."
    )
    yield _by_saving(report)
    yield from (part for part in parts[1:] if not isinstance(part, Bars))
    if is_noted(recorded):
        rows, _ = own_times(recorded.source)
        whole_ns = sum(ns for _, _, ns in rows)
        ours = [{"op": op, "time_share": ns / whole_ns} for op, _, ns in rows]
        yield beside(ours, note.COPIES, "op", "time_share", note.NOTE)
        yield Text(_copies_verdict(recorded, total_ns))


def _by_saving(report: CopiesReport) -> Bars:
    """The sources that would save most, named shortly: the end of the module, the kind of copy, the phase."""
    rows = sorted(report.rows, key=lambda row: -(row["saving_ns"] or 0.0))[:NUM_SOURCES]
    return Bars(
        id="copies_by_source", title="What a step would save without each source of copies", unit="saving_ns",
        labels=[_short_name(row) for row in rows], series=(Series("saving", [row["saving_ns"] for row in rows]),),
        caption=f"By the replay; the first {len(rows)} of {len(report.rows)} sources.",
    )  # fmt: skip


def _short_name(row: Record) -> str:
    """A source in few letters.

    >>> _short_name({"module": "blocks.*.mlp.gate_up", "what": "cast", "phase": "forward"})
    'mlp.gate_up: cast, forward'
    """
    words = [word for word in str(row["module"] or "no module").split(".") if word != "*"]
    return f"{'.'.join(words[-2:])}: {str(row['what']).replace('_', ' ')}, {row['phase'] or 'no phase'}"


def _copies_verdict(recorded: Recorded, total_ns: float) -> str:
    """What the note says of the copies' sources, and its conclusion, beside our figures."""
    report, phases = recorded.source.copies, _by(recorded.source.copies, "phase", PARTS)
    kinds = listed(f"{said('share', share)} {name}" for name, share in _by(report, "what").items())
    share = report.saving_ns / report.step_ns
    verdict = "does not follow from" if share >= WORTH_SHARE else "fits"
    return (
        f"The note's share is of ops called aten::copy_. All copies are {said('share', total_ns / report.whole_ns)} "
        f"here: {kinds.replace('_', ' ')}. It names as the main sources {note.COPIES_FROM}: here the optimizer has "
        f"{said('share', phases['optimizer'])} of their time, the backward {said('share', phases['backward'])} and "
        f'the forward {said("share", phases["forward"])}. Its conclusion, "{note.COPIES_CONCLUSION}", {verdict} '
        f"our figures: without any copy a step would be {said('share', share)} shorter, without those that it needs "
        f"less. And {other_model(recorded)}."
    )


def _by(report: CopiesReport, column: str, always: Sequence[str] = ()) -> dict[str, float]:
    """The shares of the copies' time, most first; those that are asked for always also where they have none."""
    sums: dict[str, float] = dict.fromkeys(always, 0.0)
    for row in report.rows:
        name = str(row[column] or "no phase")
        sums[name] = sums.get(name, 0.0) + row["total_ns"]
    whole_ns = sum(sums.values())
    found = {name: ns / whole_ns for name, ns in sorted(sums.items(), key=lambda item: -item[1])}
    return {name: share for name, share in found.items() if share >= LEAST_SHARE or name in always}


def _more_than_its_time(report: CopiesReport, total_ns: float) -> str:
    """Why a step would be shorter by more than the copies take on the GPU; nothing where it would not."""
    if not report.is_on_gpu or report.saving_ns <= total_ns:
        return ""
    num_calls = sum(row["num_calls"] for row in report.rows)
    return (
        f" That is more than they take on the GPU, which waits for the host in this step: what counts is the host's "
        f"time to launch {num_calls:,.0f} copies."
    )


def micro(stored: Stored) -> Iterator[Any]:
    """A copy in the open, in secret, or none; the shift of values in five ways."""
    convs, shifts = (stored.rows(name).needed() for name in ("contiguity", "value_shift"))
    mode = convs.values("mode")[-1]
    sliced, *copied = (convs.one(implementation=name, mode=mode) for name in ("sliced", "contiguous", "padded"))
    sentences = [f"The convolutions of the queries take {said(TIME, sliced[TIME])} on a transposed slice ({mode})."]
    sentences += _on_gpu((sliced, *copied)) or [
        f"A {record['implementation']} copy first is {against(record, sliced, 'that')}." for record in copied
    ]
    forward = shifts.ok.where(mode=shifts.values("mode")[0])
    best, *_, worst = sorted(forward.needed(), key=lambda record: float(record[TIME]))
    times = " and ".join(f"{said(TIME, each[TIME])} as {each['implementation']}" for each in (best, worst))
    sentences += [f"The value shift takes {times} ({best['mode']}).", *_on_gpu(list(forward))]
    yield Text(" ".join(sentences))
    names = (
        "implementation",
        "mode",
        TIME,
        "time_p10_ns",
        "time_p90_ns",
        "speedup",
        "num_kernels",
        "gpu_busy_share",
        PEAK,
    )
    yield table("contiguity", "Convolutions on a slice", convs, *known(convs, *names))
    yield table("value_shift", "The value shift, five ways", shifts, *known(shifts, *names))
    recorded, used = main_point(stored), _used(forward)
    if used is not None and all(recorded.axes[name] == used[name] for name in ("batch", "seq_len")):
        share = used[TIME] * recorded.axes["blocks"] / step_record(recorded)["step_ns"]
        yield Text(
            f"The model shifts as {used['implementation']}, once in each of {recorded.axes['blocks']} blocks: "
            f"{said('share', share)} of its step, forward alone."
        )
    if is_noted(recorded):
        time_of = busy_ns if all(map(paced, (sliced, copied[0]))) else _time_ns
        ours = [{"what": "contiguous first", "times_sliced": time_of(copied[0]) / time_of(sliced)}]
        yield beside(ours, note.CONTIGUOUS, "what", "times_sliced", note.NOTE)
        yield beside([{"what": "value shift", "call_ns": best[TIME]}], note.SHIFT, "what", "call_ns", note.NOTE)
        yield Text(_micro_differs(recorded.source.copies, sliced, copied[0], best))


def _on_gpu(records: Sequence[Record]) -> list[str]:
    """Where the host sets the pace of all of them: that, and what they take the GPU; nothing where it does not."""
    if not all(map(paced, records)):
        return []
    told = listed(
        f"{said('_ns', busy_ns(record))} as {record['implementation']} ({record['num_kernels']} kernels)"
        for record in sorted(records, key=busy_ns)
    )
    return [
        f"But the host sets the pace, and differs from process to process: the GPU is busy for "
        f"{span('share', [record['gpu_busy_share'] for record in records])} of the time. Its work is {told}."
    ]


def _time_ns(record: Record) -> float:
    return float(record[TIME])


def _micro_differs(report: CopiesReport, sliced: Record, contiguous: Record, shift: Record) -> str:
    """Why the note's ratio and its call are others."""
    hidden = [row for row in report.rows if row["cause"] == "inside" and "convolution_backward" in str(row["op"])]
    text = f"The note does not say whether its ratio has the backward in it; ours is of {sliced['mode']}."
    if hidden:
        text += f" There convolutions copy on their own: {sum(row['num_calls'] for row in hidden):,.0f} times in the "
        text += "backward of a recorded step."
    if all(map(paced, (sliced, contiguous))):
        text += " Ours is of the GPU's work, since the host sets the pace of both."
    if shift.get("num_kernels") is not None:
        text += f" Our value shift as {shift['implementation']} launches {shift['num_kernels']} kernels in "
        text += f"{said(TIME, shift[TIME])}{paced(shift)}."
    return text


def _used(rows: Rows) -> dict[str, Any] | None:
    """The implementation that is the model's own (`workloads/models/ccgqa.py`): pad and crop."""
    return next(iter(rows.where(implementation="pad")), None)
