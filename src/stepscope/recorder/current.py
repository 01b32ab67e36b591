"""The recording session of this process, if there is one. Imports nothing: `stepscope.step()` must be free."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.recorder.session import Session

session: Session | None = None
