"""Communication, by kernels or by gloo on the host: which collective, how large, how fast, how much is exposed."""

import json
import re
from collections.abc import Callable
from math import prod
from typing import Any

import polars as pl

from stepscope.analysis.costs.op_calls import ITEM_BYTES
from stepscope.analysis.costs.op_costs import DTYPES
from stepscope.analysis.kernels.copies import bandwidth
from stepscope.analysis.structure.intervals import covered_before, spans, union
from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.nesting import with_answers
from stepscope.analysis.structure.once import once

UNKNOWN = "unknown"
POINT_TO_POINT = ("send", "recv", "send_recv")
# The first whose letters are in a name.
_KINDS = "barrier all_reduce reduce_scatter all_gather all_to_all broadcast send_recv send recv scatter gather reduce"
_ON_HOST = "^(gloo|mpi|ucc):"
_ANNOTATION = f"^(nccl|rccl):|{_ON_HOST}"
_RECORD = "record_param_comms"
_DEEPEST = 512
_SPLIT = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")

_BANDWIDTHS = ("algorithm_bandwidth_bytes_per_s", "bus_bandwidth_bytes_per_s")
SCHEMA: dict[str, pl.DataType] = {
    "event": pl.UInt32(),
    "device": pl.Int32(),
    **dict.fromkeys(("stream", "start_ns", "end_ns", "duration_ns", "step"), pl.Int64()),
    **dict.fromkeys(("phase", "collective", "source", "dtype"), pl.String()),
    **dict.fromkeys(("num_elements", "bytes"), pl.Int64()),
    **dict.fromkeys(("group", "group_ranks"), pl.String()),
    **dict.fromkeys(("group_size", *_BANDWIDTHS, "exposed_ns"), pl.Int64()),
}


def collective_kind(name: str) -> str:
    """Return the collective that a name means, in one spelling.

    >>> [collective_kind(name) for name in ("_allgather_base", "nccl:all_to_all", "ncclDevKernel_SendRecv(Args)")]
    ['all_gather', 'all_to_all', 'send_recv']
    """
    letters = re.sub("[^a-z]", "", name.partition("(")[0].lower())
    return next((kind for kind in _KINDS.split() if kind.replace("_", "") in letters), UNKNOWN)


def dtype_name(name: str) -> str | None:
    """Return a dtype in one spelling; None if its size is unknown.

    >>> dtype_name("c10::BFloat16"), dtype_name("Float"), dtype_name("TensorList")
    ('bfloat16', 'float32', None)
    """
    letters = _letters(name)
    if letters in ITEM_BYTES:
        return letters
    return "float8" if letters.startswith("float8") else _DTYPES.get(letters)


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower().removeprefix("c10::"))


_DTYPES = {"byte": "uint8", **{_letters(name): dtype for name, dtype in DTYPES.items()}}


def bus_factor() -> pl.Expr:
    """Return the factor from algorithm to bus bandwidth by `collective` and `group_size`; null if there is none.

    As in nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md; gather, scatter and sendrecv from its
    sources): the traffic of the busiest link over the size, independent of the number of ranks.
    """
    kind, ranks = pl.col("collective"), pl.when(pl.col("group_size") > 0).then("group_size")
    others = (ranks - 1) / ranks
    return (
        pl.when(kind == "all_reduce")
        .then(2 * others)
        .when(kind.is_in(_SPLIT))
        .then(others)
        .when(kind.is_in(("broadcast", "reduce", *POINT_TO_POINT)))
        .then(1.0)
    )


def host_collectives(linked: Linked) -> pl.DataFrame:
    """Return the events of collectives that threads of the host carry out, in a trace without GPU work."""
    is_one = (pl.col("kind") == "annotation") & pl.col("name").cast(pl.String).str.contains(_ON_HOST)
    return linked.host.filter(is_one & pl.lit(linked.device.is_empty()))


