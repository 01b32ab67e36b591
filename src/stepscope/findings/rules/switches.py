"""Rules about torch's switches: deterministic algorithms, cuDNN's choice of kernels."""

from typing import Any

import polars as pl

from stepscope.findings.rule import Case, Evidence, Finding, Unavailable, one_finding, rule
from stepscope.formatting import whole_percent

_CONVOLVING_SHARE = 0.1  # of GPU time; with less, cuDNN's choice matters little


@rule
def torch_switches(case: Case) -> list[Finding]:
    """Are deterministic algorithms left on, or is cuDNN not allowed to try its convolution kernels?"""
    flags = case.recording.facts.get("flags")
    if not flags:
        raise Unavailable("The recording does not have torch's switches. Record it again with `stepscope run`.")
    return [*_deterministic(case, flags), *_autotuning(case, flags)]


def _deterministic(case: Case, flags: dict[str, Any]) -> list[Finding]:
    switches = {
        "deterministic_algorithms": "torch.use_deterministic_algorithms(False)",
        "cudnn.deterministic": "torch.backends.cudnn.deterministic = False",
    }
    is_gpu = (case.recording.facts.get("environment") or {}).get("device") != "cpu"
    on = [name for name in switches if flags.get(name) and (is_gpu or not name.startswith("cudnn"))]
    if not on:
        return []
    slower = "Convolutions" if on == ["cudnn.deterministic"] else "Scatters, lookups' backwards and convolutions"
    return one_finding(
        sentence=f"Deterministic algorithms are on ({', '.join(on)}). {slower} then use slower kernels.",
        fix="; ".join(switches[name] for name in on),
        derived="unknown: a trace does not show which kernels would run without it",
        confidence="medium",
        falsified_by="turn it off; the finding is wrong if the step is not faster, or if runs must be equal",
        evidence=(Evidence("torch's switches", [dict(flags)]),),
    )


def _autotuning(case: Case, flags: dict[str, Any]) -> list[Finding]:
    if flags.get("cudnn.benchmark") is not False or not case.has_gpu_work or case.num_steps < 2:
        return []
    convolving = case.work.filter(pl.col("class") == "convolution").with_columns(pl.col("shapes").cast(pl.String))
    share = case.total_ns(convolving) / case.busy_ns if case.busy_ns else 0.0
    by_step = [sorted(part["shapes"].drop_nulls().unique()) for _, part in convolving.group_by("step")]
    if share < _CONVOLVING_SHARE or any(shapes != by_step[0] for shapes in by_step):
        return []  # with shapes that change, cuDNN would try its kernels again and again
    table = case.grouped(convolving, "num_kernels", "op", "shapes")
    return one_finding(
        sentence=f"Convolutions take {whole_percent(share)} of the GPU's time, always with the same shapes, and "
        "cuDNN chooses their kernels without trying them (torch.backends.cudnn.benchmark is off).",
        fix="torch.backends.cudnn.benchmark = True  # at the start: cuDNN times its kernels once per shape",
        derived="unknown: how much faster other kernels are is not measured; trying them costs seconds at the start",
        confidence="low",
        falsified_by="turn it on; the finding is wrong if the step is not faster",
        places=case.places(convolving["event"]),
        evidence=(Evidence("convolutions", table.head(8).to_dicts()),),
    )
