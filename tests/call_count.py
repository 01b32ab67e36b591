"""How much work something is, without a clock."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable


def num_calls(work: Callable[[], object]) -> int:
    """How many functions are called, in any thread: no clock."""
    calls: Counter[str] = Counter()

    def count(_: object, event: str, __: object) -> None:
        calls[event] += 1

    sys.setprofile(count)
    threading.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls["call"] + calls["c_call"]
