"""The ledger of a step: the least time its work needs on this device, and every loss above it, without remainder.

A row is an integer number of nanoseconds over the typical steps of a trace; the rows add up to the steps. GPU work
that overlaps counts once, for what started first; kernels before communication, communication before transfers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from stepscope.analysis.costs.attainable_rates import BANDWIDTH_SHARE, SCATTER_SHARE, fused_ns, product_share
from stepscope.analysis.kernels.fusible import FUSIBLE
from stepscope.analysis.structure.intervals import length_ns, spans, union
from stepscope.devices import Device

LIMIT, WORK, RATES, LOSS, UNKNOWN = "limit", "work", "rates", "loss", "unknown"
ROWS = {
    "products": (LIMIT, "Matrix products, convolutions and attention at the device's peak rate."),
    "traffic": (LIMIT, "What a fused program reads and writes otherwise, at the device's bandwidth."),
    "kernel_rates": (RATES, "Good kernels stay below the device's peaks by this much."),
    "cpu_products": (WORK, "Products, convolutions and attention on the CPU. The least time they need is unknown."),
    "cpu_ops": (WORK, "Other ops on the CPU. The least time they need is unknown."),
    "cpu_data": (LOSS, "The step waits for its batch."),
    "cpu_between": (LOSS, "Host work between steps, without a DataLoader: batches, metrics, averages of weights."),
    "cpu_outside": (LOSS, "What the script does outside of data, passes and optimizer: metrics, copies, clipping."),
    "cpu_ranks": (LOSS, "No op is running while ranks communicate: they wait for the slowest one, or the network."),
    "cpu_python": (LOSS, "No op is running: Python code of the script and its libraries."),
    "slow_products": (LOSS, "Products, convolutions and attention that are slower than good kernels."),
    "layout": (LOSS, "Convolutions and products change the layout of their tensors."),
    "unfused": (LOSS, "Elementwise work, norms and losses move more than a fused program would, or move it slowly."),
    "copies": (LOSS, "Copies, casts and fills that a fused program would not make."),
    "scatters": (LOSS, "Lookups, scatters and sorts that are slower than their bytes."),
    "updates": (LOSS, "Parameter updates that are slower than their bytes."),
    "recomputed": (LOSS, "Forward work that runs again in the backward pass."),
    "communication": (LOSS, "Communication that no computation hides."),
    "transfers": (LOSS, "Copies between host and GPU that no computation hides."),
    "idle_launch": (LOSS, "The GPU waits for the host to launch its next kernel."),
    "idle_synchronization": (LOSS, "The GPU has nothing to do because the host waited for it."),
    "idle_data": (LOSS, "The GPU waits while the host fetches the next batch."),
    "idle_allocator": (LOSS, "The GPU waits while the host is in the driver's allocator."),
    "idle_python": (LOSS, "The GPU waits while the host runs Python outside of any op."),
    "idle_compile": (LOSS, "The GPU waits while the host compiles, loads or plans kernels."),
    "idle_other_ranks": (LOSS, "The GPU waits while the host waits for other ranks."),
    "idle_queued": (LOSS, "Short pauses between kernels that were already launched."),
    "between_steps": (LOSS, "Evaluations, checkpoints, logging and the like between training steps."),
    "slow_steps": (LOSS, "Some steps take longer than a typical one."),
    "idle_unknown": (UNKNOWN, "The GPU is idle, and the trace does not show why."),
    "unknown_work": (UNKNOWN, "Kernels whose least time is unknown: no shapes, no formula, or no peak rate."),
    "disagreement": (UNKNOWN, "The trace and the steps measured without it disagree by this much."),
}  # fmt: skip
"""Every row of a ledger: its kind and what it holds."""
_PRODUCTS = ("gemm", "convolution", "attention_forward", "attention_backward")
_MOVES = ("copy_cast", "memset_memcpy")
_LOOKUPS = ("embedding_index", "sort_scan")
_ADAM, _ADAM_PASSES = "adam", 7


@dataclass(frozen=True)
class LedgerRow:
    """An owner of a part of the step."""

    id: str  # one of `ROWS`
    kind: str  # `limit`, `rates` (what good kernels leave), `work` (without a known limit), `loss` or `unknown`
    ns: float  # per step; negative only for a disagreement
    share: float  # of the step


@dataclass(frozen=True)
class Ledger:
    """A step split without remainder."""

    total_ns: int  # the typical steps together
    num_steps: int
    parts: Mapping[str, int]  # ns over all typical steps, by row; they add up to `total_ns`
    events: pl.DataFrame
    """GPU work by `event`: the `row` of its loss, its `duration_ns`, the `ns` of it that count, and of those
    `least_ns` and `good_ns`."""
    largest_ops: pl.DataFrame | None = None
    """On a CPU, where the least time of ops is unknown: those that take most of a traced step, by where they are
    called."""
    largest_lines: pl.DataFrame | None = None
    """On a CPU, the lines of the script that take most of a step, each with the backward of its ops."""

    @property
    def step_ns(self) -> float:
        return self.total_ns / self.num_steps

    @property
    def rows(self) -> tuple[LedgerRow, ...]:
        """The rows that are not empty, in the order of `ROWS`."""
        return tuple(
            LedgerRow(id, kind, self.parts[id] / self.num_steps, self.parts[id] / self.total_ns)
            for id, (kind, _) in ROWS.items()
            if self.parts.get(id) and self.total_ns
        )

    def per_step_ns(self, *kinds: str) -> float:
        return sum(row.ns for row in self.rows if row.kind in kinds)

    @property
    def is_of_cpu(self) -> bool:
        return any(kind == WORK and self.parts.get(row) for row, (kind, _) in ROWS.items())

    @property
    def limit_share(self) -> float | None:
        """The least time ÷ the step; None if most of the GPU's work has an unknown one."""
        busy = self.events["ns"].sum() or 0
        is_known = busy and not self.is_of_cpu and self.parts.get("unknown_work", 0) < busy / 2
        return self.per_step_ns(LIMIT) / self.step_ns if is_known and self.total_ns else None

    def to_json(self) -> dict[str, Any]:
        rows = [
            {"id": row.id, "kind": row.kind, "ms": row.ns / 1e6, "share": row.share, "what": ROWS[row.id][1]}
            for row in self.rows
        ]
        found = {"step_ms": self.step_ns / 1e6, "limit_share": self.limit_share, "rows": rows}
        tables = {"largest_ops": self.largest_ops, "largest_lines": self.largest_lines}
        return found | {name: table.to_dicts() for name, table in tables.items() if table is not None}


