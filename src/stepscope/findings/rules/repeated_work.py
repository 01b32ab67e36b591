"""Rules about work that is done again: on rows that are copies of one another, in passes through the same forward."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import polars as pl

from stepscope.analysis.costs.attainable_rates import LEAST_KERNEL_NS
from stepscope.analysis.costs.op_calls import Tensor
from stepscope.analysis.costs.op_costs import operands
from stepscope.analysis.structure.backward_passes import Pass, backward_passes
from stepscope.analysis.structure.repeated_passes import Repeats, repeated_passes
from stepscope.analysis.structure.work import PRODUCTS
from stepscope.analysis.time.what_if import Saving
from stepscope.errors import if_available
from stepscope.findings.op_lines import line_text, logged_of
from stepscope.findings.rule import (
    LENGTH,
    Case,
    Change,
    Evidence,
    Finding,
    Unavailable,
    one_finding,
    rule,
    stretches,
)
from stepscope.findings.rules.cpu import least_ns
from stepscope.findings.rules.matrix_products import products_of
from stepscope.formatting import plural

_COPIES = ("aten::copy_", "aten::clone", "aten::contiguous", "aten::_to_copy")
_RANDOM = "dropout"
_MOST_LINES = 3  # in a sentence
_SPANS = {"start_ns": pl.Int64, "end_ns": pl.Int64}


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


@rule
def repeated_backward(case: Case) -> list[Finding]:
    """Do several backward passes run through the same forward, where one call could give all gradients?"""
    host, work = case.linked.host, case.work
    if not (host["sequence"] >= 0).any():
        raise Unavailable("The trace has no numbers of autograd's nodes. Record with torch.profiler.")
    passes = backward_passes(host, work["step"].drop_nulls().unique())
    found = repeated_passes(passes, host)
    return [*_from_one_output(case, found.same), *_of_a_sum(case, found.summed), *_one_by_one(case, found.rows)]


def _from_one_output(case: Case, same: Repeats) -> list[Finding]:
    saving_ns, work = _without(case, same)
    if not case.is_worth(saving_ns):
        return []
    num, needed = len(same.passes) / case.num_steps, same.num_needed / case.num_steps
    return one_finding(
        sentence=f"{plural(num, 'backward pass', 'backward passes')} per step begin at only "
        f"{plural(needed, 'output')} with the same gradient, ones: what they do again, with its own backward, takes "
        f"{case.cost_text(work)}.{_called(case, same.passes)}",
        fix="u_x, u_y = torch.autograd.grad(u, (x, y), torch.ones_like(u), create_graph=True)  # one call for all "
        "inputs of an output",
        saving_ns=saving_ns,
        derived="the step without the nodes that an earlier pass from the same output ran, and without the backward "
        "of what they made",
        confidence="high",
        falsified_by="make one call for each output; the finding is wrong if the step is as long",
        places=case.places(work["event"]),
        evidence=(Evidence("nodes that run again", _nodes(case, same)),),
    )


def _of_a_sum(case: Case, summed: Repeats) -> list[Finding]:
    saving_ns, work = _without(case, summed)
    if not case.is_worth(saving_ns):
        return []
    num = len(summed.passes) / case.num_steps
    return one_finding(
        sentence=f"{plural(num, 'backward pass', 'backward passes')} per step go through the same forward and add to "
        f"the same gradients: what they do again takes {case.cost_text(work)}.{_called(case, summed.passes)}",
        fix="(loss_a + loss_b).backward()  # one pass, instead of one for each loss with retain_graph=True",
        saving_ns=saving_ns,
        derived="the step without the nodes that an earlier pass ran: the sum of the losses has the sum of their "
        "gradients",
        confidence="high",
        falsified_by="look for code that reads .grad between these passes without an op of torch",
        places=case.places(work["event"]),
        evidence=(Evidence("nodes that run again", _nodes(case, summed)),),
    )


def _one_by_one(case: Case, groups: list[list[Pass]]) -> list[Finding]:
    """Return the finding for passes that begin at one output each and do the same."""
    later = [one for group in groups for one in group[1:]]
    if not later:
        return []
    rows = [row for one in later for execution in one.executions for row in execution.rows]
    work = case.work.filter(pl.col("call").is_in(rows))
    spans = pl.DataFrame(
        [(one.executions[0].start_ns, one.executions[-1].end_ns) for one in later], schema=_SPANS, orient="row"
    )
    left = 0.0
    if case.is_on_cpu:  # what the work takes at least is done there
        whole_ns = float(spans.select(LENGTH).sum().item()) * case.clean_share
        left = min(1.0, float(work.select(least_ns(case).fill_null(0.0)).sum().item()) / whole_ns)
    change = Change(host=stretches(spans, left))
    saving_ns = case.saving_ns(change)
    if not case.is_worth(saving_ns):
        return []
    passes = dict.fromkeys(one for group in groups for one in group)
    return one_finding(
        sentence=f"{plural(len(passes) / case.num_steps, 'backward pass', 'backward passes')} per step run the same "
        f"nodes, each for one output or one sample: one batched call could compute them all."
        f"{_called(case, passes)}",
        fix="torch.autograd.grad(y, x, rows, is_grads_batched=True)  # rows: one gradient of y for each pass; or "
        "torch.func.jacrev, or vmap(grad(loss)) for a gradient per sample",
        saving_ns=saving_ns,
        upper_bound=True,
        rows=("cpu_products", "cpu_ops", "cpu_python") if case.is_on_cpu else (),
        derived="the time of these passes but the first, beyond what their FLOPs and bytes take"
        if case.is_on_cpu
        else "the step without the host time of these passes but the first; their work on the GPU remains",
        confidence="medium",
        falsified_by="make one batched call; the finding is wrong if the step is as long",
        places=case.places(work["event"]),
        evidence=(Evidence("passes", [{"num_passes": len(group), "num_nodes": len(group[0].executions)}
                                      for group in groups][:8]),),
    )  # fmt: skip


def _without(case: Case, repeats: Repeats) -> tuple[Saving, pl.DataFrame]:
    """Return what a step saves without what passes do again, and that work."""
    rows = [row for one in repeats.gone for row in (*one.rows, *one.accumulations)]
    work = case.work.filter(pl.col("call").is_in(rows))
    change = case.without(work["event"])
    if not case.is_on_cpu:  # nodes without work on the GPU take time of the host
        spans = [pl.DataFrame([(one.start_ns, one.end_ns) for one in repeats.gone], schema=_SPANS, orient="row")]
        spans += [change.host.select("start_ns", "end_ns")] if change.host is not None else []
        change = replace(change, host=stretches(pl.concat(spans)))
    return case.saving_ns(change), work


def _called(case: Case, passes: Iterable[Pass]) -> str:
    """Return the lines that call passes as a sentence, if a recording has them: those of the ops right before."""
    ops = if_available(lambda: logged_of(case))
    if ops is None:
        return ""
    last = [one.before[-1] for one in passes if one.before]
    counts = ops.filter(pl.col("row").is_in(last))["place"].drop_nulls().value_counts(sort=True, name="num")
    lines = [line_text(place) for place in counts.sort("num", "place", descending=[True, False])["place"]]
    more = f" and {plural(len(lines) - _MOST_LINES, 'other line')}" if len(lines) > _MOST_LINES else ""
    return f" They are called at {', '.join(lines[:_MOST_LINES])}{more}." if lines else ""


def _nodes(case: Case, repeats: Repeats) -> list[dict[str, Any]]:
    names = Counter(one.name for one in repeats.gone)
    return [{"node": name, "num": num / case.num_steps} for name, num in names.most_common(8)]
