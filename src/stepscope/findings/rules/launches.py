"""Rules about a host that launches too little: launch overhead, small kernels, pauses."""

import polars as pl

from stepscope.analysis.comparison.micro_batches import MICRO_BATCH
from stepscope.analysis.kernels.kernels import launches
from stepscope.analysis.memory.allocator_events import allocator_calls
from stepscope.analysis.structure.intervals import complement, intersect
from stepscope.analysis.time.stalls import STALL_NS, quiet_stretches
from stepscope.findings.op_lines import python_text
from stepscope.findings.rule import Case, Change, Evidence, Finding, Unavailable, on_gpu, one_finding, stretches
from stepscope.findings.rules.waits import host_work, place, starts_within
from stepscope.formatting import duration, plural, size
from stepscope.session.places import places_without_work

_SURE = 0.3  # of a step; the profiler's own overhead in a bare trace is known less exactly
_GRAPH_LAUNCH = 0.02  # of the host's time is left when it launches graphs
_LAUNCHING = ["launch", "python"]  # causes of GPU idle time, see analysis/time/idle_causes.py


@on_gpu
def launch_bound(case: Case) -> list[Finding]:
    """Does the GPU wait for the host to launch kernels?

    The step is replayed without the host's time between launches, as with a CUDA graph. Host pauses of a
    millisecond or more are not launch overhead: other rules report those.
    """
    kernels = case.work.filter(pl.col("kind") == "kernel")
    length = pl.col("end_ns") - pl.col("start_ns")
    between = case.replay.host_stretches().filter(length < STALL_NS)
    allocating = case.within(allocator_calls(case.linked))
    if allocating.height:  # `allocator_churn` reports those
        calls = complement(allocating.select("start_ns", "end_ns"), case.replay.start_ns, case.replay.end_ns)
        between = intersect(between, calls)
    saving_ns = case.saving_ns(Change(host=stretches(between, _GRAPH_LAUNCH))).at_most(case.starved_ns)
    if not case.is_worth(saving_ns):
        return []
    step = case.step
    num_kernels = kernels.height / case.num_steps
    median_ns = float(kernels["duration_ns"].median() or 0.0)  # type: ignore[arg-type]  # numbers
    # Other rules report the stalls.
    launching = Change(host=stretches(case.stalls), overhead=case.overhead)
    host_ns = case.replay.play(launching).host_ns
    row = {"num_kernels": num_kernels, "median_kernel_ns": median_ns, "busy_ns": case.busy_ns, "host_ns": host_ns,
           "step_ns": step.done_ns, "starved_share": launches(case.linked).get("starved_share")}  # fmt: skip
    sure_ns = (_SURE if case.clean_ns is None else _SURE / 2) * step.done_ns
    return one_finding(
        sentence=f"The GPU waits for the host, which needs {duration(host_ns, 3)} to launch "
        f"{plural(num_kernels, 'kernel')} per step. Half of them are shorter than {duration(median_ns, 3)}, so the "
        f"GPU is busy for only {duration(case.busy_ns, 3)} of {duration(step.done_ns, 3)}.",
        fix='model = torch.compile(model, mode="reduce-overhead")  # or a larger batch: host time stays the same',
        saving_ns=saving_ns,
        rows=("idle_launch", "idle_python"),
        group="compile",
        upper_bound=True,
        derived="the step replayed with 2 % of the host's time between launches, as with CUDA graphs; compiling also "
        "fuses kernels, which is not counted",
        confidence="high" if saving_ns > sure_ns else "medium",
        falsified_by='compile with mode="reduce-overhead"; the finding is wrong if the step is not faster, or if '
        "doubling the batch doubles the step",
        places=places_without_work(case.idle.filter(pl.col("cause").cast(pl.String).is_in(_LAUNCHING))),
        evidence=(Evidence("step", [row]), Evidence("kernels per step by size", case.kernel_sizes.to_dicts())),
    )


_SHORT_NS = 10_000  # shorter kernels spend most of their time starting and ending
_SHORT_SHARE = 0.5
_BUSY_SHARE = 0.9
_FREE_SHARE = 0.5


