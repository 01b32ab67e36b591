"""Sources of copies on the GPU (without GPU work, on the host): the called op, module, phase, and bytes moved."""

from typing import Any

import polars as pl

from stepscope.analysis.costs.op_calls import ITEM_BYTES, Tensor
from stepscope.analysis.costs.op_costs import operands
from stepscope.analysis.kernels.copies import COPYING, classified_copies, copies
from stepscope.analysis.memory.module_tree import starred
from stepscope.analysis.precision.casts import EXPLICIT, LOW, parameter_shapes
from stepscope.analysis.structure.links import Linked
from stepscope.analysis.structure.nesting import ancestor, is_named, outermost, python_callers
from stepscope.analysis.structure.work import origins_of

CAUSES = {
    "autocast_weight": "Autocast casts a weight to lower precision.",
    "autocast_gradient": "The gradient of such a weight is cast back.",
    "mixed_dtypes": "Autocast casts another input or its gradient, or an op got two dtypes.",
    "called": "The program called it: copy_, to, contiguous, clone, cat.",
    "inside": "An op that the program called needs it internally.",
    "compiled": "Code that torch.compile made.",
    "unknown": "The trace does not show the op.",
}
"""What caused a copy."""
KEYS = ("what", "cause", "op", "root_op", "phase", "module", "caller")  # the columns that identify a source
_MOVERS = frozenset(f"aten::{name}" for name in ("copy_", "cat", "_cat", "stack", "_stack", "_foreach_copy_"))
_CALLED = frozenset(COPYING | set(EXPLICIT))
_FACTS = {
    "cause": pl.String(), "shape": pl.List(pl.Int64()), "source": pl.String(), "target": pl.String(),
    "written_bytes": pl.Int64(),
}  # fmt: skip


_DECIDING = ("what", "shapes", "dtypes", "bytes", "root_op", "root_shapes", "is_compiled", "is_backward")


def copy_sources(linked: Linked) -> pl.DataFrame:
    """Return every copy, cast, layout change and concatenation, by time.

    `event` is the GPU event (the op without GPU work), `row` the copying op's host row or null. `what` is one of
    `KINDS`, `cause` one of `CAUSES`. `op` was called to copy (`aten::contiguous`); `root_op` is the outermost op
    around it (for the backward, the op it belongs to). `bytes` is read and written.
    """
    host = linked.host
    moved = _on_device(linked) if linked.device.height else _on_host(linked)
    rows = moved["row"]
    origins = origins_of(host, rows)
    moved = moved.with_columns(
        *origins.with_columns(pl.col("root_op").cast(pl.String)),
        host["shapes"].gather(origins["root"]).cast(pl.String).alias("root_shapes"),
        python_callers(host, rows),
        *(host[text].gather(rows).cast(pl.String).alias(text) for text in ("shapes", "dtypes")),
    )
    known: dict[tuple[Any, ...], int] = {}  # the same copies come again in every step
    texts = moved.select(_DECIDING).with_columns(pl.col(pl.Categorical).cast(pl.String))
    places = pl.Series([known.setdefault(row, len(known)) for row in texts.iter_rows()], dtype=pl.UInt32)
    facts = pl.DataFrame([_copy_facts(dict(zip(_DECIDING, row))) for row in known], schema=_FACTS, orient="row")
    return moved.hstack(facts[places]).select(
        "event", "row", "start_ns", "step", "phase", "module", "what", "cause", "op", "root_op", "caller", "shape",
        "source", "target", "bytes", "written_bytes", "duration_ns",
    )  # fmt: skip


def copy_summary(sources: pl.DataFrame, num_steps: int, whole_ns: float) -> pl.DataFrame:
    """Return copies per step by source (`KEYS`, module numbers starred), the longest first.

    `share` is relative to `whole_ns`; `events` lists the events of all steps.
    """
    steps = max(1, num_steps)
    modules = pl.Series("module", [starred(name) for name in sources["module"].cast(pl.String)], dtype=pl.String)
    known = [
        pl.when(pl.col(name).is_not_null().any()).then(pl.col(name).sum() / steps).alias(name)
        for name in ("bytes", "written_bytes")
    ]
    return (
        sources.with_columns(modules, pl.col("what", "phase").cast(pl.String))
        .group_by(KEYS, maintain_order=True)
        .agg(
            (pl.len() / steps).alias("num_calls"), *known, (pl.col("duration_ns").sum() / steps).alias("total_ns"),
            pl.col("event").alias("events"),
        )
        .with_columns((pl.col("total_ns") / whole_ns if whole_ns else pl.lit(None, pl.Float64)).alias("share"))
        .sort("total_ns", descending=True, maintain_order=True)
    )  # fmt: skip


