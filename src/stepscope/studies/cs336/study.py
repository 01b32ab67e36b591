"""The plain transformer in its sizes: where time and memory go, measured as the CS336 systems report meant to.

That report averaged over the first call, called a mean of host time a median, kept the graph in inference, looked for
products among ten kernels, read reserved segments as peaks, and attributed autocast's extra memory to einsum.
"""

from contextlib import suppress
from typing import Any

from stepscope.errors import Unavailable
from stepscope.formatting import plural
from stepscope.studies.cs336.kernels import exactness, kernels, mixed_precision, products, softmax
from stepscope.studies.cs336.memory import alive, autocast, peaks
from stepscope.studies.cs336.note import SQUARE_TENSORS
from stepscope.studies.cs336.passes import durations, model_of, warm_up
from stepscope.studies.cs336.points import AUTOCAST, FP32, MEASURES
from stepscope.studies.figures import PEAK, TIME, compared, listed, said, span
from stepscope.studies.lengths import grows
from stepscope.studies.stored import Rows, Stored
from stepscope.studies.study import REPORT, LinesOf, Record, Records, Study, Tables, question, table_of

HELD, THEORY = "before_backward_bytes", "by_formula_bytes"
ITEM_BYTES = {"fp32": 4, "bf16": 2}
IMPLEMENTATIONS = ("naive", "builtin", "custom", "compiled", "efficient", "flash")


@table_of(
    "attention-grid", "Attention written out, fp32, causal",
    f"seq_len head_width forward_ns backward_ns {HELD} {THEORY}",
    num_shown=48,
)  # fmt: skip
def attention_grid(stored: Stored) -> Records:
    rows = stored.rows("attention").where(implementation="naive").needed()
    names = {f"{phase}_ns": f"fact_{phase}_ms" for phase in ("forward", "backward")}
    return [
        {**row, THEORY: row.get("fact_theory_bytes"), "width": f"width {row['head_width']}",
         **{name: None if row.get(fact) is None else row[fact] * 1e6 for name, fact in names.items()}}
        for row in rows
    ]  # fmt: skip


def _narrowest(rows: Rows) -> Rows:
    return rows.ok.needed().where(head_width=min(rows.ok.values("head_width")))


@table_of("attention-accounting", "Held when the backward begins, longest length")
def accounting(stored: Stored) -> Records:
    row = _narrowest(stored.rows(attention_grid)).most("seq_len")
    tensors = {name.removeprefix("fact_tensor_").removesuffix("_bytes"): value
               for name, value in row.items() if name.startswith("fact_tensor_")}  # fmt: skip
    sizes = {name: value for name, value in tensors.items() if name != "gradients"}
    sizes |= {"by formula, in all": row[THEORY], "measured": row[HELD]}
    return [
        {"tensor": n.replace("_", " "), "held_bytes": size, "share": size / row[HELD]} for n, size in sizes.items()
    ]


@question(
    "How does attention written out grow?",
    *(LinesOf(f"attention-{id}", f"{title} of attention by width", lambda s: s.rows(attention_grid).ok, "seq_len", y,
              "width")
      for id, title, y in (("forward", "Forward", "forward_ns"), ("backward", "Backward", "backward_ns"),
                           ("before-backward", "Memory before the backward", HELD))), attention_grid, accounting,
)  # fmt: skip
def grid(tables: Tables) -> str:
    of = _narrowest(tables["attention-grid"])
    last = of.most("seq_len")
    off = span("bytes", [abs(row[HELD] - row[THEORY]) for row in tables["attention-grid"].ok])
    failed = [row for row in tables["attention-grid"] if row["status"] == "oom"]
    rest = f"; {min(row['seq_len'] for row in failed)} tokens run out of memory" if failed else ""
    return (
        f"{said(HELD, last[HELD])} are held before the backward at {last['seq_len']} tokens and width "
        f"{last['head_width']}, {off} from the formula; the memory {grows(of, HELD)}{rest}."
    )


@table_of(
    "squares", "Tensors of length × length that attention keeps",
    f"implementation dtype {HELD} {THEORY} squares squares_in_the_note {TIME}",
)  # fmt: skip
def squares_kept(stored: Stored) -> Records:
    rows = stored.rows("attention").ok.where(implementation=IMPLEMENTATIONS)
    others = [row for row in rows if row["implementation"] != "naive"]
    if not others:
        raise Unavailable("only attention written out was measured")
    width, length = others[0]["head_width"], max(row["seq_len"] for row in others)
    for name in IMPLEMENTATIONS:
        for row in rows.where(implementation=name, head_width=width, seq_len=length):
            head = row["batch"] * row["heads"] * length * ITEM_BYTES[row["dtype"]]
            num = (row[HELD] - 5 * head * width) / (head * length)
            noted = {"squares": num, "squares_in_the_note": SQUARE_TENSORS.get(name)}
            yield {**row, THEORY: row.get("fact_theory_bytes"), **noted}


