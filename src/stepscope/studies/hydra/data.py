"""Answers of the study `hydra` about what is around the steps: the data, and the first call of a process."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from stepscope.analysis.comparison.sweeps import OK
from stepscope.document.model import Bars, Series, Table, Text
from stepscope.errors import Unavailable
from stepscope.studies.figures import Record, against, beside, compared, known, listed, paced, said, table, told_apart
from stepscope.studies.hydra import note
from stepscope.studies.hydra.step import is_noted, main_point, other_model, step_record
from stepscope.studies.stored import Recorded, Stored

ONE_BATCH, TEXT = "one batch", "text"
MOSTLY = 0.5
"""A wait that is less of a difference does not explain it."""
ALIKE = 0.05
"""Two measurements of one step that differ by less are not worth a word."""


def data(stored: Stored) -> Iterator[Any]:
    """One batch that is there already against a text that a DataLoader reads, at each size that has both."""
    groups = _groups(stored)
    yield from (Text(_data_sentence(*group)) for group in groups)
    records = [record for group in groups for record in group]
    names = ("batch", "seq_len", "data", "step_ns", "tokens_per_s", "data_wait_ns", "wait_share", "gpu_idle_share")
    remark = "the wait is on the host's clock; there is none for a batch that is there already"
    yield table("data", "Synthetic and real data", records, *known(records, *names), note=remark)
    recorded = main_point(stored)
    if is_noted(recorded):
        noted = next((group for group in groups if recorded.axes.items() <= group[0].items()), [])
        yield beside(noted, note.TOKENS, "data", "tokens_per_s", f"{note.NOTE}; withdrawn by its author")
        waits = listed(f"{said('share', record['wait_share'])} of a step on {record['data']}" for record in noted[1:])
        yield Text(
            f"In the note text has {note.TOKENS[TEXT] / note.TOKENS[ONE_BATCH]:.2f} times the tokens/s of one batch; "
            f"here the wait for data is {waits}. The steps are not the same in both: {other_model(recorded)}."
        )


def _groups(stored: Stored) -> list[list[dict[str, Any]]]:
    """Of each size the steps on one batch and on the text; first where the GPU has least time to spare."""
    texts = {TEXT: _recordings(stored, "text"), f"{TEXT}, 2 workers": _recordings(stored, "workers")}
    groups = []
    for base in _recordings(stored, "step"):
        arms = [_arm(name, each) for name, found in texts.items() for each in found if each.axes == base.axes]
        if arms:
            groups.append([_arm(ONE_BATCH, base), *arms])
    if not groups:
        raise Unavailable("no point was trained on the text")
    return sorted(groups, key=lambda group: group[0].get("gpu_idle_share", 0.0))


def _recordings(stored: Stored, measure: str) -> list[Recorded]:
    try:
        return [each for each in stored.recordings(measure) if each.status == OK]
    except Unavailable:
        return []  # --quick leaves it out


def _arm(name: str, recorded: Recorded) -> dict[str, Any]:
    """A step, and what it waits for data. Without a DataLoader the phase `data` is what the loop does before a
    forward, such as dropping gradients: that is no wait."""
    record, summary = step_record(recorded) | {"data": name}, recorded.source.card.summary
    if not summary.data_is_named:
        return record
    waits = next(phase.host_ns for phase in summary.phases if phase.name == "data")
    return record | {"data_wait_ns": waits, "wait_share": waits / record["step_ns"]}


def _data_sentence(base: Record, *arms: Record) -> str:
    """What steps of one size wait, how far they are apart, and how much of that the waits are."""
    pace = f", where the {'host' if paced(base) else 'GPU'} sets the pace," if "gpu_busy_share" in base else ""
    text = (
        f"At {base['batch']} × {base['seq_len']} tokens{pace} a step takes {said('step_ns', base['step_ns'])} on "
        f"{ONE_BATCH} that is there already."
    )
    for record in arms:
        text += (
            f" On {record['data']} the host waits {said('time_ns', record['data_wait_ns'])} for data "
            f"({said('share', record['wait_share'])} of a step) and it takes {said('step_ns', record['step_ns'])}, "
            f"{against(record, base, 'that')}"
        )
        text += f"; the wait is {_explained(record, base)} of the difference." if told_apart(record, base) else "."
    if all("gpu_busy_share" in record and not paced(record) for record in (base, *arms)):
        return f"{text} {_hidden(base, *arms)}"
    if all(_share_explained(record, base) >= MOSTLY for record in arms if told_apart(record, base)):
        return text
    text += " The rest is not the data"
    if all(map(paced, (base, *arms))):
        idle = listed(said("share", record["gpu_idle_share"]) for record in (base, *arms))
        text += (
            f" but the host's pace: the GPU has nothing to do for {idle} of these steps, and the pace differs from "
        )
        text += "process to process"
    return f"{text}. So these times do not say that {TEXT} makes a step faster or slower: what it costs is the wait."


def _hidden(base: Record, *arms: Record) -> str:
    """Where the GPU sets the pace: how much of a wait of the host's it waits too, by its idle time."""
    before, *idle = ((1 - record["gpu_busy_share"]) * record["step_ns"] for record in (base, *arms))
    times = listed(f"{said('_ns', ns)} on {record['data']}" for ns, record in zip(idle, arms))
    waits = [record["data_wait_ns"] for record in arms]
    shared = [min(wait, max(0.0, ns - before)) for wait, ns in zip(waits, idle)]
    rest = ", the rest passes while it works" if sum(shared) < sum(waits) else ""
    return (
        f"The GPU has nothing to do for {said('_ns', before)} of a step on {ONE_BATCH}, {times}: at most "
        f"{listed(said('_ns', ns) for ns in shared)} of these waits are the GPU's too{rest}."
    )


