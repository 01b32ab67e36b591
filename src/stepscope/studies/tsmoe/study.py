"""Training a time-series mixture of experts: what it reaches, what AMP, masks, dispatch and the compiler change.

Repeats the "FoundationTS training notes". They count 12·N FLOPs per token, no attention, and the peak with sparsity;
rank speeds of models whose losses are 260 and 3; invert the attention mask; print one NVML field under two names; and
leave two questions open: why one dispatch is half as fast, and what grouped products change.
"""

import math
from collections.abc import Iterator
from typing import Any

from stepscope.analysis.comparison.sweeps import OK
from stepscope.errors import Unavailable
from stepscope.formatting import plural, safe
from stepscope.studies import BarsOf, Recordings, Study, Sweep
from stepscope.studies.figures import PEAK, TIME, against, listed, meet, said, speeds, without_folders
from stepscope.studies.recorded import differences, op_times
from stepscope.studies.stored import Rows, Stored
from stepscope.studies.study import REPORT, Record, Records, Tables, question, table_of
from stepscope.studies.tsmoe.training import amp, mfu, training

BOTH = FP32, AMP = ["fp32", "autocast_bf16"]
# Short enough for a processor that emulates bfloat16.
TINY = {"preset": "tiny", "seq_len": 16, "batch": 1}
# Experts filled as by a trained router; a fifth of the rows of `capacity` and `indexed` are padding.
EVEN = {"routing": "balanced", "capacity_factor": 1.25}
# A third of the layers of 538m: layers are alike, and compile time grows with them.
PART = {"preset": "538m", "layers": 4, **EVEN, "dtype": AMP, "steps": 8, "warmup": 2}
LEARNED = {"preset": "538m", "layers": 2, "batch": 4, "dtype": AMP, "dispatch": ["loop", "grouped"]}
QUICK = {**TINY, "steps": 3, "warmup": 1}
WAYS = ["loop", "capacity", "one_hot", "tile", "grouped", "indexed"]
MASKS = {"mask": ["causal", "given", "inverted"]}

MEASURES = (
    Recordings(
        "training", "tsmoe", "AMP and fp32, a small and a large model, and the small one on few tokens",
        quick={**TINY, "dtype": BOTH},
        full=[
            {"preset": "23m", "batch": 1, "seq_len": 512, "routing": "balanced", "dtype": BOTH},
            {"preset": "23m", "batch": 4, "routing": "balanced", "dtype": BOTH},
            {"preset": "538m", "routing": "balanced", "dtype": BOTH},
        ],
        options=("--warmup", "2", "--clean", "6", "--trace", "1"),
    ),
    Sweep(
        "dispatch", "tsmoe", "ways to dispatch against the loop", trace=True,
        quick={**QUICK, **EVEN, "layers": 1, "dtype": AMP, "dispatch": WAYS},
        full=[
            {**PART, "dispatch": WAYS},
            {**PART, "compile": "default", "dispatch": ["loop", "capacity", "grouped"]},
            {**PART, "compile": "reduce-overhead", "optimizer": "fused", "dispatch": "capacity"},
        ],
    ),
    Sweep(
        "masks", "tsmoe", "masks against is_causal", trace=True, quick={**QUICK, "dtype": FP32, **MASKS},
        full={**PART, **MASKS},
    ),
    Recordings(
        "compiled", "tsmoe", "compiled, with a router that learns", quick=(),
        full=[{**LEARNED, "compile": mode} for mode in ("default", "reduce-overhead")],
        options=("--warmup", "8", "--clean", "6", "--trace", "1"),
    ),
)  # fmt: skip

LOOP, CAPACITY, INDEXED, GROUPED = "loop", "capacity", "indexed", "grouped"
SAME_SHARE = 0.01  # models whose losses on equal weights and batch differ by more are different models
COMPILER = ("num_graphs", "num_graph_breaks", "num_recompiles", "num_recompile_limit_hits", "num_cuda_graphs")
FEW = f"dispatch compile {TIME} num_kernel_launches loss"


def _deviations(stored: Stored, measure: str) -> dict[str, dict[str, Any]]:
    """Return by hash how far each row is from the reference."""
    return {row["hash"]: (row.get("gate") or {}).get("deviations") or {} for row in stored.sweep(measure).rows}


