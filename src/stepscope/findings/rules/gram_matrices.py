"""Rules about products of a matrix with its own transpose."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import polars as pl

from stepscope.analysis.costs.attainable_rates import LEAST_KERNEL_NS, gemm_ns
from stepscope.analysis.costs.op_calls import Tensor
from stepscope.analysis.costs.op_costs import operands
from stepscope.analysis.structure.work import PRODUCTS
from stepscope.errors import if_available
from stepscope.findings.op_lines import first_line, lines_of, logged_of
from stepscope.findings.rule import Case, Change, Evidence, Finding, one_finding, rule
from stepscope.findings.rules.matrix_products import products_of
from stepscope.formatting import plural, whole_percent

_MOVES = ("copy_cast", "memset_memcpy")
_SUMS = ("aten::add", "aten::add_", "aten::sub", "aten::sub_", "aten::lerp", "aten::lerp_")
_SCALINGS = ("aten::mul", "aten::mul_", "aten::div", "aten::div_")


@dataclass
class _Chain:
    """The products of p(X·Xᵀ)·X, where X has `long` rows and `short` columns, or the other way around."""

    long: int
    short: int
    is_tall: bool
    products: list[dict[str, Any]]
    sums: list[int]  # sums and multiples of the square matrix, by event

    @property
    def share(self) -> float:
        """The FLOPs on the other side of X ÷ those on this one."""
        now = left = 0.0
        for row in self.products:
            now += row["flops"]
            left += row["flops"] * self.part(row)
        return left / now

    def part(self, row: dict[str, Any]) -> float:
        """Return the FLOPs of one product on the other side ÷ those on this one."""
        return (self.short / self.long) ** (3 if row["num_rows"] == row["inner"] == row["num_columns"] else 1)


@rule
def longer_side(case: Case) -> list[Finding]:
    """Is a polynomial of X·Xᵀ computed on the longer side of X?

    p(X·Xᵀ)·X is X·p(Xᵀ·X), and the smaller of both Gram matrices has all that the larger one has.
    """
    case.with_shapes()
    chains = list(_chains(case))
    durations: dict[int, float] = {}
    work_ns = dict(case.work.select("event", "duration_ns").iter_rows())
    for chain in chains:
        for row in chain.products:
            share = chain.part(row)
            good_ns = 0.0
            if row["peak_dtype"] in case.device.peak_flops:
                good_ns = gemm_ns(case.device, row["peak_dtype"], round(row["flops"] * share), None)
            now_ns = work_ns[row["event"]]
            durations[row["event"]] = min(now_ns, max(LEAST_KERNEL_NS, now_ns * share, good_ns))
        for event in chain.sums:
            shorter_ns = max(LEAST_KERNEL_NS, work_ns[event] * (chain.short / chain.long) ** 2)
            durations[event] = min(work_ns[event], shorter_ns)
    saving_ns = case.saving_ns(Change(duration_ns=durations))
    if not case.is_worth(saving_ns):
        return []
    rows = case.work.filter(pl.col("event").is_in(list(durations))).with_columns(
        pl.col("op", "shapes", "phase").cast(pl.String)
    )
    longest = max(chains, key=lambda chain: sum(row["flops"] for row in chain.products))
    left = sum(chain.share * sum(row["flops"] for row in chain.products) for chain in chains)
    share = left / sum(row["flops"] for chain in chains for row in chain.products)
    by = f"{longest.long:,} × {longest.long:,}"
    of = (longest.long, longest.short) if longest.is_tall else (longest.short, longest.long)
    grams = rows.filter(pl.col("event").is_in([chain.products[0]["event"] for chain in chains]))["call"]
    lines = if_available(lambda: lines_of(case, logged_of(case).filter(pl.col("row").is_in(grams.implode()))))
    where = f", at {first_line(lines)}" if lines is not None and lines.height else ""
    return one_finding(
        sentence=f"{plural(len(chains) / case.num_steps, 'time')} per step, a matrix is multiplied by its transpose "
        f"on its longer side{where}: one of {of[0]:,} × {of[1]:,} makes {by}, of rank {longest.short:,} at most. "
        f"With the products that follow, this takes {case.cost_text(rows)}. On the shorter side, "
        f"they need {whole_percent(share)} of the FLOPs.",
        fix=f"x = x.mT if x.size(-2) {'>' if longest.is_tall else '<'} x.size(-1) else x  # before the products; "
        "transpose the result back",
        saving_ns=saving_ns,
        derived=f"the step replayed with these products at {whole_percent(share)} of their FLOPs, no faster than at "
        "60 % of the peak",
        confidence="medium",
        falsified_by="transpose the matrix; the finding is wrong if anything but sums, multiples and products works "
        "on the square matrix",
        places=case.places(durations),
        evidence=(
            Evidence("products", case.grouped(rows, "num_kernels", "op", "shapes", "phase").head(8).to_dicts()),
        ),
    )


def _chains(case: Case) -> Iterator[_Chain]:
    """Return runs of products in which X·Xᵀ is multiplied by itself and by X, with sums and multiples in between."""
    products = {row["event"]: row for row in products_of(case).iter_rows(named=True)}
    columns = ("event", "op", "class", "shape", "shapes", "dtypes", "strides")
    texts = pl.col(pl.Categorical, pl.Enum).cast(pl.String)
    work = case.sized.sort("device", "stream", "start_ns").select("step", *columns)
    chain: _Chain | None = None
    for row in work.with_columns(texts).iter_rows(named=True):
        one = products.get(row["event"])
        if one is None:
            if chain is not None and prod(row["shape"] or ()) == chain.products[0]["batch"] * chain.long**2:
                chain.sums.append(row["event"])
                chain = chain if _is_linear(row) else None
            continue
        first = chain.products[0] if chain is not None else None
        if chain is not None and first is not None and (one["batch"], one["step"]) == (first["batch"], first["step"]):
            sizes = (one["num_rows"], one["inner"], one["num_columns"])
            if sizes == (chain.long,) * 3:
                chain.products.append(one)
                continue
            is_tall = sizes == (chain.long, chain.long, chain.short)
            if len(chain.products) > 1 and (is_tall or sizes == (chain.short, chain.long, chain.long)):
                chain.products.append(one)
                chain.is_tall = is_tall
                yield chain
        chain = _Chain(one["num_rows"], one["inner"], True, [one], []) if _is_long_gram(row, one) else None


def _is_long_gram(row: dict[str, Any], one: dict[str, Any]) -> bool:
    """Return whether a product may be that of a matrix and its transpose, with a result larger than the matrix.

    Both have the same numbers in the same place: the strides of one are those of the other, exchanged.
    """
    if not one["num_rows"] == one["num_columns"] > one["inner"]:
        return False
    place = PRODUCTS[row["op"]]
    left, right = operands(row["shapes"], row["dtypes"], row["strides"])[place : place + 2]
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)) or left.strides is None or right.strides is None:
        return True
    return left.strides[-2:] == right.strides[-2:][::-1]


def _is_linear(row: dict[str, Any]) -> bool:
    """Return whether a kernel only copies or adds matrices, or multiplies one by a number."""
    if row["class"] in _MOVES:
        return True
    given = operands(row["shapes"], row["dtypes"])
    matrices = [one for one in given if isinstance(one, Tensor) and prod(one.shape) > 1]
    return row["op"] in _SUMS or (row["op"] in _SCALINGS and len(matrices) == 1)
