"""Dense against sparse attention in a GPT: what a sparse pattern saves, and where it saves nothing.

Repeats the profiling suite of "Nano XYZ". That suite reported density as sparsity, compared causal sparse attention
with non-causal dense attention in models of different sizes, and took one call inside a profiler for the latency.
"""

from statistics import median

from stepscope.formatting import heading
from stepscope.studies.figures import BUSY, PEAK, TIME, against, listed, loss_said, ratios, said, speeds, told_apart
from stepscope.studies.lengths import FORMULA, growth_records
from stepscope.studies.stored import Rows, Stored
from stepscope.studies.study import REPORT, LinesOf, Records, Study, Sweep, TableOf, Tables, question, table_of

DENSE, MASK, FLEX = "dense", "sparse_mask", "sparse_flex"
MODES = ["inference", "forward+backward"]
SAME = "preset part seq_len batch mode"
PATTERN = {
    "sparsity_share": "fact_sparsity", "density_share": "fact_density", "causal_density_share": "fact_causal_density",
    "needed_flops": "fact_attention_formula_flops", "executed_flops": "fact_attention_executed_flops",
}  # fmt: skip
ALONE_MODES = {"inference": "inference", "step": "forward+backward"}
"""Mode of a model → the mode of attention alone that is a part of it."""
ALONE_KNOBS = ("preset", "heads", "head_width", "seq_len", "dtype", "window", "global_tokens", "random_keys")

ALONE = {"preset": "decoder_medium", "part": "attention", "dtype": "bf16", "batch": 4}
TINY = {"preset": "tiny", "steps": 5, "warmup": 1}
BF16 = {"dtype": "bf16", "mode": ["inference", "step"]}
ATTENTION = Sweep(
    "attention", "nano", "attention of one layer alone, by length",
    quick=[
        {**TINY, "part": "attention", "attention": [DENSE, MASK], "seq_len": [64, 128, 256], "mode": MODES},
        # FlexAttention has no block-skipping kernel on a CPU: the row is unproven and not ranked.
        {**TINY, "part": "attention", "attention": FLEX, "seq_len": 128, "mode": "inference"},
    ],
    full=[
        {**ALONE, "attention": [DENSE, MASK, FLEX], "seq_len": [1024, 2048, 4096, 16384], "mode": MODES},
        {**ALONE, "attention": FLEX, "random": "scattered", "seq_len": 4096, "mode": "forward+backward"},
    ],
)  # fmt: skip
MODELS = Sweep(
    "models", "nano", "whole models",
    quick=[{**TINY, "seq_len": [64, 128], "attention": [DENSE, MASK], "mode": ["inference", "step"]}],
    full=[
        {**BF16, "preset": ["decoder_tiny", "decoder_small", "decoder_medium"], "seq_len": [1024, 4096],
         "attention": DENSE},
        {**BF16, "preset": "decoder_medium", "seq_len": [2048, 16384], "attention": DENSE},
        {**BF16, "preset": "decoder_medium", "seq_len": [4096, 16384], "attention": FLEX},
    ],
)  # fmt: skip


@table_of("attention", "Attention alone", f"mode attention random seq_len batch {TIME} {BUSY} {PEAK} speedup loss")
def attention(stored: Stored) -> Records:
    rows = stored.rows("attention").needed()
    return [{**r, "path": f"{r['attention']}{' scattered' * (r['random'] == 'scattered')}"} for r in rows]


def _by_mode(id: str, title: str, y: str) -> list[LinesOf]:
    return [LinesOf(f"{id}-{m}", f"{title}, {m}", attention, "seq_len", y, "path", {"mode": m}) for m in MODES]


