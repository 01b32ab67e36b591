"""Answers of the study `tsmoe` about AMP: at which size it pays, and what the difference is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.analysis.comparison.sweeps import OK
from stepscope.document.model import Bars, Series, Table, Text
from stepscope.errors import Unavailable
from stepscope.formatting import safe
from stepscope.studies.figures import HOST_SPREAD, compared, known, listed, paced, said, table
from stepscope.studies.stored import Recorded, Stored
from stepscope.studies.tsmoe import note
from stepscope.studies.tsmoe.training import size_of, step_of

if TYPE_CHECKING:
    from stepscope.analysis.comparison.compare import Pair
    from stepscope.analysis.comparison.compare import Table as Parts
    from stepscope.session.source import Source

NUM_PARTS, NUM_CHARTED = 5, 9
"""Parts of a difference that are told by name, in the table and in the chart."""
LEAST_SHARE = 0.001
"""Of a step: a smaller part is not worth a word."""


def amp(stored: Stored) -> Iterator[Any]:
    """AMP against fp32 at every size, and what the difference is made of."""
    pairs = _amp_pairs(stored)
    sentences, parts, records = [], [], []
    for fp32, low in pairs:
        one, other = step_of(fp32), step_of(low)
        pair = pair_of(_folder(fp32), _folder(low), allow=("dtype",))
        difference = parts_of(pair)
        casts = [_casts(each.source) for each in (fp32, low)]
        sentences.append(_amp_sentence(one, other, difference, casts))
        parts.append((one["model"], difference))
        for record, (num_casts, casts_ns) in zip((one, other), casts):
            records.append({**record, "num_casts": num_casts, "cast_time_ns": casts_ns})
    yield Text(f"{amp_verdict(list(zip(records[::2], records[1::2])))}{_fp32_said(records)}")
    for sentence in sentences:
        yield Text(sentence)
    yield _amp_chart(parts)
    names = ("model", "dtype", "step_ns", "num_kernels", "gpu_idle_share", "num_casts", "cast_time_ns", "peak_bytes")
    yield table("amp", "With AMP and without", records, *known(records, *names, "loss"))
    yield _amp_parts(parts)
    yield Text(_amp_note(records))


def amp_verdict(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> str:
    """For which models AMP pays; of those for which it does not, why, as far as the GPU's idle time tells it."""
    sentences = []
    alike = [pair for pair in pairs if _is_alike(*pair)]
    for verdict, pays in (("AMP pays for", True), ("AMP does not pay for", False)):
        found = [
            (fp32, low)
            for fp32, low in pairs
            if not _is_alike(fp32, low) and (low["step_ns"] < fp32["step_ns"]) == pays
        ]
        if found:
            told = (f"{a['model']} ({compared(b['step_ns'], a['step_ns'], 'fp32')})" for a, b in found)
            sentences.append(f"{verdict} {listed(told)}.")
        sentences += [
            f"There the GPU has nothing to do for {said('share', low['gpu_idle_share'])} of a step: the host sets "
            f"the pace, and launches {low['num_kernels']:,.0f} kernels with AMP instead of "
            f"{fp32['num_kernels']:,.0f}."
            for fp32, low in found
            if not pays and _waits(low)
        ]
    sentences += [
        f"For {fp32['model']} it cannot be told: {said('_ns', low['step_ns'])} with AMP and "
        f"{said('_ns', fp32['step_ns'])} in fp32, where the GPU has nothing to do for "
        f"{said('share', low['gpu_idle_share'])} and {said('share', fp32['gpu_idle_share'])} of a step: the host "
        f"sets the pace of both, and differs from process to process. It launches {low['num_kernels']:,.0f} kernels "
        f"instead of {fp32['num_kernels']:,.0f}, and the GPU's work is {_work(low)} instead of {_work(fp32)}."
        for fp32, low in alike
    ]
    if not alike and all(low["step_ns"] < fp32["step_ns"] for fp32, low in pairs):
        on_gpu = all(fp32["gpu_idle_share"] is not None for fp32, _ in pairs)
        small = on_gpu and not any(_waits(fp32) for fp32, _ in pairs)
        sentences.append(
            "No size was measured at which it does not"
            + ("; none of them is so small that the host sets the pace in fp32 too." if small else ".")
        )
    return " ".join(sentences)


def _is_alike(fp32: Mapping[str, Any], low: Mapping[str, Any]) -> bool:
    """Whether two steps differ by no more than one does from process to process, where the host sets the pace."""
    short, long = sorted((fp32["step_ns"], low["step_ns"]))
    return _waits(fp32) and _waits(low) and long < HOST_SPREAD * short


def _work(record: Mapping[str, Any]) -> str:
    return said("_ns", (1 - record["gpu_idle_share"]) * record["step_ns"])