@once
def collectives(linked: Linked) -> pl.DataFrame:
    """Return one row per communication kernel, by start; columns as in `SCHEMA`. Without GPU work, they are gloo's
    collectives on the host, and computation is any op.

    `collective` comes from the profiler's arguments on the kernel or on the op around its launch (`source` is
    `arguments`), else from the label around the launch (`annotation`), else from the kernel's name (`kernel`), where
    an all-to-all is a `send_recv` and a generic kernel is `unknown`.

    `num_elements` is the size in nccl-tests' sense, the whole array: the larger of what a rank sends and receives. A
    label has what a rank sends; for an all-gather it is multiplied by the group size. `group_size` is the world size
    if the group is unknown. `step` and `phase` are those of the launch.

    Bandwidths are size over kernel duration. A kernel that starts early waits for other ranks, so they are lower
    bounds for the links: see `ranks.stragglers`.

    `exposed_ns` is the part without computation. If kernels overlap, a moment belongs to the first, so that the parts
    add up to `GpuTime.exposed_communication_ns`.
    """
    device = linked.device
    kernels = device.filter(pl.col("activity") == "communication")
    compute = spans(device, pl.col("activity") == "compute")
    if kernels.is_empty():
        on_host = {"device": pl.lit(None, pl.Int32), "stream": pl.col("thread"), "launch": pl.col("row")}
        kernels = host_collectives(linked).with_columns(**on_host)
        compute = spans(linked.host, pl.col("kind") == "op")
    if kernels.is_empty():
        return pl.DataFrame(schema=SCHEMA)
    kernels, compute = kernels.sort("start_ns", "event").with_row_index("kernel"), union(compute)
    facts = _collective_facts(linked, kernels)
    world_size = pl.lit(linked.trace.facts.world_size, pl.Int64)
    table = kernels.with_columns(_exposed(kernels, compute)).join(
        facts, on="kernel", how="left", maintain_order="left"
    )
    table = table.with_columns(pl.coalesce("group_size", world_size))
    gathered = (pl.col("source") == "annotation") & (pl.col("collective") == "all_gather")
    size = pl.when(gathered).then(pl.col("num_elements") * pl.col("group_size")).otherwise("num_elements")
    item = pl.col("dtype").replace_strict(ITEM_BYTES, default=None, return_dtype=pl.Int64)
    return (
        table.with_columns(pl.when(size >= 0).then(size).alias("num_elements"))
        .with_columns((pl.col("num_elements") * item).alias("bytes"))
        .with_columns(
            bandwidth(pl.col("bytes"), pl.col("duration_ns")).alias("algorithm_bandwidth_bytes_per_s"),
            bandwidth(pl.col("bytes") * bus_factor(), pl.col("duration_ns")).alias("bus_bandwidth_bytes_per_s"),
        )
        .select(pl.col(name).cast(dtype) for name, dtype in SCHEMA.items())
    )


def collectives_by_size(table: pl.DataFrame) -> pl.DataFrame:
    """Return calls of `collectives` by `collective`, `dtype`, `bytes` and `group_size`, the longest total first.

    Bandwidths are over the total time; `best_bus_bandwidth_bytes_per_s` is of the call that waited least.
    """
    keys = ["collective", "dtype", "bytes", "group_size"]
    total, all_bytes = pl.col("total_ns"), pl.col("bytes") * pl.col("num_calls")
    return (
        table.group_by(keys)
        .agg(
            pl.len().cast(pl.Int64).alias("num_calls"),
            pl.col("duration_ns").sum().alias("total_ns"),
            pl.col("duration_ns").median().floor().cast(pl.Int64).alias("median_ns"),
            pl.col("exposed_ns").sum(),
            pl.col("bus_bandwidth_bytes_per_s").max().alias("best_bus_bandwidth_bytes_per_s"),
        )
        .with_columns(
            bandwidth(all_bytes, total).alias("algorithm_bandwidth_bytes_per_s"),
            bandwidth(all_bytes * bus_factor(), total).alias("bus_bandwidth_bytes_per_s"),
            pl.col(pl.Categorical).cast(pl.String),
        )
        .sort("total_ns", *keys, descending=[True, False, False, False, False])
    )


def _exposed(kernels: pl.DataFrame, compute: pl.DataFrame) -> pl.Series:
    """Return the exposed time of each kernel by start: not covered by an earlier one or by computation."""
    reach = pl.col("end_ns").cum_max().shift(1).fill_null(pl.col("start_ns"))
    start, end = kernels.select(reach.clip("start_ns", "end_ns").alias("start_ns"), "end_ns")
    hidden = covered_before(compute, end) - covered_before(compute, start)
    exposed: pl.Series = end - start - hidden
    return exposed.alias("exposed_ns")