@table_of(
    "masks", "Masks beside is_causal",
    f"mask status outputs_deviation loss_deviation gradients_deviation {TIME} loss what",
)  # fmt: skip
def masks(stored: Stored) -> Records:
    off = _deviations(stored, "masks")
    for row in stored.rows("masks").needed():
        kinds = {f"{kind}_deviation": off[row["hash"]].get(kind) for kind in ("outputs", "loss", "gradients")}
        yield {**row, **kinds, "what": safe(str(row["reason"] or "the same model"), 200)}


@table_of(
    "attention", "Attention in a traced step",
    "mask backend dtype num_calls forward_ns backward_ns beside_ns attention_ns step_ns why_not_flash",
)  # fmt: skip
def attention(stored: Stored) -> Records:
    for mask in ("causal", "given"):
        record = stored.rows("masks").one(mask=mask)
        for row in stored.traced("masks", record).attention.rows:
            times = {"attention_ns": float(row.call["total_ns"]), "step_ns": record[TIME]}
            yield {**row.call, "mask": mask, **times, "why_not_flash": _why_not_flash(row, record)}


def _why_not_flash(row: Any, record: Record) -> str:
    """Return the reasons in words. If nothing in the trace or the settings rules flash out, torch chose."""
    from stepscope.analysis.attention.reasons import in_words

    if row.call["backend"] == "flash":
        return "it is"
    told = []
    for reason in (reason for reason in row.reasons if reason.backend == "flash"):
        code = "preferred" if reason.code == "not_seen" and record["sdpa"] == "free" else reason.code
        told.append(reason.said or (in_words(code, row.call) if code else ""))
    return safe("; ".join(told), 200) or "unknown"


@question(
    "What does an attention mask cost?", masks, attention,
    claim="1.68 times as long with a mask on an H100 PCIe with 12 layers (1210 and 720 ms); its mask is inverted.",
)  # fmt: skip
def mask(tables: Tables) -> str:
    rows = tables["masks"]
    plain, given = rows.one(mask="causal"), rows.one(mask="given")
    wrong = [r["outputs_deviation"] for r in rows.where(mask="inverted") if r["status"] == "wrong"]
    off = f"; the note's inverted mask is off by {wrong[0]:.2f} of the outputs' norm" if wrong and wrong[0] else ""
    return (
        f"A mask that equals is_causal makes a step {given[TIME] / plain[TIME]:.2f} times as long "
        f"({said(TIME, given[TIME])} instead of {said(TIME, plain[TIME])}) with {given[PEAK] / plain[PEAK]:.2f} "
        f"times the peak{off}."
    )


def name_of(record: Record) -> str:
    return str(record["dispatch"]) + ("" if record["compile"] == "off" else f" compiled ({record['compile']})")


@table_of(
    "dispatch", "Ways to dispatch",
    f"dispatch compile optimizer status {TIME} tokens_per_s mfu_share speedup loss gradients_deviation {PEAK} "
    "peak_reserved_bytes num_kernel_launches padded_share dropped_share loss_off_share",
    note=lambda rows: "; ".join(f"{name_of(row)}: {row['notes']}" for row in rows if row.get("notes")),
)  # fmt: skip
def ways(stored: Stored) -> Records:
    rows, off = stored.rows("dispatch").needed(), _deviations(stored, "dispatch")
    base = rows.ok.one(dispatch=LOOP, compile="off")
    for row in rows:
        if row["status"] == OK and row.get("loss") is None:
            raise Unavailable(f"dispatch={row['dispatch']} has no loss")
        facts = {name: row.get(f"fact_{name}") for name in ("padded_share", "dropped_share")}
        facts["gradients_deviation"] = off[row["hash"]].get("gradients")
        facts["loss_off_share"] = abs(row["loss"] / base["loss"] - 1) if row["status"] == OK else None
        yield {**row, **facts, "name": name_of(row)}


def _same_model(stored: Stored) -> Records:
    return [row for row in stored.rows(ways).ok if row["loss_off_share"] <= SAME_SHARE]


