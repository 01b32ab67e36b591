"""Rules about many kernels where one would do."""

import polars as pl

from stepscope.analysis.costs.attainable_rates import traffic_ns
from stepscope.analysis.kernels.handwritten_builtins import handwritten_builtin
from stepscope.analysis.structure.op_log import TRAINING
from stepscope.analysis.time.what_if import Saving
from stepscope.errors import if_available
from stepscope.findings.op_lines import followed_of
from stepscope.findings.rule import LENGTH, Case, Change, Evidence, Finding, Unavailable, one_finding, rule, stretches
from stepscope.formatting import duration, plural, whole_percent


def fusible(case: Case) -> tuple[pl.DataFrame, Saving]:
    """Return the runs of work that are not compiled and could be one pass over memory, and what that saves."""
    case.with_shapes(and_dtypes=True)
    can_fuse = ~pl.col("is_compiled") & (pl.col("num_kernels") > 1) & (pl.col("fused_ns") < pl.col("duration_ns"))
    # On a CPU, ops outside of the passes are the script's own: compiling the model does not touch them.
    is_of_model = pl.lit(not case.is_on_cpu) | pl.col("phase").is_in(["forward", "backward"])
    found = case.segments.filter(can_fuse, is_of_model)
    durations = dict(found.select("last", "fused_ns").iter_rows())
    events = found["events"].explode()
    gone = events.filter(~events.is_in(list(durations)))
    # The host takes as long per launch of compiled code as per launch of an op (docs/findings/README.md).
    return found, case.saving_ns(case.without(gone, durations))


@rule
def unfused_elementwise(case: Case) -> list[Finding]:
    """Do elementwise ops, norms and casts move their tensors many times because they are not compiled?"""
    found, saving_ns = fusible(case)
    if found.is_empty() or not case.is_worth(saving_ns):
        return []
    per_step = found.select(pl.col("num_kernels", "duration_ns", "fused_ns").sum() / case.num_steps)
    num_kernels, total_ns, left_ns = per_step.row(0)
    named = found.with_columns(pl.col("ops").list.join(", ").str.replace_all("aten::", "", literal=True))
    sizes = [pl.col("num_kernels", "bytes", "fused_bytes").first(), pl.col("fused_ns").sum() / case.num_steps]
    table = case.grouped(named, "num_segments", "phase", "shape", "dtype", "ops", more=sizes)
    table = table.select(pl.exclude("fused_ns"), "fused_ns")
    longest = table.row(0, named=True)
    how = "Only a part of the step is" if case.work["is_compiled"].any() else "Nothing in this step is"
    fix = _known(case, found) or "model = torch.compile(model)  # or torch.compile of the function in the evidence"
    wrapped = ""
    if case.has_recording and (bypassed := case.recording.facts.get("bypassed")):
        wrapped = f"torch.compile has wrapped {', '.join(bypassed[:3])}, but the step calls it without the wrapper. "
        fix = "model = torch.compile(model)  # and call that: out = model(x)"
    return one_finding(
        sentence=f"{how} compiled. {wrapped}{plural(num_kernels, f'elementwise {case.unit}')} per step, with norms, "
        f"casts and reductions among them, take {case.cost_text(total_ns)}; fused they would take "
        f"{duration(left_ns, 3)}. The longest run, over {list(longest['shape'])}: {_short(longest['ops'])}.",
        fix=fix,
        saving_ns=saving_ns,
        group="compile",
        derived="the step replayed with one pass over memory between two matrix products, at 57 % of the device's "
        "bandwidth as compiled kernels reach, and norms at 45 %"
        ", without the host's time for the launches that are no longer needed",
        confidence="high" if total_ns > 3 * left_ns else "medium",
        falsified_by="use torch.compile; the finding is wrong if there are as many kernels and they take as long, "
        "without a graph break among them",
        places=case.places(found["events"].explode()),
        evidence=(Evidence("runs of elementwise ops", table.head(8).to_dicts()),),
    )


