"""Answers of the study `cs336` about time: passes, warm-up, kernels, products, softmax, mixed precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepscope.findings.finding import CannotCheck
from stepscope.report.cells import heading
from stepscope.report.parts import Table, Text
from stepscope.studies import cs336_note as note
from stepscope.studies.figures import beside, known, lines, listed, paced, said, span, table, told_apart
from stepscope.studies.stored import Rows, Stored

Record = Mapping[str, Any]
FP32, AUTOCAST = "fp32", "autocast_bf16"
WARMUPS = (0, 1, 2, 5)
MEAN, STD = "mean_ns", "std_ns"
PASSES = ("inference", "forward", "forward+backward", "step")
WARMED = "gate_ran_before"
FEW_KERNELS = 10
"""So many the note looked at."""


def model_of(record: Record) -> str:
    """How the note names a point.

    >>> model_of({"preset": "small", "seq_len": 128})
    'small 128'
    """
    return f"{record['preset']} {record['seq_len']}"


def plain(stored: Stored) -> Rows:
    """The rows of models as the note had them: attention and products written out."""
    return stored.rows("models").where(attention="naive", linear="einsum").needed()


def passes(stored: Stored) -> list[dict[str, Any]]:
    """A record for every pass and number of warm-up passes; a point that failed has one, with its status."""
    from stepscope.analysis.warmups import by_warmup

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


def _one(records: Sequence[Record], **values: Any) -> Record | None:
    return next((r for r in records if all(r.get(name) == value for name, value in values.items())), None)


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
        sentences.append(f"Out of memory in the note, and not here: {'; '.join(named)} tokens.")
    yield Text(" ".join(sentences) or "No step was measured.")
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
    yield from _why_different(records)


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
    spread = said("share", max(step[STD] / step[MEAN] for step in of))
    yield f"A step takes {means} on average, with standard deviations of up to {spread}: {made_of}."
    if inference := [each["inference"] for each in times if "inference" in each]:
        yield f"Inference takes {listed(said(MEAN, ns) for ns in inference)}."


def _why_different(records: Sequence[Record]) -> Iterator[Any]:
    """How much of a step the device works: what a faster GPU can change, and what it cannot."""
    steps = [r for r in records if r["pass"] == "step" and r[MEAN] and r.get("gpu_busy_share") is not None]
    if steps:
        yield table("busy", "How much of a step the GPU works", steps, "model", "time_median_ns", "gpu_busy_share")
    waiting = [f"{r['model']} ({said('share', r['gpu_busy_share'])})" for r in steps if paced(r)]
    if waiting:
        yield Text(
            f"In a step of {', '.join(waiting)} the GPU waits for the host, which sets the pace: there the "
            "difference to the note is between two hosts."
        )


def warm_up(stored: Stored) -> Iterator[Any]:
    """What the first passes do to a mean."""
    records = [r for r in passes(stored) if r[MEAN]]
    cold = [r for r in records if not r[WARMED]]
    sentences = {name: text for name in PASSES if (text := _warm_up_said([r for r in cold if r["pass"] == name]))}
    if not sentences:
        raise CannotCheck("no run is long enough for five passes of warm-up")
    worst = max(note.PROFILED_FORWARD_NS, key=lambda key: note.PROFILED_FORWARD_NS[key] / note.FORWARD_NS[key])
    theirs, warm_ns = note.PROFILED_FORWARD_NS[worst], note.FORWARD_NS[worst]
    step = sentences.pop("step", "")
    yield Text(
        f"{step} The note's profiler averages had the first call in them: {said(MEAN, theirs)} for {worst}, which "
        f"its own benchmark took {said(MEAN, warm_ns)} for, {theirs / warm_ns:.1f} times as much.".strip()
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
        f"{heading(warm['pass'])} of {model}: {said(MEAN, cold[MEAN])} on average without warm-up (standard "
        f"deviation {said(STD, cold[STD])}), {cold[MEAN] / warm[MEAN]:.2f} times the "
        f"{said(MEAN, warm[MEAN])} ({said(STD, warm[STD])}) after {max(WARMUPS)} passes of it; "
        f"the fewest that bring it within 10 % of that: {close[0]}."
    )
    if len(by_model) > 1:
        ratios = {of[0][MEAN] / of[max(WARMUPS)][MEAN]: model for model, of in by_model.items()}
        least, most = min(ratios), max(ratios)
        text += f" Over {len(by_model)} points it is {least:.2f} ({ratios[least]}) to {most:.2f} times "
        text += f"({ratios[most]})."
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


def mixed_precision(stored: Stored) -> Iterator[Any]:
    """Whether bf16 is slower."""
    steps = plain(stored).ok.where(mode="step")
    pairs = [
        (wide, narrow)
        for wide in steps.where(dtype=FP32)
        for narrow in steps.where(dtype=AUTOCAST, preset=wide["preset"], seq_len=wide["seq_len"])
    ]
    if not pairs:
        raise CannotCheck("no model was trained in both precisions")
    records = [_in_both(wide, narrow, name) for wide, narrow in pairs for name in PASSES[1:]]
    yield Text(" ".join(_bf16_said(pairs, records)))
    names = ["model", "pass", "fp32_median_ns", "autocast_median_ns", "speedup"]
    names += known(records, "fp32_busy_share", "autocast_busy_share", "work_speedup")
    text = "busy: the GPU in a whole step; work: what it is busy for, fp32 ÷ autocast"
    yield table("mixed-precision", "fp32 against bf16 autocast", records, *names, note=text, num_shown=48)
    for name, published in note.BF16_SPEEDUP.items():
        ours = [r for r in records if r["pass"] == name]
        at_128 = {f"{preset} 128": value for preset, value in published.items()}
        yield from set_beside(ours, at_128, "speedup", f"published-bf16-{name}", f"speed-up of {name}")


def _in_both(wide: Record, narrow: Record, name: str) -> dict[str, Any]:
    """One pass of a model in fp32 and under autocast."""
    fp32_ns, autocast_ns = _pass_ns(wide, name), _pass_ns(narrow, name)
    record = {"model": model_of(wide), "preset": wide["preset"], "seq_len": wide["seq_len"], "pass": name,
              "fp32_median_ns": fp32_ns, "autocast_median_ns": autocast_ns, "speedup": fp32_ns / autocast_ns,
              "gpu_busy_share": narrow.get("gpu_busy_share")}  # fmt: skip
    fp32_busy, autocast_busy = (each.get("gpu_busy_share") for each in (wide, narrow))
    if name == "step" and fp32_busy and autocast_busy:
        record |= {"fp32_busy_share": fp32_busy, "autocast_busy_share": autocast_busy,
                   "work_speedup": fp32_busy * fp32_ns / (autocast_busy * autocast_ns)}  # fmt: skip
    return record


def _bf16_said(pairs: Sequence[tuple[Record, Record]], records: Sequence[Record]) -> Iterator[str]:
    """Steps that can be told apart, those that cannot, the GPU's own work, and how many passes are slower."""
    apart = [pair for pair in pairs if told_apart(*pair)]
    if apart:
        times = (
            f"{wide['time_median_ns'] / narrow['time_median_ns']:.2f} ({model_of(wide)}: "
            f"{said('time_ns', narrow['time_median_ns'])} against {said('time_ns', wide['time_median_ns'])})"
            for wide, narrow in apart
        )
        yield f"A step under bf16 autocast has {listed(times)} times the speed of fp32."
    alike = [pair for pair in pairs if pair not in apart]
    if alike:
        models = listed(model_of(wide) for wide, _ in alike)
        waits = any(paced(record) for pair in alike for record in pair)
        why = "the host sets the pace, and differs from one process to the next" if waits else "the samples overlap"
        yield f"That of {models} is not to be told from fp32: {why}."
    works = [r for r in records if "work_speedup" in r]
    if works:
        least, most = (choose(works, key=lambda r: r["work_speedup"]) for choose in (min, max))
        yield (
            f"The GPU's own work is done {least['work_speedup']:.2f} ({least['model']}) to "
            f"{most['work_speedup']:.2f} times ({most['model']}) as fast."
        )
    losses = max(abs(wide["loss"] - narrow["loss"]) for wide, narrow in pairs)
    yield f"Losses differ by at most {losses:.1g}."
    slower = [r for r in records if r["speedup"] < 1]
    theirs = [value for published in note.BF16_SPEEDUP.values() for value in published.values()]
    text = f"On the device autocast is slower in {len(slower)} of {len(records)} passes"
    if slower:
        text += f" ({listed(r['pass'] + ' of ' + r['model'] for r in slower)}"
        if all(paced(r) for r in slower):
            shares = span("share", [r["gpu_busy_share"] for r in slower])
            text += f", in whose steps the GPU is busy for {shares}: the host sets the pace"
        text += ")"
    yield (
        f"{text}; the note, from means of the host's time, had it slower in {sum(value < 1 for value in theirs)} of "
        f"{len(theirs)}."
    )


