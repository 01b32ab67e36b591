"""What a page shows about each event: name, op, module, shapes, caller, and its launch."""

from __future__ import annotations

import re

import polars as pl

from stepscope.analysis.structure.callers import python_callers
from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.modules import MODULE_PREFIX
from stepscope.analysis.structure.nesting import ancestor
from stepscope.analysis.structure.steps import PHASE_PREFIX
from stepscope.document.kernel_names import short_name
from stepscope.document.timeline.lanes import TABLES
from stepscope.formatting import safe

KINDS = (
    "step", "phase", "module", "op", "annotation", "runtime", "driver", "python", "overhead", "other",
    "kernel", "memcpy", "memset", "label",
)  # fmt: skip
TEXTS = ("name", "module", "op", "shapes", "dtypes", "step", "phase", "caller", "more")
"""Columns of text, each an index into the list of strings."""
MOST_CHARACTERS = 600
"""Longest name: a C++ template can have thousands of characters."""
_MOST_LABEL = 80


def details(linked: Linked, drawn: pl.DataFrame, runs: pl.DataFrame) -> pl.DataFrame:
    """Return `kind` (an index into `KINDS`), `launch` (1 + the row in `drawn` of the call that launched it, or 0) and
    the columns of `TEXTS`, for each row of `drawn`."""
    parts = [pl.DataFrame(schema={"at": pl.UInt32, "kind": pl.String, "launch_row": pl.UInt32, **_text_schema()})]
    for number, table in enumerate(TABLES):
        some = drawn.filter(pl.col("table") == number)
        if some.height:
            found = _of_runs(runs, some["place"]) if table == "runs" else _DETAILS[table](linked, some["place"])
            parts.append(pl.concat([some.select("at"), found], how="horizontal"))
    every = pl.concat(parts, how="diagonal_relaxed").sort("at")
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
    every = pl.concat([described[name].alias("text") for name in TEXTS]).drop_nulls()
    counts = every.value_counts(sort=False).sort("count", "text", descending=[True, False])
    known = counts["text"].to_list()
    codes = described.select(
        pl.col(name).replace_strict(known, list(range(1, len(known) + 1)), default=0, return_dtype=pl.UInt32)
        if known
        else pl.zeros(pl.len(), pl.UInt32).alias(name)
        for name in TEXTS
    )
    texts = ["", *(_shown(text) for text in known)]
    names = set(codes["name"].unique().to_list())
    kernels = set(codes["name"].filter(described["kind"] == KINDS.index("kernel")).unique().to_list())
    labels = [_label(text, number in kernels) if number in names else "" for number, text in enumerate(texts)]
    return texts, labels, codes


def _shown(text: str) -> str:
    cut = text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"
    return cut if cut.isprintable() else safe(cut, MOST_CHARACTERS)


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


def _text_schema() -> dict[str, type[pl.String]]:
    return dict.fromkeys(TEXTS, pl.String)


def _of_steps(linked: Linked, place: pl.Series) -> pl.DataFrame:
    steps = linked.steps.table[place]
    return steps.select(
        pl.lit("step").alias("kind"),
        pl.format("step {}", "step").alias("name"),
        pl.col("step").cast(pl.String),
    )


def _of_phases(linked: Linked, place: pl.Series) -> pl.DataFrame:
    phase = pl.col("phase").cast(pl.String)
    return linked.steps.phases[place].select(pl.lit("phase").alias("kind"), phase.alias("name"), phase)


def _of_modules(linked: Linked, place: pl.Series) -> pl.DataFrame:
    rows = linked.host.select("row", "module", "step", "phase")[place]
    path = pl.col("module").cast(pl.String)
    return rows.select(
        pl.lit("module").alias("kind"),
        _last_words(path).alias("name"),
        path,
        pl.col("step").cast(pl.String),
        pl.col("phase").cast(pl.String),
        python_callers(linked.host, rows["row"]),
    )


def _of_runs(runs: pl.DataFrame, place: pl.Series) -> pl.DataFrame:
    path = pl.col("module")
    return runs[place].select(
        pl.lit("module").alias("kind"), _last_words(path).alias("name"), path, pl.col("step", "phase")
    )


def _last_words(path: pl.Expr) -> pl.Expr:
    """Return the last part of a module name; the lanes above show the rest. A number is never alone."""
    return path.str.extract(r"((?:[^.]*\.)?\d+|[^.]*)$").fill_null(path)


def _of_host(linked: Linked, place: pl.Series) -> pl.DataFrame:
    host = linked.host
    rows = host[place]
    op = rows["op"]
    return pl.DataFrame(
        {
            "kind": rows["kind"].cast(pl.String),
            "name": rows["name"].cast(pl.String),
            "module": rows["module"].cast(pl.String),
            # An op has its own name already.
            "op": host["name"].gather(op.set(rows["kind"] == "op", None)).cast(pl.String),
            **_of_op(host, op),
            "step": rows["step"].cast(pl.String),
            "phase": rows["phase"].cast(pl.String),
            "caller": callers(host, rows["row"]),
        }
    )


def _of_device(linked: Linked, place: pl.Series) -> pl.DataFrame:
    host, rows = linked.host, linked.device[place]
    around = rows["launch"].zip_with(rows["launch"].is_not_null(), rows["op"])
    size = pl.format("{} bytes", "bytes")
    grid = pl.format("grid {}, block {}", pl.col("grid").cast(pl.String), pl.col("block").cast(pl.String))
    return pl.DataFrame(
        {
            "kind": rows["kind"].cast(pl.String),
            "name": rows["name"].cast(pl.String),
            "module": rows["module"].cast(pl.String),
            "op": rows["op_name"].cast(pl.String),
            **_of_op(host, rows["op"]),
            "step": rows["step"].cast(pl.String),
            "phase": rows["phase"].cast(pl.String),
            "caller": callers(host, around),
            "more": rows.select(pl.coalesce(grid, size).alias("more"))["more"],
            "launch_row": rows["launch"],
        }
    )


def _of_ranges(linked: Linked, place: pl.Series) -> pl.DataFrame:
    ranges = linked.trace.device_ranges[place]
    return ranges.select(pl.lit("label").alias("kind"), pl.col("name").cast(pl.String))


def _of_op(host: pl.DataFrame, op: pl.Series) -> dict[str, pl.Series]:
    return {name: host[name].gather(op).cast(pl.String) for name in ("shapes", "dtypes")}


def callers(host: pl.DataFrame, rows: pl.Series) -> pl.Series:
    """Return the user's function around each row of the host table, or around its forward op.

    Old profilers write an op's stack beside it: then its innermost frames.
    """
    forward = host["forward"].gather(rows)
    around = python_callers(host, rows)
    around = around.zip_with(around.is_not_null(), python_callers(host, forward))
    caller: pl.Series = around
    if host["stack"].null_count() == host.height:
        return caller
    nearest = ancestor(host, host["stack"].is_not_null())
    row = nearest.gather(rows)
    row = row.zip_with(row.is_not_null(), nearest.gather(forward))
    stack = host["stack"].gather(row).cast(pl.String).str.replace_all(";", " ← ", literal=True)
    caller = around.zip_with(around.is_not_null(), stack)
    return caller


_DETAILS = {
    "steps": _of_steps, "phases": _of_phases, "modules": _of_modules, "host": _of_host, "ranges": _of_ranges,
    "gpu": _of_device,
}  # fmt: skip
