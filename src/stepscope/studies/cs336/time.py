"""Answers of the study `cs336` about time: passes by size and length, and what warm-up changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stepscope.analysis.time.warmups import by_warmup
from stepscope.document.model import Table, Text
from stepscope.errors import Unavailable
from stepscope.formatting import heading
from stepscope.studies.cs336 import note
from stepscope.studies.figures import HOST_PACED, beside, lines, listed, paced, said, span, table
from stepscope.studies.stored import Rows, Stored

if TYPE_CHECKING:
    import polars as pl

Record = Mapping[str, Any]
FP32, AUTOCAST = "fp32", "autocast_bf16"
WARMUPS = (0, 1, 2, 5)
MEAN, STD = "mean_ns", "std_ns"
PASSES = ("inference", "forward", "forward+backward", "step")
WARMED = "gate_ran_before"
SIZES = ("preset", "num_parameters", "layers", "d_model", "d_ff", "heads", "vocab", "batch")
FEW_KERNELS = 10
"""So many the note looked at."""


def model_of(record: Record) -> str:
    """How the note names a point.

    >>> model_of({"preset": "small", "seq_len": 128})
    'small 128'
    """
    return f"{record['preset']} {record['seq_len']}"


def ends(records: Sequence[Record], name: str) -> str:
    """The least and the most of a ratio, each with its model.

    >>> ends([{"model": "small 128", "ratio": 2.0}, {"model": "xl 128", "ratio": 1.5}], "ratio")
    '1.50 (xl 128) to 2.00 (small 128)'
    """
    found = (choose(records, key=lambda record: record[name]) for choose in (min, max))
    return " to ".join(f"{record[name]:.2f} ({record['model']})" for record in found)


def plain(stored: Stored) -> Rows:
    """The rows of models as the note had them: attention and products written out."""
    return stored.rows("models").where(attention="naive", linear="einsum").needed()


def work_of(stored: Stored, record: Record) -> pl.DataFrame:
    """What a traced row of a model spent its time on."""
    from stepscope.analysis.time.pass_work import pass_work

    return pass_work(stored.traced("models", record).case.linked)


def gpu_work_ns(stored: Stored, record: Record) -> dict[str, int]:
    """By phase, for how long the GPU works; nothing without a GPU, or where the trace was not kept."""
    if stored.facts.get("device") == "cpu":
        return {}
    try:
        work = work_of(stored, record)
    except Unavailable:
        return {}
    phases = work.partition_by("phase", as_dict=True)
    return {str(name): int(of["duration_ns"].sum()) for (name,), of in phases.items()}


def passes(stored: Stored) -> list[dict[str, Any]]:
    """A record for every pass and number of warm-up passes; a point that failed has one, with its status."""
    records = []
    known = {record["hash"]: record for record in plain(stored).where(dtype=FP32)}
    for row in stored.sweep("models").rows:
        record = known.get(row["hash"])
        if record is None or (record["mode"] == "forward" and record["status"] == "ok"):
            continue
        base = {**record, "model": model_of(record), "pass": record["mode"], WARMED: _gate_ran_before(row)}
        found = list(by_warmup(row.get("samples_phase_ns") or {}, record["steps"], WARMUPS))
        if not found:
            records.append({**base, "num_warmup": max(WARMUPS), MEAN: None, STD: None})
        for each in found:
            figures = {MEAN: each.time.mean, STD: each.time.std, "median_ns": each.time.median}
            name = each.what if record["mode"] != "inference" else "inference"
            records.append({**base, "pass": name, "num_warmup": each.num_warmup, **figures})
    return records


def _gate_ran_before(row: Record) -> bool:
    """Whether the point's own process had checked its variant, so that its first call was not the first of all."""
    gate = row.get("gate") or {}
    return bool(gate) and not gate.get("run_by")


def _warm(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record["num_warmup"] == max(WARMUPS)]


def set_beside(
    ours: Sequence[Record], published: Mapping[str, float], name: str, id: str, what: str
) -> Iterator[Any]:
    """A figure beside the note's; nothing where none of its models ran."""
    found = beside(ours, published, "model", name, f"{what}; {note.WHERE}")
    if found.num_rows:
        yield Table(id, found.title, found.columns, found.num_shown)


