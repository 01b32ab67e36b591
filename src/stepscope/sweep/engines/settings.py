"""The resources and the set-up of each point on an engine: `[tool.stepscope.engine]`, or `engine={…}` in Python."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from stepscope.errors import UsageError
from stepscope.rows import MOST_ATTEMPTS
from stepscope.workloads.users_code import nearest

LOCAL, RAY, SLURM = "local", "ray", "slurm"
ENGINES = (LOCAL, RAY, SLURM)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Keys of `[tool.stepscope.engine]`."""

    jobs: int = 64
    """Points submitted at a time; the others wait in the sweep."""
    attempts: int = MOST_ATTEMPTS
    """How often a point is tried if its node is lost, it is preempted or something kills it."""
    patience_s: float = 300.0
    """Seconds to wait for a scheduler that does not answer."""
    cpus_per_point: int = 1
    gpus_per_point: int | None = None
    """By default 1 if the points run on CUDA, else 0."""
    memory_per_point: str | None = None
    """Host memory, such as `16GiB`."""
    time_limit_min: int | None = None
    """Slurm: minutes per job. By default the time limit of the point and 10 more."""
    partition: str | None = None
    account: str | None = None
    setup: tuple[str, ...] = ()
    """Slurm: shell lines before each point, such as `module load cuda`."""
    srun: tuple[str, ...] = ()
    """Slurm: arguments of `srun`, such as `--container-image=train.sqsh`."""
    python: str | None = None
    """Slurm: the command that starts Python on a node. By default the path of this Python."""
    sbatch: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Slurm: further options of `sbatch`, such as `{constraint = "h100"}`."""
    lag_s: float = 30.0
    """Slurm: seconds to wait for the file of a job that has ended: shared disks lag."""
    address: str = "auto"
    """Ray: address of the cluster. `auto` is `RAY_ADDRESS`, else the cluster of this machine."""
    runtime_env: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Ray: environment of the points (`env_vars`, `working_dir`, `conda`, `container` …)."""


def settings_of(table: Mapping[str, Any], where: str = "engine") -> Settings:
    """Return settings from a table; UsageError for a key or a value that does not fit.

    >>> settings_of({"jobs": 8}).jobs
    8
    """
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = str(key).replace("-", "_")
        if name not in fields:
            raise UsageError(f"{where} has no key {key!r}: {nearest(str(key), fields)}")
        kind = str(fields[name].type)
        if "tuple" in kind:
            is_fine = isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value)
            value = tuple(value) if is_fine else value
        elif "Mapping" in kind:
            is_fine = isinstance(value, Mapping)
        elif "str" in kind:
            is_fine = isinstance(value, str) or (value is None and "None" in kind)
        else:
            least = 0 if name in ("gpus_per_point", "lag_s") else 1
            numbers = (int, float) if "float" in kind else (int,)
            is_number = isinstance(value, numbers) and not isinstance(value, bool) and value >= least
            is_fine = is_number or (value is None and "None" in kind)
        if not is_fine:
            kind = kind.replace("tuple[str, ...]", "list of texts").replace("Mapping[str, Any]", "table")
            raise UsageError(f"{where}: {key} = {value!r} does not fit: {kind}")
        values[name] = value
    return Settings(**values)
