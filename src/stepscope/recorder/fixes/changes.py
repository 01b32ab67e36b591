"""Fixes of a script's loaders, optimizers and modules: what each changes, what it leaves as it is, and why."""

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from stepscope.recorder.compiler.compile_watch import cuda_graphs
from stepscope.recorder.fixes.words import Regrouped
from stepscope.recorder.machine.cpu import num_cores
from stepscope.recorder.model import is_compiled, replace_call
from stepscope.recorder.patches import Around, Handle, remove_all


class Change:
    """One fix. `start()` is called before the script runs, `use_roots()` once its root modules are known."""

    nothing_seen = "nothing of the kind was seen"
    """Why nothing was changed if the script never used what the fix is about."""
    only_looks = False
    """Whether to count what would be changed, and change nothing."""
    words: Regrouped | None = None
    """What was changed on the command line, or would be."""

    def __init__(self, value: str | None) -> None:
        self.value = value
        self.changed: Counter[str] = Counter()  # what was changed, and how often
        self.left: Counter[str] = Counter()  # what was left unchanged and why, and how often
        self.handles: list[Handle] = []

    def start(self) -> None:
        """Apply what can be applied after torch is imported, before the script does anything."""

    def use_roots(self, roots: list[nn.Module]) -> None:
        """Change the modules that the script calls directly, after its second step."""

    def finish(self) -> None:
        """Count what can only be counted after the script has ended."""

    def remove(self) -> None:
        remove_all(self.handles)

    def facts(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "changed": {what: count for what, count in self.changed.items() if count},
            "left": dict(self.left),
            "nothing_seen": self.nothing_seen,
        }


MOST_WORKERS = 8
PREFETCH_FACTOR = 4


