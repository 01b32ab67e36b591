"""The module an event ran in, from Stepscope's own ranges or else from Python stacks."""

import re
from dataclasses import dataclass

import polars as pl

from stepscope.analysis.structure.names import matches
from stepscope.analysis.structure.nesting import ancestor

MODULE_PREFIX = "stepscope.module/"  # prefix of module names, written by `recorder/trace_window.py`
STACK_PREFIX = "nn.Module: "  # prefix of module classes, written by the profiler


@dataclass(frozen=True)
class Modules:
    """Module calls in a trace."""

    source: str  # `ranges`, `stacks`, `compiled` (only regions of compiled code) or `none`
    calls: pl.DataFrame  # `row` of the host table and `module`, its name
    inlined: pl.DataFrame | None = None  # the same for ops and kernels in compiled code, from the compiler's log

    def of_rows(self, host: pl.DataFrame) -> pl.Series:
        """Return the module each host event ran in; a backward op ran in the module of its forward."""
        named = self.calls if self.inlined is None else pl.concat([self.calls, self.inlined])
        names = host.select("row").join(named, on="row", how="left", maintain_order="left")["module"]
        own: pl.Series = names.gather(ancestor(host, names.is_not_null()))
        module: pl.Series = own.zip_with(own.is_not_null(), own.gather(host["forward"]))
        return module


def find_modules(host: pl.DataFrame) -> Modules:
    for source, kind, prefix in (("ranges", "annotation", MODULE_PREFIX), ("stacks", "python", STACK_PREFIX)):
        calls = host.select("row", "name").filter(host["kind"] == kind)
        calls = calls.filter(matches(calls["name"], "^" + re.escape(prefix)))
        if calls.is_empty():
            continue
        named = calls.select("row", pl.col("name").cast(pl.String).str.strip_prefix(prefix).alias("module"))
        if source == "stacks":
            named = _paths(host, named)
        return Modules(source, named.cast({"module": pl.Categorical()}))
    return Modules("none", pl.DataFrame(schema={"row": pl.UInt32(), "module": pl.Categorical()}))


def _paths(host: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Return module paths from stacks, which name a module by class and number (`Linear_3`) inside other modules."""
    above = ancestor(host, host["row"].is_in(calls["row"].implode()))
    around = above.gather(host["parent"].gather(calls["row"]))
    paths: dict[int, str] = {}
    for row, name, outer in zip(calls["row"], calls["module"], around):  # parents have lower rows, so they come first
        paths[row] = f"{paths[outer]}.{name}" if outer is not None else name
    return pl.DataFrame({"row": calls["row"], "module": [paths[row] for row in calls["row"]]})
