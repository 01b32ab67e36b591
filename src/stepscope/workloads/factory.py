"""A user's own workload: `my.module:build` or `path/to/file.py:build`.

The function's keyword arguments are the knobs. It returns `(module, batch)`, where `batch()` returns a tensor, or a
tuple or dict of tensors, for `module`. An optional third element is the number of tokens per batch. Or it returns a
function without arguments that runs one complete step of the user's loop.
"""

import dataclasses
import importlib
import inspect
import pkgutil
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NoReturn

from torch import Tensor, nn

from stepscope.errors import UsageError
from stepscope.workloads.users_code import check_python_file, function_of, module_from_file, nearest
from stepscope.workloads.workload import Batch, Built, WholeStep, Workload, knob

SHAPES = "(module, batch function), or a function that runs one complete step"


def user_factory(name: str) -> Workload[Any]:
    place, _, function_name = name.rpartition(":")
    if not place or not function_name:
        raise UsageError(f"{name!r}: write my.module:build or path/to/file.py:build")
    is_file = place.endswith(".py") or "/" in place or "\\" in place
    module = module_from_file(Path(place)) if is_file else _from_module(place)
    workload = getattr(module, function_name, None)
    if isinstance(workload, Workload):  # has its own presets, reference, gate and proofs
        return dataclasses.replace(workload, name=name)
    function = function_of(module, place, function_name)
    return Workload(
        name=name,
        about=(inspect.getdoc(function) or "a user-defined workload").splitlines()[0],
        config=_config_of(function, name),
        presets={"default": {}},
        build=lambda config: normalized(
            function(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)}), name
        ),
    )


def refuse_file(name: str) -> NoReturn:
    """Raise UsageError: the function is missing after the file name, or the file does not exist."""
    check_python_file(Path(name))
    raise UsageError(
        f"{name} is a file. Add the function that builds the workload, {name}:build. It must return {SHAPES}."
    )


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
    if isinstance(made, Built | WholeStep):
        return made
    if isinstance(made, tuple) and len(made) in (2, 3):
        module, batch, *rest = made
        if isinstance(module, nn.Module) and callable(batch) and all(isinstance(n, int) for n in rest):
            return Built(module=UserModule(module), batch=lambda: _named(batch(), name), num_tokens=sum(rest))
    elif callable(made) and not isinstance(made, nn.Module):
        return WholeStep(made)
    raise UsageError(f"{name} returned {_types(made)}. It must return {SHAPES}.")


def _types(made: object) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(part).__name__ for part in made)})"
    return type(made).__name__


def _named(given: object, name: str) -> Batch:
    """Return a batch as named tensors; unnamed ones are `0`, `1`, …"""
    unnamed = given if isinstance(given, tuple | list) else (given,)
    batch = dict(given) if isinstance(given, Mapping) else {str(at): value for at, value in enumerate(unnamed)}
    if not all(isinstance(value, Tensor) for value in batch.values()):
        raise UsageError(f"{name}: a batch must be a tensor, or a tuple or dict of tensors, not {_types(given)}")
    return batch


class UserModule(nn.Module):
    """The user's module, called with a named batch; returns a loss or tensors."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **batch: Tensor) -> Any:
        out = self.module(*batch.values()) if "0" in batch else self.module(**batch)
        named = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
        loss = out if isinstance(out, Tensor) else named
        if isinstance(loss, Tensor):
            return _scalar(loss)
        parts = out.values() if isinstance(out, Mapping) else out if isinstance(out, tuple | list) else ()
        tensors = tuple(part for part in parts if isinstance(part, Tensor))
        if not tensors:
            raise UsageError(
                f"The module returned {_types(out)}. It must return a loss, tensors, or an output with a loss."
            )
        return _scalar(tensors[0]) if tensors[0].numel() == 1 else tensors


def _scalar(tensor: Tensor) -> Tensor:
    return tensor.reshape(()) if tensor.numel() == 1 else tensor