class LoaderChange(Change):
    """`arguments_of(given)` returns the arguments to change."""

    nothing_seen = "no DataLoader was made"

    def start(self) -> None:
        self._names = list(inspect.signature(DataLoader.__init__).parameters)[1:]
        self.handles.append(Around(DataLoader, "__init__", self._make))

    def _make(self, original: Callable[..., Any], loader: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self._names, args)), **kwargs}
        wanted = self.arguments_of(given)
        return original(loader, **given if self.only_looks else {**given, **wanted})

    def arguments_of(self, given: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError


class MoreWorkers(LoaderChange):
    """Raises `num_workers`, and keeps workers between epochs."""

    def arguments_of(self, given: dict[str, Any]) -> dict[str, Any]:
        wanted = int(self.value or min(MOST_WORKERS, max(1, num_cores() - 1)))
        before = given.get("num_workers") or 0
        if isinstance(given.get("dataset"), IterableDataset):
            self.left["a DataLoader of an IterableDataset: each worker would read all of it"] += 1
            return {}
        if before >= wanted:
            self.left[f"a DataLoader has {before} workers already"] += 1
            return {}
        self.value = str(wanted)
        self.changed[f"DataLoaders with num_workers={wanted} instead of {before}"] += 1
        return {
            "num_workers": wanted,
            "persistent_workers": True,
            "prefetch_factor": given.get("prefetch_factor") or PREFETCH_FACTOR,
        }


class LargerBatch(LoaderChange):
    """Multiplies `batch_size`."""

    def arguments_of(self, given: dict[str, Any]) -> dict[str, Any]:
        if given.get("batch_sampler") is not None or given.get("batch_size", 1) is None:
            self.left["a DataLoader has no batch_size: it was given whole batches, or a batch_sampler"] += 1
            return {}
        before = int(given.get("batch_size", 1))
        after = max(1, round(before * float(self.value or 2)))
        self.changed[f"DataLoaders with batch_size {after} instead of {before}"] += 1
        return {"batch_size": after}


class PinnedCopies(LoaderChange):
    """Sets `pin_memory=True`, and makes copies of pinned tensors non-blocking."""

    nothing_seen = "no DataLoader was made, and no pinned tensor was copied to a GPU"

    def start(self) -> None:
        super().start()
        if self.only_looks:
            return
        self.handles.append(Around(torch.Tensor, "to", self._copy))
        self.handles.append(Around(torch.Tensor, "cuda", self._copy))

    def arguments_of(self, given: dict[str, Any]) -> dict[str, Any]:
        if not torch.cuda.is_available():
            self.left["a DataLoader: there is no GPU to copy to"] += 1
            return {}
        if given.get("pin_memory"):
            self.left["a DataLoader pins its memory already"] += 1
            return {}
        self.changed["DataLoaders with pin_memory=True"] += 1
        return {"pin_memory": True}

    def _copy(self, original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        says_so = "non_blocking" in kwargs or any(isinstance(value, bool) for value in args)
        if not says_so and tensor.device.type == "cpu" and torch.cuda.is_initialized() and tensor.is_pinned():
            result = original(tensor, *args, non_blocking=True, **kwargs)
            self.changed["copies made non_blocking"] += result.is_cuda
            return result
        return original(tensor, *args, **kwargs)


class FusedOptimizers(Change):
    nothing_seen = "no optimizer was made"

    def start(self) -> None:
        self._depth = 0
        for kind in vars(torch.optim).values():
            if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
                continue
            names = inspect.signature(vars(kind).get("__init__", kind)).parameters
            forms = [form for form in ("fused", "foreach") if form in names]
            if forms and "__init__" in vars(kind):
                make = functools.partial(self._make, kind, forms, list(names)[1:])
                self.handles.append(Around(kind, "__init__", make))
        # Every optimizer calls this constructor.
        self.handles.append(Around(torch.optim.Optimizer, "__init__", self._made))

    def _made(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._depth:
            self.left[f"{type(optimizer).__name__} has neither a fused nor a foreach form"] += 1
        return original(optimizer, *args, **kwargs)

    def _make(
        self,
        kind: type,
        forms: list[str],
        names: list[str],
        original: Callable[..., Any],
        optimizer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self._depth:  # AdamW's constructor calls Adam's
            return original(optimizer, *args, **kwargs)
        self._depth += 1
        try:
            given = {**dict(zip(names, args)), **kwargs}
            name = type(optimizer).__name__
            why_not = _why_not(given, type(optimizer), kind)
            if why_not is not None:
                self.left[f"{name} {why_not}"] += 1
                return original(optimizer, *args, **kwargs)
            if self.only_looks:
                self.changed[f"{name} could be made with {forms[0]}=True"] += 1
                return original(optimizer, *args, **kwargs)
            if "params" in given and not isinstance(given["params"], (torch.Tensor, dict)):
                given["params"] = list(given["params"])  # a generator can be read only once
            for form in forms:
                try:
                    original(optimizer, **{**given, "foreach": None, form: True})
                except (RuntimeError, ValueError) as error:
                    self.left[f"{name} refused {form}=True: {str(error).splitlines()[0]}"] += 1
                    continue
                before = "a loop" if given.get("foreach") is False else "the default"
                self.changed[f"{name} made with {form}=True instead of {before}"] += 1
                return None
            return original(optimizer, **given)
        finally:
            self._depth -= 1


def _why_not(given: dict[str, Any], kind: Any, base: Any) -> str | None:
    if given.get("fused"):
        return "is fused already"
    if given.get("differentiable"):
        return "is differentiable"
    # torch wraps `step` separately for each class.
    return None if inspect.unwrap(kind.step) is inspect.unwrap(base.step) else "has a step of its own"


WITH_GRAPHS = ("reduce-overhead", "max-autotune")
_HALF = (torch.bfloat16, torch.float16)
_Dropout = nn.modules.dropout._DropoutNd


class Autocast(Change):
    """Runs root modules under torch.autocast in bfloat16, and casts their outputs back to float32.

    In an autocast region of the script itself, the loss would be computed in float32 too.
    """

    nothing_seen = "no module was called from outside compiled code"

    def use_roots(self, roots: list[nn.Module]) -> None:
        for root in roots:
            name = type(root).__name__
            floats = [p for p in root.parameters() if p.is_floating_point()]
            if floats and all(p.dtype in _HALF for p in floats):
                self.left[f"{name} has its weights in {str(floats[0].dtype).removeprefix('torch.')} already"] += 1
            elif floats:
                replace_call(root, self._under_autocast(floats[0].device.type, name))

    def _under_autocast(self, device: str, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        counted = f"forwards of {name} under autocast"

        def around(call: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                if torch.is_autocast_enabled(device):
                    self.left[f"a forward of {name} is under the script's own autocast"] += 1
                    return call(*args, **kwargs)
                self.changed[counted] += 1
                if self.only_looks:
                    return call(*args, **kwargs)
                with torch.autocast(device, dtype=torch.bfloat16):
                    output = call(*args, **kwargs)
                return with_tensors(output, lambda each: each.float() if each.dtype in _HALF else each)

            return forward

        return around


class Compiled(Change):
    """Runs root modules through torch.compile in a given mode."""

    nothing_seen = "no module was called from outside compiled code"

    def __init__(self, value: str | None) -> None:
        super().__init__(value)
        self.mode = value or "default"
        self._num_before = 0

    def use_roots(self, roots: list[nn.Module]) -> None:
        self._num_before = _num_graphs()
        for root in roots:
            if is_compiled(root):
                self.left[f"{type(root).__name__} is compiled already"] += 1
                continue
            if self.only_looks:
                self.changed[f"{type(root).__name__} could be compiled"] += 1
                continue
            if any(isinstance(each, _Dropout) and each.p for each in root.modules()):
                # Compiled code draws other random numbers than eager code, so losses could not be compared.
                from torch._inductor import config

                config.fallback_random = True
                self.changed["modules compiled with fallback_random, for the dropout masks of eager mode"] += 1
            replace_call(root, self._compile, compiles=True)
            if self.mode in WITH_GRAPHS and any(p.is_cuda for p in root.parameters()):
                replace_call(root, _cloning)
            self.changed[f"{type(root).__name__} compiled"] += 1

    def _compile(self, call: Callable[..., Any]) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            # An extra frame: Dynamo skips torch's own frames, and would not compile a Sequential at all.
            return call(*args, **kwargs)

        return torch.compile(forward, mode=None if self.mode == "default" else self.mode)

    def finish(self) -> None:
        if self.only_looks:
            return
        num_graphs = _num_graphs() - self._num_before
        if self.changed and not num_graphs:
            self.changed.clear()
            self.left["torch.compile found nothing it could compile"] += 1
        self.changed["compiled graphs"] = num_graphs
        if self.mode not in WITH_GRAPHS or not num_graphs:
            return
        graphs = cuda_graphs()
        self.changed["CUDA graphs recorded"] = graphs["num_recorded"] if graphs else 0
        if not self.changed["CUDA graphs recorded"]:
            why = "compile.json of its recording says why" if torch.cuda.is_initialized() else "there is no GPU"
            self.left[f"compiled without CUDA graphs: {why}"] += 1


def _num_graphs() -> int:
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["stats"]["unique_graphs"]) if utils is not None else 0


def _cloning(call: Callable[..., Any]) -> Callable[..., Any]:
    """Clone scalars: a loss returned by a CUDA graph is overwritten by the next step."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return with_tensors(call(*args, **kwargs), lambda tensor: tensor if tensor.dim() else tensor.clone())

    return forward


def with_tensors(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a module's output with its tensors changed. Dictionaries are changed in place and keep their type."""
    if isinstance(output, torch.Tensor):
        return change(output)
    if isinstance(output, dict):
        for name, value in list(output.items()):
            output[name] = with_tensors(value, change)
        return output
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*(with_tensors(value, change) for value in output))
    if type(output) in (list, tuple):
        return type(output)(with_tensors(value, change) for value in output)
    return output
