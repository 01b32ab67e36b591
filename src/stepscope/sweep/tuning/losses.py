"""Whether a point trains like the plainest variant of its configuration: the losses of both, held together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stepscope.sweep.checks.gate import TOLERANCE

# A scaler leaves steps out until it has found its scale: the weights have moved less often.
SCALED = "autocast_fp16"


@dataclass(frozen=True, kw_only=True)
class LossCheck:
    """A point's losses against the plainest variant's; JSON with `dataclasses.asdict`."""

    passed: bool | None
    """None: it could not be checked."""
    reason: str | None
    """Why it did not pass, or could not be checked."""
    plain_loss: float | None = None
    """The plainest variant's, at the first call."""
    deviation: float | None = None
    """The larger of the two distances, as a share of the plainest variant's larger loss; see `is_final`."""
    tolerance: float | None = None
    """What the dtype allows."""
    is_final: bool = False
    """Whether these are of the last step's loss, not of the first call's."""


def no_loss(row: Mapping[str, Any]) -> LossCheck:
    """Of a point that computes none."""
    gate = "; what it computes has passed the gate" if (row.get("gate") or {}).get("passed") else ""
    return LossCheck(passed=None, reason=f"it has no loss{gate}")


def check_loss(row: Mapping[str, Any], plain: Mapping[str, Any]) -> LossCheck:
    """A point's row against the row of the plainest variant: same sizes, batch, seed and number of steps."""
    if "samples_device_ns" not in plain:
        said = plain.get("reason") or plain["status"]
        return LossCheck(passed=None, reason=f"the plainest variant has no loss to show: {plain['status']}: {said}")
    dropped = [(side.get("facts") or {}).get("dropped_share", 0) for side in (row, plain)]
    if dropped[0] > 0 and not dropped[1] > 0:
        reason = f"it drops {dropped[0]:.1%} of the routed work, the plainest variant none"
        return LossCheck(passed=False, reason=reason)
    if plain.get("loss") is None:
        return no_loss(row)
    if row.get("loss") is None:
        return LossCheck(passed=False, reason="its loss is no number", plain_loss=plain["loss"])
    tolerances = TOLERANCE[str(row["run"]["dtype"])]
    scale = max(abs(plain["loss"]), abs(plain.get("final_loss") or 0.0)) or 1.0
    first = abs(row["loss"] - plain["loss"]) / scale
    checks = [(first / tolerances[0], first, tolerances[0], False)]
    if plain.get("final_loss") is not None and row["run"]["dtype"] != SCALED:
        if row.get("final_loss") is None:
            return LossCheck(passed=False, reason="its last loss is no number", plain_loss=plain["loss"])
        # By then gradients have moved the weights: what a gradient may deviate by, this may.
        last = abs(row["final_loss"] - plain["final_loss"]) / scale
        checks.append((last / tolerances[1], last, tolerances[1], True))
    worst, deviation, tolerance, is_final = max(checks)
    names = ("final_loss", "last loss") if is_final else ("loss", "loss")
    reason = (
        f"{names[1]} {row[names[0]]:.6g} against {plain[names[0]]:.6g} of the plainest variant: "
        f"{deviation:.2g} of it, allowed is {tolerance:.2g}"
    )
    return LossCheck(
        passed=worst <= 1,
        reason=None if worst <= 1 else reason,
        plain_loss=plain["loss"],
        deviation=deviation,
        tolerance=tolerance,
        is_final=is_final,
    )
