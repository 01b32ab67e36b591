"""The fixes that `stepscope verify` makes to a script from outside: what each does, and what its losses are held to.

How they are made is in `record/fixes`; a test holds the names of both together. No more than the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stepscope.analysis.comparison.losses import NOT_COMPARABLE, REDUCED, REORDERED, SAME
from stepscope.errors import UsageError

_MODES = ("default", "max-autotune", "max-autotune-no-cudagraphs", "reduce-overhead")


@dataclass(frozen=True)
class Fix:
    """One change. It has the id of the finding that asks for it, where there is one."""

    id: str
    about: str
    """What it does to the script."""
    arithmetic: str
    """How its losses may differ: `same`, `reordered`, `reduced` or `not comparable` (`comparison/losses.py`)."""
    values: tuple[str, ...] = ()
    """What may stand behind `=`, the default first; `N` for a number of one's own."""
    lowers_to: str | None = None
    """The dtype in which products run with it: where their number does not grow, it was not applied."""


FIXES: Mapping[str, Fix] = {
    fix.id: fix
    for fix in (
        Fix("fp32_matmul", 'torch.set_float32_matmul_precision("high")', REDUCED, lowers_to="tf32"),
        Fix("autocast", "the modules that the script calls run under torch.autocast in bfloat16, and return float32",
            REDUCED, lowers_to="bf16"),
        Fix("unfused_optimizer", "torch.optim's optimizers are made with fused=True, or foreach=True where there is "
            "no fused one", REORDERED),
        Fix("attention_backend", "scaled_dot_product_attention may use this back end and no other", REORDERED,
            ("flash", "efficient", "cudnn", "math")),
        Fix("launch_bound", 'torch.compile(mode="reduce-overhead") of the modules that the script calls: CUDA graphs',
            REORDERED),
        Fix("compile", "torch.compile of the modules that the script calls", REORDERED, _MODES),
        Fix("pageable_copies", "DataLoaders with pin_memory=True, and copies from pinned memory non_blocking", SAME),
        Fix("waiting_for_data", "DataLoaders with more workers, which persist (default: one a core, 2 to 8)", SAME,
            ("", "N")),
        Fix("small_batch", "DataLoaders with batch_size times N; tokens a second are compared, losses cannot be",
            NOT_COMPARABLE, ("2", "N")),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Chosen:
    """Fixes made together, as the user typed them."""

    text: str
    fixes: tuple[Fix, ...]

    @property
    def arithmetic(self) -> str:
        """The widest of what its fixes may do to losses."""
        order = (SAME, REORDERED, REDUCED, NOT_COMPARABLE)
        return max((fix.arithmetic for fix in self.fixes), key=order.index)


def parse_fix(text: str) -> Chosen:
    """Fixes from the command line: `autocast`, `compile=max-autotune`, `autocast+unfused_optimizer` made together.

    >>> parse_fix("autocast+compile").arithmetic
    'reduced'
    """
    fixes = []
    for part in text.split("+"):
        name, equals, value = (word.strip() for word in part.partition("="))
        fix = FIXES.get(name)
        if fix is None:
            raise UsageError(f"no fix is called {name!r}; there are {', '.join(FIXES)} (stepscope list fixes)")
        if equals and not _is_allowed(fix, value):
            takes = f"takes {', '.join(filter(None, fix.values))}" if fix.values else "takes no value"
            raise UsageError(f"--fix {part.strip()}: {name} {takes}")
        fixes.append(fix)
    return Chosen("+".join(part.strip() for part in text.split("+")), tuple(fixes))


def _is_allowed(fix: Fix, value: str) -> bool:
    if "N" not in fix.values:
        return bool(value) and value in fix.values
    try:
        number = float(value)
    except ValueError:
        return False
    # Half a worker is none; half a batch is one.
    return number > 0 and (fix.arithmetic == NOT_COMPARABLE or value.isdigit())