@dataclass(frozen=True)
class LedgerFacts:
    """What a ledger is made of: tables of the typical steps."""

    work: pl.DataFrame
    segments: pl.DataFrame
    attention: pl.DataFrame  # calls with `call` and `num_keys`
    in_attention: frozenset[int]  # work of attention that is not one kernel: a fused attention moves none of it
    recomputed: frozenset[int]
    idle: pl.DataFrame
    device: Device | None
    parameter_bytes: int = 0  # over all steps; a trace omits the sizes of many parameters, a recording has them


def ledger(
    facts: LedgerFacts, step_ns: float, num_steps: int, between_ns: float = 0.0, slow_ns: float = 0.0
) -> Ledger:
    """Return the ledger of `num_steps` steps of `step_ns` each, with what lies between them and what some take
    longer, per step."""
    parts = dict.fromkeys(ROWS, 0)
    within, events = _work_parts(facts)
    for row, ns in within.items():
        parts[row] += ns
    parts["between_steps"], parts["slow_steps"] = round(between_ns * num_steps), max(0, round(slow_ns * num_steps))
    left = round(step_ns * num_steps) - sum(within.values())
    if left < 0:  # the GPU worked longer in the trace than the whole step takes without it
        parts["disagreement"] = left
    else:
        for row, ns in _idle_parts(facts.idle, left).items():
            parts[row] += ns
    return Ledger(sum(parts.values()), num_steps, {row: ns for row, ns in parts.items() if ns}, events)


