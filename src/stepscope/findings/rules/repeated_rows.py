"""Rules about rows that are copies of one another."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import polars as pl

from stepscope.analysis.costs.attainable_rates import LEAST_KERNEL_NS
from stepscope.analysis.costs.op_calls import Tensor
from stepscope.analysis.costs.op_costs import operands
from stepscope.analysis.structure.work import PRODUCTS
from stepscope.findings.rule import Case, Evidence, Finding, one_finding, rule
from stepscope.findings.rules.matrix_products import products_of
from stepscope.formatting import plural

_COPIES = ("aten::copy_", "aten::clone", "aten::contiguous", "aten::_to_copy")
_RANDOM = "dropout"


@dataclass(frozen=True)
class _Expanded:
    """A tensor whose rows repeat, from an op on an expanded tensor on."""

    shape: tuple[int, ...]
    num_repeats: int
    root: int


@dataclass(frozen=True)
class _Repeated:
    """A product of rows that repeat."""

    num_repeats: int
    product: dict[str, Any]
    roots: tuple[int, ...]
    sizes: frozenset[int]  # elements of tensors whose rows repeat


@rule
def repeated_rows(case: Case) -> list[Finding]:
    """Do products multiply rows that are copies of one another, because a tensor was expanded before them?"""
    case.with_shapes()
    found = list(_repeated(case))
    sized = case.sized.select("event", "root", "class", "shape", "duration_ns")
    durations: dict[int, float] = {}
    for one in found:
        work = sized.filter(pl.col("root").is_in(list(one.roots)))
        for event, shape, ns in work.select("event", "shape", "duration_ns").iter_rows():
            if prod(shape or ()) in one.sizes:
                durations[event] = min(ns, max(LEAST_KERNEL_NS, ns / one.num_repeats))
    saving_ns = case.saving_ns(case.without([], durations))
    if not case.is_worth(saving_ns):
        return []
    rows = case.work.filter(pl.col("event").is_in(list(durations))).with_columns(
        pl.col("op", "shapes", "phase", "module").cast(pl.String)
    )
    most = max(found, key=lambda one: one.product["flops"])
    product = most.product
    keys = ("op", "shapes", "phase", "module")
    return one_finding(
        sentence=f"{plural(len(found) / case.num_steps, 'product')} of rows that are copies of one another per step: "
        f"of {product['num_rows']:,} × {product['inner']:,}, only "
        f"{product['num_rows'] // most.num_repeats:,} rows differ, because a tensor was expanded before. With their "
        f"backward, and the elementwise work before them, they take {case.cost_text(rows)}.",
        fix="expand after the product, or let its result broadcast: self.ada(cond.unsqueeze(1)), with "
        f"{most.num_repeats:,} times fewer rows, instead of self.ada(cond.expand_as(x))",
        saving_ns=saving_ns,
        derived="the step replayed with these products, and the elementwise work before them, on rows that differ",
        confidence="medium",
        falsified_by="expand after the product; the finding is wrong if it does not take the expanded tensor",
        places=case.places(durations),
        evidence=(Evidence("work on repeated rows", case.grouped(rows, "num_kernels", *keys).head(8).to_dicts()),),
    )


def _repeated(case: Case) -> Iterator[_Repeated]:
    """Return forward products whose rows come from an expanded tensor, with only ops on each row in between."""
    products = {row["event"]: row for row in products_of(case).iter_rows(named=True)}
    columns = ("event", "step", "root", "op", "shapes", "dtypes", "strides")
    forward = case.sized.filter(pl.col("phase").cast(pl.String) == "forward").sort("start_ns", "event")
    last: _Expanded | None = None
    for row in forward.select(columns).with_columns(pl.col(pl.Categorical).cast(pl.String)).iter_rows(named=True):
        one = products.get(row["event"])
        if one is not None:
            num_elements = one["num_rows"] * one["inner"]
            if last is not None and one["batch"] == 1 and (num_elements, one["inner"]) == (
                prod(last.shape), last.shape[-1]
            ):  # fmt: skip
                sizes = frozenset([num_elements, one["num_rows"] * one["num_columns"]])
                yield _Repeated(last.num_repeats, one, (last.root, one["root"]), sizes)
                last = None
            continue
        if row["op"] in PRODUCTS:  # a copy of its summand, or a fill
            continue
        large = _inputs(row)
        if expanded := _expanded(row, large):
            last = expanded
        elif last is not None and any(each.num_elements == prod(last.shape) for each in large):
            last = None if len(large) > 1 or _RANDOM in str(row["op"]) else last


def _inputs(row: dict[str, Any]) -> list[Tensor]:
    """Return the tensors with more than one element that an op reads."""
    given = operands(row["shapes"], row["dtypes"], row["strides"])
    read = given[1:] if row["op"] in _COPIES and len(given) > 2 else given
    return [one for one in read if isinstance(one, Tensor) and one.num_elements > 1]


def _expanded(row: dict[str, Any], large: list[Tensor]) -> _Expanded | None:
    """Return what an op makes of an expanded tensor, if that is all it reads."""
    if len(large) != 1 or row["root"] is None:
        return None
    strides, shape = large[0].strides, large[0].shape
    if strides is None or not strides or strides[-1] == 0:
        return None
    num_repeats = prod(size for size, step in zip(shape, strides) if step == 0)
    return _Expanded(shape, num_repeats, row["root"]) if num_repeats > 1 else None