def _share_explained(record: Record, base: Record) -> float:
    """Which share of what a step takes longer is its wait: 0 where it takes less."""
    longer_ns = record["step_ns"] - base["step_ns"]
    return min(1.0, float(record["data_wait_ns"] / longer_ns)) if longer_ns > 0 else 0.0


def _explained(record: Record, base: Record) -> str:
    share = _share_explained(record, base)
    return {0.0: "none", 1.0: "all"}.get(share, said("share", share))


def first_call(stored: Stored) -> Iterator[Any]:
    """What each layer takes in the first pass of a process, and once it is warm."""
    row = next((row for row in stored.sweep("first_call").rows if row["status"] == OK and row.get("layers")), None)
    if row is None:
        raise Unavailable("no first call was timed layer by layer")
    first, warm = row["layers"]["first_call_ns"], row["layers"]["warm_ns"]
    blocks = [name for name in first if name.startswith("blocks.")]
    if len(blocks) < 2:
        raise Unavailable("the model has not two layers to compare")
    others, others_warm = ([times[name] for name in blocks[1:]] for times in (first, warm))
    head = blocks[0]
    cold, settled = (times[head] / statistics.median(rest) for times, rest in ((first, others), (warm, others_warm)))
    yield Text(
        f"In the first call of a process {head} takes {said('time_ns', first[head])}, {cold:.1f} times the median of "
        f"the other layers; once warm it takes {said('time_ns', warm[head])}, {settled:.2f} times theirs. The first "
        f"step as a whole takes {said('time_ns', row['first_call_ns'])}, a later one "
        f"{said('time_ns', statistics.median(row['samples_device_ns']))}.{_recorded_otherwise(stored, row)}"
    )
    columns: dict[str, Any] = {
        "layer": list(first),
        "first_call_ns": list(first.values()),
        "warm_ns": [warm[name] for name in first],
        "ratio": [first[name] / warm[name] for name in first],
    }
    yield Bars(
        id="first_call", title="The first call, in times of a warm one, by layer", labels=columns["layer"],
        series=(Series("first ÷ warm", columns["ratio"]),), unit="ratio",
    )  # fmt: skip
    remark = (
        "the forward of each layer, the device done with it before the next begins; warm: the median of later passes"
    )
    yield Table("first_call", "First call and later ones, by layer", columns, 40, remark)
    if row["preset"] == note.PRESET:
        ours = [{"layer": head, "beside_others": cold}]
        yield beside(ours, note.FIRST, "layer", "beside_others", note.NOTE)
        longer_ns = row["first_call_ns"] - statistics.median(row["samples_device_ns"])
        yield Text(
            f"The note lays it to JIT warm-up. Here compile={row['run']['compile']}: a first call takes "
            f"{said('_ns', first[head] - warm[head])} longer in {head}, of {said('_ns', longer_ns)} in the whole "
            "step; probably that is to load and to choose kernels, which was not measured apart."
        )


def _recorded_otherwise(stored: Stored, row: Mapping[str, Any]) -> str:
    """Where the recording has another time for the same step: that, and why."""
    recorded, step_ns = main_point(stored), statistics.median(row["samples_device_ns"])
    if recorded.axes != {"preset": row["preset"], **row["config"], **row["run"]}:
        return ""
    record = step_record(recorded)
    if abs(record["step_ns"] / step_ns - 1) < ALIKE:
        return ""
    pace = "; the pace differs from process to process" if paced(record) else ""
    return (
        f" The same step, recorded, takes {said('time_ns', record['step_ns'])}{paced(record)}, "
        f"{compared(record['step_ns'], step_ns, 'that')}{pace}."
    )