@on_gpu
def small_batch(case: Case) -> list[Finding]:
    """Is the batch so small that kernels would take no longer with more data?"""
    kernels = case.work.filter(pl.col("kind") == "kernel", pl.col("activity").cast(pl.String) != "communication")
    step = case.step
    # If the host cannot keep up, `launch_bound` reports that.
    if kernels.is_empty() or step.device_ns < _BUSY_SHARE * step.done_ns:
        return []
    # The optimizer's kernels do not grow with the batch.
    short = kernels.filter(pl.col("duration_ns") < _SHORT_NS, pl.col("phase").ne_missing("optimizer"))
    short_ns = float(short["duration_ns"].sum())
    if short_ns < _SHORT_SHARE * float(kernels["duration_ns"].sum()):
        return []
    peak_bytes = case.memory.peak_bytes
    memory_bytes = case.device.visible_bytes or case.device.memory_bytes
    if peak_bytes > _FREE_SHARE * memory_bytes:
        return []
    halved = {event: ns / 2 for event, ns in short.select("event", "duration_ns").iter_rows()}
    saving_ns = case.saving_ns(Change(duration_ns=halved))
    if not case.is_worth(saving_ns):
        return []
    median_ns = float(kernels["duration_ns"].median() or 0.0)  # type: ignore[arg-type]  # numbers
    num_micro_batches = case.summary.num_micro_batches if case.has_recording else 1
    fix = "double batch_size as long as tokens per second increase; the learning rate may need to change too"
    if num_micro_batches > 1:
        fix = f"half as many micro-batches ({num_micro_batches} now) of twice the size, as long as steps get shorter"
    return one_finding(
        sentence=f"The batch is too small for {case.device.name}: kernels shorter than {duration(_SHORT_NS, 3)} take "
        f"{duration(short_ns / case.num_steps, 3)} of the {duration(case.step_ns, 3)} step, and would take hardly "
        f"longer with more data. Half of {case.number_text(kernels, 'kernel')} per step are shorter than "
        f"{duration(median_ns, 3)}, and {size(memory_bytes - peak_bytes)} of {size(memory_bytes)} of memory is free.",
        fix=fix,
        other_fix=MICRO_BATCH if num_micro_batches > 1 else "",
        saving_ns=saving_ns,
        derived="time per batch at twice the batch size: the step replayed with these kernels half as long, since "
        "such kernels take no longer with twice the data",
        confidence="medium",
        falsified_by="double the batch; the finding is wrong if the step takes twice as long",
        places=case.places(short["event"]),
        evidence=(Evidence("kernels per step by size", case.kernel_sizes.to_dicts()),),
    )


_LEAST_SHARE_OF_STEPS = 0.5  # an occasional checkpoint is intended


@on_gpu
def host_stall(case: Case) -> list[Finding]:
    """Does the host pause within each step: logging, checkpoints, garbage collection?"""
    if case.work.is_empty():
        return []
    if not case.linked.steps.num:
        raise Unavailable("The trace does not mark where steps end. Call prof.step() at the end of each step.")
    silent = case.stalls.filter(pl.col("kind").is_in(["python", "launch"]))
    quiet = quiet_stretches(case.linked, silent).filter(pl.col("phase").ne_missing("optimizer"))
    quiet = quiet.filter(~starts_within(quiet, host_work(case)))  # `synchronization` reports those
    if case.linked.steps.num == 1:  # what follows the only step may be the profiler stopping
        quiet = quiet.filter(pl.col("end_ns") <= case.work["start_ns"].max())
    saving_ns = case.host_saving_ns(quiet)
    num_stalled = quiet["step"].n_unique()
    if not case.is_worth(saving_ns) or num_stalled < _LEAST_SHARE_OF_STEPS * case.num_steps:
        return []
    table = case.grouped(quiet, "num_stretches", "phase", "op", "caller")
    top = table.row(0, named=True)
    if str(top["op"]).startswith("aten::"):
        where, fix = (
            f"in {top['op']} on the CPU",
            f"pass {top['op']} a CUDA tensor, or move it to a DataLoader worker",
        )
    else:
        where = f"in {top['op']}" if top["op"] is not None else f"in {place(top)}, with no op running"
        fix = (
            "find it with python -m cProfile -s cumtime train.py; then log and save every 100 steps or from a "
            "thread, and use gc.disable() with gc.collect() between epochs"
        )
    once = " Only one step was traced, so this may be a one-time cost." if case.num_steps == 1 else ""
    return one_finding(
        sentence=f"The host launches nothing for {case.cost_text(float(table['duration_ns'].sum()))}, in "
        f"{case.number_text(quiet, 'pause')}, mostly {where}. The GPU has only "
        f"{duration(case.step.device_ns, 3)} of work.{once}{python_text(case)}",
        fix=fix,
        saving_ns=saving_ns,
        derived="the step replayed without these pauses",
        confidence="low" if once else "high" if top["op"] or top["caller"] else "medium",
        falsified_by="turn off logging, checkpoints and gc; the finding is wrong if the step is not faster",
        places=case.host_places(quiet),
        evidence=(Evidence("pauses of the host", table.head(8).to_dicts()),),
    )