def durations(stored: Stored) -> Iterator[Any]:
    """Every size, length and pass."""
    records = _warm(passes(stored))
    sentences = [*_steps_said(records)]
    failed = {r["model"]: [o["pass"] for o in records if o["model"] == r["model"] and o["status"] == "oom"]
              for r in records if r["status"] == "oom"}  # fmt: skip
    if failed:
        named = [f"{model} ({', '.join(names)})" for model, names in failed.items()]
        sentences.append(f"Out of memory here: {', '.join(named)}.")
    fits = [r for r in records if r["pass"] == "step" and r[MEAN] and r["model"] in note.OUT_OF_MEMORY]
    if fits:
        lengths = {r["preset"]: [o["seq_len"] for o in fits if o["preset"] == r["preset"]] for r in fits}
        named = [f"{preset} at {listed(values)}" for preset, values in lengths.items()]
        sentences.append(
            f"Forward and backward of {'; '.join(named)} tokens did not fit the note's {note.DEVICE}; a step fits "
            "here."
        )
    yield Text(" ".join(sentences) or "No step was measured.")
    sizes = {r["preset"]: {name: r[name] for name in SIZES} for r in records}.values()
    yield table("sizes", "The models", sizes, *SIZES, note="fp32 is without TF32")
    names = ("preset", "num_parameters", "seq_len", "pass", MEAN, STD, "median_ns")
    text = (
        "after five passes; the parts of a step are marked in passes of their own, the device waited for after each"
    )
    yield table("durations", "Passes by size and length", records, *names, note=text, num_shown=80)
    steps = [r for r in records if r["pass"] == "step"]
    yield lines("step-times", "A step by length", steps, "seq_len", MEAN, "preset")
    for name, published in (("forward", note.FORWARD_NS), ("forward+backward", note.FORWARD_BACKWARD_NS)):
        ours = [r for r in records if r["pass"] == name and r[MEAN]]
        yield from set_beside(ours, published, MEAN, f"published-{name}", name)
    if not any(r["model"] in note.FORWARD_NS for r in records):
        models = ", ".join(dict.fromkeys(key.split()[0] for key in note.FORWARD_NS))
        yield Text(f"None of the note's models ({models}) ran here: its figures have nothing beside them.")
    yield from _why_different(stored, records)


def _steps_said(records: Sequence[Record]) -> Iterator[str]:
    """A step of each size at its longest: its time, what it consists of, and inference beside it."""
    steps = [r for r in records if r["pass"] == "step" and r[MEAN]]
    of = [max((r for r in steps if r["preset"] == preset), key=lambda r: r["seq_len"])
          for preset in dict.fromkeys(r["preset"] for r in steps)]  # fmt: skip
    if not of:
        return
    times = [{r["pass"]: r[MEAN] for r in records if r["model"] == step["model"] and r[MEAN]} for step in of]
    shares = {
        "forward": [each["forward"] / each["step"] for each in times],
        "backward": [(each["forward+backward"] - each["forward"]) / each["step"] for each in times],
        "optimizer": [1 - each["forward+backward"] / each["step"] for each in times],
    }
    means = listed(f"{said(MEAN, step[MEAN])} ({step['model']})" for step in of)
    made_of = ", ".join(f"{name} {span('share', values)}" for name, values in shares.items())
    yield f"A step takes {means} on average: {made_of}."
    if inference := [each["inference"] for each in times if "inference" in each]:
        yield f"Inference takes {listed(said(MEAN, ns) for ns in inference)}."
    if len(steps) > len(of):
        most = max(steps, key=lambda r: r[STD] / r[MEAN])
        yield (
            f"Over all {len(steps)} points the standard deviation of a step is up to "
            f"{said('share', most[STD] / most[MEAN])} of it ({most['model']})."
        )


def _why_different(stored: Stored, records: Sequence[Record]) -> Iterator[Any]:
    """How much of a pass the GPU works: what a faster one can change, and what it cannot."""
    means = {r["model"]: r[MEAN] for r in records if r["pass"] == "forward" and r[MEAN]}
    steps = []
    for r in records:
        work = gpu_work_ns(stored, r) if r["pass"] == "step" and r["model"] in means else {}
        if work:
            share = work["forward"] / means[r["model"]]
            steps.append({**r, "forward_ns": means[r["model"]], "forward_busy_share": share})
    if not steps:
        return
    names = ("forward_ns", "forward_busy_share", "time_median_ns", "gpu_busy_share")
    text = "the forward is waited for, which takes longer than one in a step that runs freely"
    yield table("busy", "How much of a forward and of a step the GPU works", steps, "model", *names, note=text)
    known = [r for r in steps if r["model"] in note.FORWARD_NS]
    waits = [r for r in known if r["forward_busy_share"] < HOST_PACED]
    rest = [r for r in known if r not in waits]
    sentences = []
    if waits:
        shares = span("share", [r["forward_busy_share"] for r in waits])
        sentences.append(
            f"In the forward of {listed(r['model'] for r in waits)} the GPU works for {shares} of the time and waits "
            "for the host, which sets the pace: there the difference to the note is between two hosts."
        )
    if rest:
        ratios = [note.FORWARD_NS[r["model"]] / r["forward_ns"] for r in rest]
        sentences.append(
            f"Where the GPU sets it, the {note.DEVICE} takes {min(ratios):.2f} to {max(ratios):.2f} times as long."
        )
    if sentences:
        yield Text(" ".join(sentences))