def _pass_ns(record: Record, name: str) -> float:
    if name == "step":
        return float(record["time_median_ns"])
    phases = {"forward": ("forward",), "forward+backward": ("forward", "backward")}[name]
    return sum(float(record[f"fact_{phase}_ms"]) * 1e6 for phase in phases)


def exactness(stored: Stored) -> Iterator[Any]:
    """Running sums, and dtypes under autocast."""
    rows = stored.rows("precision").ok.needed()
    sums = rows.where(experiment="accumulate")
    texts = [
        f"{r['terms']} times 0.01 added up in {r['accumulate_dtype']} from {r['value_dtype']} is "
        f"{r['fact_result']:.4f} (exact {r['fact_exact']:.4f})"
        for r in sums
    ]
    yield Text(f"{'; '.join(texts)}.")
    names = ("value_dtype", "accumulate_dtype", "result", "relative_error")
    figures = [{**r, **{name: r[f"fact_{name}"] for name in names[2:]}} for r in sums]
    text = f"{sums.values('terms')[0]} times; the exact sum is {next(iter(sums))['fact_exact']:g}"
    yield table("running-sums", "0.01 added one by one", figures, *names, note=text)
    kinds = ("linear", "norm", "residual", "softmax", "loss")
    records = [
        {"autocast": r["value_dtype"], **{kind: _dtype_of(r, kind) for kind in kinds}}
        for r in rows.where(experiment="audit")
    ]
    if records:
        yield table("autocast-dtypes", "What each kind of op answers in, under autocast", records, "autocast", *kinds)


def _dtype_of(record: Record, kind: str) -> str | None:
    prefix = f"fact_{kind}_"
    return ", ".join(name.removeprefix(prefix) for name in record if name.startswith(prefix)) or None
