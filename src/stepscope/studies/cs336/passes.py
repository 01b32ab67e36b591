"""Questions of the cs336 study about time: passes and warm-up."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from stepscope.analysis.time.step_times import by_warmup
from stepscope.errors import Unavailable
from stepscope.formatting import plural
from stepscope.studies.cs336.note import OUT_OF_MEMORY, PROFILED_OVER_BENCHMARKED, note
from stepscope.studies.cs336.points import FP32
from stepscope.studies.figures import BUSY, TIME, is_host_bound, listed, published, ratios, said
from stepscope.studies.stored import Rows, Stored
from stepscope.studies.study import LinesOf, Record, Records, TableOf, Tables, question, table_of

if TYPE_CHECKING:
    import polars as pl

WARMUPS = (0, 1, 2, 5)
MEAN = "mean_ns"
BOTH_PASSES = ("forward", "forward+backward")
SIZES = ("preset", "num_parameters", "layers", "d_model", "d_ff", "heads", "vocab", "batch")
ByModel = Callable[[Stored], Mapping[str, float]]


def beside(id: str, what: str, of: TableOf | ByModel, name: str, column: str, **where: Any) -> TableOf:
    """Return a table of our figures, of some rows of a table, beside a column of the note, by model and length."""
    ours = figure(of, name, **where) if isinstance(of, TableOf) else of
    what = f"{what}; CS336 systems report, RTX 5090"
    return published(f"published-{id}", what, ours, note(column.replace("+", "_")), "model", name)


def figure(of: Any, name: str, **where: Any) -> ByModel:
    """Return a function of Stored that returns a figure of some rows by model, the first row of each."""

    def by_model(stored: Stored) -> dict[str, float]:
        found: dict[str, float] = {}
        for row in stored.rows(of).where(**where):
            if row.get(name) is not None:
                found.setdefault(row.get("model") or model_of(row), row[name])
        return found

    return by_model


def model_of(record: Record) -> str:
    """Return the note's name of a point.

    >>> model_of({"preset": "small", "seq_len": 128})
    'small 128'
    """
    return f"{record['preset']} {record['seq_len']}"


def plain(stored: Stored) -> Records:
    """Return the rows of models as the note has them: attention and products written out."""
    rows = stored.rows("models").where(attention="naive", linear="einsum").needed()
    return [row | {"model": model_of(row)} for row in rows]


def work_of(stored: Stored, record: Record) -> "pl.DataFrame":
    """Return what a traced row of a model spent its time on."""
    from stepscope.analysis.time.pass_work import pass_work

    return stored.once(("work", record["hash"]), lambda: pass_work(stored.traced("models", record).case.linked))


def gpu_work_ns(stored: Stored, record: Record) -> dict[str, int]:
    """Return by phase how long the GPU works; nothing without a GPU, or without the trace of the row."""
    if stored.facts.get("device") == "cpu":
        return {}
    try:
        phases = work_of(stored, record).partition_by("phase", as_dict=True)
    except Unavailable:
        if stored.kept:
            raise  # the published table has it
        return {}
    return {str(name): int(of["duration_ns"].sum()) for (name,), of in phases.items()}


def every_pass(stored: Stored) -> Records:
    """Return one record per pass and number of warm-up passes. A point that failed has one, with its status."""
    known = {row["hash"]: row for row in stored.rows(plain).where(dtype=FP32)}
    for row in stored.sweep("models").rows:
        base = known.get(row["hash"])
        if base is None or (base["mode"] == "forward" and base["status"] == "ok"):
            continue
        # A process that ran the correctness check before was not cold.
        gate = row.get("gate") or {}
        base = {**base, "pass": base["mode"], "is_cold": not gate or bool(gate.get("run_by"))}
        found = list(by_warmup(row.get("samples_phase_ns") or {}, base["steps"], WARMUPS))
        if not found:
            yield {**base, "num_warmup": max(WARMUPS), MEAN: None, "std_ns": None}
        for each in found:
            name = each.what if base["mode"] != "inference" else "inference"
            figures = {MEAN: each.time.mean, "std_ns": each.time.std, "median_ns": each.time.median}
            yield {**base, "pass": name, "num_warmup": each.num_warmup, **figures}


@table_of(
    "durations", "Passes by size and length", "preset num_parameters seq_len pass mean_ns std_ns median_ns",
    num_shown=80, note="after five warm-up passes; parts of a step are timed in passes of their own, synchronized",
)  # fmt: skip
def warm(stored: Stored) -> Rows:
    return stored.rows(every_pass).where(num_warmup=max(WARMUPS))


@table_of("sizes", "The models", " ".join(SIZES), note="fp32 is without TF32")
def sizes(stored: Stored) -> Records:
    return {row["preset"]: {name: row[name] for name in SIZES} for row in stored.rows(warm)}.values()


@table_of(
    "busy", "How much of a forward and of a step the GPU works",
    f"model forward_ns forward_busy_share {TIME} {BUSY}", is_optional=True,
    note="the forward is synchronized, which takes longer than one inside a step",
)  # fmt: skip
def busy(stored: Stored) -> Records:
    forward = figure(warm, MEAN, **{"pass": "forward"})(stored)
    for row in stored.rows(warm).where(**{"pass": "step"}):
        if row["model"] in forward and (work := gpu_work_ns(stored, row)):
            mean = forward[row["model"]]
            yield {**row, "forward_ns": mean, "forward_busy_share": work["forward"] / mean}


@question(
    "How long does each pass take, and what does not fit?",
    LinesOf("step-times", "A step by length", warm, "seq_len", MEAN, "preset", {"pass": "step"}), sizes, warm,
    *(beside(name, name, warm, MEAN, f"{name}_ns", **{"pass": name}) for name in BOTH_PASSES), busy,
    claim=f"On an RTX 5090, forward and backward run out of memory for {', '.join(OUT_OF_MEMORY)}.",
)  # fmt: skip
def durations(tables: Tables) -> str:
    rows, told = [row for row in tables["durations"] if row[MEAN]], []
    steps = Rows("steps", [row for row in rows if row["pass"] == "step"])
    for step in (steps.where(preset=preset).most("seq_len") for preset in steps.values("preset")):
        forward = next(row[MEAN] for row in rows if (row["model"], row["pass"]) == (step["model"], "forward"))
        share = said("share", forward / step[MEAN])
        told.append(f"{said(MEAN, step[MEAN])} for {step['model']} (forward {share})")
    failed = [f"{row['model']} ({row['pass']})" for row in tables["durations"] if row["status"] == "oom"]
    rest = f", and {listed(failed)} ran out of memory" if failed else ""
    return f"A step takes {listed(told)}{rest}."


@table_of(
    "warm-up", "Mean and spread by warm-up", "preset seq_len pass num_warmup mean_ns std_ns", num_shown=48,
    note="one run per point, cut after this many passes; without runs whose process was warm",
)  # fmt: skip
def cold(stored: Stored) -> Records:
    return [row for row in stored.rows(every_pass) if row[MEAN] and row["is_cold"]]


@question(
    "What does warm-up change?", cold,
    *(beside(f"cold-{name}", f"{name}, no warm-up", cold, MEAN, f"cold_{name}_ns", num_warmup=0, **{"pass": name})
      for name in BOTH_PASSES),
    claim=f"Its profiler averages include the first call: {PROFILED_OVER_BENCHMARKED} times its own benchmark.",
)  # fmt: skip
def warm_up(tables: Tables) -> str:
    by_model: dict[str, dict[int, Record]] = {}
    for row in tables["warm-up"].where(**{"pass": "step"}):
        by_model.setdefault(row["model"], {})[row["num_warmup"]] = row
    whole = {model: by for model, by in by_model.items() if set(WARMUPS) <= by.keys()}
    if not whole:
        raise Unavailable("no run is long enough for five warm-up passes")
    # Prefer a GPU-bound model: host noise is not warm-up.
    model, by = min(whole.items(), key=lambda item: is_host_bound(item[1][0]))
    warm = by[max(WARMUPS)][MEAN]
    enough = next(n for n in WARMUPS if all(abs(by[m][MEAN] / warm - 1) <= 0.1 for m in WARMUPS if m >= n))
    every = ratios(of[0][MEAN] / of[max(WARMUPS)][MEAN] for of in whole.values())
    return (
        f"Without warm-up the mean step of {model} is {said(MEAN, by[0][MEAN])} instead of {said(MEAN, warm)}, "
        f"{by[0][MEAN] / warm:.2f} times as long ({every} times over {plural(len(whole), 'point')}); "
        f"a warm-up of {enough} brings it within 10 %."
    )
