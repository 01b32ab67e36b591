"""Answers of the study `cs336` about precision: whether bf16 is slower, how exact sums are, what autocast casts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from stepscope.analysis.time.warmups import PASSES
from stepscope.document.model import Text
from stepscope.errors import Unavailable
from stepscope.studies.cs336 import note
from stepscope.studies.cs336.time import AUTOCAST, FP32, Record, ends, gpu_work_ns, model_of, plain, set_beside
from stepscope.studies.figures import known, listed, paced, said, table
from stepscope.studies.stored import Stored


def mixed_precision(stored: Stored) -> Iterator[Any]:
    """Whether bf16 is slower."""
    steps = plain(stored).ok.where(mode="step")
    pairs = [
        (wide, narrow)
        for wide in steps.where(dtype=FP32)
        for narrow in steps.where(dtype=AUTOCAST, preset=wide["preset"], seq_len=wide["seq_len"])
    ]
    if not pairs:
        raise Unavailable("no model was trained in both precisions")
    records = [record for wide, narrow in pairs for record in _in_both(stored, wide, narrow)]
    yield Text(" ".join(_bf16_said(pairs, records)))
    names = ("model", "pass", "fp32_median_ns", "autocast_median_ns", "speedup")
    work = known(records, "fp32_work_ns", "autocast_work_ns", "work_speedup")
    text = "steps run freely; the parts of one are waited for, and may take longer together than the whole"
    if work:
        text += "; work: for how long the GPU works in a traced pass"
    yield table("mixed-precision", "fp32 against bf16 autocast", records, *names, *work, note=text, num_shown=48)
    for name, published in note.BF16_SPEEDUP.items():
        ours = [r for r in records if r["pass"] == name]
        at_128 = {f"{preset} 128": value for preset, value in published.items()}
        yield from set_beside(ours, at_128, "speedup", f"published-bf16-{name}", f"speed-up of {name}")
    if any(r["model"].endswith(" 128") for r in records):
        yield Text(
            "The note's are means of the host's time, in a column called median, and it did not wait for the GPU."
        )


def _in_both(stored: Stored, wide: Record, narrow: Record) -> Iterator[dict[str, Any]]:
    """Each pass of a model in fp32 and under autocast, by the clock and by the GPU's work."""
    works = gpu_work_ns(stored, wide), gpu_work_ns(stored, narrow)
    for name, phases in PASSES.items():
        fp32_ns, autocast_ns = _pass_ns(wide, name), _pass_ns(narrow, name)
        record = {"model": model_of(wide), "pass": name, "fp32_median_ns": fp32_ns, "autocast_median_ns": autocast_ns,
                  "speedup": fp32_ns / autocast_ns}  # fmt: skip
        if all(works):
            fp32_work, autocast_work = (sum(work[phase] for phase in phases) for work in works)
            record |= {"fp32_work_ns": fp32_work, "autocast_work_ns": autocast_work,
                       "work_speedup": fp32_work / autocast_work}  # fmt: skip
        yield record


def _bf16_said(pairs: Sequence[tuple[Record, Record]], records: Sequence[Record]) -> Iterator[str]:
    """By the GPU's work, where that is known; by the clock, apart where the host sets the pace; and the note's."""
    works = [r for r in records if "work_speedup" in r]
    if works:
        ranges = [f"in the {name} {ends([r for r in works if r['pass'] == name], 'work_speedup')}" for name in PASSES]
        slower = sum(r["work_speedup"] < 1 for r in works)
        yield f"Under bf16 autocast the GPU's work has {listed(ranges)} times the speed of fp32."
        yield f"It is slower in {slower} of {len(works)} passes."
    free = [pair for pair in pairs if not any(map(paced, pair))]
    if free:
        times = (
            f"{wide['time_median_ns'] / narrow['time_median_ns']:.2f} ({model_of(wide)}: "
            f"{said('time_ns', narrow['time_median_ns'])} against {said('time_ns', wide['time_median_ns'])})"
            for wide, narrow in free
        )
        yield f"By the clock a step has {listed(times)} times the speed of fp32."
    waits = [pair for pair in pairs if pair not in free]
    if waits:
        ratios = [wide["time_median_ns"] / narrow["time_median_ns"] for wide, narrow in waits]
        speeds = " to ".join(dict.fromkeys(f"{ratio:.2f}" for ratio in (min(ratios), max(ratios))))
        yield (
            f"In that of {listed(model_of(wide) for wide, _ in waits)} the host sets the pace, and the clock says "
            f"{speeds}."
        )
    losses = max(abs(wide["loss"] - narrow["loss"]) for wide, narrow in pairs)
    yield f"Losses differ by at most {losses:.1g}."
    slower = sum(r["speedup"] < 1 for r in records)
    theirs = [value for published in note.BF16_SPEEDUP.values() for value in published.values()]
    yield (
        f"By the clock autocast is slower in {slower} of {len(records)} passes; the note, from means of the host's "
        f"time, had it slower in {sum(value < 1 for value in theirs)} of {len(theirs)}."
    )


def _pass_ns(record: Record, name: str) -> float:
    if name == "step":
        return float(record["time_median_ns"])
    return sum(float(record[f"fact_{phase}_ms"]) * 1e6 for phase in PASSES[name])


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