def _fp32_said(records: Sequence[Mapping[str, Any]]) -> str:
    """What fp32 means here; nothing of a CPU."""
    plain = [record for record in records if record["dtype"] == "fp32"]
    if any((record["device"], record["float32_matmul"]) != ("cuda", "fp32") for record in plain):
        return ""
    return " fp32 is without TF32; with it nothing was measured."


def _waits(record: Mapping[str, Any]) -> bool:
    """Whether the GPU waits for the host in a step; False where that is not known."""
    idle = record["gpu_idle_share"]
    return idle is not None and bool(paced({"gpu_busy_share": 1 - idle}))


def _amp_pairs(stored: Stored) -> list[tuple[Recorded, Recorded]]:
    pairs = []
    for low in stored.recordings("training", dtype="autocast_bf16"):
        sizes = {name: low.axes[name] for name in ("preset", "d_model", "layers", "batch", "seq_len")}
        fp32 = [each for each in stored.recordings("training", dtype="fp32", **sizes) if each.status == OK]
        if fp32 and low.status == OK:
            pairs.append((fp32[0], low))
    if not pairs:
        raise Unavailable("no size was trained both with AMP and in fp32")
    return sorted(pairs, key=lambda pair: size_of(step_of(pair[0])))


def pair_of(base: Path, new: Path, allow: Sequence[str] = ()) -> Pair:
    """Two recordings or traces as `stepscope compare` holds them against each other; Unavailable where it refuses."""
    from stepscope.session.compare_paths import compare_paths

    pair = compare_paths(base, new, allow=allow).pairs[0]
    if pair.refused:
        raise Unavailable(f"the two are not comparable: {', '.join(each.what for each in pair.refused)}")
    return pair


def _folder(recorded: Recorded) -> Path:
    if recorded.folder is None or recorded.status != OK:
        raise Unavailable(f"{recorded.status}: {recorded.reason}")
    return recorded.folder


def parts_of(pair: Pair) -> Parts:
    """Where the difference lies: by class of kernel, of a CPU by op."""
    found = {table.by: table for table in pair.tables}
    by = next((found[name] for name in ("kernel_class", "op") if name in found), None)
    if by is None:
        raise Unavailable("the recordings have no traces to tell where the difference lies")
    return by


def _casts(source: Source) -> tuple[float, float]:
    """How many casts a step makes, and their time: kernels that cast, of a CPU calls of `_to_copy`."""
    import polars as pl

    case = source.case
    if case.has_gpu_work:
        return case.casts.height / case.num_steps, float(case.casts["duration_ns"].sum()) / case.num_steps
    account = source.analysis.ranks[0]
    calls = account.ops.filter(pl.col("op") == "aten::_to_copy")
    num_steps = max(1, account.steps.height)
    return float(calls["num_calls"].sum()) / num_steps, float(calls["host_total_ns"].sum()) / num_steps


def _amp_sentence(
    fp32: Mapping[str, Any], low: Mapping[str, Any], difference: Parts, casts: Sequence[tuple[float, float]]
) -> str:
    (_, _), (num_casts, casts_ns) = casts
    text = (
        f"{fp32['model']}: a step takes {said('_ns', low['step_ns'])} with AMP and {said('_ns', fp32['step_ns'])} in "
        "fp32."
    )
    least_ns = LEAST_SHARE * fp32["step_ns"]
    named = [row for row in difference.rows if row.name != "unattributed" and abs(row.delta) >= least_ns]
    more = [row for row in named if row.delta > 0][:2]
    less = [row for row in named if row.delta < 0][:2]
    if more:
        text += f" More: {_deltas(more)}."
    if less:
        text += f" Less: {_deltas(less)}."
    text += (
        f" It casts {num_casts - casts[0][0]:,.0f} times more a step; all its casts take {said('_ns', casts_ns)}, "
        f"{said('share', casts_ns / low['step_ns'])} of a step."
    )
    if low["gpu_idle_share"] is not None and fp32["gpu_idle_share"] is not None:
        text += (
            f" A step launches {low['num_kernels']:,.0f} kernels instead of {fp32['num_kernels']:,.0f}, and the GPU "
            f"has nothing to do for {said('share', low['gpu_idle_share'])} of it instead of "
            f"{said('share', fp32['gpu_idle_share'])}.{amp_pace(fp32, low)}"
        )
    return text


def amp_pace(fp32: Mapping[str, Any], low: Mapping[str, Any]) -> str:
    """What it means for AMP that the host sets the pace; nothing where the GPU does."""
    if not _waits(low):
        return ""
    if _waits(fp32):
        return " The host sets the pace of both: what AMP saves on the GPU is not seen."
    if low["step_ns"] >= fp32["step_ns"]:
        return " With AMP the host sets the pace."
    slower = fp32["step_ns"] / low["step_ns"]
    return f" With AMP the host sets the pace: with one {slower:.2f} times slower it would not pay."


