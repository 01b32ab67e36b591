"""Rules about training on a CPU: threads, precision, small ops."""

from typing import Any

import polars as pl

from stepscope.analysis.time.cpu_ledger import PRODUCTS
from stepscope.errors import ABOUT_CPUS
from stepscope.findings.rule import Case, Evidence, Finding, Unavailable, one_finding, rule
from stepscope.formatting import duration, plural, whole_percent

_SHORT_NS = 20_000
_SHORT_SHARE = 0.3
_PRODUCT_SHARE = 0.3


def _flags(case: Case) -> dict[str, Any]:
    """Return torch's switches of a recording on a CPU; raise Unavailable otherwise."""
    flags = case.recording.facts.get("flags")
    if not case.is_on_cpu:
        raise Unavailable(ABOUT_CPUS)
    if not flags:
        raise Unavailable("The recording does not have torch's switches. Record it again with `stepscope run`.")
    return dict(flags)


def _ops(case: Case) -> tuple[pl.DataFrame, float]:
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
    ops, total_ns = _ops(case)
    is_wide = ~pl.col("dtypes").str.contains("BFloat16|Half|double").fill_null(True)
    products = ops.filter(pl.col("name").is_in(PRODUCTS), is_wide)
    share = float(products["self_ns"].sum()) / total_ns
    if share < _PRODUCT_SHARE:
        return []
    table = products.group_by("name").agg(pl.len().alias("num_calls"), pl.col("self_ns").sum().alias("duration_ns"))
    return one_finding(
        sentence=f"Matrix products and convolutions in float32 take {whole_percent(share)} of the step, and this CPU "
        "has instructions for bfloat16.",
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
def small_cpu_ops(case: Case) -> list[Finding]:
    """On a CPU: does the step consist of ops so short that calling them costs more than their work?"""
    _flags(case)
    ops, total_ns = _ops(case)
    short = ops.filter(pl.col("self_ns") < _SHORT_NS)
    short_ns = float(short["self_ns"].sum())
    share = short_ns / total_ns
    if share < _SHORT_SHARE:
        return []
    num_steps = case.linked.steps.num
    table = short.group_by("name").agg(
        (pl.len() / num_steps).alias("num_calls"), (pl.col("self_ns").sum() / num_steps).alias("duration_ns")
    )
    return one_finding(
        sentence=f"{plural(short.height / num_steps, 'op')} per step are shorter than {duration(_SHORT_NS, 3)} and "
        f"take {whole_percent(share)} of the step: calling them costs more than what they compute.",
        fix="a larger batch_size: these ops hardly take longer; torch.optim.AdamW(..., foreach=True); or "
        "torch.compile(model), which fuses them",
        saving_ns=share * case.step_ns,
        rows=("cpu_ops", "cpu_python", "cpu_products"),
        upper_bound=True,
        derived="their share of the traced steps, of a clean step; the work in them remains",
        confidence="medium",
        falsified_by="double the batch; the finding is wrong if the step takes twice as long",
        evidence=(Evidence("short ops", table.sort("duration_ns", descending=True).head(8).to_dicts()),),
    )
