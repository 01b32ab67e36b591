"""Rules about training on a CPU: threads, precision, small ops, work beside the training itself."""

from typing import Any

import polars as pl

from stepscope.analysis.costs.attainable_rates import BANDWIDTH_SHARE, GEMM_SHARE
from stepscope.analysis.costs.op_calls import Tensor
from stepscope.analysis.costs.op_costs import operands
from stepscope.analysis.structure.modules import MODULE_PREFIX
from stepscope.analysis.time.cpu_ledger import DATA, PRODUCTS, TRAINING
from stepscope.analysis.time.loop_time import measured_steps
from stepscope.errors import ABOUT_CPUS, if_available
from stepscope.findings.op_lines import outside_text
from stepscope.findings.rule import LENGTH, Case, Evidence, Finding, Unavailable, one_finding, rule
from stepscope.formatting import duration, plural, safe, size, whole_percent
from stepscope.session.case import WORTH_WITHOUT_GPU

_SHORT_NS = 100_000
_SHORT_SHARE = 0.3
_LEAST_CALLS = 16  # of a module per step; fewer are the layers of a model
_PRODUCT_SHARE = 0.3
_EMULATED_SHARE = 2 / 3  # of the time of products in bfloat16: what float32 saves without instructions for it
_RUNNING = ("slow_steps", "cpu_products", "cpu_ops")  # time without any op may be a sleep


def _flags(case: Case) -> dict[str, Any]:
    """Return torch's switches of a recording on a CPU; raise Unavailable otherwise."""
    flags = case.recording.facts.get("flags")
    if not case.is_on_cpu:
        raise Unavailable(ABOUT_CPUS)
    if not flags:
        raise Unavailable("The recording does not have torch's switches. Record it again with `stepscope run`.")
    return dict(flags)


def ops_of_steps(case: Case) -> tuple[pl.DataFrame, float]:
    """Return the ops of the traced steps with `self_ns`, and how long those steps are."""
    steps = case.linked.steps.table
    if steps.is_empty():
        raise Unavailable("The trace does not mark where steps end.")
    total_ns = float((steps["end_ns"] - steps["start_ns"]).sum())
    host = case.linked.host
    is_op = (host["kind"] == "op") & host["step"].is_in(steps["step"].implode()).fill_null(False)
    return host.filter(is_op).with_columns(pl.col("name", "dtypes").cast(pl.String)), total_ns


