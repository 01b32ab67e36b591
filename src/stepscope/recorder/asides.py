"""Hooks on what a loop does beside training: checkpoints, evaluations, log lines, garbage collections."""

from __future__ import annotations

import functools
import gc
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

from stepscope.recorder.clock import CHECKPOINT, EVALUATION, GARBAGE, LOGGING
from stepscope.recorder.loop import Loop
from stepscope.recorder.patches import After, Handle, Patch, remove_all
from stepscope.recorder.processes.imports import AfterImport
from stepscope.recorder.wall import failed

# Module, what in it, label. Modules that are not imported yet are patched when they are.
_FUNCTIONS = (
    ("torch", "save", CHECKPOINT),
    ("torch.serialization", "save", CHECKPOINT),
    ("torch.distributed.checkpoint.state_dict_saver", "save", CHECKPOINT),
    ("torch.distributed.checkpoint.state_dict_saver", "async_save", CHECKPOINT),
    ("safetensors.torch", "save_file", CHECKPOINT),
    ("safetensors.torch", "save_model", CHECKPOINT),
    ("transformers.trainer", "Trainer._save_checkpoint", CHECKPOINT),
    ("transformers.trainer", "Trainer.evaluate", EVALUATION),
    ("lightning.pytorch.trainer.trainer", "Trainer.save_checkpoint", CHECKPOINT),
    ("pytorch_lightning.trainer.trainer", "Trainer.save_checkpoint", CHECKPOINT),
    ("accelerate.accelerator", "Accelerator.save_state", CHECKPOINT),
    ("torch.utils.tensorboard.writer", "FileWriter.add_event", LOGGING),
    ("wandb.sdk.wandb_run", "Run.log", LOGGING),
    ("mlflow.tracking.client", "MlflowClient.log_batch", LOGGING),
    ("mlflow.tracking.client", "MlflowClient.log_metric", LOGGING),
)


def install_asides(loop: Loop) -> list[Handle]:
    """Label the time inside checkpoints, log calls and full garbage collections."""

    def samples(*_args: Any, **_kwargs: Any) -> None:
        if loop.listens():
            loop.between.outputs_are_sampled()
            loop.facts.acted()

    return [
        _Patches(loop),
        Patch(logging.Logger, "callHandlers", _labeled(loop, LOGGING)),
        *[Patch(torch, name, samples) for name in ("multinomial", "normal")],  # what torch.distributions calls
        _Garbage(loop),
    ]


def _labeled(loop: Loop, label: str) -> Callable[..., After | None]:
    return lambda *_args, **_kwargs: loop.aside_ended if loop.aside_begins(label) else None


class _Patches:
    """Patches the functions of the table, now or as soon as the script imports their modules."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        modules = dict.fromkeys(module for module, _, _ in _FUNCTIONS)
        later = {module: functools.partial(self._install, module) for module in modules if module not in sys.modules}
        self._handles: list[Handle] = [AfterImport(later)]
        for module in (one for one in modules if one not in later):
            self._install(module)

    def _install(self, name: str) -> None:
        for module, path, label in _FUNCTIONS:
            *owners, function = path.split(".")
            owner = functools.reduce(lambda at, one: getattr(at, one, None), owners, sys.modules.get(name))
            if module == name and hasattr(owner, function):
                self._handles.append(Patch(owner, function, _labeled(self._loop, label)))

    def remove(self) -> None:
        remove_all(self._handles)


class _Garbage:
    """Labels full garbage collections. The young generations are collected too often and too fast to be worth it."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._is_labeled = False
        gc.callbacks.append(self._collects)

    def _collects(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] < 2:
            return
        try:
            if phase == "start":
                self._is_labeled = self._loop.aside_begins(GARBAGE)
            elif self._is_labeled:
                self._is_labeled = False
                self._loop.aside_ended()
        except Exception as error:
            failed(error)

    def remove(self) -> None:
        if self._collects in gc.callbacks:
            gc.callbacks.remove(self._collects)
