"""A callback for the Trainer of Hugging Face, and for what is built on it: trl, sentence-transformers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from stepscope.integrations.trainer_recording import RecordingCallback, missing
from stepscope.recorder import wall

try:
    from transformers import Trainer, TrainerCallback
except ModuleNotFoundError:
    raise missing("transformers", "transformers accelerate") from None

if TYPE_CHECKING:
    from stepscope.recorder.patches import After


class StepscopeCallback(RecordingCallback, TrainerCallback):
    """Records each training of a Trainer, and adds Stepscope's figures to its logs.

    `folder` is where the recording goes (default: a new one under `runs/`). The other arguments are those of
    `stepscope.record()`.

    >>> trainer = Trainer(model, arguments, callbacks=[StepscopeCallback()])  # doctest: +SKIP
    """

    @wall.guarded
    def on_train_begin(self, _args: Any, state: Any, *_rest: Any, **_kwargs: Any) -> None:
        if self.recording.begin(state, state.global_step):
            from stepscope.recorder.patches import Patch

            self.recording.plan(state.max_steps - state.global_step)
            # Trackers are callbacks too, and come before those that the user adds.
            self.recording.keep(Patch(Trainer, "log", self._logs))
            if hasattr(Trainer, "_run_epoch"):
                self.recording.keep(Patch(Trainer, "_run_epoch", self._runs_epoch))

    def on_step_end(self, _args: Any, state: Any, *_rest: Any, **_kwargs: Any) -> None:
        self.recording.step(state.global_step)

    def on_train_end(self, *_args: Any, **_kwargs: Any) -> None:
        self.recording.end()

    def _logs(self, trainer: Trainer, logs: dict[str, Any], *_args: Any, **_kwargs: Any) -> None:
        if self._is_in(trainer) and not {"loss", "train_loss"}.isdisjoint(logs):  # else an evaluation's
            logs.update(self.recording.metrics(are_last="train_loss" in logs))

    def _runs_epoch(self, trainer: Trainer, *_args: Any, **_kwargs: Any) -> After | None:
        # The Trainer has no event for an exception.
        return self._epoch_ended if self._is_in(trainer) else None

    def _epoch_ended(self, has_returned: bool) -> None:
        if not has_returned:
            self.recording.end(sys.exc_info()[1])

    def _is_in(self, trainer: Trainer) -> bool:
        return any(callback is self for callback in trainer.callback_handler.callbacks)