def weight_casts(sources: pl.DataFrame, num_steps: int) -> tuple[int, int, int]:
    """Return per step the bytes that autocast reads and writes to cast each weight once, and the bytes written in
    total.

    The total includes casts repeated by later micro-batches. Casting float32 to half precision writes half the bytes
    read.
    """
    casts = sources.filter(pl.col("cause") == "autocast_weight", pl.col("bytes").is_not_null())
    if casts.is_empty():
        return 0, 0, 0
    first = casts.filter(pl.col("step").is_null() | (pl.col("step") == pl.col("step").min()))
    keys = ["module", "root_op", "shape"] if casts["module"].null_count() < casts.height else ["row"]
    once = first.unique(keys, keep="first", maintain_order=True)
    written = int(once["written_bytes"].sum())
    return int(once["bytes"].sum()) - written, written, int(casts["written_bytes"].sum()) // max(1, num_steps)


def _on_device(linked: Linked) -> pl.DataFrame:
    table = copies(linked).filter(pl.col("what") != "fill")
    rows = linked.device.select("event", pl.col("op").alias("row"))
    return table.join(rows, on="event", how="left", maintain_order="left").select(
        "event", "row", "start_ns", "step", "phase", "module", "what",
        pl.col("outer_op").cast(pl.String).alias("op"), "bytes", "duration_ns",
    )  # fmt: skip


def _on_host(linked: Linked) -> pl.DataFrame:
    host = linked.host
    is_mover = (host["kind"] == "op") & is_named(host, _MOVERS)
    # A stack calls cat, and cat may call copy: only the outermost op counts.
    above = ancestor(host, is_mover).gather(host["parent"])
    moved = host.filter(is_mover & above.is_null())
    outer = outermost(host, moved["row"], is_named(host, COPYING))
    moved = moved.with_columns(
        pl.lit("kernel").alias("kind"), pl.lit(None, pl.String).alias("name"), pl.lit("copy_cast").alias("class"),
        pl.col("name").alias("op_name"), host["name"].gather(outer).cast(pl.String).alias("outer_op"),
    )  # fmt: skip
    return classified_copies(moved).select(
        "event", "row", "start_ns", "step", "phase", "module", "what", pl.col("outer_op").alias("op"),
        pl.col("op_bytes").alias("bytes"), "duration_ns",
    )  # fmt: skip


def _copy_facts(row: dict[str, Any]) -> tuple[str, list[int] | None, str | None, str | None, int | None]:
    """Return a copy's cause, shape, source and target dtype, and bytes written."""
    pair = [one for one in operands(row["shapes"], row["dtypes"])[:2] if isinstance(one, Tensor)]
    is_pair = len(pair) == 2 and row["what"] != "concatenate"
    shape = list(pair[0].shape) if is_pair else None
    target, source = (pair[0].dtype, pair[1].dtype) if is_pair else (None, None)
    item_bytes = ITEM_BYTES.get(target or "")
    written = pair[0].num_elements * item_bytes if is_pair and item_bytes else None
    num_bytes = row["bytes"]
    if num_bytes is None or written is None or written > num_bytes:
        written = None if num_bytes is None else num_bytes // 2
    return _cause(row, shape, source, target), shape, source, target, written


def _cause(row: dict[str, Any], shape: list[int] | None, source: str | None, target: str | None) -> str:
    root = row["root_op"]
    if row["is_compiled"]:
        return "compiled"
    if root is None:
        return "unknown"
    if root in _CALLED:
        return "called"
    if row["what"] == "cast" and {source, target} & set(LOW) and "float32" in (source, target):
        if shape is None or shape not in parameter_shapes(root, row["root_shapes"]):
            return "mixed_dtypes"
        if target in LOW and not row["is_backward"]:
            return "autocast_weight"
        return "autocast_gradient" if source in LOW and row["is_backward"] else "mixed_dtypes"
    return "inside"
