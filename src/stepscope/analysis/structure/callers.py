"""The user's Python function around an event, skipping framework and standard library code."""

import polars as pl

from stepscope.analysis.structure.names import matches
from stepscope.analysis.structure.nesting import ancestor

_FUNCTION = r"\.py\(\d+\): "
# The profiler removes the package folder from a path if it knows it.
_NOT_THE_USERS = (
    r"(^|-packages/|/python3\.\d+/)(torch|torchvision|numpy|importlib|asyncio|logging|multiprocessing|concurrent|json)/"
    r"|(^|/python3\.\d+/)(contextlib|functools|threading|runpy|traceback|linecache|copy|random|gc|socket|pickle)\.py\("
    r"|^<"
)


def python_callers(host: pl.DataFrame, rows: pl.Series) -> pl.Series:
    """Return the user's innermost function around each row (`train.py(12): step`); null without Python stacks."""
    is_function = (host["kind"] == "python") & matches(host["name"], _FUNCTION)
    if not is_function.any():
        return pl.repeat(None, len(rows), dtype=pl.String, eager=True).alias("caller")
    around = ancestor(host, is_function & ~matches(host["name"], _NOT_THE_USERS)).gather(rows)
    names: pl.Series = host["name"].gather(around).cast(pl.String)
    return names.alias("caller")