@question(
    "Is sparse attention faster, and from which length?", *_by_mode("latency", "Attention", TIME), attention,
    claim="Compares single calls of models of different sizes.",
)  # fmt: skip
def faster(tables: Tables) -> str:
    rows, told = tables["attention"].where(random="blocks"), []
    for name in dict.fromkeys(row["attention"] for row, _ in rows.beside(SAME.split(), attention=DENSE)):
        of = rows.where(attention=(name, DENSE))
        last = of.where(seq_len=max(of.ok.where(attention=name).values("seq_len")))
        speed = speeds(last, SAME, lambda row, _: f" in {row['mode']}", attention=DENSE)
        told.append(f"at {last[0]['seq_len']} tokens {speed}, and it wins {_wins(of)}")
    return f"{heading('; '.join(told))}."


def _wins(rows: Rows) -> str:
    """Return at which lengths the sparse rows are faster beyond noise, by mode."""
    where: dict[str, list[str]] = {}
    for mode in rows.values("mode"):
        pairs = rows.where(mode=mode).beside(SAME.split(), attention=DENSE)
        won = {row["seq_len"]: row[TIME] < dense[TIME] and told_apart(row, dense) for row, dense in pairs}
        lengths = sorted(length for length, is_won in won.items() if is_won)
        lasts = lengths and all(won[length] for length in won if length >= lengths[0])
        at = (
            f"from {lengths[0]} tokens on" if lasts else f"at {listed(lengths)} tokens only" if lengths else "nowhere"
        )
        where.setdefault(at, []).append(mode)
    return listed(where) if len(where) == 1 else listed(f"{at} in {listed(of)}" for at, of in where.items())


@table_of("sparsity", "Pattern and work", f"seq_len attention random {' '.join(PATTERN)}")
def sparsity(stored: Stored) -> Records:
    unique = {(r["seq_len"], r["attention"], r["random"]): r for r in stored.rows(attention).ok}
    return [{**r, **{name: r.get(fact) for name, fact in PATTERN.items()}} for r in unique.values()]


@question(
    "How sparse is it, and how much of it is skipped?",
    LinesOf("executed", "Executed FLOPs", sparsity, "seq_len", "executed_flops", "path"), sparsity,
    claim="Prints the density as the sparsity.",
)  # fmt: skip
def skipped(tables: Tables) -> str:
    rows = tables["sparsity"].where(attention=(MASK, FLEX))
    longest = {row["path"]: row for row in sorted(rows.needed(), key=lambda row: row["seq_len"])}
    times = (
        f"{r['executed_flops'] / r['needed_flops']:.2f} times by {p} ({r['seq_len']})" for p, r in longest.items()
    )
    at = rows.most("seq_len")
    return (
        f"The pattern skips {said('share', at['sparsity_share'])} of all pairs at {at['seq_len']} tokens (density "
        f"{said('share', at['density_share'])}), and its FLOPs are executed {listed(times)}."
    )


@table_of("memory-growth", "Peak memory over the length", note=FORMULA)
def growth(stored: Stored) -> Records:
    blocks = stored.rows("attention").ok.where(random="blocks").needed()
    names = [(mode, name) for mode in blocks.values("mode") for name in blocks.values("attention")]
    groups = {(f"{name} attention", mode): blocks.where(attention=name, mode=mode) for mode, name in names}
    whole = stored.rows("models").ok.where(attention=DENSE, mode="step")
    groups |= {(preset, "step"): whole.where(preset=preset) for preset in whole.values("preset")}
    return growth_records(groups, PEAK)


@question("Does memory grow linearly or quadratically?", *_by_mode("memory", "Peak of attention", PEAK), growth)
def memory(tables: Tables) -> str:
    rows = tables["memory-growth"]
    told = listed(f"{r['of']} {r['growth']}" for r in rows.where(variant=rows[0]["variant"]))
    return f"In {rows[0]['variant']}, the peak of {told}."


