"""A tracker for Hugging Face Accelerate: an object for `Accelerator(log_with=…)`, or the name "stepscope"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stepscope.integrations.trainer_recording import RecordingCallback, TrainerRecording, missing
from stepscope.recorder import wall

try:
    from accelerate import Accelerator, tracking
except ModuleNotFoundError:
    raise missing("accelerate", "accelerate") from None


class StepscopeTracker(RecordingCallback, tracking.GeneralTracker):
    """Records from `accelerator.init_trackers()` to `end_training()`, and adds Stepscope's figures to each log.

    `folder` is where the recording goes (default: a new one under `runs/`). The other arguments are those of
    `stepscope.record()`.

    >>> accelerator = Accelerator(log_with=[StepscopeTracker("runs/mine"), "tensorboard"])  # doctest: +SKIP
    """

    name = "stepscope"
    requires_logging_directory = False
    main_process_only = False

    @property
    def tracker(self) -> TrainerRecording:
        return self.recording

    @wall.guarded
    def start(self) -> None:
        if self.recording.begin():
            from stepscope.recorder.patches import Around

            self.recording.keep(Around(Accelerator, "log", self._logs))

    def _logs(
        self, log: Callable[..., None], accelerator: Accelerator, values: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        metrics = self.recording.metrics() if any(one is self for one in accelerator.trackers) else {}
        log(accelerator, {**values, **metrics}, *args, **kwargs)

    def finish(self) -> None:
        self.recording.end()


class _NamedTracker(StepscopeTracker):
    """The tracker that Accelerate makes for "stepscope", with the name of the project."""

    def __init__(self, project: str, **settings: Any) -> None:
        super().__init__(settings.pop("folder", None), **settings)


if hasattr(tracking, "register_tracker_class") and "stepscope" not in tracking.LOGGER_TYPE_TO_CLASS:
    tracking.register_tracker_class(_NamedTracker)
