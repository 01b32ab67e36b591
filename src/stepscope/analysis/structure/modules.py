"""The module an event ran in, from Stepscope's own ranges, Python stacks, or what the compiler wrote.

Compiled code calls no modules. For each compiled graph, `compile.json` lists its kernel and library calls in order
with their modules, under the key that the profiler uses too. Unknown calls belong to the module around them, else to
`compiled region 0/0 (forward, model.py:12)`.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import polars as pl

from stepscope.analysis.structure.nesting import ancestor, matches
from stepscope.border import limit
from stepscope.trace.compile_file import entries

MODULE_PREFIX = "stepscope.module/"  # prefix of module names, written by `recorder/trace_window.py`
STACK_PREFIX = "nn.Module: "  # prefix of module classes, written by the profiler


@dataclass(frozen=True)
class Modules:
    """Which module each call belongs to."""

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
        named = _paths(host, named) if source == "stacks" else _not_too_deep(named)
        return Modules(source, named.cast({"module": pl.Categorical()}))
    return Modules("none", pl.DataFrame(schema={"row": pl.UInt32(), "module": pl.Categorical()}))


def _not_too_deep(calls: pl.DataFrame) -> pl.DataFrame:
    deepest = limit("DEPTH")
    if not (calls["module"].str.count_matches(".", literal=True) >= deepest).any():
        return calls
    return calls.with_columns(pl.Series("module", [".".join(name.split(".")[:deepest]) for name in calls["module"]]))


def _paths(host: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Return module paths from stacks, which name a module by class and number (`Linear_3`) inside other modules."""
    above = ancestor(host, host["row"].is_in(calls["row"].implode()))
    around = above.gather(host["parent"].gather(calls["row"]))
    paths: dict[int, str] = {}
    deepest, longest = limit("DEPTH"), limit("NAME")
    for row, name, outer in zip(calls["row"], calls["module"], around):  # parents have lower rows, so they come first
        path = f"{paths[outer]}.{name}" if outer is not None else name
        is_too_deep = path.count(".") >= deepest or len(path) > longest
        paths[row] = (name[:80] if outer is None else paths[outer]) if is_too_deep else path
    return pl.DataFrame({"row": calls["row"], "module": [paths[row] for row in calls["row"]]})


_REGION = "^Torch-Compiled Region: "
_GRAPH = "^## Call CompiledFxGraph "
_FUNCTION = re.compile(r"^(.*) \((.*):(\d+)\)$")
Calls = Sequence[tuple[str, str | None]]


def with_compiled_code(host: pl.DataFrame, modules: Modules, compiler: Mapping[str, Any] | None) -> Modules:
    """Return a trace's modules including those of compiled code; `compiler` is `compile.json`, if there is one."""
    is_region, is_graph = matches(host["name"], _REGION), matches(host["name"], _GRAPH)
    if not is_region.any() and not is_graph.any():
        return modules
    regions = _regions(host, modules, is_region, is_graph, compiler or {})
    if not regions.is_empty():
        source = "compiled" if modules.source == "none" else modules.source
        modules = Modules(source, pl.concat([modules.calls, regions.cast({"module": pl.Categorical()})]))
    return replace(modules, inlined=_inlined(host, modules, is_graph, compiler or {}, set(regions["module"])))


def region_name(compile_id: str, compiler: Mapping[str, Any]) -> str:
    """Return the name of a compiled region from its number and function.

    >>> region_name("0/0", {"regions": {"0/0": "forward (/me/model.py:12)"}})
    'compiled region 0/0 (forward, model.py:12)'
    """
    match = _FUNCTION.match(compiler.get("regions", {}).get(compile_id, ""))
    where = f" ({match.group(1)}, {PurePath(match.group(2)).name}:{match.group(3)})" if match else ""
    return f"compiled region {compile_id}{where}"


def named_regions(names: pl.Series, compiler: Mapping[str, Any]) -> pl.Series:
    """Return the profiler's names `Torch-Compiled Region: 0/0` replaced by `region_name`."""
    named = [region_name(name.partition(":")[2].strip(), compiler) for name in names]
    return pl.Series(names.name, named, dtype=pl.String)


def calls_by_graph(compiler: Mapping[str, Any]) -> dict[str, Calls]:
    """Return each compiled graph's calls in order with their modules, by graph key."""
    pairs = {
        graph["key"]: [call for call in graph["calls"] if len(call) == 2]
        for graph in entries(compiler, "compiled_calls")
        if graph.get("key") is not None
    }
    return {key: [(str(n), m if isinstance(m, str) else None) for n, m in calls] for key, calls in pairs.items()}


