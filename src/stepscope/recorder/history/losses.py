"""Samples the loss about once per second, and never waits for the GPU.

On CUDA, the loss is copied to pinned memory on the stream that computes it. The copy is read at the next sample, if
it has arrived by then. Only the thread that trains asks for it: asking from another one would break a CUDA graph that
is being captured.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from stepscope.recorder.modes import unseen
from stepscope.recorder.values import is_plain

PERIOD_NS = 1_000_000_000


class LossSampler:
    """Takes a loss whenever one `is_due`, and adds it with its time to `found`."""

    def __init__(self, found: deque[tuple[int, float]]) -> None:
        self.is_due = False
        """Whether the next loss is wanted. A plain attribute, because every backward looks at it."""
        self._found = found
        self._due_ns = 0
        self._buffer: Any = None
        self._copied: Any = None  # the event after the last copy
        self._copied_ns: int | None = None

    def look(self, now_ns: int) -> None:
        """Ask for a loss if the last one was taken a while ago."""
        self.is_due = now_ns >= self._due_ns

    def take(self, loss: Any) -> None:
        """Sample a loss: what is passed to a backward, or what the script gave."""
        self.is_due = False
        now_ns = time.perf_counter_ns()
        self._due_ns = now_ns + PERIOD_NS
        if isinstance(loss, torch.Tensor):
            try:
                unseen(self._take, loss, now_ns)
            except (RuntimeError, TypeError):  # a tensor that cannot be read: the history has no losses
                self._due_ns, self._copied_ns = 2**63, None
        elif isinstance(loss, (int, float)):
            self._found.append((now_ns, float(loss)))

    def _take(self, loss: torch.Tensor, now_ns: int) -> None:
        if not is_plain(loss) or loss.numel() != 1:
            return
        if loss.device.type == "cpu":
            self._found.append((now_ns, float(loss.detach())))
        elif loss.is_cuda and not torch.cuda.is_current_stream_capturing():
            self.read()
            if self._copied_ns is not None:
                return  # the GPU is more than a second behind
            if self._buffer is None or self._buffer.dtype != loss.dtype:
                self._buffer = torch.empty((), dtype=loss.dtype, pin_memory=True)
                self._copied = torch.cuda.Event()
            self._buffer.copy_(loss.detach().reshape(()), non_blocking=True)
            self._copied.record(torch.cuda.current_stream(loss.device))
            self._copied_ns = now_ns

    def read(self) -> None:
        """Add the copied loss if it has arrived."""
        if self._copied_ns is not None and self._copied.query():
            self._found.append((self._copied_ns, float(self._buffer)))
            self._copied_ns = None
