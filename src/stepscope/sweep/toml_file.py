"""Reads TOML files on every supported Python."""

from pathlib import Path
from typing import Any

from stepscope.errors import MissingDependencyError, UsageError


def read_toml(path: Path) -> dict[str, Any]:
    """Return the table of a file; UsageError if it cannot be read, MissingDependencyError without a TOML reader."""
    try:
        import tomllib  # type: ignore[import-not-found, unused-ignore]  # since Python 3.11
    except ModuleNotFoundError:  # Python 3.10
        try:
            import tomli as tomllib  # type: ignore[import-not-found, no-redef, unused-ignore]  # before it
        except ModuleNotFoundError:
            raise MissingDependencyError("Reading TOML needs Python 3.11 or newer, or: pip install tomli") from None
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    return table
