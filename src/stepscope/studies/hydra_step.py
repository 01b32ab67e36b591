"""Answers of the study `hydra` that come from recordings: where time, memory and copies of a step are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from stepscope.analysis.sweeps import OK
from stepscope.findings.finding import CannotCheck
from stepscope.report.parts import Bars, Series, Table, Text
from stepscope.report.text import plural, safe
from stepscope.studies.figures import beside, said, table
from stepscope.studies.stored import Recorded, Stored

if TYPE_CHECKING:
    from stepscope.report.source import Source

NOTE = "hydra-100m-notes, device not named"
NOTED_PRESET = "100m"
NOTED_PARAMETERS = 62_000_000
"""Of the model that the note calls 100M: its misspelt keywords set nothing."""
NOTED_RUN = "compiled with max-autotune-no-cudagraphs, every second layer checkpointed"
NOTED_SHARES = {"forward": 0.35, "backward": 0.62, "optimizer": 0.03}
NOTED_STEP = {"a step": 53_000_000}
NOTED_BYTES = {"weights": 135e6, "activations of a layer": 645e6, "head and loss": 1.2e9, "peak": 5.4e9}
NOTED_OPS = {"aten::mm": 0.36}
NOTED_COPIES = {"copies": 0.19}
PARTS = ("forward", "backward", "optimizer")


def main_point(stored: Stored) -> Recorded:
    """The recording that the single answers are about: the first."""
    return stored.recording("step")


def name_of(recorded: Recorded) -> str:
    """The point in a sentence."""
    axes = recorded.axes
    return f"{axes['preset']} ({axes['batch']} × {axes['seq_len']} tokens, {axes['dtype']})"


def is_noted(recorded: Recorded) -> bool:
    """Whether the note has figures of it."""
    return bool(recorded.axes["preset"] == NOTED_PRESET)


def step_record(recorded: Recorded) -> dict[str, Any]:
    """What one recording says of its step: time, tokens, and the share of every phase."""
    summary = recorded.source.card.summary
    if summary.step_ns is None or summary.throughput is None or summary.parameters is None:
        raise CannotCheck(f"the recording of {name_of(recorded)} has no clean step")
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
    return record | ({"gpu_idle_share": idle[0]} if idle else {})


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
        text += f" For {said('share', record['gpu_idle_share'])} of the step the GPU has nothing to do."
    yield Text(text)
    records = [step_record(each) for each in stored.recordings("step") if each.status == OK]
    yield Bars(
        id="step_shares",
        title="Shares of a step",
        labels=[f"{each['preset']} × {each['seq_len']}" for each in records],
        series=tuple(Series(name, [each[f"{name}_share"] for each in records], colour=name) for name in PARTS),
        unit="share",
        caption=f"What is missing to 100 % is data and what lies between the phases, in {record['preset']} "
        f"{said('share', _rest(record))}.",
    )
    names = ("preset", "batch", "seq_len", "dtype", "step_ns", "tokens_per_s", *(f"{name}_share" for name in PARTS))
    idle = ("gpu_idle_share",) if "gpu_idle_share" in record else ()
    yield table("step_shares", "Steps by phase", records, *names, *idle)
    if not is_noted(recorded):
        raise CannotCheck(f"the note's figures are of {NOTED_PRESET}, and this run has {recorded.axes['preset']}")
    ours = [{"phase": name, "step_share": record[f"{name}_share"]} for name in PARTS]
    yield beside(ours, NOTED_SHARES, "phase", "step_share", NOTE)
    yield beside([{"what": "a step", "step_ns": record["step_ns"]}], NOTED_STEP, "what", "step_ns", NOTE)
    axes, more = recorded.axes, record["num_parameters"] / NOTED_PARAMETERS
    device = recorded.source.card.recording.facts.get("environment", {}).get("device_name")
    yield Text(
        f"The two differ in more than the device: the note's step is of {NOTED_PARAMETERS / 1e6:.0f} M parameters, "
        f"{NOTED_RUN}; ours is of {record['num_parameters']:,} ({more:.2f} times as many), on "
        f"{safe(str(device))}, with compile={axes['compile']} and checkpoint={axes['checkpoint']}."
    )


def _rest(record: Mapping[str, Any]) -> float:
    return 1 - sum(float(record[f"{name}_share"]) for name in PARTS)


def model(stored: Stored) -> Iterator[Any]:
    """The parameters that were counted while it ran, and every knob that made them."""
    recorded = main_point(stored)
    record = step_record(recorded)
    number = record["num_parameters"]
    text = f"{record['preset']} has {number:,} parameters, counted in the process that trained it."
    if is_noted(recorded):
        less = 1 - NOTED_PARAMETERS / number
        text += (
            f" The model that the note calls 100M had {NOTED_PARAMETERS / 1e6:.0f} M, {said('share', less)} fewer: "
            f"its misspelt keywords were swallowed."
        )
    knobs = [name for name in recorded.axes if name != "preset"]
    yield Text(f"{text} All {len(knobs)} knobs of the run are below as they were resolved.")
    columns = {"knob": knobs, "value": [str(recorded.axes[name]) for name in knobs]}
    yield Table("knobs", f"Every knob of {name_of(recorded)}", columns, 60)
    found = {each["preset"]: each for each in map(step_record, stored.recordings("step"))}
    yield table("parameters", "Parameters by preset", found.values(), "preset", "dim", "blocks", "num_parameters")


def memory(stored: Stored) -> Iterator[Any]:
    """What was alive when, and what each layer keeps for the backward."""
    from stepscope.report.sections import memory as section

    recorded = main_point(stored)
    account = recorded.source.memory.account
    kept = {row.module: row for row in account.activations if row.module is not None}
    layers = sorted((name for name in kept if _is_layer(name)), key=lambda name: int(name.split(".")[1]))
    if not layers:
        raise CannotCheck("no layer keeps anything for the backward")
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
    series = (Series("kept for the backward", columns["kept_bytes"], colour="activation"),)
    title = "Kept for the backward, by layer"
    yield Bars(id="memory_by_layer", title=title, labels=columns["module"], series=series, unit="kept_bytes")
    yield Table("memory_by_layer", title, columns, 40, "activations: the most of each at one time")
    wanted = ("memory_timeline", "memory_at_peak", "memory_stages")
    yield from (part for part in section.parts(recorded.source) if getattr(part, "id", None) in wanted)
    if is_noted(recorded):
        weights, layer = owners.get("parameter", 0), sum(sizes) / len(sizes)
        ours = zip(NOTED_BYTES, (weights, layer, kept[""].bytes, account.peak_bytes))
        yield beside([{"what": w, "memory_bytes": n} for w, n in ours], NOTED_BYTES, "what", "memory_bytes", NOTE)
        axes, number = recorded.axes, step_record(recorded)["num_parameters"]
        num_logits = axes["batch"] * axes["seq_len"] * axes["vocab"]
        of_loss = NOTED_BYTES["head and loss"]
        yield Text(
            f"The note's weights are {NOTED_BYTES['weights'] / NOTED_PARAMETERS:.1f} bytes a parameter, ours "
            f"{weights / number:.1f}. {num_logits:,} logits in two bytes and again in four would be "
            f"{said('bytes', 6 * num_logits)}: the note's {said('bytes', of_loss)} for its loss are "
            f"{of_loss / (6 * num_logits):.2f} times that."
        )


def _is_layer(name: str) -> bool:
    words = name.split(".")
    return len(words) == 2 and words[0] == "blocks"


def _range(name: str, low: float, high: float) -> str:
    return f"{said(name, low)} to {said(name, high)}"


def own_times(source: Source) -> tuple[list[tuple[str | None, int, int]], str]:
    """Every op with its calls and its own time, most first, and whose time it is; nothing is counted twice."""
    rank = source.analysis.ranks[0]
    where = "device" if rank.gpu_time.window_ns else "host"
    rows = rank.ops.sort(f"{where}_self_ns", descending=True).select("op", "num_calls", f"{where}_self_ns")
    return [row for row in rows.iter_rows() if row[2]], where


def bottlenecks(stored: Stored) -> Iterator[Any]:
    """Ops and modules by their own time, without what lies inside them."""
    from stepscope.analysis.ops import module_groups

    recorded = main_point(stored)
    rows, where = own_times(recorded.source)
    rank = recorded.source.analysis.ranks[0]
    steps = max(1, rank.steps.height)
    whole_ns = sum(ns for _, _, ns in rows)
    if not whole_ns:
        raise CannotCheck("the trace has no op with a time of its own")
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
    note = "own: without modules inside; the column adds up to 100 %, that of with inner does not"
    yield Table("modules", "Modules by their own time", by_module, 15, note)
    if is_noted(recorded):
        ours = [{"op": op, "own_share": ns / whole_ns} for op, _, ns in rows]
        yield beside(ours, NOTED_OPS, "op", "own_share", NOTE)


def copies(stored: Stored) -> Iterator[Any]:
    """Where every copy comes from, and what a step would be without it."""
    from stepscope.report.copies_text import source_name
    from stepscope.report.sections import copies as section

    recorded = main_point(stored)
    parts = section.parts(recorded.source)
    report = recorded.source.copies
    total_ns = sum(row["total_ns"] for row in report.rows)
    sums: dict[str, float] = {}
    for row in report.rows:
        sums[row["phase"] or "no phase"] = sums.get(row["phase"] or "no phase", 0.0) + row["total_ns"]
    by_phase = ", ".join(f"{said('share', ns / total_ns)} in {name}" for name, ns in _most_first(sums))
    largest = max(report.rows, key=lambda row: row["saving_ns"] or 0.0)
    yield Text(
        f"{parts[0].text} Of their time {by_phase}. The source whose removal would save most, "
        f"{said('time_ns', largest['saving_ns'])}, is {source_name(largest)} ({largest['phase']}). A copy that "
        f"the next op needs would come back inside it: the micro-benchmarks of the next section measure that."
    )
    yield from parts[1:]
    if is_noted(recorded):
        ours = [{"what": "copies", "time_share": total_ns / report.whole_ns}]
        yield beside(ours, NOTED_COPIES, "what", "time_share", NOTE)


def _most_first(sums: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(sums.items(), key=lambda item: -item[1])
