"""Rules about work that is spread unevenly: experts, and scatters with repeated indices."""

from collections.abc import Sequence
from typing import Any

import polars as pl

from stepscope.analysis.costs.attainable_rates import scatter_ns, traffic_ns
from stepscope.analysis.costs.op_calls import Tensor
from stepscope.analysis.costs.op_costs import COLUMNS, op_tensors, operands
from stepscope.analysis.kernels.product_loops import Looped, Padded, looped_experts, padded_experts, routers
from stepscope.findings.rule import Case, Change, Evidence, Finding, on_gpu, one_finding
from stepscope.formatting import plural, size, whole_percent

_UNEVEN = 4.0  # the busiest expert's tokens over the mean; a balanced router stays below 2
_LEAST_OF_STEP = 0.1  # of GPU time
_FILLED_SHARE = 0.6  # usual capacity factors are 1 to 1.5, so a balanced load fills more than this
_DROPPED_SHARE = 0.05
_BALANCE = "loss = loss + 0.01 * num_experts * (share_of_tokens * mean_router_probability).sum()"


@on_gpu
def expert_imbalance(case: Case) -> list[Finding]:
    """Are experts loaded so unevenly that padding is computed or tokens are dropped?

    On one GPU, experts called one after the other take the same total time however tokens are spread, so a very
    uneven load is reported without a saving. Empty slots cost time: they are computed like full ones.
    """
    case.with_shapes()
    known = routers(case.work)
    padded = padded_experts(case.work, known)
    return [*_padding(case, padded), *_dropped(case, padded), *_uneven(case, looped_experts(case.work, known))]


def _padding(case: Case, padded: Sequence[Padded]) -> list[Finding]:
    empty = [one for one in padded if one.filled_share < _FILLED_SHARE]
    durations: dict[int, float] = {}
    for one in empty:
        size = (one.router.num_experts, one.capacity)
        roots = case.work.filter(pl.col("call").is_in(one.calls))["root"].drop_nulls().unique()
        is_theirs = pl.col("root").is_in(roots.implode()) | pl.Series(_is_over(case.work["shapes"], size))
        parts = case.work.filter(is_theirs, pl.col("kind") == "kernel").select("event", "duration_ns")
        durations |= {event: ns * one.filled_share for event, ns in parts.iter_rows()}
    saving_ns = case.saving_ns(Change(duration_ns=durations))
    if not case.is_worth(saving_ns):
        return []
    worst = min(empty, key=lambda one: one.filled_share)
    router = worst.router
    places = router.num_experts * worst.capacity
    rows = [
        {"num_experts": one.router.num_experts, "capacity": one.capacity, "num_tokens": one.router.num_tokens,
         "num_chosen": one.router.num_chosen, "filled_share": one.filled_share, "num_calls": len(one.calls)}
        for one in empty[:8]
    ]  # fmt: skip
    return one_finding(
        sentence=f"At least {whole_percent(1 - worst.filled_share)} of what the experts compute is padding: "
        f"{router.num_experts} experts have {worst.capacity:,} slots each, {places:,} in total, but "
        f"{router.num_tokens:,} tokens go to {plural(router.num_chosen, 'expert')} each. This affects "
        f"{plural(len(worst.calls) / case.num_steps, 'matrix product')} per step.",
        fix=f"{_BALANCE}  # and a capacity factor of 1.25, or grouped products: torch._grouped_mm",
        saving_ns=saving_ns,
        upper_bound=True,
        derived="the step replayed with all work on these slots, backward included, at "
        f"{whole_percent(worst.filled_share)} of its time",
        confidence="medium",
        falsified_by="balance the router; the finding is wrong if it needs as many slots",
        places=case.places(durations),
        evidence=(Evidence("experts with slots", rows),),
    )