@question(
    "Which dispatch is the fastest of those that are the same model?",
    BarsOf("dispatch-times", "A step by dispatch", _same_model, "name", TIME, TIME), ways,
    claim="Ranks 442 ms against 479 ms of two models whose losses are 260.2 and 3.47.",
)  # fmt: skip
def dispatch(tables: Tables) -> str:
    ok, told = tables["dispatch"].ok, []
    same = Rows("dispatch", [row for row in ok if row["loss_off_share"] <= SAME_SHARE])
    base = same.one(dispatch=LOOP, compile="off")
    for what, group in (
        ("eager", same.where(compile="off")),
        ("compiled", [r for r in same if r["compile"] != "off"]),
    ):
        if len(group):
            best = min(group, key=lambda row: row[TIME])
            tied = [row["name"] for row in group if row["hash"] != best["hash"] and meet(best, row)]
            tie = f" (a tie with {listed(tied)})" if tied else ""
            speed = f"{said(TIME, best[TIME])}, {against(best, base, 'the eager loop')}{tie}"
            told.append(f"{what}, {best['name']} is the fastest at {speed}")
    left = [row["name"] for row in ok if row["loss_off_share"] > SAME_SHARE]
    rest = f"; {listed(left)} compute another model" if left else ""
    return f"Of {plural(len(same), 'variant')} with the same loss, {'; '.join(told)}{rest}."


@table_of("slow-dispatch", "The two ways to dispatch", f"{FEW} padded_share")
def slow_pair(stored: Stored) -> Rows:
    return stored.rows(ways).where(dispatch=(INDEXED, CAPACITY), compile="off")


@table_of("indexing", "Ops that differ most, per traced step")
def indexing(stored: Stored) -> Records:
    rows = stored.rows("dispatch")
    found: list[dict[str, Any]] = []
    pair = (stored.traced("dispatch", rows.one(dispatch=name, compile="off")) for name in (INDEXED, CAPACITY))
    slow, fast = ({op: (ns, calls) for op, calls, ns in op_times(source)[0]} for source in pair)
    for op in {**slow, **fast}:
        (slow_ns, slow_calls), (fast_ns, fast_calls) = slow.get(op, (0.0, 0.0)), fast.get(op, (0.0, 0.0))
        times = {"indexed_ns": slow_ns, "capacity_ns": fast_ns, "difference_ns": slow_ns - fast_ns}
        found.append({"op": safe(op, 80), **times, "num_indexed_calls": slow_calls, "num_capacity_calls": fast_calls})
    return sorted(found, key=lambda row: -abs(row["difference_ns"]))[:10]


@question("Why is one dispatch so much slower?", slow_pair, indexing, claim="Left open.")
def half(tables: Tables) -> str:
    slow, fast = (tables["slow-dispatch"].one(dispatch=name) for name in (INDEXED, CAPACITY))
    slots, most = slow["batch"] * slow["seq_len"] * slow["top_k"], tables["indexing"].most("difference_ns")
    unfilled = round(slots * slow["padded_share"])
    return (
        f"{INDEXED} is {against(slow, fast, CAPACITY)}, and {most['op']} takes {said('_ns', most['difference_ns'])} "
        f"more: {unfilled:,} of {slots + unfilled:,} rows per layer are padding that reads token 0, and the backward "
        "of x[index] adds their gradients to that one row in turn."
    )


@table_of("grouped-dispatch", "Grouped products beside others", FEW)
def grouped_rows(stored: Stored) -> Rows:
    return stored.rows(_same_model).where(dispatch=(LOOP, CAPACITY, GROUPED)).needed()


@table_of("grouped", "loop and grouped, per traced step")
def grouped_differences(stored: Stored) -> Records:
    rows = stored.rows("dispatch")
    base, new = (stored.traced("dispatch", rows.one(dispatch=name, compile="off")) for name in (LOOP, GROUPED))
    return differences(base, new, (LOOP, GROUPED), 10)


@question("What do grouped GEMMs change?", grouped_rows, grouped_differences, claim="Left open.")
def grouped(tables: Tables) -> str:
    def more(row: Record, _: Record) -> str:
        return f" ({'eager' if row['compile'] == 'off' else 'compiled'})"

    return f"{speeds(tables['grouped-dispatch'], 'compile optimizer', more, dispatch=GROUPED)}."


@table_of(
    "compiled", "Compiled", f"dispatch compile {TIME} compile_ns num_break_even_steps {' '.join(COMPILER)}",
    if_empty="no point was compiled: --full compiles (on a CPU compiling takes too long)",
)  # fmt: skip
def compiled_rows(stored: Stored) -> Records:
    from stepscope.analysis.compiler.compile_summary import break_even

    rows = stored.rows(ways)
    for row in (row for row in rows if row["compile"] != "off" and row.get("compiler_num_graphs")):
        eager = rows.ok.where(dispatch=row["dispatch"], compile="off", optimizer=row["optimizer"])
        steps = None
        if len(eager) and row["status"] == OK and row.get("compile_ns"):
            steps = break_even(row["compile_ns"] / 1e9, row[TIME], eager[0][TIME])
        figures = {name: int(row.get(f"compiler_{name}") or 0) for name in COMPILER}
        yield row | figures | {"num_break_even_steps": steps if steps and math.isfinite(steps) else None}


