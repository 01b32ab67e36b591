"""HYDRA, recursive blocks with routing: where a step goes, and what the note about it got wrong.

Repeats the notes on profiling "HYDRA 100M". There, misspelled keywords made another model (62 M parameters), routing
was compared between two sizes with the routing off, parents were counted with their children, a cold start passed for
a slow layer, and what copies cost was concluded, not measured.
"""

import statistics
from typing import Any

from stepscope.analysis.comparison.sweeps import OK
from stepscope.errors import Unavailable
from stepscope.studies import BarsOf, Recordings, Study, Sweep, TableOf
from stepscope.studies.figures import BUSY, PEAK, TIME, against, busy_ns, is_host_bound, published, said, span, speeds
from stepscope.studies.hydra.recorded import NOTE, bottlenecks, copies, data, memory, model, sizes, step
from stepscope.studies.stored import Rows, Stored
from stepscope.studies.study import REPORT, Records, Tables, question, table_of

WINDOWS = ("--warmup", "3", "--clean", "10", "--trace", "1")
TINY = {"preset": "tiny", "batch": 1, "seq_len": 32}
QUICK = {**TINY, "steps": 3, "warmup": 1}
NOTED = {"preset": "100m", "batch": 4, "seq_len": 1024, "dtype": "autocast_bf16"}
"""4,096 tokens per step: the note's step time times its tokens/s."""
LONG = {"preset": "100m", "batch": 4, "seq_len": 4096, "dtype": "autocast_bf16"}
MICRO = {"batch": 4, "seq_len": 1024, "dtype": "bf16"}
LOSSES = {"loss": ["full", "chunked", "fused"]}
CONVOLUTIONS = {"implementation": ["sliced", "contiguous", "padded"], "mode": "forward+backward"}
SHIFTS = {"implementation": ["cat", "pad", "roll", "copy", "gather"], "mode": "forward"}

MEASURES = (
    Recordings(
        "step", "hydra", "steps of the presets", options=WINDOWS,
        quick=[TINY, {"preset": "debug", "batch": 1, "seq_len": 32, "vocab": 1024}],
        full=[NOTED, {**LONG, "preset": ["100m", "500m", "1b"]}],
    ),
    Recordings(
        "text", "hydra", "the first two of them on a text, read in the training process", options=WINDOWS,
        quick=[TINY], full=[NOTED, LONG], loop=("--data", "text"),
    ),
    Recordings(
        "workers", "hydra", "the same, read by two workers", options=WINDOWS, quick=(), full=[NOTED, LONG],
        loop=("--data", "text", "--workers", "2"),
    ),
    Sweep(
        "losses", "hydra", "the three losses", quick={**QUICK, "vocab": 4096, "chunk_rows": 16, **LOSSES},
        full={**LONG, **LOSSES},
    ),
    Sweep(
        "routing", "hydra", "static and dynamic depth, one model",
        quick=[QUICK, {**QUICK, "routing": "dynamic", "dispatch": ["gather", "mask"]}],
        full=[
            {**LONG, "preset": ["100m", "500m"], "routing": ["static", "dynamic"]},
            {**LONG, "routing": "dynamic", "dispatch": "mask"},
            {**LONG, "capacity": 0.5},
            {**LONG, "compile": "reduce-overhead"},
        ],
    ),
    Sweep(
        "contiguity", "contiguity", "convolutions on a slice, a contiguous copy, a padded one",
        quick={**QUICK, **CONVOLUTIONS}, full={**MICRO, **CONVOLUTIONS},
    ),
    Sweep(
        "value_shift", "value_shift", "half of the value from the token before, five ways",
        quick={**QUICK, **SHIFTS}, full={**MICRO, **SHIFTS},
    ),
    Sweep(
        "first_call", "hydra", "every layer in the first call of a process and later", layers=True, quick=[QUICK],
        full=[NOTED],
    ),
)  # fmt: skip