@table_of(
    "faster-models", "Models with sparse attention beside dense",
    f"preset seq_len batch mode attention {TIME} dense_ns speedup {BUSY} alone_would_save_ns",
    note="alone_would_save: what attention alone saves, times layers and batch",
)  # fmt: skip
def models_beside(stored: Stored) -> Records:
    for row, dense in stored.rows("models").where(random="blocks").beside(SAME.split(), attention=DENSE):
        same = {name: row[name] for name in ALONE_KNOBS} | {"mode": ALONE_MODES[row["mode"]]}
        alone = stored.rows("attention").where(**same, attention=(row["attention"], DENSE), random="blocks")
        for one, other in alone.beside(SAME.split(), attention=DENSE)[:1]:
            row["alone_would_save_ns"] = row["layers"] * row["batch"] / one["batch"] * (other[TIME] - one[TIME])
        figures = {"dense_ns": dense[TIME], "speedup": dense[TIME] / row[TIME]}
        yield {**row, **figures, "verdict": against(row, dense, DENSE)}


@question("Is sparse attention faster in a whole model too?", models_beside)
def faster_models(tables: Tables) -> str:
    rows = tables["faster-models"].needed()
    last = rows.where(seq_len=max(rows.values("seq_len")))
    told = listed(f"{r['attention']} is {r['verdict']} in {r['mode']}" for r in last)
    return f"In {last[0]['preset']} at {last[0]['seq_len']} tokens, {told}."


@question(
    "What do the presets take?",
    *(LinesOf(f"models-{m}", f"Models, {m}", "models", "seq_len", TIME, "preset attention", {"mode": m})
      for m in ALONE_MODES),
    TableOf("models", "Whole models", "models",
            f"preset attention seq_len batch mode {TIME} {BUSY} tokens_per_s {PEAK} num_parameters loss"),
)  # fmt: skip
def presets(tables: Tables) -> str:
    rows, told = tables["models"].where(attention=DENSE), {}
    for step, run in rows.where(mode=("step", "inference")).beside(("preset", "seq_len"), mode="inference"):
        told[step["preset"]] = (
            f"{step['preset']} ({step['num_parameters']:,} parameters, {step['seq_len']} tokens) takes "
            f"{said(TIME, run[TIME])} for inference and {said(TIME, step[TIME])} per training step, with a peak of "
            f"{said(PEAK, step[PEAK])} and a loss of {loss_said(step)}"
        )
    return f"{'; '.join(told.values())}." if told else "No preset has both an inference and a training time."


@table_of(
    "profiled", "Clean calls, and one inside a profiler",
    f"mode path seq_len {TIME} traced_ns traced_more_ns traced_ratio first_call_ns",
)  # fmt: skip
def profiled(stored: Stored) -> Records:
    traced = {row["hash"]: row.get("traced_ns") for row in stored.sweep("attention").rows}
    pairs = [(row, ns) for row in stored.rows(attention).ok if (ns := traced.get(row["hash"]))]
    return [{**r, "traced_ns": ns, "traced_more_ns": ns - r[TIME], "traced_ratio": ns / r[TIME]} for r, ns in pairs]


@question(
    "Are dense and sparse comparable, and is one profiled call a latency?", profiled,
    claim="Dense attention is not causal, sparse is; latency is one call inside a profiler with stacks.",
)  # fmt: skip
def latency(tables: Tables) -> str:
    rows = tables["profiled"].needed()
    causal = rows.where(attention=DENSE).most("seq_len")["fact_causal_density"]
    return (
        f"One call inside a profiler takes {said(TIME, median(r['traced_more_ns'] for r in rows))} longer than clean "
        f"calls in the median, {ratios(r['traced_ratio'] for r in rows)} times as long; dense attention sees "
        f"{said('share', causal)} of the causal pairs."
    )


STUDY = Study(
    name="nano",
    title="Dense against sparse attention in a GPT",
    about="Latency, memory, sparsity and FLOPs of dense, masked and block-sparse attention, alone and in models.",
    measures=(ATTENTION, MODELS),
    questions=(faster, skipped, memory, faster_models, presets, latency),
    files={
        "attention_profile.json": "attention", "model_profile.json": "models",
        "attention_latency.png": "latency-inference", "attention_memory.png": "memory-inference",
        "attention_efficiency.png": "executed", "model_performance.png": "models-step",
        "attention_summary.csv": "attention", "attention_summary.md": "attention",
        "model_summary.csv": "models", "model_summary.md": "models", "profiling_report.md": REPORT,
    },
)  # fmt: skip
