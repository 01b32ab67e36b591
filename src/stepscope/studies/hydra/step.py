"""Answers of the study `hydra` about the recorded step: its phases, the model, and what is in memory when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stepscope.analysis.comparison.sweeps import OK
from stepscope.document.model import Bars, Series, Table, Text
from stepscope.errors import Unavailable
from stepscope.formatting import plural, safe
from stepscope.studies.figures import beside, paced, said, table
from stepscope.studies.hydra import note
from stepscope.studies.stored import Recorded, Stored

PARTS = ("forward", "backward", "optimizer")


def main_point(stored: Stored) -> Recorded:
    """The recording that the single answers are about: the first."""
    return stored.recording("step")


def name_of(recorded: Recorded) -> str:
    """The point in a sentence."""
    return f"{recorded.axes['preset']} ({shape_of(recorded)}, {recorded.axes['dtype']})"


def shape_of(recorded: Recorded) -> str:
    """Its batch and length in a sentence."""
    return f"{recorded.axes['batch']} × {recorded.axes['seq_len']} tokens"


def is_noted(recorded: Recorded) -> bool:
    """Whether the note has figures of it."""
    return bool(recorded.axes["preset"] == note.PRESET)


def step_record(recorded: Recorded) -> dict[str, Any]:
    """What one recording says of its step: time, tokens, and the share of every phase."""
    summary = recorded.source.card.summary
    if summary.step_ns is None or summary.throughput is None or summary.parameters is None:
        raise Unavailable(f"the recording of {name_of(recorded)} has no clean step")
    times = {phase.name: phase.host_ns if phase.device_ns is None else phase.device_ns for phase in summary.phases}
    whole_ns = sum(times.values())
    record = {
        **recorded.axes,
        "num_parameters": int(summary.parameters["num_total"]),
        "step_ns": summary.step_ns.median,
        "time_median_ns": summary.step_ns.median,
        "time_ci_low_ns": summary.step_ns.ci_low,
        "time_ci_high_ns": summary.step_ns.ci_high,
        "num_samples": summary.step_ns.num_samples,
        "tokens_per_s": summary.throughput.per_s,
        **{f"{name}_share": ns / whole_ns for name, ns in times.items()},
    }
    idle = [row.share for row in summary.rows if row.name == "idle"]
    return record | ({"gpu_idle_share": idle[0], "gpu_busy_share": 1 - idle[0]} if idle else {})


def recorded_steps(stored: Stored) -> list[dict[str, Any]]:
    """The steps of all presets that have one."""
    return [step_record(each) for each in stored.recordings("step") if each.status == OK]


def shares(stored: Stored) -> Iterator[Any]:
    """Forward, backward, optimizer."""
    recorded = main_point(stored)
    record = step_record(recorded)
    parts = ", ".join(f"{name} {said('share', record[f'{name}_share'])}" for name in PARTS)
    text = (
        f"A step of {name_of(recorded)} takes {said('step_ns', record['step_ns'])}, "
        f"{record['tokens_per_s']:,.0f} tokens/s: {parts}; all else {said('share', _rest(record))}."
    )
    if "gpu_idle_share" in record:
        pace = ": the host sets the pace, which differs from process to process" if paced(record) else ""
        text += f" For {said('share', record['gpu_idle_share'])} of the step the GPU has nothing to do{pace}."
    yield Text(text)
    records = recorded_steps(stored)
    yield Bars(
        id="step_shares",
        title="Shares of a step",
        labels=[f"{each['preset']} × {each['seq_len']}" for each in records],
        series=tuple(Series(name, [each[f"{name}_share"] for each in records], color=name) for name in PARTS),
        unit="share",
        caption=f"What is missing to 100 % is data and what lies between the phases, in {record['preset']} "
        f"{said('share', _rest(record))}.",
    )
    names = ("preset", "batch", "seq_len", "dtype", "step_ns", "tokens_per_s", *(f"{name}_share" for name in PARTS))
    idle = ("gpu_idle_share",) if "gpu_idle_share" in record else ()
    yield table("step_shares", "Steps by phase", records, *names, *idle)
    if not is_noted(recorded):
        raise Unavailable(f"the note's figures are of {note.PRESET}, and this run has {recorded.axes['preset']}")
    ours = [{"phase": name, "step_share": record[f"{name}_share"]} for name in PARTS]
    yield beside(ours, note.SHARES, "phase", "step_share", note.NOTE)
    yield beside([{"what": "a step", "step_ns": record["step_ns"]}], note.STEP, "what", "step_ns", note.NOTE)
    yield Text(_step_differs(recorded, record))


def _rest(record: Mapping[str, Any]) -> float:
    return 1 - sum(float(record[f"{name}_share"]) for name in PARTS)


def _step_differs(recorded: Recorded, record: Mapping[str, Any]) -> str:
    axes, number = recorded.axes, record["num_parameters"]
    device = recorded.source.card.recording.facts.get("environment", {}).get("device_name")
    text = (
        f"The two differ in more than the device: the note's step is of {note.NUM_PARAMETERS / 1e6:.0f} M "
        f"parameters, {note.RUN}; ours is of {number:,} ({number / note.NUM_PARAMETERS:.2f} times as many), on "
        f"{safe(str(device))}, with compile={axes['compile']} and checkpoint={axes['checkpoint']}."
    )
    if paced(record):
        busy_ns = record["gpu_busy_share"] * record["step_ns"]
        text += f" The GPU's work in our step is {said('_ns', busy_ns)}: for the rest it waits for the host."
    return text


def other_model(recorded: Recorded) -> str:
    """That the note's figures are of another model than ours."""
    share = note.NUM_PARAMETERS / step_record(recorded)["num_parameters"]
    return f"the note's model is compiled, checkpointed and has {share:.2f} times our parameters"