ALONE = f"implementation mode {TIME} time_p10_ns time_p90_ns speedup num_kernels {BUSY} {PEAK}"
LOSS_TABLE = TableOf(
    "losses", "The loss, three ways", "losses",
    f"knob_loss {TIME} tokens_per_s {PEAK} before_backward_bytes loss speedup",
)  # fmt: skip


@question("What does the loss cost?", BarsOf("losses", "Peak by loss", LOSS_TABLE, "knob_loss", PEAK), LOSS_TABLE)
def losses(tables: Tables) -> str:
    full = tables["losses"].one(knob_loss="full")
    told = speeds(tables["losses"], "", lambda r, b: f" with {said('share', r[PEAK] / b[PEAK])} of its peak",
                  knob_loss="full")  # fmt: skip
    return f"{said(TIME, full[TIME])} per step and a peak of {said(PEAK, full[PEAK])} with full logits; {told}."


def _sliced(stored: Stored) -> dict[str, float]:
    """Return how long a contiguous copy first takes beside a slice: GPU work if both are host-bound."""
    base, copied = (stored.rows("contiguity").one(implementation=name) for name in ("sliced", "contiguous"))
    is_bound = is_host_bound(base) and is_host_bound(copied)
    return {"contiguous first": busy_ns(copied) / busy_ns(base) if is_bound else copied[TIME] / base[TIME]}


@question(
    "What are contiguous copies and the value shift worth alone?",
    TableOf("contiguity", "Convolutions on a slice", "contiguity", ALONE),
    TableOf("value_shift", "The value shift, five ways", "value_shift", ALONE),
    published("published-times_sliced", NOTE, _sliced, {"contiguous first": 1.056}, "what", "times_sliced"),
    published("published-call_ns", NOTE, lambda s: {"value shift": s.rows("value_shift").ok.least(TIME)[TIME]},
              {"value shift": 20_000.0}, "what", "call_ns"),
    claim="A contiguous copy first is 1.056 times slower; a value shift takes 20 µs.",
)  # fmt: skip
def micro(tables: Tables) -> str:
    convs, shifts = tables["contiguity"].ok.needed(), tables["value_shift"].ok.needed()
    best, worst, work = shifts.least(TIME), shifts.most(TIME), ""
    if all(map(is_host_bound, [*convs, *shifts])):
        busy = [span("_ns", [busy_ns(row) for row in rows]) for rows in (convs, shifts)]
        work = f"; the GPU works {busy[0]} per convolution and {busy[1]} per shift"
    ends = " to ".join(f"{said(TIME, row[TIME])} ({row['implementation']})" for row in (best, worst))
    return f"For the convolutions, {speeds(convs, implementation='sliced')}; the value shift takes {ends}{work}."


@table_of(
    "routing", "Routing at equal topology",
    f"preset routing dispatch capacity compile loss executed_share step_flops {TIME} tokens_per_s mfu_share "
    f"num_kernels {PEAK} peak_reserved_bytes {BUSY} time_p10_ns time_p90_ns num_parameters",
)  # fmt: skip
def routing_rows(stored: Stored) -> Records:
    rows = stored.rows("routing").needed()
    for preset in rows.values("preset"):
        if len(rows.ok.where(preset=preset).values("num_parameters")) > 1:
            raise Unavailable(f"{preset}: the variants differ in the number of parameters")
    facts = {"executed_share": "fact_executed_fraction", "step_flops": "flops_counted"}
    return [row | {name: row.get(fact) for name, fact in facts.items()} for row in rows]