def _collective_facts(linked: Linked, kernels: pl.DataFrame) -> pl.DataFrame:
    """Return the trace's facts about each kernel: from the best source, missing fields from the next."""
    above = _above(linked.host, kernels)
    told = linked.trace.collectives
    rows = told.with_columns(
        _mapped(told["collective"], collective_kind),
        _mapped(told["dtype"], dtype_name),
        pl.max_horizontal("num_in_elements", "num_out_elements").alias("num_elements"),
        pl.col("group", "group_ranks").cast(pl.String).str.strip_chars('"'),
    ).filter(pl.col("collective") != UNKNOWN)
    fields = ["collective", "dtype", "num_elements", "group", "group_ranks", "group_size"]
    own = kernels.select("kernel", "event", pl.lit(-1, pl.Int64).alias("depth"))
    arguments = (
        pl.concat([own, above.select("kernel", "event", "depth")])
        .join(rows.unique("event", keep="first"), on="event")
        .sort("depth")
        .unique("kernel", keep="first")
        .select("kernel", pl.lit("arguments").alias("source"), *fields)
    )
    kinds = _mapped(kernels["name"], collective_kind).alias("collective")
    names = kernels.select("kernel", pl.lit("kernel").alias("source"), kinds)
    merged = kernels.select("kernel")
    for place, frame in enumerate((arguments, _annotations(above), names)):
        merged = merged.join(frame, on="kernel", how="left", suffix=f"_{place}")
    ends = ("", "_1", "_2")
    known = [pl.when(pl.col(f"collective{end}") != UNKNOWN).then(f"collective{end}") for end in ends]
    source = [pl.when(kind.is_not_null()).then(f"source{end}") for kind, end in zip(known, ends)]
    return merged.select(
        "kernel",
        pl.coalesce(*known, pl.lit(UNKNOWN)).alias("collective"),
        pl.coalesce(*source, pl.lit("kernel")).alias("source"),
        pl.coalesce("dtype", "dtype_1").alias("dtype"),
        pl.coalesce("num_elements", "num_elements_1").alias("num_elements"),
        *fields[3:],
    )


def _above(host: pl.DataFrame, kernels: pl.DataFrame) -> pl.DataFrame:
    """Return every host event at or above a kernel's launch, and how far above (`depth`)."""
    here = kernels.select("kernel", pl.coalesce("launch", "op").alias("row")).drop_nulls()
    levels = [here.with_columns(pl.lit(0, pl.Int64).alias("depth"))]
    for depth in range(1, _DEEPEST):
        here = here.with_columns(host["parent"].gather(here["row"]).alias("row")).drop_nulls()
        if here.is_empty():
            break
        levels.append(here.with_columns(pl.lit(depth, pl.Int64).alias("depth")))
    found = pl.concat(levels)
    return found.with_columns(host[name].gather(found["row"]) for name in ("event", "name", "shapes", "dtypes"))


def _annotations(above: pl.DataFrame) -> pl.DataFrame:
    """Return facts from labels around a launch: `kernel`, `source`, `collective`, `dtype`, `num_elements`."""
    name = pl.col("name").cast(pl.String)
    labels = above.filter(name.str.contains(_ANNOTATION) | (name == _RECORD)).sort("depth")
    schema = {"collective": pl.String(), "num_elements": pl.Int64(), "dtype": pl.String()}
    known = with_answers(labels, ["name", "shapes", "dtypes"], _label_facts, schema)
    fields = [pl.col(field).drop_nulls().first() for field in ("collective", "dtype", "num_elements")]
    return known.group_by("kernel").agg(pl.lit("annotation").first().alias("source"), *fields)


def _label_facts(name: str, shapes: str | None, dtypes: str | None) -> tuple[str | int | None, ...]:
    kind = collective_kind(name)
    return (None if kind == UNKNOWN else kind, *tensor_sizes(shapes, dtypes, first_only=name == _RECORD))


def tensor_sizes(shapes: str | None, dtypes: str | None, first_only: bool = False) -> tuple[int | None, str | None]:
    """Return the element count of an event's input tensors and their dtype, as far as known.

    >>> tensor_sizes("[[4, 8], [2]]", '["float", "float"]')
    (34, 'float32')
    """
    try:
        pairs: list[tuple[Any, Any]] = list(zip(json.loads(shapes or ""), json.loads(dtypes or "")))
    except (ValueError, TypeError, RecursionError):
        return None, None
    found: list[tuple[int, str | None]] = []
    for shape, text in pairs[:1] if first_only else pairs:
        dtype = dtype_name(text) if isinstance(text, str) else None
        members = [shape] if dtype else shape  # a list of tensors contains shapes, and has no dtype
        for sizes in members if isinstance(members, list) else ():
            if isinstance(sizes, list) and all(type(size) is int and size >= 0 for size in sizes):
                found.append((prod(sizes), dtype))
    num, types = sum(count for count, _ in found), {dtype for _, dtype in found}
    return (num, types.pop()) if len(types) == 1 and num < 2**60 else (None, None)


def _mapped(names: pl.Series, function: Callable[[str], str | None]) -> pl.Series:
    """Return names, few of them distinct, mapped through a function."""
    answers = {name: function(name) for name in names.cast(pl.String).unique().drop_nulls()}
    mapped: pl.Series = names.cast(pl.String).replace_strict(answers, default=None, return_dtype=pl.String)
    return mapped
