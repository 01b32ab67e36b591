"""Whether the process that writes a recording still runs."""

import os
import platform
import re
from pathlib import Path

from stepscope.session.history import host_of
from stepscope.trace.recording import RECORDING_FILE
from stepscope.trace.recording_facts import RecordingFacts


def writer_runs(folder: Path, facts: RecordingFacts) -> bool | None:
    """Return whether the process that writes a recording runs; None if it is unknown, as on another machine."""
    pid = facts.get("pid")
    if not pid or (facts.get("host") or host_of(folder)) != platform.node():
        return None
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        boot = re.search(r"^btime (\d+)", Path("/proc/stat").read_text(encoding="ascii"), re.MULTILINE)
        began_s = int(boot[1]) - 1 + int(state[19]) // os.sysconf("SC_CLK_TCK") if boot else 0
        # A process that began after the file was written only has the same number.
        return state[0] not in ("Z", "X") and began_s <= (folder / RECORDING_FILE).stat().st_mtime
    except (OSError, IndexError, ValueError):
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's
    return True
