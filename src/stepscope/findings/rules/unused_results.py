"""Rules about results that are never used: forwards without a backward, gradients without an optimizer, rows that no
step looks up."""

from collections import Counter
from typing import Any

import polars as pl

from stepscope.analysis.costs.op_calls import Tensor
from stepscope.analysis.costs.op_costs import operands
from stepscope.analysis.structure.modules import MODULE_PREFIX
from stepscope.analysis.structure.op_log import TRAINING
from stepscope.errors import if_available
from stepscope.findings.op_lines import followed_of
from stepscope.findings.rule import Case, Evidence, Finding, Unavailable, one_finding, rule
from stepscope.findings.rules.memory import is_worth_bytes
from stepscope.formatting import count, plural, size, whole_percent

_WEIGHT_SHARE = 0.5  # of the products of a backward pass: those for weights; the others are for inputs
_PRODUCTS = ["gemm", "convolution"]
_MOST_MODULES = 100


@rule
def unused_gradients(case: Case) -> list[Finding]:
    """Are gradients computed for parameters that no optimizer has?"""
    facts = case.recording.facts.get("parameters") or {}
    if "without_optimizer" not in facts:
        raise Unavailable("The recording does not say which parameters no optimizer has. Record it again.")
    unused = sorted(facts["without_optimizer"], key=lambda one: -one["num_parameters"])[:_MOST_MODULES]
    if not unused:
        return []
    table = _named(case.work)
    work = table.with_columns(pl.col("step").alias("of"))
    if case.is_on_cpu:  # each call of the model, of which a step may have several
        calls = _outermost_calls(case).select("start_ns", pl.col("call").alias("of").cast(pl.Int64))
        work = table.sort("start_ns").join_asof(calls, on="start_ns", check_sortedness=False)
    is_theirs = pl.any_horizontal(_is_inside(one["module"]) for one in unused)
    trained = work.filter(pl.col("phase") == "forward", pl.col("module").is_not_null(), ~is_theirs)
    first_ns = trained.group_by("of").agg(pl.col("start_ns").min().alias("trained_ns"))
    followed = if_available(lambda: followed_of(case))
    durations: dict[int, float] = {}
    gone: list[int] = []
    rows = []
    for one in unused:
        inside = work.filter(_is_inside(one["module"]))
        forward, backward = (inside.filter(pl.col("phase") == phase) for phase in ("forward", "backward"))
        if backward.is_empty():
            continue
        # What runs before anything that is trained passes no gradient on.
        begins = forward.join(first_ns, on="of", how="left")
        is_first = not begins.is_empty() and bool((begins["start_ns"] < begins["trained_ns"].fill_null(2**62)).all())
        if is_first:
            gone += backward["event"].to_list()
        elif followed is not None:  # what each result leads to is known
            trains = followed.filter(pl.col("use") == TRAINING)["row"]
            useless = backward.filter(~pl.col("call").is_in(trains.implode()).fill_null(True))
            gone += useless["event"].to_list()
            is_first = useless.height == backward.height
        else:
            products = backward.filter(pl.col("class").is_in(_PRODUCTS)).select("event", "duration_ns")
            durations |= {event: ns * (1 - _WEIGHT_SHARE) for event, ns in products.iter_rows()}
        rows.append({**one, "is_first": is_first, "backward_ns": case.total_ns(backward)})
    saving_ns = case.saving_ns(case.without(gone, durations))
    if not rows or not case.is_worth(saving_ns):
        return []
    rows.sort(key=lambda row: -row["backward_ns"])
    names = ", ".join(row["module"] for row in rows[:3])
    total_ns = sum(row["backward_ns"] for row in rows)
    is_first = all(row["is_first"] for row in rows)
    return one_finding(
        sentence=f"No optimizer has the {count(sum(row['num_parameters'] for row in rows))} trainable parameters of "
        f"{names}, but each step computes their gradients: the backward pass there takes {case.cost_text(total_ns)}.",
        fix="with torch.no_grad():  # around its forward" if is_first else f"{names}.requires_grad_(False)",
        saving_ns=saving_ns,
        derived="the step without that backward pass"
        if is_first
        else "the step without what of that backward pass no update uses: each result was followed"
        if followed is not None
        else f"the step with {whole_percent(_WEIGHT_SHARE)} of that backward pass's products: gradients "
        "pass through it to what is trained",
        confidence="high" if is_first else "medium",
        falsified_by="look for code that reads these gradients or updates these parameters without a torch optimizer",
        evidence=(Evidence("modules without an optimizer", rows[:8]),),
    )


