"""What a page shows about each event: name, op, module, shapes, caller, and its launch."""

import re

import polars as pl

from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.modules import MODULE_PREFIX
from stepscope.analysis.structure.nesting import ancestor, python_callers
from stepscope.analysis.structure.steps import PHASE_PREFIX
from stepscope.document.kernel_names import short_name
from stepscope.document.timeline.tracks import TABLES
from stepscope.formatting import safe

KINDS = (
    "step", "phase", "module", "op", "annotation", "runtime", "driver", "python", "overhead", "other",
    "kernel", "memcpy", "memset", "label",
)  # fmt: skip
TEXTS = ("name", "module", "op", "shapes", "dtypes", "step", "phase", "caller", "more")
"""Columns of text, each an index into the list of strings."""
MOST_CHARACTERS = 600  # longest name: a C++ template can have thousands of characters
_MOST_LABEL = 80


def details(linked: Linked, drawn: pl.DataFrame, runs: pl.DataFrame) -> pl.DataFrame:
    """Return `kind` (an index into `KINDS`), `launch` (1 + the row in `drawn` of the call that launched it, or 0) and
    the columns of `TEXTS`, for each row of `drawn`."""
    columns = ("kind", *TEXTS, "launch_row")
    schema = {"at": pl.UInt32, **dict.fromkeys(columns, pl.String), "launch_row": pl.UInt32}
    parts = [pl.DataFrame(schema=schema)]
    for number, table in enumerate(TABLES):
        some = drawn.filter(pl.col("table") == number)
        if some.height:
            found = _described(linked, table, some["place"], runs)
            known = [pl.col(name).cast(schema[name]) for name in columns if name in found.columns]
            parts.append(pl.concat([some.select("at"), found.select(known)], how="horizontal"))
    every = pl.concat(parts, how="diagonal").sort("at")
    # If two tracks show an event, the later one is not the copy.
    on_host = drawn.filter(pl.col("table") == TABLES.index("host")).unique("place", keep="last", maintain_order=True)
    place = pl.zeros(linked.host.height, pl.UInt32, eager=True).scatter(on_host["place"], on_host["at"] + 1)
    return every.with_columns(
        pl.col("kind").replace_strict(list(KINDS), list(range(len(KINDS))), default=KINDS.index("other")),
        place.gather(every["launch_row"]).fill_null(0).alias("launch"),
    )


def strings(described: pl.DataFrame) -> tuple[list[str], list[str], pl.DataFrame]:
    """Return every text once, "" and then the most frequent first; a shorter label for each ("": itself); and the
    columns of `TEXTS` as indices into the list."""
    every = pl.concat([described[name].alias("text") for name in TEXTS])
    counts = every.filter(every != "").value_counts(sort=False).sort("count", "text", descending=[True, False])
    known = ["", *counts["text"]]
    numbers = list(range(len(known)))
    codes = described.select(pl.col(*TEXTS).replace_strict(known, numbers, default=0, return_dtype=pl.UInt32))
    texts = [safe(text, MOST_CHARACTERS) for text in known]
    names = set(codes["name"].unique().to_list())
    kernels = set(codes["name"].filter(described["kind"] == KINDS.index("kernel")).unique().to_list())
    labels = [_label(text, number in kernels) if number in names else "" for number, text in enumerate(texts)]
    return texts, labels, codes


def _label(name: str, is_kernel: bool) -> str:
    """Return a shorter name to write on the event, or "" if there is none."""
    short = name
    for prefix in (MODULE_PREFIX, PHASE_PREFIX, "autograd::engine::evaluate_function: ", "aten::"):
        short = short.removeprefix(prefix)
    if is_kernel:
        short = short_name(short, _MOST_LABEL)
        # CUTLASS gives every kernel this name; what it is is inside.
        short = re.sub(r"^Kernel2?\[(.*)\]$", r"\1", short)
    elif "/" in short and ".py(" in short:
        short = short.rsplit("/", 1)[-1]
    short = short[:_MOST_LABEL]
    return "" if short == name else short


def _described(linked: Linked, table: str, place: pl.Series, runs: pl.DataFrame) -> pl.DataFrame:
    """Return `kind`, `launch_row` and those columns of `TEXTS` that rows of a table have."""
    host = linked.host
    match table:
        case "steps":
            steps = linked.steps.table[place]
            return steps.select("step", name=pl.format("step {}", "step"), kind=pl.lit("step"))
        case "phases":
            return linked.steps.phases[place].select("phase", name="phase", kind=pl.lit("phase"))
        case "ranges":
            return linked.trace.device_ranges[place].select("name", kind=pl.lit("label"))
        case "runs" | "modules":
            rows = runs[place] if table == "runs" else host.select("row", "module", "step", "phase")[place]
            path = pl.col("module").cast(pl.String)
            # The last part of the name: the lanes above show the rest. A number is never alone.
            last = path.str.extract(r"((?:[^.]*\.)?\d+|[^.]*)$").fill_null(path)
            named = rows.with_columns(name=last, kind=pl.lit("module"))
            return named if table == "runs" else named.with_columns(caller=python_callers(host, rows["row"]))
        case "host":
            rows = host[place]
            own = rows["op"].set(rows["kind"] == "op", None)  # an op has its own name already
            op, caller = host["name"].gather(own), callers(host, rows["row"])
            return rows.with_columns(*_shapes(host, rows["op"]), op=op, caller=caller)
        case _:
            rows = linked.device[place]
            around = rows["launch"].zip_with(rows["launch"].is_not_null(), rows["op"])
            grid = pl.format("grid {}, block {}", pl.col("grid").cast(pl.String), pl.col("block").cast(pl.String))
            more = pl.coalesce(grid, pl.format("{} bytes", "bytes"))
            shapes, caller = _shapes(host, rows["op"]), callers(host, around)
            return rows.with_columns(*shapes, op="op_name", caller=caller, more=more, launch_row="launch")


def _shapes(host: pl.DataFrame, op: pl.Series) -> list[pl.Series]:
    return [host[name].gather(op) for name in ("shapes", "dtypes")]


def callers(host: pl.DataFrame, rows: pl.Series) -> pl.Series:
    """Return the user's function around each row of the host table, or around its forward op.

    Old profilers write an op's stack beside it: then its innermost frames.
    """
    forward = host["forward"].gather(rows)
    caller: pl.Series = python_callers(host, rows)
    caller = caller.zip_with(caller.is_not_null(), python_callers(host, forward))
    if host["stack"].null_count() == host.height:
        return caller
    nearest = ancestor(host, host["stack"].is_not_null())
    row = nearest.gather(rows)
    row = row.zip_with(row.is_not_null(), nearest.gather(forward))
    stack = host["stack"].gather(row).cast(pl.String).str.replace_all(";", " ← ", literal=True)
    caller = caller.zip_with(caller.is_not_null(), stack)
    return caller
