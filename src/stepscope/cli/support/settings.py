"""What a project's pyproject.toml says to Stepscope."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from stepscope.errors import MissingDependencyError, UsageError
from stepscope.sweep.toml_file import read_toml


def ignored_rules(folder: Path) -> Collection[str]:
    """`ignore` of `[tool.stepscope.diagnose]` in the nearest pyproject.toml at or above a folder."""
    path = next(
        (at / "pyproject.toml" for at in (folder, *folder.parents) if (at / "pyproject.toml").is_file()), None
    )
    if path is None:
        return ()
    try:
        table: Any = read_toml(path)
    except MissingDependencyError:
        return ()  # nothing is suppressed, which hides nothing
    for name in ("tool", "stepscope", "diagnose"):
        table = table.get(name, {}) if isinstance(table, dict) else {}
    if not isinstance(table, dict):
        raise UsageError(f"{path}: [tool.stepscope.diagnose] is no table")
    unknown = set(table) - {"ignore"}
    if unknown:
        raise UsageError(f"{path}: [tool.stepscope.diagnose] has no key {sorted(unknown)[0]!r}; it takes: ignore")
    ignored = table.get("ignore", [])
    if not isinstance(ignored, list) or not all(isinstance(name, str) for name in ignored):
        raise UsageError(f'{path}: ignore is a list of rules, as in ignore = ["launch_bound"]')
    return ignored
