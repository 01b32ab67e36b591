"""How a process ended, as status and facts of its recording."""

from __future__ import annotations

import sys
from typing import Any

from stepscope.recorder import files
from stepscope.recorder.run_facts import now


def ending(error: BaseException | None) -> tuple[str, dict[str, Any]]:
    """Return the status and the facts of a process that `error` ended; None if it ran to its end.

    >>> ending(SystemExit(3))[0], ending(SystemExit())[1]["exit_code"]
    ('failed', 0)
    """
    status, facts = files.STATUS_FINISHED, {"exit_code": 0, "finished_at": now()}
    if isinstance(error, KeyboardInterrupt):
        status, facts["exit_code"] = files.STATUS_INTERRUPTED, 130
    elif isinstance(error, SystemExit):
        code = error.code
        facts["exit_code"] = code if isinstance(code, int) else int(code is not None)
        status = files.STATUS_FAILED if facts["exit_code"] else files.STATUS_FINISHED
    elif error is not None:
        status, facts["exit_code"] = files.STATUS_FAILED, 1
        facts["exception"] = f"{type(error).__name__}: {error}"[:500]
    processes = sys.modules.get("multiprocessing.process")
    facts["num_child_processes"] = next(processes._process_counter) - 1 if processes else 0
    return status, facts
