"""The one door to what was measured: what a path is, opened once, with views computed on demand."""

from stepscope.session.session import Session, latest_run, need_read_side, open_session
from stepscope.trace.kind import Kind

__all__ = ["Kind", "Session", "latest_run", "need_read_side", "open_session"]
