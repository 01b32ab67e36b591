"""Answers of the study `cs336` from traces: kernels by pass, the share of products, softmax against products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from stepscope.findings.finding import CannotCheck
from stepscope.report.cells import heading
from stepscope.report.parts import Bars, Series, Text
from stepscope.studies import cs336_note as note
from stepscope.studies.cs336_time import FEW_KERNELS, FP32, model_of, plain, set_beside
from stepscope.studies.figures import said, table
from stepscope.studies.stored import Stored

if TYPE_CHECKING:
    import polars as pl

NUM_KERNELS = 3
"""Of each pass, in the table."""
SOFTMAX_FLOPS = 5
"""A score: its part of the maximum, the difference, the exponential, the sum, the quotient."""


def _works(stored: Stored) -> Iterator[tuple[Mapping[str, Any], pl.DataFrame]]:
    """Every traced inference and step in fp32, with its work; the forward of inference is a pass of its own."""
    import polars as pl

    from stepscope.analysis.pass_work import pass_work

    for record in plain(stored).ok.where(dtype=FP32, mode=("inference", "step")):
        work = pass_work(stored.traced("models", record).case.linked)
        if record["mode"] == "inference":
            work = work.filter(pl.col("phase") == "forward").with_columns(pl.lit("inference").alias("phase"))
        yield {**record, "model": model_of(record)}, work.filter(pl.col("phase") != "other")


def _what(stored: Stored) -> str:
    """What is told apart by name: kernels of a GPU, or ops of a CPU."""
    return "op" if stored.facts.get("device") == "cpu" else "kernel"


def kernels(stored: Stored) -> Iterator[Any]:
    """What takes the time of each pass."""
    import polars as pl

    from stepscope.analysis.kernels import top_kernels
    from stepscope.report.kernel_names import short_name

    what = _what(stored)
    records, others, sentences = [], [], []
    for record, work in _works(stored):
        for name in ("inference", "forward", "backward", "optimizer"):
            of = work.filter(pl.col("phase") == name)
            if of.is_empty():
                continue
            found = [
                {**record, "pass": name, what: short_name(row["name"]), **{k: row[k] for k in _FIGURES}}
                for row in top_kernels(of).iter_rows(named=True)
            ]
            records += found[:NUM_KERNELS]
            rest = [row for row in found if row["class"] != "gemm"]
            others += rest[:1]
            first = found[0]
            text = f"{heading(name)} of {record['model']}: {first[what]} takes {said('share', first['share'])}"
            if rest and rest[0] is not first:
                text += f", and of what is no product {rest[0][what]} the most, {said('share', rest[0]['share'])}"
            sentences.append((record["num_parameters"], record["seq_len"], f"{text}."))
    if not sentences:
        raise CannotCheck("no pass was traced")
    largest = max(sentence[:2] for sentence in sentences)
    yield Text(" ".join(text for *key, text in sentences if tuple(key) == largest))
    names = ("preset", "seq_len", "pass", what, "class", "num_calls", "total_ns", "share")
    yield table("kernels-by-pass", f"The {NUM_KERNELS} longest {what}s of each pass", records, *names, num_shown=60)
    title = f"The longest {what} of each pass that is no product"
    yield table("non-gemm", title, others, *names[:4], *names[5:], num_shown=60)


_FIGURES = ("class", "num_calls", "total_ns", "share")


def products(stored: Stored) -> Iterator[Any]:
    """How much of the work is products of matrices."""
    import polars as pl

    found: dict[str, dict[str, Any]] = {}
    for record, work in _works(stored):
        entry = found.setdefault(record["model"], {"model": record["model"], **{k: record[k] for k in _KEYS}})
        if record["mode"] == "inference":
            entry["inference_share"] = _share(work)
            continue
        training = work.filter(pl.col("phase").is_in(["forward", "backward"]))
        for phase in ("forward", "backward"):
            entry[f"{phase}_share"] = _share(training.filter(pl.col("phase") == phase))
        entry["training_share"], entry["step_share"] = _share(training), _share(work)
        entry["ten_largest_share"] = _share(training, FEW_KERNELS)
        named = training.filter(pl.col("name").str.starts_with("nvjet"))
        entry["nvjet_share"] = int(named["duration_ns"].sum()) / max(1, int(training["duration_ns"].sum()))
    both = [entry for entry in found.values() if "inference_share" in entry and "training_share" in entry]
    if not both:
        raise CannotCheck("no model has both an inference and a step that were traced")
    at = max(both, key=lambda entry: (entry["num_parameters"], entry["seq_len"]))
    lower = sum(entry["training_share"] < entry["inference_share"] for entry in both)
    text = (
        f"Products take {said('share', at['inference_share'])} of the work of inference of {at['model']}, "
        f"{said('share', at['training_share'])} of forward and backward, {said('share', at['step_share'])} of a "
        f"whole step. Training has the smaller share for {lower} of {len(both)} points. Counted among the "
        f"{FEW_KERNELS} largest {_what(stored)}s alone, as in the note, training would have "
        f"{said('share', at['ten_largest_share'])}."
    )
    names = [
        "inference_share",
        "forward_share",
        "backward_share",
        "training_share",
        "step_share",
        "ten_largest_share",
    ]
    if _what(stored) == "kernel":
        names.append("nvjet_share")
        text += f" Kernels called nvjet, which it took for no products, are {said('share', at['nvjet_share'])} of it."
    yield Text(text)
    yield table("gemm-share", "Products of matrices in the work", found.values(), "model", *names)
    yield Bars(
        id="gemm-share",
        title="Products of matrices in the work",
        labels=[f"{entry['model']}, {name}" for entry in both for name in _BARS],
        series=(
            Series("products", [entry[f"{name}_share"] for entry in both for name in _BARS]),
            Series("the rest", [1 - entry[f"{name}_share"] for entry in both for name in _BARS]),
        ),
        unit="share",
    )
    pairs = (("inference_share", note.INFERENCE_GEMM_SHARE), ("training_share", note.TRAINING_GEMM_SHARE))
    for name, published in pairs:
        ours = [entry for entry in found.values() if name in entry]
        yield from set_beside(ours, published, name, f"published-{name}", name.replace("_", " of "))


_BARS = ("inference", "training")
_KEYS = ("num_parameters", "seq_len")


def _share(work: pl.DataFrame, num_largest: int | None = None) -> float:
    """Of all work; with a number, only what products among so many names take, still of all."""
    from stepscope.analysis.kernels import top_kernels

    largest = top_kernels(work).head(num_largest or work.height)
    return float(sum(row["share"] for row in largest.iter_rows(named=True) if row["class"] == "gemm"))


def softmax(stored: Stored) -> Iterator[Any]:
    """Softmax against the two products of attention, in time and in FLOPs."""
    from stepscope.analysis.pass_work import MATMUL, SOFTMAX, attention_parts, pass_work

    records = []
    for recorded in stored.recordings("recordings", mode="step", attention="naive"):
        parts = attention_parts(pass_work(recorded.source.case.linked))
        if not parts[MATMUL] or not parts[SOFTMAX]:
            continue
        axes = recorded.axes
        head_width = axes["d_model"] // axes["heads"]
        scores = axes["layers"] * axes["batch"] * axes["heads"] * axes["seq_len"] ** 2
        figures: dict[str, Any] = {f"{name.replace(' ', '_')}_ns": ns for name, ns in parts.items()}
        figures |= {"softmax_flops": SOFTMAX_FLOPS * scores, "matmul_flops": 4 * head_width * scores}
        figures |= {"time_ratio": parts[SOFTMAX] / parts[MATMUL], "flops_ratio": SOFTMAX_FLOPS / (4 * head_width)}
        records.append({**axes, "model": model_of(axes), **figures})
    if not records:
        raise CannotCheck("no traced step has attention written out")
    sentences = [
        f"In the forward of {r['model']} in {r['dtype']} softmax takes {said('softmax_ns', r['softmax_ns'])} and the "
        f"two products of attention {said('matmul_ns', r['matmul_ns'])}: {r['time_ratio']:.2f} times their time for "
        f"{r['flops_ratio']:.3f} times their FLOPs ({said('softmax_flops', r['softmax_flops'])} against "
        f"{said('matmul_flops', r['matmul_flops'])}), {r['time_ratio'] / r['flops_ratio']:.1f} times as much a FLOP."
        for r in records
    ]
    yield Text(" ".join(sentences))
    names = ("matmul_ns", "softmax_ns", "scale_and_mask_ns", "layout_copies_ns", "time_ratio", "flops_ratio")
    yield table("softmax", "Inside attention, forward", records, "preset", "seq_len", "dtype", *names)
    in_fp32 = [r for r in records if r["dtype"] == FP32]
    yield from set_beside(
        in_fp32, note.SOFTMAX_PER_MATMUL, "time_ratio", "published-softmax", "softmax time ÷ product time"
    )
