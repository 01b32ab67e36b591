"""A window that is taken while the run goes on: a recording of its own, in a folder of the run."""

from __future__ import annotations

import errno
import time
from pathlib import Path

from stepscope.recorder import files
from stepscope.recorder.history.requests import WARMUP_STEPS, Request
from stepscope.recorder.history.samples import Samples
from stepscope.recorder.history.writer import Writer
from stepscope.recorder.probes import Probes
from stepscope.recorder.run_facts import now
from stepscope.recorder.windows import Windows

SHARED_FACTS = ("command", "config", "config_hash", "git", "loader", "counters")


class TriggeredWindow:
    """The window from `first_step` on. The probes work for it until `release`."""

    def __init__(self, request: Request, folder: Path, first_step: int, probes: Probes, writer: Writer) -> None:
        self.request, self.folder, self.first_step = request, folder, first_step
        self.start_ns = time.perf_counter_ns()
        self._windows = Windows(
            warmup=WARMUP_STEPS, clean=request.clean, trace=request.trace, memory=1 if request.memory else 0
        )
        folder.mkdir(parents=True, exist_ok=True)  # another rank may have made the one around it
        if (folder / files.SAMPLES_FILE).exists():
            raise FileExistsError(errno.EEXIST, "it exists")
        self.samples = Samples(folder, writer)
        facts = {name: probes.facts[name] for name in SHARED_FACTS if name in probes.facts}
        facts["started_at"] = now()
        facts["triggered"] = {"number": request.number, "reason": request.reason, "first_step": first_step}
        self.release = probes.use_folder(folder, facts, request.memory, request.stacks, first_step)
        if probes.counters is not None:
            probes.counters.copy_to(folder / files.COUNTERS_FILE)

    def at(self, step: int) -> str:
        """Return the window that contains a step of the run."""
        return self._windows.at(step - self.first_step)

    def num_left(self, step: int) -> int:
        """Return the number of steps left in the window of a step of the run."""
        return self._windows.num_left(step - self.first_step)

    def counts(self) -> dict[str, int]:
        """Return the number of steps of each window."""
        return self._windows.counts()