def _regions(
    host: pl.DataFrame, modules: Modules, is_region: pl.Series, is_graph: pl.Series, compiler: Mapping[str, Any]
) -> pl.DataFrame:
    """Return regions, and graphs outside regions, that no module contains: `row`, `module`."""
    is_call = host["row"].is_in(modules.calls["row"].implode())
    is_in_module = ancestor(host, is_call).is_not_null()
    regions = host.select("row", pl.col("name").cast(pl.String)).filter(is_region & ~is_in_module)
    regions = regions.select("row", named_regions(regions["name"], compiler).alias("module"))
    # A backward is named after its forward. Graphs of old torch versions have only a key.
    alone = is_graph & ~is_in_module & ancestor(host, is_region).is_null() & host["forward"].is_null()
    graphs = host.select("row", pl.col("name").cast(pl.String)).filter(alone)
    keys = graphs["name"].str.extract(r"CompiledFxGraph (\S{1,8})")
    graphs = graphs.select("row", ("compiled graph " + keys.fill_null("?")).alias("module"))
    return pl.concat([regions, graphs])


def _inlined(
    host: pl.DataFrame, modules: Modules, is_graph: pl.Series, compiler: Mapping[str, Any], regions: set[str]
) -> pl.DataFrame | None:
    """Return calls made directly by a compiled graph, with the module from Inductor: `row`, `module`."""
    calls = calls_by_graph(compiler)
    if not calls:
        return None
    whole = {None, *regions, *_roots(host, modules)}  # not part of module paths
    key = pl.col("name").cast(pl.String).str.extract(r"CompiledFxGraph (\S+)").alias("key")
    graphs = host.select("row", key, modules.of_rows(host).cast(pl.String).alias("around")).filter(is_graph)
    graphs = graphs.filter(pl.col("key").is_in(list(calls)))
    made = host.filter(host["parent"].is_in(graphs["row"].implode()))
    made = made.select(pl.col("parent").alias("row"), pl.col("row").alias("call"), pl.col("name").cast(pl.String))
    found: list[tuple[int, str]] = []
    made = made.group_by("row", maintain_order=True).agg("call", "name")
    for _, key, outer, rows, names in graphs.join(made, on="row", maintain_order="left").iter_rows():
        for call, module in zip(rows, modules_in_order(names, calls[key])):
            if module:  # else the surrounding module, or the region
                found.append((call, module if outer in whole else f"{outer}.{module}"))
    return pl.DataFrame(found, schema={"row": pl.UInt32(), "module": pl.Categorical()}, orient="row")


def modules_in_order(seen: Sequence[str], calls: Calls) -> list[str | None]:
    """Return the module of each observed call: the k-th call of a name is the k-th in the code.

    If the numbers differ (some torch versions rename calls), a module is given only if all calls of the name share
    it.

    >>> modules_in_order(["mm", "add", "mm"], [("mm", "a"), ("add", "b"), ("mm", "c")])
    ['a', 'b', 'c']
    """
    by_name: dict[str, list[str | None]] = {}
    for name, module in calls:
        by_name.setdefault(name, []).append(module)
    num_seen, places, found = Counter(seen), Counter[str](), []
    for name in seen:
        modules = by_name.get(name, [])
        if len(modules) == num_seen[name]:
            found.append(modules[places[name]])
            places[name] += 1
        else:
            found.append(modules[0] if len(set(modules)) == 1 else None)
    return found


def _roots(host: pl.DataFrame, modules: Modules) -> set[str]:
    """Return the name of the only root module, which is not part of module paths."""
    is_call = host["row"].is_in(modules.calls["row"].implode())
    above = ancestor(host, is_call).gather(host["parent"]).gather(modules.calls["row"])
    outer = set(modules.calls["module"].cast(pl.String).filter(above.is_null()))
    labeled = {name for name in outer if not name.startswith("compiled ")}
    return labeled if len(labeled) == 1 else set()


def of_graph_kernels(device: pl.DataFrame, host: pl.DataFrame, compiler: Mapping[str, Any] | None) -> pl.DataFrame:
    """Return GPU work with the module of CUDA graph kernels, if only one module has kernels of that name."""
    known: dict[str, set[str]] = {}
    for calls in calls_by_graph(compiler or {}).values():
        for name, module in calls:
            if name.startswith("triton_"):
                known.setdefault(name, set()).add(module or "")
    named = {name: next(iter(found)) for name, found in known.items() if len(found) == 1 and "" not in found}
    is_replayed = matches(host["name"], "GraphLaunch").gather(device["launch"]).fill_null(False)
    if not named or not is_replayed.any():
        return device
    replayed = device["name"].cast(pl.String).replace_strict(named, default=None, return_dtype=pl.String)
    module = replayed.zip_with(is_replayed & replayed.is_not_null(), device["module"].cast(pl.String))
    return device.with_columns(module.cast(pl.Categorical()).alias("module"))
