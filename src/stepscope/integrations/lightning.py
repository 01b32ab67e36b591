"""A callback for the Trainer of Lightning."""

from __future__ import annotations

from typing import Any

from stepscope.integrations.trainer_recording import RecordingCallback, missing
from stepscope.recorder import wall

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:
    try:
        from pytorch_lightning import Callback
    except ModuleNotFoundError:
        raise missing("lightning", "lightning") from None


class StepscopeCallback(RecordingCallback, Callback):
    """Records each `fit()` of a Trainer, and logs Stepscope's figures with its loggers.

    `folder` is where the recording goes (default: a new one under `runs/`). The other arguments are those of
    `stepscope.record()`.

    >>> trainer = Trainer(callbacks=[StepscopeCallback()])  # doctest: +SKIP
    """

    @wall.guarded
    def on_train_start(self, trainer: Any, _module: Any) -> None:
        if self.recording.begin(trainer, trainer.global_step):
            self.recording.plan(trainer.estimated_stepping_batches - trainer.global_step)

    @wall.guarded
    def on_train_batch_end(self, trainer: Any, module: Any, *_args: Any, **_kwargs: Any) -> None:
        is_new = self.recording.step(trainer.global_step)
        if is_new and trainer._logger_connector.should_update_logs and (metrics := self.recording.metrics()):
            module.log_dict(metrics, on_step=True, on_epoch=False)

    @wall.guarded
    def on_train_end(self, trainer: Any, _module: Any) -> None:
        if metrics := self.recording.metrics(are_last=True):
            trainer._logger_connector.log_metrics(metrics)  # `log` is not allowed here

    def on_validation_start(self, *_args: Any) -> None:
        self.recording.evaluation_begins()

    def on_validation_end(self, *_args: Any) -> None:
        self.recording.evaluation_ended()

    def on_exception(self, _trainer: Any, _module: Any, exception: BaseException) -> None:
        self.recording.end(exception)

    def on_fit_end(self, *_args: Any) -> None:
        self.recording.end()