@rule
def forward_without_backward(case: Case) -> list[Finding]:
    """Does a module that is trained also run forward in the same step without a backward pass?"""
    calls = _outermost_calls(case)
    if calls.is_empty():
        raise Unavailable("The trace does not mark the calls of modules. Record it with `stepscope run`.")
    used = case.linked.host["forward"].drop_nulls().unique()
    ops = case.linked.host.filter(pl.col("kind") == "op").select("row", "start_ns", "thread").sort("start_ns")
    inside = ops.join_asof(calls, on="start_ns", check_sortedness=False).filter(
        pl.col("start_ns") < pl.col("call_end_ns"), pl.col("thread") == pl.col("call_thread")
    )
    is_used = pl.col("row").is_in(used.implode()).any().alias("is_used")
    by_call = inside.group_by("call", "module", "phase", "duration_ns").agg(is_used, pl.col("row"))
    again = by_call.filter(pl.col("phase") == "backward")["module"]  # recomputed
    trained = by_call.filter("is_used", ~pl.col("module").is_in(again.implode()))["module"].unique()
    idle = by_call.filter(~pl.col("is_used"), pl.col("module").is_in(trained.implode()))
    if case.is_on_cpu:  # the whole of each call, with its Python code
        cost_ns = saving_ns = case.total_ns(idle) * case.clean_share
    else:
        work = case.work.filter(pl.col("call").is_in(idle["row"].explode().implode()))
        cost_ns, saving_ns = case.total_ns(work), case.saving_ns(case.without(work["event"]))
    if not case.is_worth(saving_ns):
        return []
    counts = idle.group_by("module").agg((pl.len() / case.num_steps).alias("num_calls")).sort("module").to_dicts()
    names = ", ".join(row["module"] for row in counts[:3])
    return one_finding(
        sentence=f"{names} runs forward {plural(sum(row['num_calls'] for row in counts), 'time')} per step with no "
        f"backward pass, besides the forward that is trained: {case.cost_text(cost_ns)}.",
        fix="use the outputs of the first forward, such as out.detach() for a metric; or do it every N steps, under "
        "torch.no_grad()",
        saving_ns=saving_ns,
        rows=("cpu_products", "cpu_ops", "cpu_outside", "cpu_between", "cpu_python"),
        upper_bound=True,
        derived="the step without the ops of these calls; a forward that training needs, such as of an old policy, "
        "remains",
        confidence="medium",
        falsified_by="leave it out of a run; the finding is wrong if training needs its result",
        evidence=(Evidence("modules that run forward without a backward", counts[:8]),),
    )


@rule
def graph_without_backward(case: Case) -> list[Finding]:
    """Does a forward keep memory for a backward that never comes?"""
    memory, window = case.memory, case.allocations
    if not window.get("graphs") or not memory.saved:
        raise Unavailable("The recording does not say which modules made a graph. Record it again: `stepscope run`.")
    with_graph = {_root(one["module"]) for one in window["graphs"]}
    reached = {_root(one.module) for one in memory.saved if one.bytes}
    kept: Counter[str] = Counter()
    for one in window["allocations"]:
        is_alive = one["born"] is not None and one["born"] <= memory.peak_event
        is_alive = is_alive and (one["died"] is None or one["died"] > memory.peak_event)
        if is_alive and one["owner"] == "activation" and one["device"] == memory.device and one["module"]:
            kept[_root(one["module"])] += one["bytes"]
    lost = [(root, num) for root, num in kept.most_common() if root in with_graph and root not in reached]
    saving_bytes = sum(num for _, num in lost)
    if not is_worth_bytes(case, saving_bytes):
        return []
    rows = [{"module": root, "bytes": num} for root, num in lost]
    names = ", ".join(root for root, _ in lost[:3])
    return one_finding(
        sentence=f"The forward of {names} keeps {size(saving_bytes)} of the {size(memory.peak_bytes)} peak for a "
        "backward that never comes: no gradient flows back into it.",
        fix="with torch.no_grad():  # around its forward",
        saving_bytes=saving_bytes,
        derived="the results of its forward that are alive at the peak, and that no backward of the step can reach; "
        "its last output remains",
        upper_bound=True,
        falsified_by="put its forward under torch.no_grad(); the finding is wrong if the peak stays the same",
        evidence=(Evidence("modules whose graph no backward reaches", rows[:8]),),
    )


def _root(module: str | None) -> str:
    """Return the first part of a module's name, such as one of two models."""
    return (module or "").partition(".")[0]


def _named(work: pl.DataFrame) -> pl.DataFrame:
    return work.with_columns(
        pl.col("kind", "op", "class", "phase", "module", "shapes", "dtypes", "inputs").cast(pl.String)
    )


def _outermost_calls(case: Case) -> pl.DataFrame:
    """Return the calls of modules in the typical steps that are in no other call, in order."""
    labels = case.linked.host.filter(pl.col("name").cast(pl.String).str.starts_with(MODULE_PREFIX))
    calls = case.within(labels).sort("start_ns", "end_ns", descending=[False, True])
    ends = pl.col("end_ns").cum_max().shift(1).over("thread")
    return calls.filter((pl.col("start_ns") >= ends).fill_null(True)).select(
        "start_ns",
        "duration_ns",
        pl.col("thread").alias("call_thread"),
        pl.col("row").alias("call"),
        pl.col("name").cast(pl.String).str.strip_prefix(MODULE_PREFIX).alias("module"),
        pl.col("phase").cast(pl.String),
        pl.col("end_ns").alias("call_end_ns"),
    )