def _summaries(stored: Stored) -> Iterator[tuple[dict[str, Any], Any, Any]]:
    """Yield every compiled training run with its knobs, its session and its compiler summary, also if it crashed."""
    from stepscope.findings.compiler_report import compiler_report

    for one in stored.recordings("compiled"):
        names = {name: one.axes[name] for name in ("dispatch", "compile", "device")} | {"status": one.status}
        names |= {"what": safe(without_folders(one.reason), 200)} if one.status != OK else {}
        has_recording = one.status == OK or (one.folder is not None and one.folder.exists())
        source = one.opened() if has_recording else None
        yield names, source, compiler_report(source.case).summary if source else None


@table_of(
    "compiled-training", "Compiled, with a router that learns",
    "dispatch compile num_steps step_ns num_graphs num_graph_breaks num_recompiles num_limit_hits compile_ns "
    "num_cuda_graphs num_cuda_graph_sizes what",
)  # fmt: skip
def learned(stored: Stored) -> Records:
    for names, source, summary in _summaries(stored):
        if summary is None:
            if names["status"] != OK:
                yield names
            continue
        # Without GPU clock readings, host time only tells how long launching took.
        is_timed = source.summary.clock == ("device" if names["device"] == "cuda" else "host")
        graphs, step = summary.cuda_graphs or {}, source.summary.step_ns
        names |= {"num_steps": len(source.recording.samples), "step_ns": step.median if step and is_timed else None}
        names |= {name: getattr(summary, name) for name in ("num_graphs", "num_graph_breaks", "num_recompiles")}
        names |= {"num_limit_hits": len(summary.limit_hits), "compile_ns": summary.seconds * 1e9}
        names |= {"num_cuda_graphs": graphs.get("num_recorded")}
        yield names | {"num_cuda_graph_sizes": graphs.get("num_distinct_sizes")}


@table_of("recompiles", "What was compiled again, and why", is_optional=True)
def recompiles(stored: Stored) -> Records:
    return [
        {"dispatch": names["dispatch"], "compile": names["compile"],
         "function": safe(without_folders(again.frame), 100), "guard": safe(again.guard, 80),
         "num_times": again.count, "values_seen": safe(", ".join(again.values), 100)}
        for names, _, summary in _summaries(stored) if summary is not None for again in summary.recompiles
    ]  # fmt: skip


@question(
    "What does the compiler do, and how often again?", compiled_rows, learned, recompiles,
    claim="Its loop hit the limit of 8 recompiles and recorded CUDA graphs for 51 sizes.",
)  # fmt: skip
def compiled(tables: Tables) -> str:
    told = []
    for row in tables["compiled"]:
        text = (
            f"{name_of(row)} has {plural(row['num_graphs'], 'graph')}, {plural(row['num_recompiles'], 'recompile')}"
        )
        text += f" and pays after {row['num_break_even_steps']:,.0f} steps" if row["num_break_even_steps"] else ""
        told.append(text if row["status"] == OK else f"{text} and is {row['status']}")
    for row in tables["compiled-training"]:
        again = "" if row.get("num_recompiles") is None else f" with {plural(row['num_recompiles'], 'recompile')}"
        told.append(
            f"with a router that learns {row['dispatch']} ({row['compile']}) is {row.get('status', OK)}{again}"
        )
    return f"{'; '.join(told)}."


STUDY = Study(
    name="tsmoe",
    title="Training a time-series mixture of experts",
    about="Tokens/s, MFU and utilization of a training run; AMP, attention masks, expert dispatch and the compiler.",
    measures=MEASURES,
    questions=(training, mfu, amp, mask, dispatch, half, grouped, compiled),
    files={
        "training.csv": "training", "training.md": "training", "mfu.csv": "mfu", "amp.csv": "amp", "amp.png": "amp",
        "attention.csv": "attention", "dispatch.json": "dispatch", "dispatch.csv": "dispatch",
        "dispatch.md": "dispatch", "dispatch.png": "dispatch-times", "indexing.csv": "indexing",
        "grouped.csv": "grouped", "training_report.md": REPORT,
    },
)  # fmt: skip