def _idle_parts(idle: pl.DataFrame, total_ns: int) -> dict[str, int]:
    """Return idle time without the profiler by cause, in the proportions of the trace."""
    length = (pl.col("end_ns") - pl.col("start_ns")).sum()
    causes = idle.group_by(pl.col("cause").cast(pl.String)).agg(length.alias("ns")).filter(pl.col("ns") > 0)
    traced = dict(causes.sort("ns", "cause").iter_rows())
    whole = sum(traced.values())
    parts = {f"idle_{cause}": total_ns * ns // whole for cause, ns in traced.items()}
    rest = total_ns - sum(parts.values())
    largest = max(parts, key=lambda row: parts[row], default="idle_unknown")
    parts[largest] = parts.get(largest, 0) + rest
    return parts


def _work_parts(facts: LedgerFacts) -> tuple[dict[str, int], pl.DataFrame]:
    work = facts.work.with_columns(
        pl.col(pl.Categorical).cast(pl.String), pl.col("class", "activity").cast(pl.String)
    )
    is_transfer = (pl.col("kind") == "memcpy") & ~pl.col("name").str.contains("(?i)DtoD")
    computing = work.filter(~is_transfer, pl.col("activity") != "communication")
    computing_ns = length_ns(union(spans(computing)))
    communicating = work.filter(~is_transfer)
    communicating_ns = length_ns(union(spans(communicating)))
    parts = {
        "communication": communicating_ns - computing_ns,
        "transfers": length_ns(union(spans(work))) - communicating_ns,
    }
    events = _priced(_alone(computing), facts)
    for row, least, good, rest in events.group_by("row").agg(
        pl.col("least_ns").sum(),
        (pl.col("good_ns") - pl.col("least_ns")).sum(),
        (pl.col("ns") - pl.col("good_ns")).sum(),
    ).iter_rows():  # fmt: skip
        for name, ns in ((limit_row(row), least), ("kernel_rates", good), (row, rest)):
            parts[name] = parts.get(name, 0) + ns
    return parts, events


def limit_row(row: str) -> str:
    """Return the row with the least time of the work whose loss is in another row."""
    return "products" if row in ("slow_products", "layout") else "traffic"


def _alone(work: pl.DataFrame) -> pl.DataFrame:
    """Return work with `ns`, the time in which nothing that started earlier ran: they add up to the busy time."""
    end = pl.col("start_ns") + pl.col("duration_ns")
    ordered = work.sort("start_ns", "event").with_columns(end.alias("end_ns"))
    start = pl.max_horizontal("start_ns", pl.col("end_ns").cum_max().shift(1))
    return ordered.with_columns((pl.col("end_ns") - start).clip(0).alias("ns"))


def _priced(work: pl.DataFrame, facts: LedgerFacts) -> pl.DataFrame:
    """Return each event's `row`, `ns`, and of that `least_ns` at the device's limit and `good_ns` of good kernels."""
    owner = {event: place for place, events in enumerate(facts.segments["events"]) for event in events}
    number = pl.col("event").replace_strict(owner, default=None, return_dtype=pl.Int64)
    is_again = pl.col("event").is_in(list(facts.recomputed))
    is_product = pl.col("class").is_in(_PRODUCTS) | (pl.col("call_flops") > 0)
    is_move = pl.col("class").is_in(_MOVES)
    row = (
        pl.when(is_again).then(pl.lit("recomputed"))
        .when(is_product.fill_null(False) & ~is_move).then(pl.lit("slow_products"))
        .when((pl.col("call_flops") > 0).fill_null(False)).then(pl.lit("layout"))
        .when(pl.col("class").is_in(_LOOKUPS)).then(pl.lit("scatters"))
        .when((pl.col("class") == "optimizer") | (pl.col("phase") == "optimizer").fill_null(False))
        .then(pl.lit("updates"))
        .when(is_move).then(pl.lit("copies"))
        .otherwise(pl.lit("unfused"))
    )  # fmt: skip
    is_apart = pl.col("event").is_in(list(facts.in_attention)) & pl.col("class").is_in(FUSIBLE)
    # Adam reads parameters, gradients and two states, and writes all but the gradients.
    is_adam = pl.col("bytes").is_null() & pl.col("op").str.contains("_fused_adam").fill_null(False)
    group = pl.coalesce(
        pl.when(is_adam).then(pl.lit(_ADAM)),
        pl.format("s{}", number),
        pl.format("c{}-{}", "call", is_move.cast(pl.Int8)),
        pl.format("e{}", "event"),
    )
    events = work.select(
        "event", "class", "call", "flops", "bytes", "peak_dtype", "duration_ns", "ns", row.alias("row"),
        number.alias("segment"),
        group.alias("group"), is_apart.alias("is_apart"),
    )  # fmt: skip
    groups = events.group_by("group").agg(
        pl.col("ns").sum().alias("group_ns"), pl.col("row", "class", "call", "segment", "is_apart").first(),
        pl.col("flops", "bytes").sum(), pl.col("bytes").is_not_null().any().alias("has_bytes"),
        pl.col("peak_dtype").drop_nulls().first(),
    )  # fmt: skip
    limits = _limits(facts)
    prices = [(one["group"], one["group_ns"], *limits(one)) for one in groups.iter_rows(named=True)]
    schema = {"group": pl.String, "group_ns": pl.Int64, "least": pl.Float64, "good": pl.Float64, "known": pl.Boolean}
    priced = events.join(pl.DataFrame(prices, schema=schema, orient="row"), on="group", maintain_order="left")

    def part(of: str) -> pl.Expr:
        share = (pl.col(of) / pl.col("group_ns")).clip(0, 1).fill_nan(0).fill_null(0)
        return (pl.col("ns") * share).floor().cast(pl.Int64)

    return priced.select(
        "event", "duration_ns", "ns", pl.when("known").then("row").otherwise(pl.lit("unknown_work")).alias("row"),
        part("least").alias("least_ns"), pl.max_horizontal(part("least"), part("good")).alias("good_ns"),
    )  # fmt: skip


def _limits(facts: LedgerFacts) -> Callable[[dict[str, Any]], tuple[float, float, bool]]:
    """Return a function from a group of work to its least time, that of good kernels, and whether they are known."""
    device = facts.device
    num_keys = dict(facts.attention.select("call", "num_keys").iter_rows())
    in_segment = facts.segments.select("fused_bytes", "norm_bytes", "unknown_ns").rows()

    def limits(group: dict[str, Any]) -> tuple[float, float, bool]:
        if group["row"] in ("recomputed", "layout") or group["is_apart"]:
            return 0.0, 0.0, True
        if device is None:
            return 0.0, 0.0, False
        moving_ns = (group["bytes"] or 0) / device.bandwidth_bytes_per_s * 1e9
        if group["row"] == "slow_products":
            peak = device.peak_flops.get(group["peak_dtype"] or "")
            if not peak or not group["flops"]:
                return 0.0, 0.0, False
            least_ns = max(group["flops"] / peak * 1e9, moving_ns)
            share = product_share(group["class"], group["peak_dtype"], num_keys.get(group["call"]))
            return least_ns, max(group["flops"] / peak / share * 1e9, moving_ns / BANDWIDTH_SHARE), True
        if group["segment"] is not None:
            fused_bytes, norm_bytes, unknown_ns = in_segment[group["segment"]]
            least_ns = (fused_bytes + norm_bytes) / device.bandwidth_bytes_per_s * 1e9
            return least_ns, fused_ns(device, fused_bytes, norm_bytes), unknown_ns < group["group_ns"]
        if group["group"] == _ADAM and facts.parameter_bytes:
            moving_ns = _ADAM_PASSES * facts.parameter_bytes / device.bandwidth_bytes_per_s * 1e9
            return moving_ns, moving_ns / BANDWIDTH_SHARE, True
        share = SCATTER_SHARE if group["row"] == "scatters" else BANDWIDTH_SHARE
        return moving_ns, moving_ns / share, bool(group["has_bytes"])

    return limits
