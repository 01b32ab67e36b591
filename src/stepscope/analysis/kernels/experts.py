"""Experts of a mixture, from their matrix products: tokens per expert, and padding."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

import polars as pl

from stepscope.analysis.costs.op_calls import Tensor
from stepscope.analysis.costs.op_costs import argument_values, operands
from stepscope.analysis.structure.tensor_sizes import product

_CHOOSING = {"aten::topk": None, "aten::argmax": 1, "aten::max": 1}  # experts per token; None if an argument gives it
_MOST_EXPERTS = 1024


@dataclass(frozen=True)
class Router:
    num_tokens: int
    num_experts: int
    num_chosen: int  # experts per token


@dataclass(frozen=True)
class Looped:
    """Experts called one after the other, each with its own tokens, in one or several similar layers."""

    loads: tuple[tuple[int, ...], ...]  # tokens of each call by layer; an expert without tokens may not be called
    calls: tuple[int, ...]  # op rows of all layers

    @property
    def num_experts(self) -> int:
        return max(len(layer) for layer in self.loads)

    @property
    def imbalance(self) -> float:
        """The busiest expert's tokens over the mean; the median over layers."""
        shares = sorted(max(layer) * self.num_experts / sum(layer) for layer in self.loads)
        return shares[len(shares) // 2]


@dataclass(frozen=True)
class Padded:
    """Experts in one batched product with equal capacity."""

    router: Router
    capacity: int  # slots per expert
    calls: tuple[int, ...]

    @property
    def filled_share(self) -> float:
        """The largest share of slots that tokens can fill; above 1, tokens are dropped."""
        router = self.router
        return router.num_tokens * router.num_chosen / (router.num_experts * self.capacity)


def routers(work: pl.DataFrame) -> list[Router]:
    """Return the distinct routers in GPU work (`work.py`)."""
    found = []
    rows = work.filter(pl.col("op").cast(pl.String).is_in(list(_CHOOSING)), pl.col("phase").ne_missing("backward"))
    for op, shapes, inputs in rows.select("op", "shapes", "inputs").unique().iter_rows():
        given = [one for one in operands(shapes, None)[:1] if isinstance(one, Tensor)]
        if not given or len(given[0].shape) < 2 or not 2 <= given[0].shape[-1] <= _MOST_EXPERTS:
            continue
        chosen, values = _CHOOSING[str(op)], argument_values(inputs) or ()
        if chosen is None:
            chosen = int(values[1]) if len(values) > 1 and values[1].isdigit() else None
        shape = given[0].shape
        if chosen and chosen < shape[-1] < prod(shape[:-1]):
            found.append(Router(prod(shape[:-1]), shape[-1], chosen))
    return list(dict.fromkeys(found))


def looped_experts(work: pl.DataFrame, known: list[Router]) -> list[Looped]:
    """Return products with the same weight shape that split a layer's tokens unevenly, in one step's forward.

    They are experts if their tokens add up to the same number in every layer, or to the router's number.
    """
    groups: dict[tuple[object, str, tuple[int, int]], list[tuple[int, int]]] = {}
    for step, op, call, (_, rows, inner, columns) in _products(work, ("aten::mm", "aten::addmm")):
        if rows:
            groups.setdefault((step, op, (inner, columns)), []).append((rows, call))
    given = {router.num_tokens * router.num_chosen for router in known}
    found: dict[tuple[str, tuple[int, int]], Looped] = {}
    for (_, op, weight), calls in groups.items():
        loads = [rows for rows, _ in calls]
        layers = _layers(loads, given) if len(set(loads)) > 2 else None
        if layers:
            before = found.get((op, weight), Looped((), ()))
            numbers = (call for _, call in calls)
            found[op, weight] = Looped((*before.loads, *layers), (*before.calls, *numbers))
    return list(found.values())


def padded_experts(work: pl.DataFrame, known: list[Router]) -> list[Padded]:
    """Return batched products over a router's experts by capacity, with the fullest router that fits."""
    by_size: dict[tuple[int, int], list[int]] = {}
    for _, _, call, (batch, rows, _, _) in _products(work, ("aten::bmm", "aten::baddbmm")):
        by_size.setdefault((batch, rows), []).append(call)
    found = []
    for (num_experts, capacity), calls in by_size.items():
        fitting = [router for router in known if router.num_experts == num_experts]
        if fitting and capacity:
            most = max(fitting, key=lambda router: router.num_tokens * router.num_chosen)
            found.append(Padded(most, capacity, tuple(calls)))
    return found


def _products(
    work: pl.DataFrame, ops: Collection[str]
) -> Iterator[tuple[object, str, int, tuple[int, int, int, int]]]:
    """Return matrix products outside the backward in order: step, op, call row, sizes as from `product`."""
    is_product = pl.col("op").cast(pl.String).is_in(list(ops)) & pl.col("phase").ne_missing("backward")
    rows = work.filter(is_product, pl.col("call").is_not_null()).unique("call", keep="first", maintain_order=True)
    for step, op, call, shapes in rows.sort("call").select("step", "op", "call", "shapes").iter_rows():
        sizes = product(op, operands(shapes, None))
        if sizes is not None:
            yield step, str(op), call, sizes


def _layers(loads: list[int], given: set[int]) -> list[tuple[int, ...]] | None:
    """Return loads split into runs of equal sum with two or more calls each; None if impossible."""
    ends = {total: place for place, total in enumerate(accumulate(loads), 1)}
    whole = sum(loads)
    for part in sorted(ends):
        num = whole // part
        if whole % part or (num < 2 and part not in given):
            continue
        places = [ends.get(part * i) for i in range(1, num + 1)]
        if None in places:
            continue
        borders = [0, *(place for place in places if place is not None)]
        layers = [tuple(loads[a:b]) for a, b in pairwise(borders)]
        if all(len(layer) > 1 for layer in layers):
            return layers
    return None
