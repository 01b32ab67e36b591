"""The fixes that `stepscope verify` applies to a script from outside.

`recorder/fixes` implements them; a test keeps the names in sync. Uses only the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.analysis.comparison.verification import NOT_COMPARABLE, REDUCED, REORDERED, SAME, Expected
from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.findings.diagnose import Diagnosis

_MODES = ("default", "max-autotune", "max-autotune-no-cudagraphs", "reduce-overhead")


@dataclass(frozen=True)
class Fix:
    """One change, with the id of the finding that suggests it, if there is one."""

    id: str
    about: str  # effect on the script
    arithmetic: str
    """How losses may differ: `same`, `reordered`, `reduced` or `not comparable` (`comparison/verification.py`)."""
    values: tuple[str, ...] = ()  # values allowed after `=`, the default first; `N` stands for any number
    lowers_to: str | None = None
    """The dtype of matrix products with the fix; if their number does not grow, it was not applied."""


FIXES: Mapping[str, Fix] = {
    fix.id: fix
    for fix in (
        Fix("fp32_matmul", 'torch.set_float32_matmul_precision("high")', REDUCED, lowers_to="tf32"),
        Fix("autocast", "runs the script's modules under torch.autocast in bfloat16; they return float32",
            REDUCED, lowers_to="bf16"),
        Fix("unfused_optimizer", "creates torch.optim optimizers with fused=True, or foreach=True if there is no "
            "fused version", REORDERED),
        Fix("attention_backend", "restricts scaled_dot_product_attention to this backend", REORDERED,
            ("flash", "efficient", "cudnn", "math")),
        Fix("launch_bound", 'torch.compile(mode="reduce-overhead") for the script\'s modules: uses CUDA graphs',
            REORDERED),
        Fix("compile", "torch.compile for the script's modules", REORDERED, _MODES),
        Fix("pageable_copies", "DataLoaders with pin_memory=True, and non_blocking copies from pinned memory", SAME),
        Fix("waiting_for_data", "DataLoaders with more, persistent workers (default: one per core, 2 to 8)", SAME,
            ("", "N")),
        Fix("small_batch", "DataLoaders with batch_size times N; compares tokens per second, not losses",
            NOT_COMPARABLE, ("2", "N")),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Chosen:
    """Fixes applied together, as the user typed them."""

    text: str
    fixes: tuple[Fix, ...]

    @property
    def arithmetic(self) -> str:
        """The largest effect of its fixes on losses."""
        order = (SAME, REORDERED, REDUCED, NOT_COMPARABLE)
        return max((fix.arithmetic for fix in self.fixes), key=order.index)


def parse_fix(text: str) -> Chosen:
    """Return the fixes named on the command line, such as `compile=max-autotune` or `autocast+unfused_optimizer`.

    >>> parse_fix("autocast+compile").arithmetic
    'reduced'
    """
    fixes = []
    for part in text.split("+"):
        name, equals, value = (word.strip() for word in part.partition("="))
        fix = FIXES.get(name)
        if fix is None:
            raise UsageError(f"Unknown fix {name!r}. Choose from {', '.join(FIXES)} (see stepscope list fixes).")
        if equals and not _is_allowed(fix, value):
            takes = f"must be {' or '.join(filter(None, fix.values))}" if fix.values else "is not allowed"
            raise UsageError(f"--fix {part.strip()}: the value of {name} {takes}.")
        fixes.append(fix)
    return Chosen("+".join(part.strip() for part in text.split("+")), tuple(fixes))


def _is_allowed(fix: Fix, value: str) -> bool:
    if "N" not in fix.values:
        return bool(value) and value in fix.values
    try:
        number = float(value)
    except ValueError:
        return False
    # Workers must be a whole number; a batch may be scaled by any.
    return number > 0 and (fix.arithmetic == NOT_COMPARABLE or value.isdigit())


def expected_of(diagnosis: Diagnosis, chosen: Chosen) -> Expected:
    """Return the saving that a diagnosis predicts for a fix, from the finding with its id, or why there is none."""
    name = chosen.fixes[0].id
    finding = next((each for each in diagnosis.findings if each.id == name), None)
    unchecked = next((each.reason for each in diagnosis.unchecked if each.id == name), None)
    if len(chosen.fixes) > 1:
        reason = "savings of several findings cannot be added"
    elif finding is not None:
        share = finding.saving_ns / diagnosis.step_ns if finding.saving_ns and diagnosis.step_ns else None
        return Expected(finding.saving_ns, share, finding.upper_bound, finding.confidence, None)
    elif unchecked is not None:
        reason = f"diagnose could not check it: {unchecked}"
    else:
        reason = "diagnose found nothing to gain" if name in diagnosis.clean else "no finding suggests it"
    return Expected(None, None, False, None, reason)