def _is_inside(module: str) -> pl.Expr:
    return (pl.col("module") == module) | pl.col("module").str.starts_with(f"{module}.")


_LEAST_UNTOUCHED = 0.5  # of a table's rows
_ROWS_ARGUMENT = {"aten::embedding_dense_backward": 2, "aten::_embedding_bag_dense_backward": 5}
_LOOKUPS = ["embedding_index", *_PRODUCTS]
"""Classes of work over a table that touch only the rows looked up, or need all of them."""


@rule
def untouched_rows(case: Case) -> list[Finding]:
    """Are all rows of a large table updated although a step looks up only a few of them?"""
    case.with_shapes()
    work = _named(case.work)
    tables = _tables(work)
    durations: dict[int, float] = {}
    rows: list[dict[str, Any]] = []
    for (num_rows, width), num_lookups in tables.items():
        size = f"[{num_rows}, {width}]"
        over = work.filter(pl.col("shapes").str.contains(size, literal=True))
        if over["class"].is_in(_PRODUCTS).any():
            continue  # the table is also multiplied, so every row has a gradient
        passes = over.filter(~pl.col("class").is_in(_LOOKUPS), pl.col("kind") == "kernel")
        untouched = 1 - num_lookups / num_rows
        for shapes, part in passes.group_by("shapes"):
            share = _share_of(str(shapes[0]), (num_rows, width)) * untouched
            events = part.select("event", "duration_ns").iter_rows()
            durations |= {event: durations.get(event, ns) - ns * share for event, ns in events}
        ops = sorted(passes["op"].unique().drop_nulls())
        sizes = {"num_rows": num_rows, "width": width, "num_lookups": num_lookups}
        rows.append({**sizes, "duration_ns": case.total_ns(passes), "ops": ", ".join(ops)})
    saving_ns = case.saving_ns(case.without((), durations))
    if not rows or not case.is_worth(saving_ns):
        return []
    rows.sort(key=lambda row: -row["duration_ns"])
    largest, total_ns = rows[0], sum(row["duration_ns"] for row in rows)
    return one_finding(
        sentence=f"A step looks up at most {largest['num_lookups']:,} of the {largest['num_rows']:,} rows of an "
        f"embedding table, but its gradient is dense: filling it and updating all rows takes "
        f"{case.cost_text(total_ns)}{'' if len(rows) == 1 else f', for {len(rows)} such tables'}.",
        fix="nn.Embedding(..., sparse=True), with torch.optim.SparseAdam for its weight  # its moments decay only in "
        "rows that are looked up",
        saving_ns=saving_ns,
        upper_bound=True,
        derived="the step with this work on the rows that are looked up; sorting them is not counted",
        confidence="medium",
        falsified_by="use sparse gradients; the finding is wrong if the optimizer takes as long",
        places=case.places(durations),
        evidence=(Evidence("tables", rows[:8]),),
    )


def _tables(work: pl.DataFrame) -> dict[tuple[int, int], int]:
    """Return the lookups per step, at most, of each table whose rows are mostly not looked up, by rows and width."""
    lookups: Counter[tuple[tuple[int, int], int]] = Counter()
    calls = work.filter(pl.col("op").is_in(list(_ROWS_ARGUMENT))).unique("call")
    for op, shapes, inputs, step in calls.select("op", "shapes", "inputs", "step").iter_rows():
        given = operands(shapes, None)
        values = [text.strip(' "[]') for text in (inputs or "").split(",")]
        num_rows = values[_ROWS_ARGUMENT[op] : _ROWS_ARGUMENT[op] + 1]
        tensors = [one for one in given[:2] if isinstance(one, Tensor) and one.shape]
        if len(tensors) == 2 and num_rows and num_rows[0].isdigit():
            lookups[(int(num_rows[0]), tensors[0].shape[-1]), step] += tensors[1].num_elements
    tables: dict[tuple[int, int], int] = {}
    for (table, _), number in lookups.items():
        tables[table] = max(number, tables.get(table, 0))
    return {table: number for table, number in tables.items() if number < (1 - _LEAST_UNTOUCHED) * table[0]}


def _share_of(shapes: str, table: tuple[int, int]) -> float:
    """Return the share of a table in the tensors that an op works on: in its first list, or all of it."""
    first = next(iter(operands(shapes, None)), None)
    if not isinstance(first, tuple):
        return 1.0
    return sum(one.num_elements for one in first if one.shape == table) / sum(one.num_elements for one in first)