def _deltas(rows: Sequence[Any]) -> str:
    return ", ".join(f"{safe(row.name, 60)} by {said('_ns', abs(row.delta))}" for row in rows)


def _amp_chart(parts: Sequence[tuple[str, Parts]]) -> Bars:
    """Every step as a bar of 100 %, its largest parts by name."""
    labels, columns = [], []
    for model, difference in parts:
        for side in ("base", "new"):
            times = {row.name: max(0.0, float(getattr(row, side))) for row in difference.rows}
            whole = sum(times.values()) or 1.0
            labels.append(f"{model.partition(', ')[0]}, {'fp32' if side == 'base' else 'AMP'}")
            columns.append({name: ns / whole for name, ns in times.items()})
    names = {name for column in columns for name in column}
    largest = sorted(names, key=lambda name: -sum(column.get(name, 0.0) for column in columns))[:NUM_CHARTED]
    # Idle time has the color of one class of kernels, which takes another here.
    series = [
        Series(safe(name, 60), [column.get(name, 0.0) for column in columns],
               color=None if name == "memset_memcpy" else name)
        for name in largest
    ]  # fmt: skip
    rest = [sum(share for name, share in column.items() if name not in largest) for column in columns]
    return Bars(
        id="amp-parts", title="Where a step goes", labels=labels, unit="share",
        series=(*series, Series("all else", rest, color="other")),
        caption=f"Of {parts[0][1].of}, by {parts[0][1].by.replace('_', ' ')}; the steps' times are in the table.",
    )  # fmt: skip


def _amp_parts(parts: Sequence[tuple[str, Parts]]) -> Table:
    rows = [
        {
            "model": model,
            "what": safe(row.name, 80),
            "fp32_ns": row.base,
            "amp_ns": row.new,
            "difference_ns": row.delta,
        }
        for model, difference in parts
        for row in difference.rows[:NUM_PARTS]
    ]
    title = f"What the difference is made of ({parts[0][1].of}, by {parts[0][1].by.replace('_', ' ')})"
    return table("amp-differences", title, rows, *rows[0])


def _small_said(small: Sequence[Mapping[str, Any]], theirs: Sequence[float]) -> str:
    """Our small model beside the note's, fp32 and AMP, and in what the two differ."""
    plain, low = (record["tokens_per_s"] for record in small)
    width, tokens = small[0]["d_ff"], small[0]["batch"] * small[0]["seq_len"]
    told = note.SMALL_FP32_TOKENS_PER_S * note.SMALL_FP32_MS / 1e3
    return (
        f" Ours has {plain:,.0f} in fp32, {plain / theirs[0]:.2f} times the note's, and {low:,.0f} with AMP, "
        f"{low / theirs[1]:.2f} times. The two are not alike: the note's command has "
        f"d_ff={note.SMALL_D_FF}, ours {width}; its tokens/s and {note.SMALL_FP32_MS:.0f} ms a step are {told:,.0f} "
        f"tokens a step, where its command has {note.SMALL_BATCH * note.LENGTH:,} and ours {tokens:,}; it does "
        "not say whether its float32 is without TF32."
    )


def _amp_note(records: Sequence[Mapping[str, Any]]) -> str:
    theirs = (note.SMALL_FP32_TOKENS_PER_S, note.SMALL_AMP_TOKENS_PER_S)
    text = (
        f"The note ({note.NOTE}, device not named) has {theirs[0]:,} tokens/s of its small model without AMP, "
        f"{theirs[1]:,} with it, {theirs[1] / theirs[0]:.2f} times as many, and {note.SMALL_NO_CASTS_TOKENS_PER_S:,} "
        "after its casts to fp32 were taken out."
    )
    size = (note.SMALL_PRESET, note.SMALL_BATCH, note.LENGTH)
    small = [record for record in records if (record["preset"], record["batch"], record["seq_len"]) == size]
    if small:
        text += _small_said(small, theirs)
    large = max(records, key=lambda record: (record["num_parameters"], record["dtype"] == "fp32"))
    if (large["preset"], large["batch"]) != (note.PRESET, note.BATCH):
        return text
    peak_gib = large["peak_bytes"] / 2**30
    fits = "does not fit there" if peak_gib > note.OUT_OF_MEMORY_GIB else "fits there"
    return (
        f"{text} Its {note.PRESET} ran out of memory without AMP where there are {note.OUT_OF_MEMORY_GIB} GiB: ours "
        f"peaks at {peak_gib:.1f} GiB and {fits}."
    )
