"""Defaults that a project sets in its pyproject.toml: `[tool.stepscope.VERB]`, with the names of the verb's options.

```toml
[tool.stepscope.run]
warmup = 10

[tool.stepscope.diagnose]
ignore = ["launch_bound"]
```
"""

import argparse
from collections.abc import Collection
from pathlib import Path
from typing import Any

from stepscope.errors import MissingDependencyError, UsageError
from stepscope.sweep.toml_file import read_toml

_ONLY_TYPED = ("help", "yes", "force")
"""Options that a file cannot set: it may have come with somebody else's folder, and these are the user's consent."""


def ignored_rules(folder: Path) -> Collection[str]:
    """Return `ignore` of `[tool.stepscope.diagnose]` in the nearest pyproject.toml at or above a folder."""
    path, table = _settings(folder, "diagnose")
    ignored = table.get("ignore", [])
    if not isinstance(ignored, list) or not all(isinstance(name, str) for name in ignored):
        raise UsageError(f'{path}: ignore must be a list of rules, such as ignore = ["launch_bound"]')
    return ignored


def engine_settings() -> dict[str, Any]:
    """Return `[tool.stepscope.engine]` of the nearest pyproject.toml; empty if it has none."""
    return dict(_settings(Path.cwd(), "engine")[1])


def set_defaults(parser: argparse.ArgumentParser, verb: str) -> None:
    """Set the defaults of a verb's options from pyproject.toml; UsageError for a key that is not an option."""
    path, table = _settings(Path.cwd(), verb)
    options = {each.dest: each for each in parser._actions if each.option_strings and each.dest not in _ONLY_TYPED}
    for key, value in table.items():
        action = options.get(key.replace("-", "_"))
        if action is None:
            known = ", ".join(sorted(options))
            raise UsageError(f"{path}: [tool.stepscope.{verb}] has no key {key!r}. It takes: {known}.")
        parser.set_defaults(**{action.dest: _checked(action, value, f"{path}: [tool.stepscope.{verb}] {key}")})


def _checked(action: argparse.Action, value: Any, where: str) -> Any:
    """Return the value as the command line would have read it."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise UsageError(f"{where} must be true or false")
        return value
    if isinstance(action.default, list):
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise UsageError(f"{where} must be a list of texts")
        return value
    if isinstance(value, (dict, list, bool)):
        raise UsageError(f"{where} must be a single value")
    try:
        read = action.type(str(value)) if callable(action.type) else str(value)
    except (argparse.ArgumentTypeError, ValueError, TypeError) as error:
        raise UsageError(f"{where}: {error}") from None
    if action.choices is not None and read not in action.choices:
        raise UsageError(f"{where} must be one of {', '.join(map(str, action.choices))}")
    return read


def _settings(folder: Path, verb: str) -> tuple[Path | None, dict[str, Any]]:
    """Return the nearest pyproject.toml and its table for a verb, which is empty if there is none."""
    files = (at / "pyproject.toml" for at in (folder, *folder.parents))
    path = next((file for file in files if file.is_file()), None)
    if path is None or b"tool.stepscope" not in path.read_bytes():
        return path, {}
    try:
        table: Any = read_toml(path)
    except MissingDependencyError:
        return path, {}  # Python 3.10 without tomli: defaults stay as they are
    for name in ("tool", "stepscope", verb):
        table = table.get(name, {}) if isinstance(table, dict) else {}
    if not isinstance(table, dict):
        raise UsageError(f"{path}: [tool.stepscope.{verb}] is not a table")
    return path, table