def warm_up(stored: Stored) -> Iterator[Any]:
    """What the first passes do to a mean."""
    records = [r for r in passes(stored) if r[MEAN]]
    cold = [r for r in records if not r[WARMED]]
    sentences = {name: text for name in PASSES if (text := _warm_up_said([r for r in cold if r["pass"] == name]))}
    if not sentences:
        raise Unavailable("no run is long enough for five passes of warm-up")
    ratios = {model: ns / note.FORWARD_NS[model] for model, ns in note.PROFILED_FORWARD_NS.items()}
    first, theirs = next(iter(note.PROFILED_FORWARD_NS.items()))
    step = sentences.pop("step", "")
    yield Text(
        f"{step} The note's profiler averages had the first call in them: {said(MEAN, theirs)} for the forward of "
        f"{first}, which its own benchmark took {said(MEAN, note.FORWARD_NS[first])} for, {ratios[first]:.1f} times "
        f"as much; of all its models {min(ratios.values()):.1f} to {max(ratios.values()):.1f} times.".strip()
    )
    yield Text(" ".join(sentences.values()))
    names = ("preset", "seq_len", "pass", "num_warmup", MEAN, STD)
    text = "one run of each point: the same passes, cut after so many"
    warmed = list(dict.fromkeys(f"{r['mode']} of {r['model']}" for r in records if r[WARMED]))
    if warmed:
        text += f"; left out: {listed(warmed)}, whose process had checked the variant before and was not cold"
    yield table("warm-up", "Mean and spread by warm-up", cold, *names, note=text, num_shown=48)
    yield from _beside_cold([r for r in cold if r["num_warmup"] == 0])


def _warm_up_said(records: Sequence[Record]) -> str:
    """Of one pass: the first model's means, and over all models what no warm-up adds."""
    by_model = {r["model"]: {o["num_warmup"]: o for o in records if o["model"] == r["model"]} for r in records}
    by_model = {model: by for model, by in by_model.items() if set(WARMUPS) <= by.keys()}
    if not by_model:
        return ""
    # One whose passes the GPU sets the pace of, where there is one: the host's noise is no warm-up.
    model, by = min(by_model.items(), key=lambda item: bool(paced(item[1][0])))
    cold, warm = by[0], by[max(WARMUPS)]
    close = [n for n in WARMUPS if all(abs(by[m][MEAN] / warm[MEAN] - 1) <= 0.1 for m in WARMUPS if m >= n)]
    text = (
        f"{heading(warm['pass'])} of {model}: {said(MEAN, cold[MEAN])} over {cold['steps']} passes without warm-up "
        f"(standard deviation {said(STD, cold[STD])}), {cold[MEAN] / warm[MEAN]:.2f} times the "
        f"{said(MEAN, warm[MEAN])} ({said(STD, warm[STD])}) after {max(WARMUPS)} passes of it; "
        f"the fewest that bring it within 10 % of that: {close[0]}."
    )
    if len(by_model) > 1:
        ratios = [
            {"model": of[0]["model"], "ratio": of[0][MEAN] / of[max(WARMUPS)][MEAN]} for of in by_model.values()
        ]
        text += f" Over {len(ratios)} points it is {ends(ratios, 'ratio')} times."
    return text


def _beside_cold(records: Sequence[Record]) -> Iterator[Any]:
    for name, published in (("forward", note.COLD_FORWARD_NS), ("forward+backward", note.COLD_FORWARD_BACKWARD_NS)):
        ours = [r for r in records if r["pass"] == name]
        yield from set_beside(ours, published, MEAN, f"published-cold-{name}", f"{name}, no warm-up")
    if any(r["model"] in note.COLD_FORWARD_NS for r in records):
        yield Text(
            f"The note's means are over {note.NUM_PASSES} passes, ours over {records[0]['steps']}; both have the "
            "first call in them, which counts the more the fewer they are."
        )
