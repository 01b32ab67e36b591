"""Does the optimizer launch many small kernels where one would do?"""

from __future__ import annotations

import polars as pl

from stepscope.analysis.costs.attainable_rates import traffic_ns
from stepscope.analysis.time.replay import Change
from stepscope.analysis.time.whatif import stretches
from stepscope.errors import Unavailable
from stepscope.findings.finding import Evidence, Finding
from stepscope.formatting import duration, plural
from stepscope.session.case import Case

_LEFT_OF_HOST = 0.08
"""Of a looped optimizer's time on the host, what the fused one needs to collect the tensors and launch."""
_LEFT_OF_DEVICE = 0.3
"""Of its time on the GPU, where the trace does not say how large the parameters are."""
_FEW_LAUNCHES = 12
_WITH_FUSED = ("AdamW", "Adam", "SGD", "Adagrad")
_READ_AND_WRITTEN = 7
"""Parameter, gradient and two states read; parameter and two states written."""


def check(case: Case) -> list[Finding]:
    if case.account.phase_source == "none":
        raise Unavailable("the trace does not say where the optimizer runs")
    own = case.work.filter(pl.col("phase") == "optimizer")
    names = own["op"].cast(pl.String).fill_null("")
    num_fused = int(names.str.contains("_fused_").sum())
    launches = own.height / case.num_steps
    if launches <= _FEW_LAUNCHES or num_fused:
        return []
    is_foreach = bool(names.str.contains("_foreach_").any())
    calls = own.group_by("op").agg(
        (pl.len() / case.num_steps).alias("num_kernels"), pl.col("duration_ns").sum() / case.num_steps
    )
    # The update itself comes once a parameter: its bytes tell how large the parameters are.
    updates = own.filter(names.str.contains("addcdiv"))
    moved = int(updates["bytes"].sum() or 0) / 4 * _READ_AND_WRITTEN / case.num_steps
    device_ns = float(own["duration_ns"].sum()) / case.num_steps
    fused_ns = min(traffic_ns(case.device, moved), device_ns) if moved else device_ns * _LEFT_OF_DEVICE
    kept = own["event"].gather_every(max(1, own.height // case.num_steps))
    durations = dict.fromkeys(kept.to_list(), fused_ns)
    gone = frozenset(own["event"].to_list()) - durations.keys()
    host = case.phase_stretches("optimizer")
    saving_ns = case.saving_ns(Change(duration_ns=durations, gone=gone, host=stretches(host, _LEFT_OF_HOST)))
    if not case.is_worth(saving_ns):
        return []
    how = "foreach" if is_foreach else "one parameter after the other"
    work = f"takes {_LEFT_OF_DEVICE:.0%} of their time"
    if moved:
        work = f"moves each parameter's bytes {_READ_AND_WRITTEN} times"
    host_ns = float((host["end_ns"] - host["start_ns"]).sum()) / case.num_steps
    return [
        Finding(
            sentence=f"The optimizer works {how}: {plural(launches, 'kernel')} a step, {duration(host_ns, 3)} of "
            f"the host under the profiler and {duration(device_ns, 3)} of the GPU, where a fused one takes "
            f"{duration(fused_ns, 3)}.",
            fix=_fix(case.optimizers),
            saving_ns=saving_ns,
            derived=f"the step replayed with one kernel that {work}, and {_LEFT_OF_HOST:.0%} of the optimizer's time "
            "on the host",
            confidence="high" if moved else "medium",
            falsified_by="an optimizer without a fused version, or as many kernels with fused=True",
            places=case.places(own["event"]),
            evidence=(
                Evidence("kernels of the optimizer", calls.sort("duration_ns", descending=True).head(8).to_dicts()),
            ),
        )
    ]


def _fix(optimizers: list[str]) -> str:
    named = [name for name in _WITH_FUSED if name in optimizers]
    if optimizers and not named:
        return f"torch.compile(optimizer.step)  # {optimizers[0]} has no fused version of its own"
    return f"torch.optim.{(named or _WITH_FUSED)[0]}(model.parameters(), fused=True)"
