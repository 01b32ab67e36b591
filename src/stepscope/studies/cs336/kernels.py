"""Answers of the study `cs336` from traces: kernels by pass, the share of products, softmax against products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stepscope.document.model import Text
from stepscope.errors import Unavailable
from stepscope.formatting import heading
from stepscope.studies.cs336 import note
from stepscope.studies.cs336.time import (
    AUTOCAST,
    FEW_KERNELS,
    FP32,
    Record,
    ends,
    model_of,
    plain,
    set_beside,
    work_of,
)
from stepscope.studies.figures import lines, said, span, table
from stepscope.studies.stored import Stored

if TYPE_CHECKING:
    import polars as pl

NUM_KERNELS = 3
"""Of each pass, in the table."""
SOFTMAX_FLOPS = 5
"""A score: its part of the maximum, the difference, the exponential, the sum, the quotient."""


def _works(stored: Stored) -> Iterator[tuple[Mapping[str, Any], pl.DataFrame]]:
    """Every traced inference and step with its work; the forward of inference is a pass of its own."""
    import polars as pl

    for record in plain(stored).ok.where(mode=("inference", "step"), dtype=(FP32, AUTOCAST)):
        work = work_of(stored, record)
        if record["mode"] == "inference":
            work = work.filter(pl.col("phase") == "forward").with_columns(pl.lit("inference").alias("phase"))
        yield {**record, "model": model_of(record)}, work.filter(pl.col("phase") != "other")


def _what(stored: Stored) -> str:
    """What is told apart by name: kernels of a GPU, or ops of a CPU."""
    return "op" if stored.facts.get("device") == "cpu" else "kernel"


def kernels(stored: Stored) -> Iterator[Any]:
    """What takes the time of each pass."""
    import polars as pl

    from stepscope.analysis.kernels.kernels import top_kernels
    from stepscope.document.kernel_names import short_name

    what = _what(stored)
    records, others = [], []
    for record, work in _works(stored):
        for name in ("inference", "forward", "backward", "optimizer"):
            of = work.filter(pl.col("phase") == name)
            if of.is_empty():
                continue
            found = [
                {**record, "pass": name, what: short_name(row["name"]), **{k: row[k] for k in _FIGURES}}
                for row in top_kernels(of).iter_rows(named=True)
            ]
            records += [{**row, "rank": rank} for rank, row in enumerate(found[:NUM_KERNELS])]
            others += [row for row in found if row["class"] != "gemm"][:1]
    if not records:
        raise Unavailable("no pass was traced")
    yield Text(" ".join(_longest(records, others, what)))
    names = ("preset", "seq_len", "dtype", "pass", what, "class", "num_calls", "total_ns", "share")
    yield table("kernels-by-pass", f"The {NUM_KERNELS} longest {what}s of each pass", records, *names, num_shown=60)
    title = f"The longest {what} of each pass that is no product"
    yield table("non-gemm", title, others, *names[:5], *names[6:], num_shown=60)
    longest = [row for row in records if row["dtype"] == FP32 and not row["rank"]]
    for name, published in note.TOP_KERNEL_SHARE.items():
        ours = [row for row in longest if row["pass"] == name]
        yield from set_beside(ours, published, "share", f"published-longest-{name}", f"longest {what} of {name}")
    ours = [row for row in others if row["dtype"] == FP32 and row["pass"] == "inference"]
    title = f"longest {what} of inference that is no product"
    yield from set_beside(ours, note.TOP_OTHER_SHARE, "share", "published-longest-other", title)
    if any(row["model"] in note.TOP_OTHER_SHARE for row in longest):
        yield Text(
            "A share of one name says which kernels the library chose on that device as much as what the model does: "
            "the shares of all products are in the next section."
        )


def _longest(records: Sequence[Record], others: Sequence[Record], what: str) -> Iterator[str]:
    """Of the largest model that was trained, or else of the largest, what each pass in fp32 spends its time on."""
    in_fp32 = [row for row in records if row["dtype"] == FP32]
    largest = max(in_fp32, key=lambda row: (row["mode"] == "step", row["num_parameters"], row["seq_len"]))["model"]
    for row in in_fp32:
        if row["model"] != largest or row["rank"]:
            continue
        text = f"{heading(row['pass'])} of {largest}: {row[what]} takes {said('share', row['share'])}"
        rest = next((o for o in others if o["hash"] == row["hash"] and o["pass"] == row["pass"]), None)
        if rest and rest[what] != row[what]:
            text += f", and of what is no product {rest[what]} the most, {said('share', rest['share'])}"
        yield f"{text}."


_FIGURES = ("class", "num_calls", "total_ns", "share")


def products(stored: Stored) -> Iterator[Any]:
    """How much of the work is products of matrices."""
    import polars as pl

    found: dict[tuple[str, str], dict[str, Any]] = {}
    for record, work in _works(stored):
        key = record["model"], record["dtype"]
        entry = found.setdefault(key, {name: record[name] for name in _KEYS})
        if record["mode"] == "inference":
            entry["inference_share"] = _share(work)
            continue
        training = work.filter(pl.col("phase").is_in(["forward", "backward"]))
        for phase in ("forward", "backward"):
            entry[f"{phase}_share"] = _share(training.filter(pl.col("phase") == phase))
        entry["training_share"], entry["step_share"] = _share(training), _share(work)
        entry["ten_largest_share"] = _share(work, FEW_KERNELS)
        named = training.filter(pl.col("name").str.starts_with("nvjet"))
        entry["nvjet_share"] = int(named["duration_ns"].sum()) / max(1, int(training["duration_ns"].sum()))
    entries = list(found.values())
    both = [e for e in entries if e["dtype"] == FP32 and "inference_share" in e and "training_share" in e]
    if not both:
        raise Unavailable("no model has both an inference and a step that were traced")
    at = max(both, key=lambda entry: (entry["num_parameters"], entry["seq_len"]))
    lower = sum(entry["training_share"] < entry["inference_share"] for entry in both)
    text = (
        f"Products take {said('share', at['inference_share'])} of the work of inference of {at['model']}, "
        f"{said('share', at['training_share'])} of forward and backward, {said('share', at['step_share'])} of a "
        f"whole step. Training has the smaller share for {lower} of {len(both)} points.{_by_length(both)}"
    )
    passes = ("inference", "forward", "backward", "training", "step", "ten_largest")
    names = ["model", "dtype", *(f"{name}_share" for name in passes)]
    if _what(stored) == "kernel":
        names.append("nvjet_share")
        most = max((e for e in entries if "nvjet_share" in e), key=lambda entry: entry["nvjet_share"])
        text += (
            f" Kernels called nvjet, which the note took for no products, are {said('share', at['nvjet_share'])} of "
            f"the training of {at['model']} in {FP32}, and {said('share', most['nvjet_share'])} of that of "
            f"{most['model']} in {most['dtype']}, where without them "
            f"{said('share', most['training_share'] - most['nvjet_share'])} would be products."
        )
    yield Text(text)
    yield table("gemm-share", "Products of matrices in the work", entries, *names)
    for name, id in (("inference", "gemm-share-inference"), ("training", "gemm-share")):
        yield lines(id, f"Products in the work of {name}, fp32", both, "seq_len", f"{name}_share", "preset")
    for name, published in (("inference", note.INFERENCE_GEMM_SHARE), ("training", note.TRAINING_GEMM_SHARE)):
        figure = f"{name}_share"
        yield from set_beside(both, published, figure, f"published-{figure}", f"share of products in {name}")
    what = f"share of products among the {FEW_KERNELS} largest {_what(stored)}s of a step"
    published = note.TRAINING_GEMM_SHARE
    yield from set_beside(both, published, "ten_largest_share", "published-ten-largest", what)
    yield Text(_ten_largest_said([e for e in both if e["model"] in published] or both, _what(stored)))


def _ten_largest_said(entries: Sequence[Record], what: str) -> str:
    """What is lost where products are looked for among ten names, as the note did."""
    lost = max(entries, key=lambda entry: entry["step_share"] - entry["ten_largest_share"])
    return (
        f"The note counted products among the {FEW_KERNELS} largest {what}s, with the optimizer's, it seems: so "
        f"counted, ours are {span('share', [e['ten_largest_share'] for e in entries])} in the place of "
        f"{span('share', [e['training_share'] for e in entries])} of forward and backward. Of a step of "
        f"{lost['model']} that misses {said('share', lost['step_share'] - lost['ten_largest_share'])}."
    )


def _by_length(entries: Sequence[Record]) -> str:
    """How the share changes with the length, for the first size that has two."""
    for preset in dict.fromkeys(entry["preset"] for entry in entries):
        of = sorted((e for e in entries if e["preset"] == preset), key=lambda entry: entry["seq_len"])
        if len(of) > 1:
            first, last = (said("share", e["inference_share"]) for e in (of[0], of[-1]))
            return (
                f" Of inference of {preset} it is {first} at {of[0]['seq_len']} tokens and {last} at "
                f"{of[-1]['seq_len']}."
            )
    return ""


_KEYS = ("model", "preset", "seq_len", "dtype", "num_parameters")


def _share(work: pl.DataFrame, num_largest: int | None = None) -> float:
    """Of all work; with a number, only what products among so many names take, still of all."""
    from stepscope.analysis.kernels.kernels import top_kernels

    largest = top_kernels(work).head(num_largest or work.height)
    return float(sum(row["share"] for row in largest.iter_rows(named=True) if row["class"] == "gemm"))


def softmax(stored: Stored) -> Iterator[Any]:
    """Softmax against the two products of attention, in time and in FLOPs."""
    from stepscope.analysis.time.pass_work import MATMUL, SOFTMAX, attention_parts

    records: list[dict[str, Any]] = []
    for row in plain(stored).ok.where(mode="step", dtype=(FP32, AUTOCAST)):
        parts = attention_parts(work_of(stored, row))
        if not parts[MATMUL] or not parts[SOFTMAX]:
            continue
        head_width = row["d_model"] // row["heads"]
        scores = row["layers"] * row["batch"] * row["heads"] * row["seq_len"] ** 2
        figures: dict[str, Any] = {f"{name.replace(' ', '_')}_ns": ns for name, ns in parts.items()}
        figures |= {"softmax_flops": SOFTMAX_FLOPS * scores, "matmul_flops": 4 * head_width * scores}
        figures |= {"time_ratio": parts[SOFTMAX] / parts[MATMUL], "flops_ratio": SOFTMAX_FLOPS / (4 * head_width)}
        figures["wide_ratio"] = parts[SOFTMAX] / (sum(parts.values()) - parts[SOFTMAX])
        records.append({**row, "model": model_of(row), **figures})
    if not records:
        raise Unavailable("no traced step has attention written out")
    yield Text(" ".join(_softmax_said([r for r in records if r["dtype"] == dtype]) for dtype in (FP32, AUTOCAST)))
    names = ("matmul_ns", "softmax_ns", "scale_and_mask_ns", "copies_ns", "time_ratio", "wide_ratio", "flops_ratio")
    text = (
        "copies: to another layout or dtype, before, between and after the two products; time ratio: softmax ÷ "
        "matmul; wide: softmax ÷ (matmul, scale, mask and copies)"
    )
    yield table("softmax", "Inside attention, forward", records, "model", "dtype", *names, note=text)
    in_fp32 = [r for r in records if r["dtype"] == FP32]
    yield lines("softmax-ratio", "Softmax ÷ products of attention, fp32", in_fp32, "seq_len", "time_ratio", "preset")
    yield from set_beside(
        in_fp32, note.SOFTMAX_PER_MATMUL, "time_ratio", "published-softmax", "softmax time ÷ product time"
    )
    faster = [
        {"model": r["model"], "speedup": r["matmul_ns"] / narrow["matmul_ns"]}
        for r in in_fp32 for narrow in records if narrow["dtype"] == AUTOCAST and narrow["model"] == r["model"]
    ]  # fmt: skip
    yield from set_beside(
        faster, note.BF16_ATTENTION_SPEEDUP, "speedup", "published-bf16-attention",
        "products of attention, fp32 ÷ bf16 autocast; the note's are of the scores",
    )  # fmt: skip
    what = "softmax time ÷ the rest of attention"
    yield from set_beside(in_fp32, note.SOFTMAX_PER_MATMUL, "wide_ratio", "published-softmax-wide", what)
    of = [(r, note.SOFTMAX_PER_MATMUL[r["model"]]) for r in in_fp32 if r["model"] in note.SOFTMAX_PER_MATMUL]
    if of:
        near, wide = (
            sorted(theirs / r[name] for r, theirs in of)[len(of) // 2] for name in ("time_ratio", "wide_ratio")
        )
        yield Text(
            f"The note's ratio is {near:.2f} times ours in the middle, {wide:.2f} times where scaling, masking and "
            "copies count to the products: its ranges seem to have them in."
        )


def _softmax_said(records: Sequence[Record]) -> str:
    """The largest model at its longest, and between what the ratio lies."""
    if not records:
        return ""
    at = max(records, key=lambda r: (r["num_parameters"], r["seq_len"]))
    times = said("softmax_ns", at["softmax_ns"]), said("matmul_ns", at["matmul_ns"])
    flops = said("softmax_flops", at["softmax_flops"]), said("matmul_flops", at["matmul_flops"])
    text = (
        f"In the forward of {at['model']} in {at['dtype']} softmax takes {times[0]} and the two products of "
        f"attention {times[1]}: {at['time_ratio']:.2f} times their time for {at['flops_ratio']:.3f} times their "
        f"FLOPs ({flops[0]} against {flops[1]}), {at['time_ratio'] / at['flops_ratio']:.1f} times as much a FLOP."
    )
    if len(records) > 1:
        text += f" Over {len(records)} points the ratio of times is {ends(records, 'time_ratio')}."
    return text