def model(stored: Stored) -> Iterator[Any]:
    """The parameters that were counted while it ran, and every knob that made them."""
    recorded = main_point(stored)
    record = step_record(recorded)
    number = record["num_parameters"]
    text = f"{record['preset']} has {number:,} parameters, counted in the process that trained it."
    if is_noted(recorded):
        less = 1 - note.NUM_PARAMETERS / number
        text += (
            f" The model that the note calls 100M had {note.NUM_PARAMETERS / 1e6:.0f} M, {said('share', less)} "
            "fewer: its misspelt keywords were swallowed."
        )
    knobs = [name for name in recorded.axes if name != "preset"]
    yield Text(f"{text} All {len(knobs)} knobs of the run are below as they were resolved.")
    columns = {"knob": knobs, "value": [str(recorded.axes[name]) for name in knobs]}
    yield Table("knobs", f"Every knob of {name_of(recorded)}", columns, 60)
    found = {each["preset"]: each for each in recorded_steps(stored)}
    yield table("parameters", "Parameters by preset", found.values(), "preset", "dim", "blocks", "num_parameters")


def memory(stored: Stored) -> Iterator[Any]:
    """What was alive when, and what each layer keeps for the backward."""
    from stepscope.document.sections import memory as section

    recorded = main_point(stored)
    account = recorded.source.memory.account
    kept = {row.module: row for row in account.activations if row.module is not None}
    layers = sorted((name for name in kept if _is_layer(name)), key=lambda name: int(name.split(".")[1]))
    if not layers:
        raise Unavailable("no layer keeps anything for the backward")
    sizes = [kept[name].total_bytes for name in layers]
    of_head = max(0, kept[""].total_bytes - sum(sizes))
    owners = {part.name: part.bytes for part in account.live_at_peak.by_owner}
    when = {stage.name: stage.after_bytes for stage in account.stages if stage.name != "other"}
    stages = ", ".join(
        f"{said('bytes', n)} {'before' if name == 'start' else f'after {name}'}" for name, n in when.items()
    )
    each = said("bytes", sizes[0]) if min(sizes) == max(sizes) else _range("bytes", min(sizes), max(sizes))
    yield Text(
        f"The peak of a step of {name_of(recorded)} is {said('bytes', account.peak_bytes)}, in the stage "
        f"{account.peak_stage}. Allocated: {stages}. Each of {plural(len(layers), 'layer')} keeps {each} for the "
        f"backward, together {said('share', sum(sizes) / account.peak_bytes)} of the peak; embedding, head and loss "
        f"keep {said('bytes', of_head)}, the weights are {said('bytes', owners.get('parameter', 0))}."
    )
    rows = [*layers, *(name for name in kept if name and name.count(".") == 0 and name != "blocks")]
    columns: dict[str, Any] = {
        "module": [*rows, "head and loss"],
        "kept_bytes": [*(kept[name].total_bytes for name in rows), kept[""].bytes],
    }
    columns["peak_share"] = [size / account.peak_bytes for size in columns["kept_bytes"]]
    series = (Series("kept for the backward", columns["kept_bytes"], color="activation"),)
    title = "Kept for the backward, by layer"
    yield Bars(id="memory_by_layer", title=title, labels=columns["module"], series=series, unit="kept_bytes")
    yield Table("memory_by_layer", title, columns, 40, "activations: the most of each at one time")
    wanted = ("memory_timeline", "memory_at_peak", "memory_stages")
    yield from (part for part in section.parts(recorded.source) if getattr(part, "id", None) in wanted)
    if is_noted(recorded):
        figures = (owners.get("parameter", 0), sum(sizes) / len(sizes), kept[""].bytes, account.peak_bytes)
        ours = dict(zip(note.BYTES, figures))
        rows_of = [{"what": what, "memory_bytes": size} for what, size in ours.items()]
        yield beside(rows_of, note.BYTES, "what", "memory_bytes", note.NOTE)
        yield Text(_memory_differs(recorded, ours, owners.get("optimizer_state", 0)))


def _memory_differs(recorded: Recorded, ours: Mapping[str, float], state_bytes: float) -> str:
    axes, number = recorded.axes, step_record(recorded)["num_parameters"]
    num_logits = axes["batch"] * axes["seq_len"] * axes["vocab"]
    theirs = note.BYTES
    layers, of_loss = note.NUM_LAYERS * theirs["activations of a layer"], theirs["head and loss"]
    whole = layers + theirs["weights"] + of_loss
    return (
        f"The note's weights are {theirs['weights'] / note.NUM_PARAMETERS:.1f} bytes a parameter, ours "
        f"{ours['weights'] / number:.1f}. {num_logits:,} logits in two bytes and again in four would be "
        f"{said('bytes', 6 * num_logits)}: the note's {said('bytes', of_loss)} for its loss are "
        f"{of_loss / (6 * num_logits):.2f} times that. Its {note.NUM_LAYERS} layers, weights and loss are "
        f"{said('bytes', whole)} together, and its peak is {said('bytes', theirs['peak'])}: with every second layer "
        f"checkpointed they are not there at once. Ours has checkpoint={axes['checkpoint']}: its layers keep "
        f"{said('bytes', axes['blocks'] * ours['activations of a layer'])}, and the optimizer's state is "
        f"{said('bytes', state_bytes)}. A layer is not the same in both: {other_model(recorded)}."
    )


def _is_layer(name: str) -> bool:
    words = name.split(".")
    return len(words) == 2 and words[0] == "blocks"


def _range(name: str, low: float, high: float) -> str:
    return f"{said(name, low)} to {said(name, high)}"