@rule
def cpu_threads(case: Case) -> list[Finding]:
    """On a CPU: are there more threads than cores, or far fewer?"""
    flags = _flags(case)
    threads, cores = int(flags.get("num_threads") or 0), int(flags.get("num_cores") or 0)
    world = int((case.recording.facts.get("environment") or {}).get("world_size") or 1)
    wanted = max(1, cores // world)
    if not threads or not cores or (wanted >= threads > wanted // 4):
        return []
    of_ranks = f" in each of {world} processes" if world > 1 else ""
    many = threads > wanted
    what = "wait for one another" if many else "leave most of the machine idle"
    row = {"num_threads": threads, "num_cores": cores, "world_size": world, "step_ns": case.step_ns}
    return one_finding(
        sentence=f"Torch computes with {plural(threads, 'thread')}{of_ranks} on {plural(cores, 'core')}. "
        f"{'More threads than cores' if many else 'So few threads'} {what}.",
        fix=f"torch.set_num_threads({wanted})  # or OMP_NUM_THREADS={wanted}; fewer if other programs run too",
        derived="unknown: how well the ops of this model use more cores is not measured",
        confidence="medium" if many else "low",
        falsified_by=f"OMP_NUM_THREADS={wanted} stepscope run train.py; the finding is wrong if steps are not faster",
        evidence=(Evidence("threads and cores", [row]),),
    )


@rule
def cpu_float32(case: Case) -> list[Finding]:
    """On a CPU that computes in bfloat16: do matrix products run in float32?"""
    flags = _flags(case)
    if not flags.get("cpu.bf16"):
        return []  # emulated, bfloat16 is slower than float32
    ops, total_ns = ops_of_steps(case)
    is_wide = ~pl.col("dtypes").str.contains("BFloat16|Half|double").fill_null(True)
    products = ops.filter(pl.col("name").is_in(PRODUCTS), is_wide)
    share = float(products["self_ns"].sum()) / total_ns
    if share < _PRODUCT_SHARE:
        return []
    table = products.group_by("name").agg(pl.len().alias("num_calls"), pl.col("self_ns").sum().alias("duration_ns"))
    return one_finding(
        sentence=f"Matrix products and convolutions in float32 take {case.cost_text(share * case.step_ns)}, and this "
        "CPU has instructions for bfloat16.",
        fix='with torch.autocast("cpu", torch.bfloat16): …',
        saving_ns=share / 2 * case.step_ns,
        rows=("cpu_products",),
        upper_bound=True,
        derived="half of their time: bfloat16 has at least twice the rate; casts are not counted",
        confidence="low",
        falsified_by="use autocast; the finding is wrong if the step is not faster",
        evidence=(Evidence("products in float32", table.sort("duration_ns", descending=True).head(8).to_dicts()),),
    )


@rule
def cpu_bfloat16(case: Case) -> list[Finding]:
    """On a CPU without instructions for bfloat16: do matrix products run in it?"""
    if _flags(case).get("cpu.bf16") is not False:
        return []
    ops, total_ns = ops_of_steps(case)
    narrow = ops.filter(pl.col("dtypes").str.contains("BFloat16").fill_null(False))
    of_step = case.step_ns / total_ns
    products_ns = float(narrow.filter(pl.col("name").is_in(PRODUCTS))["self_ns"].sum()) * of_step
    casts_ns = float(narrow.filter(pl.col("name") == "aten::copy_")["self_ns"].sum()) * of_step
    saving_ns = _EMULATED_SHARE * products_ns + casts_ns
    if saving_ns < WORTH_WITHOUT_GPU * case.step_ns:
        return []
    table = by_name(narrow, case.linked.steps.num)
    return one_finding(
        sentence=f"Matrix products in bfloat16 take {case.cost_text(products_ns)}, and this CPU has no instructions "
        "for bfloat16: it converts every number to float32 and back.",
        fix="train in float32 here: torch.autocast(..., enabled=False), or model.float()",
        saving_ns=saving_ns,
        rows=("cpu_products", "cpu_ops"),
        upper_bound=True,
        derived="two thirds of their time, and their casts: such products were measured to take 2 to 5 times as long "
        "as in float32",
        confidence="medium",
        falsified_by="train in float32; the finding is wrong if the step is not faster",
        evidence=(Evidence("ops in bfloat16", table.head(8).to_dicts()),),
    )


def core_waits(case: Case) -> list[Finding]:
    """Return the finding of `other_process` for a recording on a CPU."""
    _flags(case)
    timed = [sample.step for sample in case.recording.window("clean")]
    if (share := case.run.core_wait_share_of(timed)) is None:
        raise Unavailable(
            "The recording has no readings of how long training waited for a CPU core. Linux has them, in long runs."
        )
    ledger = if_available(lambda: case.ledger)
    rows: tuple[str, ...] = _RUNNING
    lost_ns = share * case.average_ns
    if share < WORTH_WITHOUT_GPU:  # a typical step hardly waits: those do that take longer
        measured = measured_steps(case.recording, on_device=False)
        rows, lost_ns = _RUNNING[:1], case.run.core_wait_ns(measured)
    if ledger is not None:
        lost_ns = min(lost_ns, sum(ledger.parts.get(row, 0) for row in rows) / ledger.num_steps)
    if lost_ns < WORTH_WITHOUT_GPU * case.average_ns:
        return []
    waits = case.run.tracks["core_wait_share"]
    has_workers = (case.recording.facts.get("loader") or {}).get("num_workers")
    workers = ", or its own DataLoader workers," if has_workers else ""
    when, often = "In the timed steps", f" {whole_percent(share)} of the time"
    if rows != _RUNNING:
        when, often = "In steps that take longer than a typical one", ""
    row = {"wait_share": share, "num_readings": len(waits.values), "highest_share": max(waits.values)}
    return one_finding(
        sentence=f"{when}, training waits for a CPU core{often}, up to {case.cost_text(lost_ns)}: other "
        f"processes{workers} run on the same cores. Every time in this recording is longer for it.",
        fix=f"top  # end what else runs{', start fewer workers' * bool(workers)}, or wait for it; then record again",
        saving_ns=lost_ns,
        rows=rows,
        upper_bound=True,
        derived="the kernel's count of the time in which the training thread was ready and no core was free",
        confidence="high",
        falsified_by="record on an idle machine; the finding is wrong if steps are as long",
        evidence=(Evidence("waiting for a core", [row]),),
    )


@rule
def outside_passes(case: Case) -> list[Finding]:
    """On a CPU: does the script spend time outside of its data, passes and optimizer?"""
    _flags(case)
    ops, total_ns = ops_of_steps(case)
    ledger = case.ledger
    lost_ns = ledger.parts.get("cpu_outside", 0) / ledger.num_steps
    if lost_ns < WORTH_WITHOUT_GPU * case.step_ns:
        return []
    outside = ops.filter(~pl.col("phase").cast(pl.String).is_in([DATA, *TRAINING]).fill_null(False))
    table = by_name(outside, case.linked.steps.num)
    op_share = min(1.0, float(outside["self_ns"].sum()) / total_ns * case.step_ns / lost_ns)
    most = f", mostly {safe(table['name'][0], 60)}" if table.height else ""
    parts = f"{whole_percent(op_share)} of that is in ops{most}" if op_share >= 0.5 else "most of that is Python code"
    return one_finding(
        sentence=f"Outside of its data, passes and optimizer, the script spends {case.cost_text(lost_ns)}: {parts}."
        f"{outside_text(case, lost_ns / 10)}",
        fix="do it every N steps: metrics, histograms, copies and averages of weights; clip with foreach=True",
        saving_ns=lost_ns,
        rows=("cpu_outside",),
        upper_bound=True,
        derived="all of that time; what training needs of it, such as clipping, remains",
        confidence="medium",
        falsified_by="leave it out of a run; the finding is wrong if the step is not faster",
        evidence=(Evidence("ops outside of the passes", table.head(8).to_dicts()),),
    )


def by_name(ops: pl.DataFrame, num_steps: int) -> pl.DataFrame:
    """Return ops by name, per step, the longest first."""
    counts = (pl.len() / num_steps).alias("num_calls"), (pl.col("self_ns").sum() / num_steps).alias("duration_ns")
    return ops.group_by("name").agg(counts).sort("duration_ns", "name", descending=[True, False])


def recomputed_on_cpu(case: Case) -> list[Finding]:
    """Return the finding of `checkpointing_with_free_memory` for a recording on a CPU."""
    case.with_shapes()
    again = case.within(case.recomputed)
    spent_ns = case.total_ns(again, LENGTH) * case.clean_share
    if spent_ns < WORTH_WITHOUT_GPU * case.step_ns:
        return []
    if (free := case.run.tracks.get("available_bytes")) is None:
        raise Unavailable("The recording does not say how much memory was free. Record it again, on Linux.")
    texts = case.linked.host.filter(pl.col("row").is_in(again["row"].implode()))["shapes"].cast(pl.String)
    tensors = (one for text in texts for one in operands(text, None) if isinstance(one, Tensor))
    most_bytes, free_bytes = 4 * sum(one.num_elements for one in tensors) // case.num_steps, min(free.values)
    if most_bytes > free_bytes:
        return []
    table = case.grouped(again, "num_calls", "name", time=LENGTH)
    return one_finding(
        sentence=f"Recomputing {case.number_text(again, 'forward op')} in the backward takes "
        f"{case.cost_text(spent_ns)}, although the results would fit in memory: they need at most "
        f"{size(most_bytes)}, and at least {size(free_bytes)} is free.",
        fix="remove torch.utils.checkpoint / model.gradient_checkpointing_disable()",
        saving_ns=spent_ns,
        rows=("cpu_products", "cpu_ops", "cpu_python"),
        derived="the time of the recomputed ops; Python code between them is not counted",
        confidence="medium",
        falsified_by="turn it off; the finding is wrong if the run then runs out of memory or is not faster",
        evidence=(Evidence("recomputed ops", table.head(8).to_dicts()),),
    )


@rule
def small_cpu_ops(case: Case) -> list[Finding]:
    """On a CPU: does the step consist of ops so short that calling them costs more than their work?"""
    _flags(case)
    ops = case.within(ops_of_steps(case)[0])
    work = case.work.select(pl.col("call").alias("row"), least_ns(case))
    keys = ("name", "shapes")
    # By the middle of calls that are alike: a call that was interrupted is not long.
    ops = ops.join(work, on="row", how="left", maintain_order="left").with_columns(
        pl.col("self_ns").median().over(keys).alias("usual_ns"), pl.col("least_ns").fill_null(0.0) / case.clean_share
    )
    short = ops.filter(pl.col("usual_ns") < _SHORT_NS, 2 * pl.col("least_ns") < pl.col("usual_ns"))
    overhead_ns = float((short["self_ns"] - short["least_ns"]).sum()) * case.clean_share / case.num_steps
    if overhead_ns < _SHORT_SHARE * case.step_ns:
        return []
    name, num_calls = _most_called(case, short)
    again = f" Most of them are in {safe(name, 60)}, which runs {num_calls:,.0f} times per step." if name else ""
    fix = "a larger batch_size: these ops hardly take longer; torch.optim.AdamW(..., fused=True); or "
    if name:
        fix = (
            f"call {safe(name, 60)} once for all samples or time steps (nn.LSTM instead of a loop over nn.LSTMCell); "
        )
    return one_finding(
        sentence=f"{case.number_text(short, 'op')} per step take "
        f"{case.cost_text(case.total_ns(short, _SELF) * case.clean_share)}, and their work needs only a part of it: "
        f"calling them costs {duration(overhead_ns, 3)}.{again}",
        fix=f"{fix}torch.compile(model), which fuses them",
        saving_ns=overhead_ns,
        rows=("cpu_ops", "cpu_python", "cpu_products", "cpu_outside", "cpu_between"),
        upper_bound=True,
        derived="their time beyond what their FLOPs and bytes take at the rates of the trace's fast ops; some of it "
        "remains",
        confidence="medium",
        falsified_by="double the batch; the finding is wrong if the step takes twice as long",
        evidence=(Evidence("short ops", by_name(short, case.num_steps).head(8).to_dicts()),),
    )


_SELF = pl.col("self_ns").alias("duration_ns")


def least_ns(case: Case) -> pl.Expr:
    """Return what each op's work takes at the rates of the trace's fast ops: its FLOPs, or else its bytes."""
    peaks = {dtype: peak * GEMM_SHARE / 1e9 for dtype, peak in case.device.peak_flops.items()}
    rate = pl.col("peak_dtype").replace_strict(peaks, default=None, return_dtype=pl.Float64)
    moving = pl.col("bytes") / (case.device.bandwidth_bytes_per_s * BANDWIDTH_SHARE / 1e9)
    return pl.when(pl.col("flops") > 0).then(pl.col("flops") / rate).otherwise(moving).alias("least_ns")


def _most_called(case: Case, ops: pl.DataFrame) -> tuple[str | None, float]:
    """Return the outermost module that runs again and again and has most of some ops, and its calls per step."""
    labels = case.within(case.linked.host.filter(pl.col("name").cast(pl.String).str.starts_with(MODULE_PREFIX)))
    names = labels["name"].cast(pl.String).str.strip_prefix(MODULE_PREFIX)
    counts = names.value_counts(name="num").rows()
    often = {name: num / case.num_steps for name, num in counts if num >= _LEAST_CALLS * case.num_steps}
    modules = ops["module"].cast(pl.String)
    inside = {name: ((modules == name) | modules.str.starts_with(f"{name}.")).sum() or 0 for name in often}
    name = max(sorted(often), key=lambda one: (inside[one], -len(one)), default=None)
    return (name, often[name]) if name and 2 * inside[name] > ops.height else (None, 0.0)
