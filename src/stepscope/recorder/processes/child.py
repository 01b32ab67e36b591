"""The recording of a child process: opened when it begins to train, closed when it ends.

A process that never trains (a DataLoader's worker, a tokenizer, a launcher) leaves no files.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stepscope.recorder import current, files, wall
from stepscope.recorder.patches import After, Handle, Patch, remove_all
from stepscope.recorder.processes import launch
from stepscope.recorder.processes import rank as ranks
from stepscope.recorder.processes.ending import adopt, ending
from stepscope.recorder.processes.options import Options
from stepscope.recorder.run_facts import file_hash, git_revision

if TYPE_CHECKING:
    from stepscope.recorder.fixes.applied import AppliedFixes
    from stepscope.recorder.session import Session


class Sentinel:
    """Calls `trains` once, before the first backward runs or inside the first step of an optimizer.

    No optimizer hook is registered: PyTorch may be iterating over them. It calls `_optimizer_step_code` after its
    pre-hooks and before its post-hooks, where a session can register its own.
    """

    def __init__(self, trains: Callable[[], None]) -> None:
        self._trains = trains
        self._patches: list[Handle] = [
            *(Patch(torch.autograd, name, functools.partial(self._gradient, name)) for name in ("backward", "grad")),
            Patch(torch.optim.Optimizer, "_optimizer_step_code", self._step),
        ]

    def _gradient(self, name: str, *args: Any, **kwargs: Any) -> After | None:
        self.report()
        # The session that may have begun sees this backward too.
        begins = getattr(getattr(torch.autograd, name), "before", None)
        return begins(*args, **kwargs) if begins is not None else None

    def _step(self, *_args: Any) -> None:
        self.report()

    def report(self) -> None:
        if self._patches:
            self.remove()
            self._trains()

    def remove(self) -> None:
        remove_all(self._patches)


SHARED_FACTS = ("command", "config", "config_hash", "git", "started_at", "job")
CLOSES_FIRST = 100  # priority among multiprocessing's finalizers

_child: Child | None = None
_options: Options | None = None
_fixes: AppliedFixes | None = None
_watches_forks = False


def begin(options: Options) -> None:
    """Record this process if it trains. Torch is imported."""
    global _child
    wall.raise_up()
    _child = Child(options, watch_forks(options))


def watch_forks(options: Options) -> AppliedFixes | None:
    """Record the forks of this process that train, not the process itself; return its fixes, which forks inherit."""
    global _options, _fixes, _watches_forks
    if options.fix is not None:
        from stepscope.recorder.fixes.applied import AppliedFixes

        _fixes = AppliedFixes(options.fix, options.words)
    _options = options
    if not _watches_forks:
        _watches_forks = True
        os.register_at_fork(after_in_child=_forked)
    return _fixes


def session_of(
    options: Options, facts: dict[str, Any], fixes: AppliedFixes | None, progress: Callable[[str], None] | None
) -> Session:
    """Return the session of a process of the script, not started."""
    from stepscope.recorder.session import Session

    windows, rank = options.windows, ranks.rank_and_world_size()[0] or 0
    if options.trace_ranks and rank not in options.trace_ranks:
        windows = dataclasses.replace(windows, trace=0, repeat=1)  # it times its steps, like all others
    return Session(
        options.folder,
        windows=windows,
        facts=facts,
        tokens_per_step=options.tokens_per_step,
        exit_after=options.exit_after,
        inference=options.inference,
        memory_in_full=options.memory_in_full,
        is_script=True,
        when=options.when,
        limit=options.limit,
        on_roots=None if fixes is None else fixes.use_roots,
        progress=progress,
    )


def trains() -> None:
    """Open the recording of this process now, if it is a child of `stepscope run`: it is about to train."""
    if _child is not None:
        _child.sentinel.report()


def close(error: BaseException | None = None) -> None:
    if _child is not None:
        _child.close(error)


def cancel() -> None:
    """Leave this process alone: it is a `stepscope run` of its own."""
    global _child, _options
    if _child is not None:
        _child.sentinel.remove()
    _child = _options = None


@wall.guarded
def _forked() -> None:
    global _child
    if _options is None:
        return
    ranks.forget()
    if _child is None:
        _child = Child(_options, _fixes, forked_from=_options.folder)
    elif _child.session is not None:  # else the sentinel waits in this process as well
        _child = Child(_options, _fixes, forked_from=_child.session.folder)


class Child:
    """One child process, from the import of torch to its end."""

    def __init__(self, options: Options, fixes: AppliedFixes | None, forked_from: Path | None = None) -> None:
        self._options, self._fixes, self._forked_from = options, fixes, forked_from
        self._pid = 0
        self.session: Session | None = None
        self.sentinel = Sentinel(self._trains)

    def _trains(self) -> None:
        if current.session is not None or _is_loader_worker():
            return
        try:
            self._open()
        except Exception:
            self.session = None  # training goes on, unmeasured
            raise

    def _open(self) -> None:
        options = self._options
        rank, _ = ranks.rank_and_world_size()
        windows = options.windows
        if self._forked_from is not None and (self._forked_from / files.TRACE_FOLDER).exists():
            windows = dataclasses.replace(windows, trace=0)  # Kineto does not survive a fork once it has run
        folder, is_first = claim(options.folder, None if rank == options.rank else rank)
        samples = options.folder / files.SAMPLES_FILE
        trains_itself = samples.exists() and samples.stat().st_size > 0
        speaks = (is_first if rank is None else rank == 0) and not trains_itself
        shared = json.loads((options.folder / files.RECORDING_FILE).read_bytes())
        facts = {name: shared[name] for name in SHARED_FACTS if name in shared}
        if sys.argv:  # the command may be a launcher's
            script = Path(sys.argv[0])
            if facts["command"].get("program") != str(script) and script.is_file():
                facts["git"] = git_revision(script.absolute().parent)
            facts["command"] |= {"script": str(script), "script_sha256": file_hash(script)}
        options = dataclasses.replace(options, folder=folder, windows=windows)
        session = session_of(options, facts, self._fixes, wall.tell if speaks and not options.is_quiet else None)
        self._pid = os.getpid()
        self.session = session
        session.start()
        launch.hide_own_frames(None)
        close = wall.guarded(self._close_at_exit)
        atexit.register(close)
        if (util := sys.modules.get("multiprocessing.util")) is not None:
            # Processes of multiprocessing leave without running atexit.
            util.Finalize(None, close, exitpriority=CLOSES_FIRST)

    def _close_at_exit(self) -> None:
        # Multiprocessing runs this while the exception is raised; Python, after it has printed it.
        raised = sys.exc_info()[1]
        if raised is not None:
            launch.remove_own_frames(raised, None)  # multiprocessing prints it after this
        self.close(raised or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))

    def close(self, error: BaseException | None = None) -> None:
        session, self.session = self.session, None
        if session is None or os.getpid() != self._pid:
            return
        status, facts = ending(error)
        if self._fixes is not None:
            facts["fixes"] = self._fixes.finish()
        session.close(status, error=error, **facts)
        if status == files.STATUS_FINISHED and not files.num_steps(session.folder):
            shutil.rmtree(session.folder, ignore_errors=True)  # a gradient, and no training
        elif not files.is_running(self._options.pid):
            adopt(self._options.folder, self._options.rank is not None)


def claim(folder: Path, rank: int | None) -> tuple[Path, bool]:
    """Return a new folder for this process inside the recording, and whether it is the first one."""
    is_first = not any(files.CHILD_FOLDER.fullmatch(entry.name) for entry in folder.iterdir())
    names = [] if rank is None else [f"rank{rank}"]
    names += [f"process{os.getpid()}", *(f"process{os.getpid()}-{number}" for number in range(2, 100))]
    for name in names:
        try:
            (folder / name).mkdir()
            return folder / name, is_first
        except FileExistsError:
            continue
    raise FileExistsError(folder)


def _is_loader_worker() -> bool:
    worker = sys.modules.get("torch.utils.data._utils.worker")
    return worker is not None and worker.get_worker_info() is not None
