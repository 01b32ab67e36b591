"""Notices that no step ends any more, and writes where this rank is: its phase, its line, its last collectives."""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from stepscope.recorder import files, wall
from stepscope.recorder.frames import place, script_frames
from stepscope.recorder.history.history import History
from stepscope.recorder.processes.rank import rank_and_world_size

VARIABLE = "STEPSCOPE_SILENT_SECONDS"
SECONDS = 60.0  # without a step, and at least so many typical steps:
LEAST_STEPS = 20
DELIVERY_SECONDS = 15.0  # steps reach the history up to this late
OTHERS_SECONDS = 10.0  # that the first rank gives others to say where they are
MOST_FRAMES = 20
_PHASES = (  # the innermost frame in one of these files tells what a thread is in
    ("torch/distributed/distributed_c10d.py", "collective"),
    ("torch/utils/data/", "data"),
    ("torch/distributed/checkpoint/", "checkpoint"),
    ("torch/serialization.py", "checkpoint"),
    ("torch/autograd/", "backward"),
    ("torch/optim/", "optimizer"),
    ("torch/nn/modules/module.py", "forward"),
)


class Silence:
    """Looks at the history, in the writer's thread, and says so once when it stops growing."""

    def __init__(self, folder: Path, run: Path, history: History) -> None:
        self._folder, self._run, self._history = folder, run, history
        text = os.environ.get(VARIABLE, "")
        self._seconds = float(text) if text.replace(".", "", 1).isdigit() else SECONDS
        self._step, self._since = -1, time.monotonic()
        self._told: float | None = None
        self._is_summed_up = False

    def tick(self) -> None:
        """Look; called some four times per second."""
        now = time.monotonic()
        if self._history.last_step != self._step:
            # The file stays: when a script is ended in a hang, steps that ended long ago are counted last.
            self._step, self._since, self._told, self._is_summed_up = self._history.last_step, now, None, False
        elif self._told is None and self._seconds and now - self._since > self._limit():
            self._told = now
            self._write(now - self._since)
        elif self._told is not None and not self._is_summed_up and now - self._told > self._wait():
            self._is_summed_up = True
            if _rank() == 0:
                wall.tell(self._summary(now - self._since))

    def _limit(self) -> float:
        usual_ns = self._history.usual_ns(0, 1) or 0
        is_default = self._seconds == SECONDS
        return max(self._seconds, LEAST_STEPS * usual_ns / 1e9) + (DELIVERY_SECONDS if is_default else 0)

    def _wait(self) -> float:
        return min(OTHERS_SECONDS, self._seconds) if rank_and_world_size()[1] > 1 else 0.0

    def _write(self, seconds: float) -> None:
        phase, stack = where_is(sys._current_frames().get(threading.main_thread().ident or 0))
        state = {"rank": _rank(), "host": platform.node(), "pid": os.getpid(), "step": self._step, "phase": phase,
                 "stack": stack, "silent_s": round(seconds, 1), "t": round(time.time(), 3)}  # fmt: skip
        ns = round(seconds * 1e9)
        start_ns = time.perf_counter_ns() - ns
        self._history.event("silent", self._step, start_ns, ns, phase=phase, place=stack[0] if stack else None)
        try:
            files.write_json(self._folder / files.HANG_FILE, state)
            if (dump := collectives()) is not None:
                (self._run / files.HANG_FOLDER).mkdir(exist_ok=True)
                (self._run / files.HANG_FOLDER / f"trace_rank_{_rank()}").write_bytes(dump)
        except OSError as error:
            wall.tell_once(f"where the script is could not be written: {error}")

    def _summary(self, seconds: float) -> str:
        """Return where every rank is, as far as their files are here."""
        groups: dict[str, list[int]] = {}
        for path in (self._run / files.HANG_FILE, *self._run.glob(f"rank*/{files.HANG_FILE}")):
            try:
                state = json.loads(path.read_bytes())
                where = f"{state['phase']} at {state['stack'][0]}" if state["stack"] else str(state["phase"])
                groups.setdefault(where, []).append(int(state["rank"]))
            except (OSError, ValueError, KeyError, TypeError):
                continue
        num, world = sum(map(len, groups.values())), rank_and_world_size()[1]
        said = "; ".join(
            f"rank {', '.join(map(str, sorted(ranks)[:20]))}: {where}" for where, ranks in groups.items()
        )
        who = f" on {num} of {world} ranks" if world > 1 else ""
        more = f". `stepscope analyze --hang {self._run}` says more" if world > 1 else ""
        return f"no step has ended for {seconds:.0f} s{who}. {said}{more}"


def where_is(frame: FrameType | None) -> tuple[str, list[str]]:
    """Return the phase that a thread is in, and the script's lines that lead there, innermost first."""
    if frame is None:
        return "other", []
    stack = [f"{place(each)} {each.f_code.co_name}" for each in script_frames(frame)][:MOST_FRAMES]
    inner: FrameType | None = frame
    while inner is not None:
        file = inner.f_code.co_filename.replace(os.sep, "/")
        for part, phase in _PHASES:
            if part in file:
                return phase, stack
        inner = inner.f_back
    return "other", stack


def collectives() -> bytes | None:
    """Return the last collectives of this rank, as PyTorch's flight recorder has them; None if it has none."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    is_nccl = "nccl" in str(distributed.get_backend())
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace" if is_nccl else "_dump_fr_trace", None)
    try:
        return bytes(dump()) if dump is not None else None
    except RuntimeError:
        return None


def _rank() -> int:
    return rank_and_world_size()[0] or 0