def _held(stored: Stored) -> Rows:
    rows = stored.rows("attention").ok.where(implementation=IMPLEMENTATIONS)
    return rows.where(head_width=stored.rows(squares_kept)[0]["head_width"])


@question(
    "How many tensors of length × length does attention keep?",
    LinesOf("attention-held", "Memory before the backward", _held, "seq_len", HELD, "implementation"),
    squares_kept,
    claim="Expects 3 written out, 2 with torch.softmax, 1 with its own backward, 0 with flash.",
)  # fmt: skip
def squares(tables: Tables) -> str:
    rows = tables["squares"]
    told = listed(f"{row['squares']:.2f} with {row['implementation']} ({row['dtype']})" for row in rows)
    return f"At {rows[0]['seq_len']} tokens attention keeps per head this many tensors of length × length: {told}."


@table_of(
    "compiled", "Eager against compiled",
    "what mode dtype eager_ns compiled_ns speedup compiling_ns eager_peak_bytes compiled_peak_bytes",
    note="compiling: for attention its first call; torch's cache on disk saves compiling",
    if_empty="nothing was measured both eager and compiled",
)  # fmt: skip
def pairs(stored: Stored) -> Records:
    attention = stored.rows("attention").where(implementation=("naive", "compiled"))
    for fused, eager in attention.beside(("seq_len", "head_width", "mode", "dtype"), implementation="naive"):
        yield _pair(f"attention {fused['seq_len']} × {fused['head_width']}", eager, fused, "first_call_ns")
    with suppress(Unavailable):  # --quick leaves it out
        same = ("preset", "seq_len", "layers", "mode", "dtype")
        for fused, eager in stored.rows("compiled").beside(same, compile="off"):
            what = f"{model_of(fused)} with {plural(fused['layers'], 'layer')}"
            yield _pair(what, eager, fused, "compile_ns")


def _pair(what: str, eager: Record, fused: Record, compiling: str) -> dict[str, Any]:
    return {"what": what, "mode": eager["mode"], "dtype": eager["dtype"], "eager_ns": eager[TIME],
            "compiled_ns": fused[TIME], "speedup": eager[TIME] / fused[TIME], "compiling_ns": fused[compiling],
            "eager_peak_bytes": eager[PEAK], "compiled_peak_bytes": fused[PEAK]}  # fmt: skip


@question("What does the compiler change?", pairs)
def compiled(tables: Tables) -> str:
    told = []
    for row in tables["compiled"]:
        saved = row["eager_ns"] - row["compiled_ns"]
        after = f"pays after {row['compiling_ns'] / saved:,.0f} passes" if saved > 0 else "never pays"
        told.append(f"{row['what']} compiled is {compared(row['compiled_ns'], row['eager_ns'], 'eager')} and {after}")
    return f"{'; '.join(told)}."


STUDY = Study(
    name="cs336",
    title="Time and memory of a plain transformer",
    about="Passes, warm-up, kernels, products, softmax, mixed precision, memory, attention, the compiler: by size.",
    measures=MEASURES,
    questions=(durations, warm_up, kernels, products, softmax, mixed_precision, exactness, peaks, alive, autocast,
               grid, squares, compiled),
    files={
        "benchmark_results.md": "durations", "benchmark_results.csv": "durations", "warm_up.csv": "warm-up",
        "kernels_by_pass.csv": "kernels-by-pass", "gemm_share.csv": "gemm-share", "gemm_share.png": "gemm-share",
        "softmax.csv": "softmax", "mixed_precision.csv": "mixed-precision", "peak_memory.csv": "peaks",
        "memory_inference.png": f"memory-inference-{FP32}", "memory_step.png": f"memory-step-{FP32}",
        "memory_step_autocast.png": f"memory-step-{AUTOCAST}", "largest_allocations.csv": f"largest-{FP32}",
        "largest_of_the_forward.csv": f"largest-forward-{FP32}", "attention_grid.csv": "attention-grid",
        "attention_forward.png": "attention-forward", "attention_memory.png": "attention-before-backward",
        "compiled.csv": "compiled", "cs336_report.md": REPORT,
    },
)  # fmt: skip
