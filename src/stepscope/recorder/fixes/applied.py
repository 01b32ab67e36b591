"""The fixes of one run: applied, extended to the root modules, and reported in the recording."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stepscope.recorder.fixes import LOOK, MICRO_BATCH, split
from stepscope.recorder.fixes.changes import (
    Autocast,
    Change,
    Compiled,
    FusedOptimizers,
    LargerBatch,
    MoreWorkers,
    PinnedCopies,
)
from stepscope.recorder.fixes.micro_batches import MicroBatch
from stepscope.recorder.fixes.models import ChannelsLast, FusedAttention, Rounding
from stepscope.recorder.fixes.settings import AttentionBackend, CudnnBenchmark, ExpandableSegments, Tf32, Threads
from stepscope.recorder.fixes.words import Regrouped

CHANGES: dict[str, Callable[[str | None], Change]] = {
    "fp32_matmul": Tf32,
    "autocast": Autocast,
    "unfused_optimizer": FusedOptimizers,
    "attention_backend": AttentionBackend,
    "launch_bound": lambda _: Compiled("reduce-overhead"),
    "compile": Compiled,
    "memory_layout": ChannelsLast,
    "sdpa": FusedAttention,
    "cudnn_benchmark": CudnnBenchmark,
    "pageable_copies": PinnedCopies,
    "waiting_for_data": MoreWorkers,
    "small_batch": LargerBatch,
    MICRO_BATCH: MicroBatch,
    "threads": Threads,
    "expandable_segments": ExpandableSegments,
    "rounding": Rounding,
}


class AppliedFixes:
    """Fixes by name, as in `STEPSCOPE_FIX`: `autocast+compile=max-autotune`; after a `?`, they only look.

    `words` are what was changed for them on the command line.
    """

    def __init__(self, text: str, words: Regrouped | None = None) -> None:
        self._changes = [(name, CHANGES[name](value)) for name, value in split(text) if name in CHANGES]
        self._unknown = [name for name, _ in split(text) if name not in CHANGES]
        self._used: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        for _, change in self._changes:
            change.only_looks, change.words = text.startswith(LOOK), words
            try:
                change.start()
            except Exception as error:  # this runs inside the script's `import torch`
                change.left[f"it could not be applied: {type(error).__name__}: {error}"] += 1

    def use_roots(self, roots: list[nn.Module]) -> None:
        """Change the modules that the script calls directly, except those already changed."""
        if not self._used and torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()  # the steps before were unchanged
        new = [root for root in roots if root not in self._used]
        self._used.update(new)
        # Compile first, so that the other changes wrap the compiled code and count outside it.
        for _, change in sorted(self._changes, key=lambda each: not isinstance(each[1], Compiled)):
            change.use_roots(new)

    def finish(self) -> list[dict[str, Any]]:
        for _, change in self._changes:
            try:
                change.finish()
            except Exception as error:  # must not become the script's exception
                change.left[f"it could not be counted: {type(error).__name__}: {error}"] += 1
        return self.facts()

    def facts(self) -> list[dict[str, Any]]:
        """Return what each fix has done so far, as JSON values."""
        unknown = [{"id": name, "changed": {}, "left": {}, "nothing_seen": "no such fix"} for name in self._unknown]
        return [*({"id": name, **change.facts()} for name, change in self._changes), *unknown]

    def remove(self) -> None:
        for _, change in reversed(self._changes):
            change.remove()
