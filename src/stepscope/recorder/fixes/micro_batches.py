"""Larger micro-batches, and as many fewer of them per step, where a library or the command line says how many."""

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from stepscope.recorder.fixes.changes import Change
from stepscope.recorder.fixes.words import Regrouped
from stepscope.recorder.patches import Around
from stepscope.recorder.processes.imports import AfterImport

_Dropout = nn.modules.dropout._DropoutNd
_BatchNorm = nn.modules.batchnorm._BatchNorm
_TRAINER = "gradient_accumulation_steps", "per_device_train_batch_size"  # of Transformers' arguments


class MicroBatch(Change):
    """Divides the number of micro-batches per step by a factor (2), and multiplies their size by it.

    If the command line names both numbers, they were changed there before the script began. Else a library's own
    number is divided: of Transformers' Trainer with its batch size, of Accelerate and Lightning with the batch size
    of the DataLoaders that they are given. Samplers stay, so a step has the same samples in the same order.
    """

    nothing_seen = "neither a library nor an option on the command line says how many micro-batches there are"

    def start(self) -> None:
        self._factor = int(self.value or 2)
        self.value = None  # what to write into the script
        self._owners: list[tuple[weakref.ref[Any], str]] = []  # what accumulates, and how it is made
        self._loaders: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()
        self._sizes: set[int] = set()  # of micro-batches, before
        self._is_inside = self._resamples = False
        self._problem = ""
        self.handles.append(Around(DataLoader, "__init__", self._made))
        if self.words is not None:
            self._use_words(self.words)
            return
        libraries: dict[str, list[tuple[str, str, Callable[..., Any]]]] = {
            "transformers.trainer": [("Trainer", "__init__", self._make_trainer)],
            "accelerate.accelerator": [
                ("Accelerator", "__init__", functools.partial(self._make, "gradient_accumulation_steps")),
                ("Accelerator", "prepare_data_loader", self._prepare),
            ],
        }
        for package in ("lightning.pytorch", "pytorch_lightning"):
            make = functools.partial(self._make, "accumulate_grad_batches")
            connector = f"{package}.trainer.connectors.data_connector"
            libraries[f"{package}.trainer.trainer"] = [("Trainer", "__init__", make)]
            libraries[connector] = [("_DataConnector", "_prepare_dataloader", self._prepare)]
        later = {}
        for name, methods in libraries.items():
            install = functools.partial(self._install, name, methods)
            if name in sys.modules:
                install()
            else:
                later[name] = install
        self.handles.append(AfterImport(later))

    def _install(self, name: str, methods: list[tuple[str, str, Callable[..., Any]]]) -> None:
        for kind, method, around in methods:
            owner = getattr(sys.modules[name], kind, None)
            if hasattr(owner, method):
                self.handles.append(Around(owner, method, around))

    def _use_words(self, words: Regrouped) -> None:
        if words.problem:
            self.left[words.problem] += 1
        else:
            self._grows(words.new, words.old, words.size)
            self.value = f"python … {words.new}  # on the command line"

    def _grows(self, new: str, old: str, size: int) -> None:
        self._sizes.add(size)
        self.value = new
        self.changed[f"{new} instead of {old}"] += 1

    def _make_trainer(self, original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("args", args[1] if len(args) > 1 else None)
        if given is not None and self._how(given) is None:
            number, size = (getattr(given, name) for name in _TRAINER)
            if self._divides(_TRAINER[0], number):
                after = number // self._factor, size * self._factor
                new, old = (
                    f"TrainingArguments(…, {_TRAINER[1]}={samples}, {_TRAINER[0]}={count})"
                    for count, samples in (after, (number, size))
                )
                self._owners.append((weakref.ref(given), new))
                self._grows(new, old, size)
                if not self.only_looks:
                    for name, value in zip(_TRAINER, after):
                        setattr(given, name, value)
        was_inside, self._is_inside = self._is_inside, True
        try:
            return original(trainer, *args, **kwargs)  # which makes an Accelerator of its own
        finally:
            self._is_inside = was_inside

    def _make(self, name: str, original: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(owner, *args, **kwargs)
        number = getattr(owner, name, None)
        if not self._is_inside and self._divides(name, number):
            assert isinstance(number, int)
            self._owners.append((weakref.ref(owner), f"{type(owner).__name__}(…, {name}={number // self._factor})"))
            if not self.only_looks:
                setattr(owner, name, number // self._factor)
        return result

    def _how(self, owner: Any) -> str | None:
        return next((text for one, text in self._owners if one() is owner), None)

    def _divides(self, name: str, number: Any) -> bool:
        if not isinstance(number, int) or number < 2:
            return False
        if number % self._factor:
            self.left[f"{name}={number} is not a multiple of {self._factor}"] += 1
            return False
        return True

    def _prepare(self, original: Callable[..., Any], owner: Any, loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Enlarge the batches of a DataLoader that Accelerate or Lightning is given."""
        mode = kwargs.get("mode", args[-1] if args else None)
        trainer = getattr(owner, "trainer", owner)  # of Lightning's connector
        how = self._how(trainer)
        is_for_training = trainer is owner or getattr(mode, "value", None) == "train"
        if how is not None and is_for_training and isinstance(loader, DataLoader) and loader not in self._loaders:
            self._loaders.add(loader)
            self._enlarge(loader, how, getattr(trainer, "limit_train_batches", None))
        return original(owner, loader, *args, **kwargs)

    def _enlarge(self, loader: DataLoader[Any], how: str, limit: Any) -> None:
        sampler, before = loader.batch_sampler, loader.batch_size
        if type(sampler) is not BatchSampler or before is None:
            self.left["a DataLoader has no batch_size: it was given whole batches, or a batch_sampler"] += 1
            return
        if type(limit) is int:
            self._problem = f"limit_train_batches={limit} counts micro-batches: an epoch would have more samples"
            return
        after = before * self._factor
        self._look_at_end(loader, before)
        new, old = (f"DataLoader(…, batch_size={size})" for size in (after, before))
        self._grows(f"{how}  # and {new}", old, before)
        if not self.only_looks:
            # Its sampler goes on as it is. DataLoader refuses to have its attributes set.
            sampler.batch_size = vars(loader)["batch_size"] = after

    def _made(self, original: Callable[..., Any], loader: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(loader, *args, **kwargs)
        before = (loader.batch_size or 0) if self.only_looks else (loader.batch_size or 0) / self._factor
        if before in self._sizes:
            self._look_at_end(loader, int(before))
        return result

    def _look_at_end(self, loader: DataLoader[Any], before: int) -> None:
        """Note what larger batches would leave out of each epoch."""
        if not loader.drop_last:
            return
        try:
            num_samples = len(loader.sampler)
        except (TypeError, NotImplementedError):
            return  # a stream without an end that is known
        left, least = num_samples % (before * self._factor), num_samples % before
        if left > least:
            self._problem = f"drop_last would leave {left} samples of each epoch out instead of {least}"

    def use_roots(self, roots: list[nn.Module]) -> None:
        for module in (module for root in roots for module in root.modules() if module.training):
            if isinstance(module, _BatchNorm):
                self._problem = f"{type(module).__name__} normalizes each micro-batch: larger ones train otherwise"
            self._resamples |= isinstance(module, _Dropout) and module.p > 0

    def finish(self) -> None:
        if self._problem:
            self.changed.clear()
            self.left[self._problem] += 1
        elif self._owners and not self.changed and not self.left:
            self.left[f"{self._owners[-1][1].partition('(')[0]} was given no DataLoader"] += 1

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "resamples": self._resamples}
