"""Workloads by name: `cs336`, `hf:path/to/config.json`, `my.module:build`, `path/to/file.py:build`."""

import importlib
from typing import Any

from stepscope.errors import UsageError
from stepscope.workloads.users_code import nearest
from stepscope.workloads.workload import Workload

# Imported only when used, because each module imports torch.
MODELS = ("cs336", "megalodon", "hydra", "nano", "tsmoe")
OPS = (
    "attention", "ema", "moe", "norm", "softmax", "cross_entropy", "value_shift", "contiguity", "precision",
    "all_reduce",
)  # fmt: skip
HUGGING_FACE = "hf:"


def names() -> tuple[str, ...]:
    """Return the names of the built-in workloads: models, then ops."""
    return (*MODELS, *OPS)


def is_ours(name: str) -> bool:
    """Return whether a workload's knobs are defined by Stepscope, not by a user."""
    return name in names() or name.startswith(HUGGING_FACE)


def find(name: str) -> Workload[Any]:
    """Return the workload of that name; UsageError with a suggestion if there is none."""
    if name in names():
        folder = "models" if name in MODELS else "ops"
        workload: Workload[Any] = importlib.import_module(f"stepscope.workloads.{folder}.{name}").WORKLOAD
        return workload
    if name.startswith(HUGGING_FACE):
        from stepscope.workloads.huggingface import hugging_face

        return hugging_face(name.removeprefix(HUGGING_FACE))
    if ":" in name:
        from stepscope.workloads.factory import user_factory

        return user_factory(name)
    if name.endswith(".py"):
        from stepscope.workloads.factory import refuse_file

        refuse_file(name)
    raise UsageError(
        f"Unknown workload {name!r}: {nearest(name, names())} "
        "(also hf:path/to/config.json, my.module:build, path/to/file.py:build)"
    )
