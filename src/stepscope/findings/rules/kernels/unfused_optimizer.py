"""Does the optimizer launch many small kernels where one would do?"""

from __future__ import annotations

import polars as pl

from stepscope.analysis.costs.attainable_rates import traffic_ns
from stepscope.findings.rule import LENGTH, Case, Change, Evidence, Finding, Unavailable, one_finding, stretches
from stepscope.formatting import duration, plural, whole_percent

_LEFT_OF_HOST = 0.08  # of a loop's host time; a fused optimizer needs it to collect tensors and launch
_LEFT_OF_DEVICE = 0.3  # of its GPU time, if the trace does not contain the parameters' sizes
_FEW_LAUNCHES = 12
_WITH_FUSED = ("AdamW", "Adam", "SGD", "Adagrad")
_READ_AND_WRITTEN = 7  # reads parameter, gradient and two states; writes parameter and two states


def check(case: Case) -> list[Finding]:
    if case.account.phase_source == "none":
        raise Unavailable("The trace does not show where the optimizer runs.")
    own = case.work.filter(pl.col("phase") == "optimizer")
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
    inside = (pl.col("end_ns") > case.replay.start_ns) & (pl.col("start_ns") < case.replay.end_ns)
    host = case.linked.steps.phases.filter(pl.col("phase") == "optimizer", inside)
    saving_ns = case.saving_ns(Change(duration_ns=durations, gone=gone, host=stretches(host, _LEFT_OF_HOST)))
    if not case.is_worth(saving_ns):
        return []
    how = "in foreach groups" if is_foreach else "one at a time"
    bytes_text = f"moves each parameter's bytes {_READ_AND_WRITTEN} times"
    work = bytes_text if moved else f"takes {whole_percent(_LEFT_OF_DEVICE)} of their time"
    return one_finding(
        sentence=f"The optimizer updates parameters {how}: "
        f"{plural(launches, 'kernel per step takes', 'kernels per step take')} "
        f"{duration(case.total_ns(host, LENGTH), 3)} of host time (under the profiler) and {duration(device_ns, 3)} "
        f"of GPU time. A fused optimizer takes {duration(fused_ns, 3)}.",
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


def _fix(case: Case) -> str:
    host = case.linked.host
    names = host["name"].filter(host["kind"] == "annotation").unique().cast(pl.String)
    # The classes of the optimizers that stepped, as the profiler names them.
    optimizers = sorted(names.str.extract(r"^Optimizer\.step#(\w+)\.step$").drop_nulls().unique())
    named = [name for name in _WITH_FUSED if name in optimizers]
    if optimizers and not named:
        return f"torch.compile(optimizer.step)  # {optimizers[0]} has no fused version"
    return f"torch.optim.{(named or _WITH_FUSED)[0]}(model.parameters(), fused=True)"
