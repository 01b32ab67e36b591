"""The recording session of this process, if one is active. Importing this must stay cheap for `stepscope.step()`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol


class ActiveSession(Protocol):
    """The part of `session.Session` that the rest of Stepscope uses."""

    folder: Path
    is_script: bool

    def explicit_step(self, tokens: int | None = None, loss: Any = None) -> None: ...
    def phase(self, name: str) -> AbstractContextManager[None]: ...
    def aside_begins(self, label: str) -> bool: ...
    def aside_ended(self) -> None: ...
    def stop_listening(self) -> None: ...
    def abandon(self, reason: str) -> None: ...


session: ActiveSession | None = None

peak_flops: Callable[[str], Mapping[str, int] | None] | None = None
"""Returns the FLOP/s that a device can reach, by dtype. Set from outside: the recorder knows no devices."""
