"""Does the GPU wait for the host to launch kernels?

The step is replayed without the host's time between launches, as with a CUDA graph. Host pauses of a millisecond or
more are not launch overhead: other rules report those.
"""

from __future__ import annotations

import polars as pl

from stepscope.analysis.time.stalls import STALL_NS
from stepscope.findings.rule import Case, Change, Evidence, Finding, duration, one_finding, plural, stretches
from stepscope.session.places import places_without_work

_SURE = 0.3  # of a step; the profiler's own overhead in a bare trace is known less exactly
_GRAPH_LAUNCH = 0.02  # of the host's time is left when it launches graphs
_LAUNCHING = ["launch", "python"]  # causes of GPU idle time, see analysis/time/idle_causes.py


def check(case: Case) -> list[Finding]:
    kernels = case.work.filter(pl.col("kind") == "kernel")
    length = pl.col("end_ns") - pl.col("start_ns")
    between = case.replay.host_stretches().filter(length < STALL_NS)
    saving_ns = min(case.saving_ns(Change(host=stretches(between, _GRAPH_LAUNCH))), case.starved_ns)
    if not case.is_worth(saving_ns):
        return []
    step = case.step
    num_kernels = kernels.height / case.num_steps
    median_ns = float(kernels["duration_ns"].median() or 0.0)  # type: ignore[arg-type]
    # Other rules report the stalls.
    launching = Change(host=stretches(case.stalls), profiler_ns_per_event=case.profiler_ns_per_event)
    host_ns = case.replay.play(launching).host_ns
    row = {"num_kernels": num_kernels, "median_kernel_ns": median_ns, "busy_ns": case.busy_ns, "host_ns": host_ns,
           "step_ns": step.done_ns, "starved_share": case.account.launches.get("starved_share")}  # fmt: skip
    sure_ns = (_SURE if case.clean_ns is None else _SURE / 2) * step.done_ns
    return one_finding(
        sentence=f"The GPU waits for the host, which needs {duration(host_ns, 3)} to launch "
        f"{plural(num_kernels, 'kernel')} per step. Half of them are shorter than {duration(median_ns, 3)}, so the "
        f"GPU is busy for only {duration(case.busy_ns, 3)} of {duration(step.done_ns, 3)}.",
        fix='model = torch.compile(model, mode="reduce-overhead")  # or a larger batch: host time stays the same',
        saving_ns=saving_ns,
        upper_bound=True,
        derived="the step replayed with 2 % of the host's time between launches, as with CUDA graphs; compiling also "
        "fuses kernels, which is not counted",
        confidence="high" if saving_ns > sure_ns else "medium",
        falsified_by='compile with mode="reduce-overhead"; the finding is wrong if the step is not faster, or if '
        "doubling the batch doubles the step",
        places=places_without_work(case.idle.filter(pl.col("cause").cast(pl.String).is_in(_LAUNCHING))),
        evidence=(Evidence("step", [row]), Evidence("kernels per step by size", case.kernel_sizes.to_dicts())),
    )
