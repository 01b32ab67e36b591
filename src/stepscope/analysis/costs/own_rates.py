"""The rates of a CPU, for which there is no table: what the fast part of a trace's own work reaches."""

import sys

import polars as pl

from stepscope.analysis.costs.attainable_rates import BANDWIDTH_SHARE, GEMM_SHARE
from stepscope.devices import Device

_FAST_SHARE = 0.25  # of the time of such work: a rate that so much of it reaches is attainable
_LEAST_NS = 20_000  # of calls that count, if there are any: shorter ones measure the call
_LEAST_RATE = 4e9  # FLOPs, or bytes, per second: any core of the last ten years is faster; slower ones measure calls


def own_device(work: pl.DataFrame) -> Device:
    """Return a device on which good kernels are as fast as the fast part of some work."""
    flops = work.filter(pl.col("flops") > 0, pl.col("peak_dtype").is_not_null())
    moving = work.filter((pl.col("flops") == 0).fill_null(True), pl.col("bytes") > 0)
    peaks = {str(dtype): int(_rate(part, "flops") / GEMM_SHARE) for (dtype,), part in flops.group_by("peak_dtype")}
    peaks.setdefault("fp32", max(peaks.values(), default=int(_LEAST_RATE)))
    bandwidth = int(_rate(moving, "bytes") / BANDWIDTH_SHARE)
    # How much memory there is to use is not known: nothing is said about too little or too much of it.
    return Device("CPU", peaks, sys.maxsize, bandwidth, "the fast part of the trace's own ops")


def _rate(work: pl.DataFrame, what: str) -> float:
    long = work.filter(pl.col("duration_ns") >= _LEAST_NS)
    rates = (long if long.height else work).filter(pl.col("duration_ns") > 0)
    per_s = (pl.col(what) / pl.col("duration_ns") * 1e9).alias("rate")
    rates = rates.select(per_s, "duration_ns").sort("rate", descending=True)
    reached = rates.filter(pl.col("duration_ns").cum_sum() >= _FAST_SHARE * float(rates["duration_ns"].sum()))
    return max(_LEAST_RATE, float(reached["rate"][0]) if reached.height else 0.0)
