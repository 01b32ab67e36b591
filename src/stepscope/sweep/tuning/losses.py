"""Checks that a point's loss agrees with that of the plainest variant of the same configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stepscope.formatting import percent
from stepscope.sweep.checks.gate import TOLERANCE

# A GradScaler skips steps until it has found its scale, so the weights have moved less often.
SCALED = "autocast_fp16"


@dataclass(frozen=True, kw_only=True)
class LossCheck:
    """A point's losses compared with the plainest variant's; JSON with `dataclasses.asdict`."""

    passed: bool | None
    """None if it could not be checked."""
    reason: str | None
    """Why it failed or could not be checked."""
    plain_loss: float | None = None
    """The plainest variant's loss in the first call."""
    deviation: float | None = None
    """The larger deviation of first and last loss, as a share of the plainest variant's larger loss."""
    tolerance: float | None = None
    """The allowed deviation for the dtype."""
    is_final: bool = False
    """Whether deviation and tolerance are for the last loss instead of the first."""


def no_loss(row: Mapping[str, Any]) -> LossCheck:
    """Return the check of a point without a loss."""
    gate = "; its outputs passed the gate" if (row.get("gate") or {}).get("passed") else ""
    return LossCheck(passed=None, reason=f"the workload has no loss{gate}")


def check_loss(row: Mapping[str, Any], plain: Mapping[str, Any]) -> LossCheck:
    """Compare a point's row with the plainest variant's: same sizes, batch, seed and number of steps."""
    if "samples_device_ns" not in plain:
        reason = f"the plainest variant did not run: {plain['status']}: {plain.get('reason') or plain['status']}"
        return LossCheck(passed=None, reason=reason)
    dropped = [(side.get("facts") or {}).get("dropped_share", 0) for side in (row, plain)]
    if dropped[0] > 0 and not dropped[1] > 0:
        reason = f"it drops {percent(dropped[0])} of the routed tokens, the plainest variant none"
        return LossCheck(passed=False, reason=reason)
    if plain.get("loss") is None:
        return no_loss(row)
    if row.get("loss") is None:
        return LossCheck(passed=False, reason="its loss is not a number", plain_loss=plain["loss"])
    tolerances = TOLERANCE[str(row["run"]["dtype"])]
    scale = max(abs(plain["loss"]), abs(plain.get("final_loss") or 0.0)) or 1.0
    first = abs(row["loss"] - plain["loss"]) / scale
    checks = [(first / tolerances[0], first, tolerances[0], False)]
    if plain.get("final_loss") is not None and row["run"]["dtype"] != SCALED:
        if row.get("final_loss") is None:
            return LossCheck(passed=False, reason="its last loss is not a number", plain_loss=plain["loss"])
        # By then gradients have moved the weights, so the tolerance of gradients applies.
        last = abs(row["final_loss"] - plain["final_loss"]) / scale
        checks.append((last / tolerances[1], last, tolerances[1], True))
    worst, deviation, tolerance, is_final = max(checks)
    names = ("final_loss", "last loss") if is_final else ("loss", "loss")
    reason = (
        f"{names[1]} {row[names[0]]:.6g} instead of {plain[names[0]]:.6g} in the plainest variant: "
        f"relative deviation {deviation:.2g}, allowed {tolerance:.2g}"
    )
    return LossCheck(
        passed=worst <= 1,
        reason=None if worst <= 1 else reason,
        plain_loss=plain["loss"],
        deviation=deviation,
        tolerance=tolerance,
        is_final=is_final,
    )
