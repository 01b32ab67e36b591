"""The recording behind the callbacks of all trainers: the session that `stepscope.record()` uses."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from stepscope.api.recording import Recorder, check_tokens, check_windows
from stepscope.errors import MissingDependencyError, StepscopeError, UsageError
from stepscope.recorder import current, files, wall

if TYPE_CHECKING:
    from stepscope.recorder.patches import Handle
    from stepscope.recorder.session import Session
    from stepscope.recorder.windows import Windows

Folder = str | os.PathLike[str] | None
FIRST_RANK_WAIT = timedelta(seconds=10)
LEAST_WARMUP = 2  # steps, to find the model
_driver: weakref.ref[TrainerRecording] | None = None  # the one that ends the steps of the active session
_num_opened = 0


class TrainerRecording:
    """Records from `begin()` to `end()`; where a recording is active, as under `stepscope run`, it adds to that one.

    An error of ours ends the measurement, and training goes on. Copies and pickles carry only the settings.
    """

    def __init__(
        self, folder: Folder = None, windows: Windows | None = None, tokens_per_step: int | None = None,
        force: bool = False,
    ) -> None:  # fmt: skip
        if not isinstance(folder, (str, os.PathLike, type(None))):
            raise UsageError(f"folder is {folder!r}: it must be a path")
        check_windows(windows)
        if windows is not None and windows.warmup < LEAST_WARMUP:
            raise UsageError(f"windows has warmup={windows.warmup}: a callback needs at least {LEAST_WARMUP}")
        check_tokens(tokens_per_step)
        self._settings = folder, windows, tokens_per_step, force
        self._recorder: Recorder | None = None
        self._session: current.ActiveSession | None = None
        self._evaluates = False
        self._handles: list[Handle] = []
        self._place: tuple[int, int] | None = None  # the training and its number of finished steps

    def __reduce__(self) -> tuple[Callable[..., TrainerRecording], tuple[Any, ...]]:
        return TrainerRecording, self._settings

    @property
    def folder(self) -> Path | None:
        """The folder of the active recording, or None."""
        return self._session.folder if self._session is not None else None

    def begin(self, training: object = None, at: int = 0) -> bool:
        """Start to record, and return whether that was new: not if another callback records these steps.

        `training` is any object of this training, and `at` the number of steps that it has finished.
        """
        global _driver
        place = id(training), at
        if training is not None and self._is_active and place == self._place:
            return False  # the trainer has this callback twice
        self._place = place
        self.end(KeyboardInterrupt())  # an earlier training that has not reached its end
        other = _driver() if _driver is not None else None
        if other is not None and other._is_active:
            wall.tell(f"a second callback for one training does nothing: the first records to {other.folder}")
            return False
        if current.session is None:
            wall.raise_up()
            if (child := sys.modules.get("stepscope.recorder.processes.child")) is not None:
                wall.guarded(child.trains)()
            if current.session is None:
                self._open_or_tell()
        self._session = current.session
        if self._session is None:
            wall.take_down()
            return False
        _driver = weakref.ref(self)
        return True

    @wall.guarded
    def _open_or_tell(self) -> None:
        try:
            self._open()
        except StepscopeError as error:
            wall.tell(f"nothing is recorded: {error}. Training goes on")

    def _open(self) -> None:
        from stepscope.recorder.processes.rank import rank_and_world_size

        folder, windows, tokens_per_step, force = self._settings
        rank = rank_and_world_size()[0] or 0
        script = Path(sys.argv[0])
        chosen = Path(folder) if folder is not None else files.default_folder(script.stem or "train")
        chosen = _agreed(chosen if force else _unused(chosen, rank), rank)
        recorder = Recorder(_of_rank(chosen, rank).absolute(), None, None, windows, tokens_per_step, force)
        recorder.__enter__()
        if current.session is not None:  # else STEPSCOPE_DISABLE is set
            self._recorder = recorder
            atexit.register(self._exits)

    @wall.guarded
    def plan(self, num_steps: float) -> None:
        """Note how many steps the trainer is going to make; nothing for a number that is unknown or without end."""
        if self._is_active and 0 < num_steps < float("inf"):
            cast("Session", self._session)._probes.facts["num_planned_steps"] = int(num_steps)

    def keep(self, *handles: Handle) -> None:
        """Remove these handles at the end."""
        self._handles += handles

    @property
    def _is_active(self) -> bool:
        return self._session is not None and self._session is current.session

    def step(self, at: int | None = None) -> bool:
        """End a step, and return whether it was new: `at` is the number of finished steps."""
        if self._place is not None and at is not None:
            if at == self._place[1]:
                return False  # gradients accumulate, or the trainer has this callback twice
            self._place = self._place[0], at
        session = self._session
        if session is not None and session is current.session:
            session.explicit_step()
        return True

    @wall.guarded
    def evaluation_begins(self) -> None:
        from stepscope.recorder.modes import unseen

        if self._session is not None and self._is_active and not self._evaluates:
            self._evaluates = unseen(self._session.aside_begins, "evaluation")

    @wall.guarded
    def evaluation_ended(self) -> None:
        from stepscope.recorder.modes import unseen

        evaluates, self._evaluates = self._evaluates, False
        if self._session is not None and self._is_active and evaluates:
            unseen(self._session.aside_ended)

    def metrics(self, are_last: bool = False) -> dict[str, float]:
        """Return the figures of the recording so far, by the names that trackers show.

        Those of free running lag behind by up to half a second, except the last.
        """
        found: dict[str, float] = {}
        if self._is_active:
            wall.guarded(self._read_metrics)(found, are_last)
        return found

    def _read_metrics(self, found: dict[str, float], are_last: bool) -> None:
        from stepscope.recorder import live
        from stepscope.recorder.modes import unseen

        session = cast("Session", self._session)
        if are_last or not session._samples.waits:
            unseen(session.catch_up)
        found.update(unseen(live.live_metrics, session, are_last))

    def end(self, error: BaseException | None = None) -> None:
        """End the recording; `error` is the exception that ended the training."""
        while self._handles:
            self._handles.pop().remove()
        recorder, self._recorder, self._session, self._evaluates = self._recorder, None, None, False
        if recorder is not None:
            atexit.unregister(self._exits)
            wall.guarded(recorder.__exit__)(None if error is None else type(error), error, None)
            if not files.RANK_FOLDER.fullmatch(recorder.folder.name):
                _tell_end(recorder.folder)

    def _exits(self) -> None:
        # No trainer tells its callbacks of every exception. Python keeps the one that ended the script.
        self.end(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None) or KeyboardInterrupt())


class RecordingCallback:
    """What the callbacks of all trainers take: the arguments of `stepscope.record()` that a callback can use."""

    def __init__(
        self, folder: Folder = None, *, windows: Windows | None = None, tokens_per_step: int | None = None,
        force: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.recording = TrainerRecording(folder, windows, tokens_per_step, force)


def _tell_end(folder: Path) -> None:
    if num_steps := files.num_steps(folder):
        wall.tell(f"recorded {num_steps} steps. To see them, run: stepscope show {folder}")
    else:
        wall.tell(f"recorded no steps in {folder}")


def _of_rank(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}" if rank else folder


def _unused(folder: Path, rank: int) -> Path:
    """Return `folder`, or the first of `folder-2`, … in which this rank has no recording: a resumed training's."""
    number, found = 1, folder
    while (_of_rank(found, rank) / files.RECORDING_FILE).exists():
        number += 1
        found = folder.with_name(f"{folder.name}-{number}")
    return found


def _agreed(folder: Path, rank: int) -> Path:
    """Return the folder that the first rank has chosen. Nothing waits if this rank is alone or the first."""
    import torch.distributed as distributed

    global _num_opened
    _num_opened += 1
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return folder
    store, key = distributed.distributed_c10d._get_default_store(), f"stepscope/{_num_opened}"
    if rank == 0:
        store.set(key, str(folder.absolute()))
        return folder
    try:
        store.wait([key], FIRST_RANK_WAIT)
    except Exception:
        return folder  # the first rank has no callback
    return Path(store.get(key).decode())


def missing(package: str, install: str) -> MissingDependencyError:
    """Return the error for a trainer that is not installed.

    >>> print(missing("ignite", "pytorch-ignite"))
    ignite is not installed: pip install pytorch-ignite
    """
    return MissingDependencyError(f"{package} is not installed: pip install {install}")
