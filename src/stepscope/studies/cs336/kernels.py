"""Questions of the cs336 study from traces and dtypes: kernels, products, softmax, precision."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from stepscope.analysis.time.step_times import PASSES
from stepscope.errors import Unavailable
from stepscope.formatting import plural
from stepscope.studies.cs336.passes import beside, figure, gpu_work_ns, model_of, plain, work_of
from stepscope.studies.cs336.points import BOTH, FP32
from stepscope.studies.figures import TIME, listed, ratios, said, span
from stepscope.studies.stored import Stored
from stepscope.studies.study import LinesOf, Record, Records, TableOf, Tables, question, table_of

if TYPE_CHECKING:
    import polars as pl

NUM_LARGEST = 10  # how many kernels the note looked at
SOFTMAX_FLOPS = 5  # per score: maximum, difference, exponential, sum, quotient


def _works(stored: Stored) -> "Iterator[tuple[dict[str, Any], pl.DataFrame]]":
    """Yield every traced inference and step with its work. The forward of inference is a pass of its own."""
    import polars as pl

    for record in stored.rows(plain).ok.where(mode=("inference", "step"), dtype=BOTH):
        work = work_of(stored, record)
        if record["mode"] == "inference":
            work = work.filter(pl.col("phase") == "forward").with_columns(pl.lit("inference").alias("phase"))
        yield record, work.filter(pl.col("phase") != "other")


def _every_kernel(stored: Stored) -> Records:
    """Return every kernel (on a CPU: op) of every pass, longest first."""
    import polars as pl

    from stepscope.analysis.kernels.kernels import top_kernels
    from stepscope.document.kernel_names import short_name

    what = "op" if stored.facts.get("device") == "cpu" else "kernel"
    for record, work in _works(stored):
        for name in ("inference", "forward", "backward", "optimizer"):
            rows = top_kernels(work.filter(pl.col("phase") == name)).iter_rows(named=True)
            for rank, row in enumerate(rows):
                figures = {key: row[key] for key in ("class", "num_calls", "total_ns", "share")}
                yield {**record, "pass": name, "rank": rank, what: short_name(row["name"]), **figures}


@table_of(
    "kernels-by-pass", "The three longest kernels of each pass",
    "preset seq_len dtype pass kernel op class num_calls total_ns share",
    num_shown=60, if_empty="no pass was traced",
)  # fmt: skip
def longest(stored: Stored) -> Records:
    return [row for row in stored.rows(_every_kernel) if row["rank"] < 3]


@table_of(
    "non-gemm", "The longest kernel of each pass that is not a matrix product",
    "preset seq_len dtype pass kernel op num_calls total_ns share",
    num_shown=60, if_empty="no pass was traced",
)  # fmt: skip
def non_gemm(stored: Stored) -> Records:
    first: dict[Any, dict[str, Any]] = {}
    for row in stored.rows(_every_kernel):
        if row["class"] != "gemm":
            first.setdefault((row["hash"], row["pass"]), row)
    return first.values()


@question(
    "Which kernels take the time of each pass?",
    longest, non_gemm,
    *(beside(f"longest-{name}", f"longest kernel of {name}", longest, "share", f"{name}_top_share", dtype=FP32,
             **{"pass": name}) for name in ("inference", "forward", "backward")),
    beside("longest-other", "longest kernel of inference that is not a product", non_gemm, "share",
           "other_top_share", dtype=FP32, **{"pass": "inference"}),
)  # fmt: skip
def kernels(tables: Tables) -> str:
    rows = tables["kernels-by-pass"].where(dtype=FP32)
    trained = rows.where(**{"pass": "backward"}) if "backward" in rows.values("pass") else rows
    last = trained[-1]
    of = rows.where(preset=last["preset"], seq_len=last["seq_len"])
    what = "kernel" if "kernel" in last else "op"
    first = [of.where(**{"pass": name})[0] for name in of.values("pass")]
    told = listed(f"{said('share', row['share'])} of the {row['pass']} is {row[what]}" for row in first)
    return f"In {model_of(last)}, {told}."


@table_of(
    "gemm-share", "Matrix products in the work",
    "model dtype inference_share forward_share backward_share training_share step_share ten_largest_share "
    "nvjet_share", if_empty="no model was traced",
)  # fmt: skip
def gemm_shares(stored: Stored) -> Records:
    import polars as pl

    found: dict[tuple[str, str], dict[str, Any]] = {}
    for record, work in _works(stored):
        entry = found.setdefault((record["model"], record["dtype"]), {**record})
        if record["mode"] == "inference":
            entry["inference_share"] = _gemm_share(work)
            continue
        trained = work.filter(pl.col("phase").is_in(["forward", "backward"]))
        for phase in ("forward", "backward"):
            entry[f"{phase}_share"] = _gemm_share(trained.filter(pl.col("phase") == phase))
        entry |= {"training_share": _gemm_share(trained), "step_share": _gemm_share(work)}
        entry["ten_largest_share"] = _gemm_share(work, NUM_LARGEST)
        if stored.facts.get("device") != "cpu":
            nvjet = int(trained.filter(pl.col("name").str.starts_with("nvjet"))["duration_ns"].sum())
            entry["nvjet_share"] = nvjet / max(1, int(trained["duration_ns"].sum()))
    return found.values()


def _gemm_share(work: "pl.DataFrame", num_largest: int | None = None) -> float:
    """Return the share of products in all work; with a number, only of products among that many names."""
    from stepscope.analysis.kernels.kernels import top_kernels

    largest = top_kernels(work).head(num_largest or work.height)
    return float(sum(row["share"] for row in largest.iter_rows(named=True) if row["class"] == "gemm"))


def _charted(table: TableOf) -> Any:
    """Return a function of Stored that returns the fp32 rows of a table with preset and length from the model."""

    def rows(stored: Stored) -> Records:
        named = [(row, *row["model"].split()) for row in stored.rows(table).where(dtype=FP32)]
        return [{**row, "preset": preset, "seq_len": int(length)} for row, preset, length in named]

    return rows


@question(
    "How much of the work is products of matrices?",
    *(LinesOf(id, f"Products in {name}, fp32", _charted(gemm_shares), "seq_len", f"{name}_share", "preset")
      for name, id in (("inference", "gemm-share-inference"), ("training", "gemm-share"))), gemm_shares,
    *(beside(id, f"share of products {what}", gemm_shares, name, column, dtype=FP32)
      for id, what, name, column in (
        ("inference_share", "in inference", "inference_share", "inference_gemm_share"),
        ("training_share", "in training", "training_share", "training_gemm_share"),
        ("ten-largest", "among the ten largest kernels", "ten_largest_share", "training_gemm_share"))),
    claim="Counts products among the ten largest kernels, and nvjet kernels not as products.",
)  # fmt: skip
def products(tables: Tables) -> str:
    rows = tables["gemm-share"].where(dtype=FP32)
    both = [row for row in rows if row.get("inference_share") is not None and row.get("training_share") is not None]
    if not both:
        raise Unavailable("no model has both an inference and a step that were traced")
    last = both[-1]
    lower = sum(row["training_share"] < row["inference_share"] for row in both)
    missed = max(row["step_share"] - row["ten_largest_share"] for row in both)
    return (
        f"{said('share', last['inference_share'])} of the work of inference of {last['model']} and "
        f"{said('share', last['training_share'])} of forward and backward are matrix products; training has the "
        f"smaller share in {lower} of {len(both)} points, and ten kernels only miss up to {said('share', missed)}."
    )


@table_of(
    "softmax", "Inside attention, forward",
    "model dtype matmul_ns softmax_ns scale_and_mask_ns copies_ns time_ratio wide_ratio flops_ratio",
    note="time_ratio: softmax ÷ matmul; wide_ratio: softmax ÷ (matmul, scale, mask and copies)",
    if_empty="no traced step has attention written out",
)  # fmt: skip
def in_attention(stored: Stored) -> Records:
    from stepscope.analysis.time.pass_work import MATMUL, SOFTMAX, attention_parts

    for row in stored.rows(plain).ok.where(mode="step", dtype=BOTH):
        parts = attention_parts(work_of(stored, row))
        if parts[MATMUL] and parts[SOFTMAX]:
            figures: dict[str, Any] = {f"{name.replace(' ', '_')}_ns": ns for name, ns in parts.items()}
            rest = sum(parts.values()) - parts[SOFTMAX]
            figures |= {"time_ratio": parts[SOFTMAX] / parts[MATMUL], "wide_ratio": parts[SOFTMAX] / rest}
            yield {**row, **figures, "flops_ratio": SOFTMAX_FLOPS / (4 * (row["d_model"] // row["heads"]))}


def _attention_speedup(stored: Stored) -> dict[str, float]:
    wide, narrow = (figure(in_attention, "matmul_ns", dtype=dtype)(stored) for dtype in BOTH)
    return {model: ns / narrow[model] for model, ns in wide.items() if model in narrow}


@question(
    "What does softmax cost beside the products of attention?",
    LinesOf("softmax-ratio", "Softmax ÷ products of attention, fp32", _charted(in_attention), "seq_len", "time_ratio",
            "preset"), in_attention,
    beside("softmax", "softmax time ÷ product time", in_attention, "time_ratio", "softmax_per_matmul", dtype=FP32),
    beside("bf16-attention", "products of attention, fp32 ÷ bf16 autocast; the note's are of the scores",
           _attention_speedup, "speedup", "bf16_attention"),
    beside("softmax-wide", "softmax time ÷ the rest of attention", in_attention, "wide_ratio", "softmax_per_matmul",
           dtype=FP32),
    claim="Its ranges seem to count scaling, masking and copies as products.",
)  # fmt: skip
def softmax(tables: Tables) -> str:
    rows = tables["softmax"]
    groups = {dtype: rows.where(dtype=dtype) for dtype in rows.values("dtype")}
    told = listed(
        f"{ratios(row['time_ratio'] for row in of)} times as long in {dtype} ({plural(len(of), 'point')})"
        for dtype, of in groups.items()
    )
    flops = span("ratio", [row["flops_ratio"] for row in rows])
    return f"Softmax takes, beside the two products of attention, {told}, for {flops} times their FLOPs."


@table_of(
    "mixed-precision", "fp32 against bf16 autocast",
    num_shown=48, if_empty="no model was trained in both precisions",
    note="steps run freely, their parts are synchronized; work: how long the GPU works in a traced pass",
)  # fmt: skip
def in_both(stored: Stored) -> Records:
    steps = stored.rows(plain).ok.where(mode="step")
    for narrow, wide in steps.where(dtype=BOTH).beside(("model",), dtype=FP32):
        works = gpu_work_ns(stored, wide), gpu_work_ns(stored, narrow)
        for name, phases in PASSES.items():
            times = [_pass_ns(row, name) for row in (wide, narrow)]
            row = {"model": wide["model"], "pass": name, "fp32_median_ns": times[0], "autocast_median_ns": times[1]}
            row["speedup"] = times[0] / times[1]
            if all(works):
                work = [sum(each[phase] for phase in phases) for each in works]
                row |= {"fp32_work_ns": work[0], "autocast_work_ns": work[1], "work_speedup": work[0] / work[1]}
            yield row


def _pass_ns(record: Record, name: str) -> float:
    if name == "step":
        return float(record[TIME])
    return sum(float(record[f"fact_{phase}_ms"]) * 1e6 for phase in PASSES[name])


@question(
    "Is bf16 slower?",
    in_both,
    *(beside(f"bf16-{name}", f"speed-up of {name}", in_both, "speedup", f"bf16_{name}", **{"pass": name})
      for name in ("forward", "forward+backward")),
    claim="bf16 autocast is slower in 8 of 8 passes: means of host time, without synchronization.",
)  # fmt: skip
def mixed_precision(tables: Tables) -> str:
    rows = tables["mixed-precision"]
    steps = rows.where(**{"pass": "step"})
    works = [row for row in rows if row.get("work_speedup") is not None]
    clock = f"a step is {ratios(row['speedup'] for row in steps)} times as fast by the clock"
    slower = f"slower in {sum(row['speedup'] < 1 for row in rows)} of {len(rows)} passes"
    if not works:
        return f"Under bf16 autocast {clock} and {slower}."
    work = ratios(row["work_speedup"] for row in works if row["pass"] == "step")
    bad = sum(row["work_speedup"] < 1 for row in works)
    return (
        f"The GPU's work of a step is {work} times as fast under bf16 autocast, and slower in {bad} of {len(works)} "
        f"passes; {clock} and {slower}, because small models are host-bound."
    )


@table_of(
    "running-sums", "0.01 added one by one",
    "value_dtype accumulate_dtype result relative_error",
    note="the exact sum is 10",
)  # fmt: skip
def running_sums(stored: Stored) -> Records:
    rows = stored.rows("precision").ok.where(experiment="accumulate").needed()
    return [{**row, **{name: row[f"fact_{name}"] for name in ("result", "relative_error")}} for row in rows]


@table_of("autocast-dtypes", "What each kind of op returns under autocast", is_optional=True)
def autocast_dtypes(stored: Stored) -> Records:
    for row in stored.rows("precision").ok.where(experiment="audit"):
        kinds = {}
        for kind in ("linear", "norm", "residual", "softmax", "loss"):
            prefix = f"fact_{kind}_"
            kinds[kind] = ", ".join(name.removeprefix(prefix) for name in row if name.startswith(prefix)) or None
        yield {"autocast": row["value_dtype"], **kinds}


@question("How exact are sums in narrow dtypes, and where does autocast use them?", running_sums, autocast_dtypes)
def exactness(tables: Tables) -> str:
    rows = tables["running-sums"]
    told = listed(f"{row['result']:.4f} in {row['accumulate_dtype']} from {row['value_dtype']}" for row in rows)
    return f"{rows[0]['terms']} times 0.01 adds up to {told}."
