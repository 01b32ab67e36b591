"""A user's own workload: `my.module:build` or `path/to/file.py:build`.

The function's keyword arguments are the knobs. It returns `(module, batch)`, where `batch()` returns a tensor, or a
tuple or dict of tensors, for `module`. An optional third element is the number of tokens per batch. Or it returns a
function without arguments that runs one complete step of the user's loop.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NoReturn

from stepscope.errors import UsageError
from stepscope.workloads.knobs import nearest
from stepscope.workloads.workload import Batch, Built, Value, WholeStep, Workload, knob

if typing.TYPE_CHECKING:
    import torch

SHAPES = "(module, batch function), or a function that runs one complete step"


def user_factory(name: str) -> Workload[Any]:
    """Return the workload of a function in a module or file."""
    place, _, function_name = name.rpartition(":")
    if not place or not function_name:
        raise UsageError(f"{name!r}: write my.module:build or path/to/file.py:build")
    is_file = place.endswith(".py") or "/" in place or "\\" in place
    module = _from_file(Path(place)) if is_file else _from_module(place)
    function = getattr(module, function_name, None)
    if isinstance(function, Workload):  # has its own presets, reference, gate and proofs
        return dataclasses.replace(function, name=name)
    if not callable(function):
        public = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise UsageError(f"{place} has no function {function_name!r}: {nearest(function_name, public)}")
    return Workload(
        name=name,
        about=(inspect.getdoc(function) or "a user-defined workload").splitlines()[0],
        config=_config_of(function, name),
        presets={"default": {}},
        build=lambda config: normalized(function(**vars_of(config)), name),
    )


def refuse_file(name: str) -> NoReturn:
    """Raise UsageError: the function is missing after the file name, or the file does not exist."""
    _check_file(Path(name))
    raise UsageError(
        f"{name} is a file. Add the function that builds the workload, {name}:build. It must return {SHAPES}."
    )


def vars_of(config: Any) -> dict[str, Value]:
    """Return the knobs of a configuration with their values."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def _check_file(path: Path) -> None:
    if not path.is_file():
        folder = path.parent
        beside = sorted(p.name for p in folder.glob("*.py")) if folder.is_dir() else []
        where = f"in {folder.resolve()}" if folder.is_dir() else f"(no folder {folder})"
        raise UsageError(f"{path.name} not found {where}: {nearest(path.name, beside)}")


def _from_file(path: Path) -> ModuleType:
    _check_file(path)
    # Files in the same folder can be imported, as when Python runs the file.
    folder_text = str(path.resolve().parent)
    if folder_text not in sys.path:
        sys.path.insert(0, folder_text)
    spec = importlib.util.spec_from_file_location(f"stepscope_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look up a class's module by name
    spec.loader.exec_module(module)
    return module


def _from_module(name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but something it imports does not
        parent, _, last = error.name.rpartition(".")
        paths = sys.modules[parent].__path__ if parent else [str(Path.cwd())]
        beside = (module.name for module in pkgutil.iter_modules(paths))
        raise UsageError(f"Module {error.name} not found: {nearest(last or parent, beside)}") from None


def _config_of(function: Callable[..., Any], name: str) -> type[Any]:
    """Return a configuration class whose fields are the function's keyword arguments."""
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # an annotation may name something imported for type checkers only
        hints = {}
    fields = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.default is parameter.empty or parameter.kind is parameter.POSITIONAL_ONLY:
            raise UsageError(f"{name}: argument {parameter.name!r} needs a default and must be allowed as a keyword")
        if not isinstance(parameter.default, int | float | bool | str):
            continue  # cannot be typed on a command line, so it keeps its default
        hint = hints.get(parameter.name)
        known = hint in (int, float, bool, str) or typing.get_origin(hint) is Literal
        kind = hint if known else type(parameter.default)
        fields.append((parameter.name, kind, knob(parameter.default, f"argument of {name}")))
    return dataclasses.make_dataclass("UserConfig", fields, frozen=True, kw_only=True, slots=True)


def normalized(made: object, name: str) -> Built | WholeStep:
    """Return a factory's result in the form a sweep runs; UsageError for anything else."""
    from torch import nn

    if isinstance(made, Built | WholeStep):
        return made
    if isinstance(made, tuple) and len(made) in (2, 3):
        module, batch, *rest = made
        if isinstance(module, nn.Module) and callable(batch) and all(isinstance(n, int) for n in rest):
            return Built(module=_wrapped(module), batch=lambda: _named(batch(), name), num_tokens=sum(rest))
    elif callable(made) and not isinstance(made, nn.Module):
        return WholeStep(made)
    raise UsageError(f"{name} returned {_types(made)}. It must return {SHAPES}.")


def _types(made: object) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(part).__name__ for part in made)})"
    return type(made).__name__


def _named(given: object, name: str) -> Batch:
    """Return a batch as named tensors; unnamed ones are `0`, `1`, …"""
    import torch

    batch: Mapping[Any, Any] | None = None
    if isinstance(given, torch.Tensor):
        batch = {"0": given}
    elif isinstance(given, Mapping):
        batch = dict(given)
    elif isinstance(given, tuple | list):
        batch = {str(index): value for index, value in enumerate(given)}
    if batch is None or not all(isinstance(value, torch.Tensor) for value in batch.values()):
        raise UsageError(f"{name}: a batch must be a tensor, or a tuple or dict of tensors, not {_types(given)}")
    return batch


def _wrapped(module: torch.nn.Module) -> torch.nn.Module:
    from torch import nn

    class UserModule(nn.Module):
        """The user's module, called with a named batch; returns a loss or tensors."""

        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, **batch: torch.Tensor) -> Any:
            if "0" in batch:
                return _loss_or_tensors(self.module(*batch.values()))
            return _loss_or_tensors(self.module(**batch))

    return UserModule()


def _loss_or_tensors(out: Any) -> Any:
    """Return a scalar loss if there is one, else the tensors of the output."""
    import torch

    if isinstance(out, torch.Tensor):
        return out.reshape(()) if out.numel() == 1 else out
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss.reshape(()) if loss.numel() == 1 else loss
    parts = list(out.values()) if isinstance(out, Mapping) else list(out) if isinstance(out, tuple | list) else []
    tensors = tuple(part for part in parts if isinstance(part, torch.Tensor))
    if not tensors:
        raise UsageError(
            f"The module returned {_types(out)}. It must return a loss, tensors, or an output with a loss."
        )
    return tensors[0].reshape(()) if tensors[0].numel() == 1 else tensors
