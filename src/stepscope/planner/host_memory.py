"""Counts how much host memory `save_on_cpu` uses."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

MIB = 1 << 20


def patch(note: Callable[[str], None]) -> Any:
    """Return a patch of `torch.autograd.graph.save_on_cpu` that calls `note` whenever its host memory peaks."""
    original = torch.autograd.graph.save_on_cpu.__init__
    live_bytes = most_bytes = 0

    def count(num_bytes: int) -> None:
        nonlocal live_bytes, most_bytes
        live_bytes += num_bytes
        if live_bytes > most_bytes:
            most_bytes = live_bytes
            note(f"keeps up to {most_bytes / MIB:,.1f} MiB in host memory, in addition to the device's")

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        pack = self.pack_hook

        def counted(tensor: torch.Tensor) -> Any:
            device, packed = pack(tensor)
            num_bytes = packed.numel() * packed.element_size()
            count(num_bytes)
            weakref.finalize(packed, count, -num_bytes).atexit = False
            return device, packed

        self.pack_hook = counted

    return mock.patch.object(torch.autograd.graph.save_on_cpu, "__init__", __init__)
