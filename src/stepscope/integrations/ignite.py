"""A handler for the engines of PyTorch Ignite."""

from __future__ import annotations

from stepscope.integrations.trainer_recording import RecordingCallback, missing
from stepscope.recorder import wall

try:
    from ignite.engine import Engine, Events
except ModuleNotFoundError:
    raise missing("ignite", "pytorch-ignite") from None

EVERY = 10


class StepscopeHandler(RecordingCallback):
    """Records each run of an engine that trains, and puts Stepscope's figures into its `state.metrics`.

    `folder` is where the recording goes (default: a new one under `runs/`). The other arguments are those of
    `stepscope.record()`.

    >>> StepscopeHandler().attach(trainer, evaluator)  # doctest: +SKIP
    """

    def attach(self, trainer: Engine, *evaluators: Engine, every: int = EVERY) -> None:
        """Record `trainer`; runs of `evaluators` are evaluations. Figures are new after `every` iterations."""
        for evaluator in evaluators:
            evaluator.add_event_handler(Events.STARTED, lambda _engine: self.recording.evaluation_begins())
            evaluator.add_event_handler(Events.COMPLETED, lambda _engine: self.recording.evaluation_ended())
        if trainer.has_event_handler(self._started, Events.STARTED):
            return
        trainer.add_event_handler(Events.STARTED, self._started)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=every), self._updates)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, self._updates, are_last=True)
        trainer.add_event_handler(Events.COMPLETED | Events.TERMINATE, lambda _engine: self.recording.end())

    @wall.guarded
    def _started(self, trainer: Engine) -> None:
        if self.recording.begin():
            from stepscope.recorder.patches import Patch

            def failed(engine: Engine, error: BaseException) -> None:
                # A handler for EXCEPTION_RAISED may go on. Adding one would keep the exception from the script.
                if engine is trainer and Events.EXCEPTION_RAISED not in engine._event_handlers:
                    self.recording.end(error)

            self.recording.keep(Patch(Engine, "_handle_exception", failed))

    def _updates(self, trainer: Engine, are_last: bool = False) -> None:
        trainer.state.metrics.update(self.recording.metrics(are_last))