def _dynamic(rows: Rows) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return (dynamic row, static row) of each preset, eager and at full capacity."""
    return rows.where(compile="off", capacity=1.0, dispatch="gather").beside(("preset",), routing="static")


@question(
    "What does dynamic routing save?", routing_rows,
    published("published-times_static", f"{NOTE}; two sizes, with routing switched off",
              lambda s: {row["routing"]: row[TIME] / base[TIME]
                         for row, base in _dynamic(s.rows("routing").where(preset="100m"))},
              {"dynamic": 0.79}, "routing", "times_static"),
    claim="Dynamic routing takes 0.79 times as long: two models of different sizes, with routing off.",
)  # fmt: skip
def routing(tables: Tables) -> str:
    rows, told = tables["routing"], []
    for row, static in _dynamic(rows):
        text = f"{row['preset']} with dynamic depth executes {said('share', row['executed_share'])} of the MLP's rows"
        if row.get("step_flops") and static.get("step_flops"):
            text += f" and {said('share', row['step_flops'] / static['step_flops'])} of the FLOPs"
        text += f", and is {against(row, static, 'static')}"
        if is_host_bound(row) and static.get(BUSY):
            text += f" with {said('_ns', busy_ns(row))} instead of {said('_ns', busy_ns(static))} of GPU work"
        told.append(text)
    for row, eager in rows.where(routing="static", capacity=1.0).beside(("preset",), compile="off"):
        told.append(f"{row['preset']} compiled ({row['compile']}) is {against(row, eager, 'eager')}")
    if not told:
        raise Unavailable("no preset was measured with static and dynamic depth")
    return f"{'; '.join(told)}."


@table_of(
    "first_call", "First call and later ones, by layer",
    note="forward of each layer, synchronized; warm: the median of later passes",
)  # fmt: skip
def first_calls(stored: Stored) -> Records:
    row = next((row for row in stored.sweep("first_call").rows if row["status"] == OK and row.get("layers")), None)
    if row is None:
        raise Unavailable("no first call was timed layer by layer")
    first, warm = row["layers"]["first_call_ns"], row["layers"]["warm_ns"]
    return [{"layer": n, "first_call_ns": ns, "warm_ns": warm[n], "ratio": ns / warm[n]} for n, ns in first.items()]


def _beside_others(rows: Rows, name: str) -> tuple[dict[str, Any], float]:
    """Return the first block, and how long it takes beside the median of the others."""
    blocks = [row for row in rows if row["layer"].startswith("blocks.")]
    if len(blocks) < 2:
        raise Unavailable("the model does not have two layers to compare")
    return blocks[0], blocks[0][name] / statistics.median(row[name] for row in blocks[1:])


@question(
    "What does the first call cost, by layer?",
    BarsOf("first_call", "First call ÷ warm call, by layer", first_calls, "layer", "ratio"), first_calls,
    published("published-beside_others", NOTE,
              lambda s: {"blocks.0": _beside_others(s.rows(first_calls), "first_call_ns")[1]}, {"blocks.0": 40.0},
              "layer", "beside_others"),
    claim="blocks.0 takes 40 times as long as the others, because of JIT warm-up.",
)  # fmt: skip
def first_call(tables: Tables) -> str:
    (block, cold), (_, warm) = (_beside_others(tables["first_call"], name) for name in ("first_call_ns", "warm_ns"))
    times = [said("_ns", block[name]) for name in ("first_call_ns", "warm_ns")]
    return (
        f"{block['layer']} takes {times[0]} in the first call of a process, {cold:.1f} times the median of the other "
        f"layers, and {times[1]} once warm, {warm:.2f} times theirs."
    )


STUDY = Study(
    name="hydra",
    title="HYDRA: where a step of recursive blocks goes",
    about="Step shares, memory by layer, losses, bottlenecks, copies, routing, sizes, data and first calls.",
    measures=MEASURES,
    questions=(step, model, memory, losses, bottlenecks, copies, micro, routing, sizes, data, first_call),
    files={
        "step_shares.csv": "step_shares", "step_shares.png": "step_shares", "memory_by_layer.csv": "memory_by_layer",
        "memory_by_stage.csv": "memory_stages", "memory_timeline.png": "memory_timeline", "losses.csv": "losses",
        "top_bottlenecks.csv": "bottlenecks", "top_bottlenecks.png": "bottlenecks", "sizes.csv": "sizes",
        "copy_sources.csv": "copy_sources", "contiguity.json": "contiguity", "value_shift.json": "value_shift",
        "routing.csv": "routing", "data.csv": "data", "first_call.csv": "first_call", "first_call.png": "first_call",
        "profiling_report.md": REPORT,
    },
)  # fmt: skip
