"""Workloads by name: `cs336`, `hf:path/to/config.json`, `my.module:build`, `path/to/file.py:build`."""

from __future__ import annotations

import importlib
from typing import Any

from stepscope.errors import UsageError
from stepscope.workloads.knobs import nearest
from stepscope.workloads.workload import Workload

# Named here and imported when asked for: a name costs nothing, a module costs torch.
MODELS = ("cs336", "megalodon", "hydra", "nano", "tsmoe")
OPS = (
    "attention",
    "ema",
    "moe",
    "norm",
    "softmax",
    "cross_entropy",
    "value_shift",
    "contiguity",
    "precision",
    "all_reduce",
)
HUGGING_FACE = "hf:"


def names() -> tuple[str, ...]:
    """The names of the workloads that come with Stepscope: models, then ops."""
    return (*MODELS, *OPS)


def is_ours(name: str) -> bool:
    """Whether the knobs of that workload are Stepscope's, not a user's own."""
    return name in names() or name.startswith(HUGGING_FACE)


def find(name: str) -> Workload[Any]:
    """The workload of that name; UsageError with the nearest right one when there is none."""
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
        f"there is no workload {name!r}: {nearest(name, names())} "
        "(also hf:path/to/config.json, my.module:build, path/to/file.py:build)"
    )