def _dropped(case: Case, padded: Sequence[Padded]) -> list[Finding]:
    dropping = [one for one in padded if one.filled_share > 1 / (1 - _DROPPED_SHARE)]
    if not dropping:
        return []
    worst = max(dropping, key=lambda one: one.filled_share)
    router = worst.router
    share = 1 - 1 / worst.filled_share
    given = router.num_tokens * router.num_chosen
    enough = -(-given * 5 // (4 * router.num_experts))
    return one_finding(
        sentence=f"At least {whole_percent(share)} of expert assignments are dropped: {router.num_tokens:,} tokens "
        f"need {given:,} slots, and {router.num_experts} experts have only {worst.capacity:,} each. An uneven load "
        "drops more.",
        fix=f"capacity = ceil(1.25 * {given} / {router.num_experts})  # {enough:,}",
        derived="no time is saved; tokens that no expert processes cost quality",
        confidence="medium",
        falsified_by="look for a second matrix product; the finding is wrong if one processes the remaining tokens",
        places=case.places(case.work.filter(pl.col("call").is_in(worst.calls))["event"]),
        evidence=(Evidence("experts", [{"capacity": worst.capacity, "num_experts": router.num_experts,
                                        "num_tokens": router.num_tokens, "num_chosen": router.num_chosen}]),),
    )  # fmt: skip


def _uneven(case: Case, looped: Sequence[Looped]) -> list[Finding]:
    uneven = [one for one in looped if one.imbalance >= _UNEVEN]
    calls = [call for one in uneven for call in one.calls]
    roots = case.work.filter(pl.col("call").is_in(calls))["root"].drop_nulls().unique()
    work = case.work.filter(pl.col("root").is_in(roots.implode()))
    spent_ns = case.total_ns(work)
    if not uneven or spent_ns < _LEAST_OF_STEP * case.step.device_ns:
        return []
    worst = max(uneven, key=lambda one: one.imbalance)
    layer = max(worst.loads, key=lambda loads: max(loads) / sum(loads))
    rows = [
        {"layer": place, "loads": sorted(loads, reverse=True)[:16], "num_called": len(loads)}
        for place, loads in enumerate(worst.loads[:8])
    ]
    return one_finding(
        sentence=f"The busiest of {worst.num_experts} experts gets {max(layer):,} of {sum(layer):,} tokens; the "
        f"median over {plural(len(worst.loads), 'layer')} is {worst.imbalance:.1f} times an equal share. The "
        f"experts' matrix products take {case.cost_text(spent_ns)}.",
        fix=_BALANCE,
        derived="no saving on one GPU, where the products take the same total time; with experts on several GPUs, "
        "all wait for the busiest, and with a fixed capacity its tokens are dropped",
        confidence="medium",
        falsified_by="look at the products; the finding is wrong if they are not experts and only share a weight "
        "shape",
        places=case.places(work["event"]),
        evidence=(Evidence("tokens by expert", rows),),
    )


def _is_over(texts: pl.Series, size: tuple[int, int]) -> list[bool]:
    """Return whether each call's first tensor has the shape (experts, slots, …) or (experts × slots, …)."""
    known: dict[str | None, bool] = {None: False}
    for text in texts.unique().drop_nulls():
        first = next((one for one in operands(text, None) if isinstance(one, Tensor) and one.shape), None)
        known[text] = first is not None and (first.shape[:2] == size or first.shape[0] == size[0] * size[1])
    return [known[text] for text in texts]


# Positions of the operand with the values to add, and of the operand they are added to. Embedding's backward creates
# the latter itself, so the trace does not show how many rows it has.
_SCATTERS: dict[str, tuple[int, int | None]] = {
    "aten::_index_put_impl_": (2, 0), "aten::index_put_": (2, 0), "aten::index_put": (2, 0),
    "aten::_unsafe_index_put": (2, 0), "aten::embedding_dense_backward": (0, None), "aten::index_add_": (3, 0),
    "aten::index_add": (3, 0), "aten::scatter_add_": (3, 0), "aten::scatter_add": (3, 0),
    "aten::scatter_reduce_": (3, 0), "aten::scatter_reduce": (3, 0),
    "aten::_embedding_bag_dense_backward": (0, None), "aten::_unsafe_masked_index_put_accumulate": (3, 0),
}  # fmt: skip
# A scatter slower than this many times a good one is serialized. For advanced indexing, the estimate is more exact.
_FAR, _FAR_OF_INDEXING = 4.0, 2.0
_FEW_ROWS = 64  # a one-hot product adds to a table this small in one pass over the values
_LOOKUPS = ("aten::gather", "aten::index_select", "aten::embedding")
_FIXES = {
    "index_put": "F.embedding(index, x) instead of x[index]",
    "embedding": "F.one_hot(index, num_rows).to(weight.dtype) @ weight for a small table; else torch.compile(model)",
    "index_add": "torch.use_deterministic_algorithms(False) if it is on; else a segment reduction over sorted rows",
    "scatter": "torch.use_deterministic_algorithms(False) if it is on; else a segment reduction over sorted rows",
}


@on_gpu
def serialized_scatter(case: Case) -> list[Finding]:
    """Does a scatter, such as the backward of advanced indexing, take far longer than its bytes explain?"""
    case.with_shapes()
    # A call is the outermost of these ops: index_put_ calls its implementation, which sorts first.
    work = case.work.with_columns(pl.col("op").cast(pl.String), pl.col("root_op").cast(pl.String))
    calls = work.filter(pl.col("op").is_in(list(_SCATTERS)), pl.col("kind") == "kernel")
    num_rows = _table_rows(work)
    durations: dict[int, float] = {}
    gone: list[int] = []
    rows: list[dict[str, Any]] = []
    for _, part in calls.group_by("call", maintain_order=True):
        first = part.sort("duration_ns").row(-1, named=True)
        sizes = _sizes(first)
        now_ns = int(part["duration_ns"].sum())
        if sizes is None:
            continue
        added, moved, num_indices = sizes
        good_ns = scatter_ns(case.device, moved, num_indices)
        is_few = num_rows.get(added, _FEW_ROWS + 1) <= _FEW_ROWS and "embedding" in first["op"]
        if is_few:
            good_ns = traffic_ns(case.device, added)
        if now_ns < (_FAR_OF_INDEXING if is_few or "index_put" in first["op"] else _FAR) * good_ns:
            continue
        durations[first["event"]] = good_ns
        gone += [event for event in part["event"] if event != first["event"]]
        gone += _casts_beside(work, first) if is_few else []
        rows.append({"op": first["op"], "called": first["root_op"], "shapes": first["shapes"], "bytes": added,
                     "kernel": str(first["name"]), "duration_ns": now_ns, "phase": first["phase"]})  # fmt: skip
    if not rows:
        return []
    saving_ns = case.saving_ns(case.without(gone, durations))
    if not case.is_worth(saving_ns):
        return []
    keys = ("op", "called", "shapes", "kernel", "phase")
    table = case.grouped(pl.DataFrame(rows), "num_calls", *keys, more=[pl.col("bytes").first()])
    worst = table.row(0, named=True)
    total_ns, total_bytes = float(table["duration_ns"].sum()), sum(row["bytes"] for row in rows) / case.num_steps
    share = total_bytes / total_ns * 1e9 / case.device.bandwidth_bytes_per_s
    fix = next((text for name, text in _FIXES.items() if name in worst["op"]), _FIXES["scatter"])
    called = f" for {worst['called']}" if worst["called"] != worst["op"] else ""
    return one_finding(
        sentence=f"Adding {size(total_bytes)} in {plural(len(rows) / case.num_steps, 'scatter')} per step "
        f"({worst['op']}{called}, in {_short(worst['kernel'])}) takes {case.cost_text(total_ns)}, at {share:.1%} of "
        "the device's bandwidth, because repeated indices are processed one after another.",
        fix=fix,
        saving_ns=saving_ns,
        derived="the step replayed with each done like embedding's backward: sort the indices, read the values once, "
        "read and write the target rows, at 40 % of the device's bandwidth; into a table of a few rows, by one pass "
        "over the values, as a one-hot product does, without casts of what it gives and gets",
        confidence="high" if share < 0.05 else "medium",
        falsified_by="make all indices different; the finding is wrong if the scatter is not faster",
        places=case.places([*durations, *gone]),
        evidence=(Evidence("scatters far below the bandwidth", table.head(8).to_dicts()),),
    )


def _casts_beside(work: pl.DataFrame, scatter: dict[str, Any]) -> list[int]:
    """Return the casts of what a small table gave and of its gradient: under autocast, a product needs neither.

    Both have the shape of what is added: one comes before the scatter, the other after the lookup.
    """
    added = operands(scatter["shapes"], scatter["dtypes"])[0]
    if not isinstance(added, Tensor):
        return []
    now = work.filter(pl.col("step") == scatter["step"], pl.col("kind") == "kernel").sort("start_ns")
    copies = now.filter(pl.col("op") == "aten::copy_").select("event", "start_ns", "shapes", "dtypes")
    casts = [(event, ns) for event, ns, *texts in copies.iter_rows() if _is_cast_of(added.shape, *texts)]
    lookups = now.filter(pl.col("op").is_in(list(_LOOKUPS)), pl.col("phase").cast(pl.String) == "forward")
    texts = pl.col(COLUMNS[1:]).cast(pl.String)
    looked_up = (
        ns
        for ns, op, *of in lookups.select("start_ns", "op", texts).iter_rows()
        if (tensors := op_tensors(op, *of)) and tensors[1] and tensors[1][0].shape == added.shape
    )
    first_ns = next(looked_up, scatter["start_ns"])
    before = [event for event, ns in casts if ns < scatter["start_ns"]]
    after = [event for event, ns in casts if first_ns < ns < scatter["start_ns"]]
    return sorted({*before[-1:], *after[:1]})


def _is_cast_of(shape: tuple[int, ...], shapes: str | None, dtypes: str | None) -> bool:
    tensors = [one for one in operands(shapes, dtypes)[:2] if isinstance(one, Tensor)]
    return [one.shape for one in tensors] == [shape, shape] and tensors[0].dtype != tensors[1].dtype


def _table_rows(work: pl.DataFrame) -> dict[int, int]:
    """Return the rows of the tables that lookups read, by the bytes of what they return."""
    found: dict[int, int] = {}
    looked_up = work.filter(pl.col("op").is_in(list(_LOOKUPS)))
    for op, *texts in set(looked_up.select("op", pl.col(COLUMNS[1:]).cast(pl.String)).iter_rows()):
        given, tensors = operands(texts[0], texts[1]), op_tensors(op, *texts)
        if tensors and tensors[1] and isinstance(given[0], Tensor) and len(given[0].shape) == 2:
            num_bytes = tensors[1][0].num_bytes or 0
            found[num_bytes] = max(given[0].shape[0], found.get(num_bytes, 0))
    return found


def _sizes(row: dict[str, Any]) -> tuple[int, int, int] | None:
    """Return the bytes a scatter adds, the least bytes it moves, and its number of indices."""
    given = operands(row["shapes"], row["dtypes"])
    place, target_place = _SCATTERS[row["op"]]
    values = given[place] if place < len(given) else None
    if not isinstance(values, Tensor) or not values.num_bytes or not values.shape:
        return None
    target = given[target_place] if target_place is not None and target_place < len(given) else None
    added = values.num_bytes
    if isinstance(target, Tensor) and target.num_bytes and len(target.shape) > 0:
        row_elements = max(1, target.num_elements // max(1, target.shape[0]))
        return added, added + 2 * min(added, target.num_bytes), max(1, values.num_elements // row_elements)
    return added, 3 * added, max(1, values.num_elements // max(1, values.shape[-1]))


def _short(kernel: str) -> str:
    name = kernel.removeprefix("void ").replace("(anonymous namespace)::", "").split("<")[0].split("(")[0].strip()
    return name.rsplit("::", 1)[-1] or kernel[:40]