def _known(case: Case, found: pl.DataFrame) -> str | None:
    """Return the built-in function that a run in the forward is a handwritten form of, or None."""
    forward = found.filter(pl.col("phase").ne_missing("backward")).sort("duration_ns", descending=True)
    for events in forward.unique(["ops", "shape"], keep="first", maintain_order=True)["events"]:
        known = handwritten_builtin(case.work.filter(pl.col("event").is_in(events.implode())))
        if known:
            builtin, names = known
            return f"{builtin}  # instead of {_short(', '.join(names))}; for all: torch.compile(model)"
    return None


def _short(ops: str, most: int = 10) -> str:
    names = ops.split(", ")
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


_LEFT_OF_HOST = 0.08  # of a loop's host time; a fused optimizer needs it to collect tensors and launch
_LEFT_OF_DEVICE = 0.3  # of its GPU time, if the trace does not contain the parameters' sizes
_FEW_LAUNCHES = 12
_WITH_FUSED = ("AdamW", "Adam", "SGD", "Adagrad")
_READ_AND_WRITTEN = 7  # reads parameter, gradient and two states; writes parameter and two states


@rule
def unfused_optimizer(case: Case) -> list[Finding]:
    """Does the optimizer launch many small kernels where one would do?"""
    if case.linked.steps.phase_source == "none":
        raise Unavailable("The trace does not show where the optimizer runs.")
    inside = (pl.col("end_ns") > case.replay.start_ns) & (pl.col("start_ns") < case.replay.end_ns)
    host = case.linked.steps.phases.filter(pl.col("phase") == "optimizer", inside)
    own, host = _updates(case, case.work.filter(pl.col("phase") == "optimizer"), host)
    names = own["op"].cast(pl.String).fill_null("")
    num_fused = int(names.str.contains("_fused_").sum())
    launches = own.height / case.num_steps
    if launches <= _FEW_LAUNCHES or num_fused:
        return []
    is_foreach = bool(names.str.contains("_foreach_").any())
    # The update runs once per parameter, so its bytes give the parameters' size.
    updates = own.filter(names.str.contains("addcdiv"))
    moved = int(updates["bytes"].sum() or 0) / 4 * _READ_AND_WRITTEN / case.num_steps
    device_ns = case.total_ns(own)
    fused_ns = min(traffic_ns(case.device, moved), device_ns) if moved else device_ns * _LEFT_OF_DEVICE
    kept = own["event"].gather_every(max(1, own.height // case.num_steps))
    durations = dict.fromkeys(kept.to_list(), fused_ns)
    gone = frozenset(own["event"].to_list()) - durations.keys()
    saving_ns = case.saving_ns(Change(duration_ns=durations, gone=gone, host=stretches(host, _LEFT_OF_HOST)))
    if not case.is_worth(saving_ns):
        return []
    how = "in foreach groups" if is_foreach else "one at a time"
    bytes_text = f"moves each parameter's bytes {_READ_AND_WRITTEN} times"
    work = bytes_text if moved else f"takes {whole_percent(_LEFT_OF_DEVICE)} of their time"
    return one_finding(
        sentence=f"The optimizer updates parameters {how}: "
        f"{case.number_text(own, 'kernel per step takes', 'kernels per step take')} "
        f"{duration(case.total_ns(host, LENGTH), 3)} of host time (under the profiler)"
        f"{'' if case.is_on_cpu else f' and {duration(device_ns, 3)} of GPU time'}. "
        f"A fused optimizer takes {duration(fused_ns, 3)}.",
        fix=_fix(case),
        saving_ns=saving_ns,
        derived=f"the step replayed with one kernel that {work}, and with {whole_percent(_LEFT_OF_HOST)} of the "
        "optimizer's host time",
        confidence="high" if moved else "medium",
        falsified_by="set fused=True; the finding is wrong if there are as many kernels, or if the optimizer has no "
        "fused version",
        places=case.places(own["event"]),
        evidence=(Evidence("kernels of the optimizer", case.grouped(own, "num_kernels", "op").head(8).to_dicts()),),
    )


def _updates(case: Case, own: pl.DataFrame, host: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the work that updates parameters, and the host time from its first op to its last: a trainer's hooks may
    look at gradients inside of `optimizer.step`. All of it if the recording does not say what ops are for."""
    ops = if_available(lambda: followed_of(case))
    if ops is None or own.is_empty():
        return own, host
    ops = ops.filter(pl.col("use") == TRAINING, pl.col("row").is_in(own["call"].implode())).sort("start_ns")
    spans = host.select(pl.col("start_ns").alias("begin_ns"), "end_ns").sort("begin_ns")
    placed = ops.select("start_ns", pl.col("end_ns").alias("until_ns")).join_asof(
        spans, left_on="start_ns", right_on="begin_ns", coalesce=False
    )
    within = placed.filter(pl.col("until_ns") <= pl.col("end_ns")).group_by("begin_ns")
    updates = within.agg(pl.col("start_ns").min(), pl.col("until_ns").max().alias("end_ns")).sort("start_ns")
    return own.filter(pl.col("call").is_in(ops["row"].implode())), updates.select("start_ns", "end_ns")


def _fix(case: Case) -> str:
    host = case.linked.host
    names = host["name"].filter(host["kind"] == "annotation").unique().cast(pl.String)
    # The classes of the optimizers that stepped, as the profiler names them.
    optimizers = sorted(names.str.extract(r"^Optimizer\.step#(\w+)\.step$").drop_nulls().unique())
    named = [name for name in _WITH_FUSED if name in optimizers]
    if optimizers and not named:
        return f"torch.compile(optimizer.step)  # {optimizers[0]} has no fused version"
    return f"torch.optim.{(named or _WITH_FUSED)[0]}(model.parameters(), fused=True)"


_LEAST_REPEATS = 32  # of an op per step; fewer are not a loop over a model's parameters
_LEAST_SHAPES = 3  # parameters have several shapes, steps of a loop over time have one
_FOREACH = "torch._foreach_lerp_(averages, parameters, 1 - decay)  # one call for all tensors; or torch._foreach_"


@rule
def parameter_loop(case: Case) -> list[Finding]:
    """Does a Python loop of your own launch kernels for one parameter after the other?"""
    case.with_shapes()
    if case.linked.steps.phase_source == "none":
        raise Unavailable("The trace does not show where forward, backward and optimizer run.")
    own = case.work.filter(
        pl.col("phase") == "other", pl.col("class") == "elementwise", pl.col("op") == pl.col("root_op")
    )
    own = own.with_columns(pl.col("op", "shapes").cast(pl.String)).filter(
        ~pl.col("op").str.contains("_foreach_|_fused_")
    )
    is_loop = (pl.len() >= _LEAST_REPEATS * case.num_steps) & (pl.col("shapes").n_unique() >= _LEAST_SHAPES)
    looped = own.filter(is_loop.over("op"))
    if looped.is_empty():
        return []
    # A foreach call moves the same bytes in a few launches.
    durations: dict[int, float] = {}
    for _, part in looped.group_by("op", "step", maintain_order=True):
        now_ns = float(part["duration_ns"].sum())
        durations[part["event"][0]] = min(now_ns, traffic_ns(case.device, int(part["bytes"].sum() or 0)))
    gone = looped.filter(~pl.col("event").is_in(list(durations)))["event"]
    saving_ns = case.saving_ns(case.without(gone, durations, is_loop=True))
    if not case.is_worth(saving_ns):
        return []
    table = case.grouped(looped, "num_kernels", "op", more=[pl.col("shapes").n_unique().alias("num_shapes")])
    names = ", ".join(op.removeprefix("aten::") for op in table["op"].head(3))
    return one_finding(
        sentence=f"A Python loop between backward and forward calls {names} for one tensor after the other: "
        f"{case.number_text(looped, 'kernel')} per step take {case.cost_text(looped)}"
        f"{', and longer to call' if case.is_on_cpu else ' on the GPU, and longer to launch'}.",
        fix=f"{_FOREACH}{str(table['op'][0]).removeprefix('aten::')}",
        saving_ns=saving_ns,
        derived="the step replayed with one kernel per op, which moves the same bytes at 85 % of the device's "
        "bandwidth, and without the host's time for the others",
        confidence="medium",
        falsified_by="use the foreach function; the finding is wrong if the step is not faster",
        places=case.places(looped["event"]),
        evidence=(Evidence("ops of the loop", table.head(8).to_dicts()),),
    )
