"""Does the GPU wait for the host to launch its kernels?

The step is replayed with the host's time between launches gone, as a CUDA graph or a fuller queue would have it.
What keeps the host for a millisecond and more in one piece is no launching: other rules look at that.
"""

from __future__ import annotations

import polars as pl

from stepscope.analysis.time.replay import Change
from stepscope.analysis.time.stalls import STALL_NS
from stepscope.analysis.time.whatif import stretches
from stepscope.findings.finding import Evidence, Finding
from stepscope.formatting import duration, plural
from stepscope.session.case import Case

_SURE = 0.3
"""Of a step: what the profiler adds to a bare trace is known less well than this."""
_GRAPH_LAUNCH = 0.02
"""Of the host's time, what a step of graph launches is left with."""

_LAUNCHING = ["launch", "python"]
"""What the host did while the GPU stood, of the causes of `analysis/time/idle.py`."""


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
    launches = case.account.launches
    # What other rules tell of is no launching.
    launching = Change(host=stretches(case.stalls), profiler_ns_per_event=case.profiler_ns_per_event)
    host_ns = case.replay.play(launching).host_ns
    return [
        Finding(
            sentence=f"The GPU waits for the host: {plural(num_kernels, 'kernel')} a step, half of them shorter "
            f"than {duration(median_ns, 3)}, keep the GPU busy for {duration(case.busy_ns, 3)} of "
            f"{duration(step.done_ns, 3)}, and the host needs {duration(host_ns, 3)} to launch them.",
            fix='model = torch.compile(model, mode="reduce-overhead")  # or a larger batch: the host\'s time stays',
            saving_ns=saving_ns,
            upper_bound=True,
            derived="the step replayed with 2 % of the host's time between launches left, as CUDA graphs would leave "
            "it; compiling also fuses kernels, which is not counted",
            confidence="high"
            if saving_ns > (_SURE if case.clean_ns is None else _SURE / 2) * step.done_ns
            else "medium",
            falsified_by='a step as long with mode="reduce-overhead", or twice as long with twice the batch',
            places=case.idle_places(case.idle.filter(pl.col("cause").cast(pl.String).is_in(_LAUNCHING))),
            evidence=(
                Evidence(
                    "step",
                    [
                        {
                            "num_kernels": num_kernels,
                            "median_kernel_ns": median_ns,
                            "busy_ns": case.busy_ns,
                            "host_ns": host_ns,
                            "step_ns": step.done_ns,
                            "starved_share": launches.get("starved_share"),
                        }
                    ],
                ),
                Evidence("kernels of a step by size", case.kernel_sizes.to_dicts()),
            ),
        )
    ]
