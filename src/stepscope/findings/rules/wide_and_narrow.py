"""Rules about tensors that are wider than training needs, and products that are narrower."""

from math import prod
from typing import Any

import polars as pl

from stepscope.analysis.costs.attainable_rates import LEAST_KERNEL_NS, gemm_ns
from stepscope.analysis.costs.op_calls import ITEM_BYTES, Tensor
from stepscope.analysis.costs.op_costs import COLUMNS, op_tensors, operands
from stepscope.findings.rule import Case, Change, Evidence, Finding, one_finding, rule
from stepscope.findings.rules.matrix_products import products_of
from stepscope.formatting import plural, size, whole_percent

_DOUBLE, _DOUBLES = "double", ("float64", "complex128")
_FLOAT32 = "torch.from_numpy(array).float(); torch.tensor(array, dtype=torch.float32)  # NumPy's default is float64"


@rule
def float64_work(case: Case) -> list[Finding]:
    """Does work run in float64, which training rarely needs?"""
    case.with_shapes(and_dtypes=True)
    is_double = pl.col("dtypes").cast(pl.String).str.contains(_DOUBLE).fill_null(False)
    wide = case.work.filter(is_double, pl.col("kind") == "kernel")
    texts = wide.select("event", "duration_ns", pl.col("op", *COLUMNS[1:]).cast(pl.String)).iter_rows()
    durations = {event: ns * _share_in_float32(*call) for event, ns, *call in texts}
    saving_ns = case.saving_ns(Change(duration_ns=durations))
    if not case.is_worth(saving_ns):
        return []
    keys = ("op", "phase", "module", "dtypes")
    table = case.grouped(wide.with_columns(pl.col(keys).cast(pl.String)), "num_kernels", *keys)
    # The first op that has another dtype too is where float64 comes in.
    mixed = wide.filter(pl.col("dtypes").cast(pl.String).str.contains("float|BFloat16|Half")).sort("start_ns")
    first = mixed["root_op"].cast(pl.String)[0] if mixed.height else None
    enters = f" It comes in at {first}." if first else ""
    return one_finding(
        sentence=f"{case.number_text(wide, 'kernel')} per step read or write float64 tensors. They take "
        f"{case.cost_text(wide)} and move up to twice the bytes of float32.{enters}",
        fix=_FLOAT32,
        saving_ns=saving_ns,
        derived="the step replayed with each of these kernels shortened by the bytes that float32 does not move",
        confidence="high",
        falsified_by="convert the tensors to float32; the finding is wrong if the loss needs float64",
        places=case.places(wide["event"]),
        evidence=(Evidence("work in float64", table.head(8).to_dicts()),),
    )


def _share_in_float32(op: str | None, *texts: str | None) -> float:
    """Return the bytes that an op moves if its float64 tensors are float32 ÷ those that it moves now.

    Of an op without a formula, such as an FFT, only its inputs are known.
    """
    known = op_tensors(op or "", *texts)
    tensors = operands(*texts[:2]) if known is None else [*known[0], *known[1]]
    both = [one for one in tensors if isinstance(one, Tensor) and one.num_bytes]
    now = sum(one.num_bytes or 0 for one in both)
    less = sum(one.num_bytes or 0 for one in both if one.dtype in _DOUBLES) / 2
    return 1 - less / now if now else 1.0


_LEAST_SPLIT = 8  # products of one input; query, key and value as three are usual
_NARROW = 4  # a product is narrow if its input has at least this many times its columns


@rule
def split_products(case: Case) -> list[Finding]:
    """Do many narrow products read the same input, where one wide product would do?

    Modules side by side, such as one per attention head, each multiply the same tensor by a small weight. Products
    share their input if it has the same size and nothing in between writes a tensor of that size.
    """
    case.with_shapes()
    runs = _runs(case)
    durations: dict[int, float] = {}
    members: list[int] = []
    for run in runs:
        roots = {row["root"] for row in run}
        work = case.work.filter(pl.col("root").is_in(list(roots)), pl.col("flops") > 0)
        one = run[0]
        item = ITEM_BYTES.get(_dtype(one), 4)
        columns = sum(row["num_columns"] for row in run)
        moved = item * (one["num_rows"] * (one["inner"] + columns) + one["inner"] * columns)
        # The backward has two products per weight: by the input, and by the weight with a sum over all of them.
        for _, part in work.group_by("phase", "op", "shapes", maintain_order=True):
            flops, dtype = int(part["flops"].sum()), part["peak_dtype"][0]
            now_ns = float(part["duration_ns"].sum())
            good_ns = gemm_ns(case.device, dtype, flops, moved) if dtype in case.device.peak_flops else now_ns
            durations[part["event"][0]] = min(now_ns, good_ns)
            members += part["event"].to_list()
    members += _sums(case, runs)
    gone = [event for event in dict.fromkeys(members) if event not in durations]
    saving_ns = case.saving_ns(case.without(gone, durations, is_loop=True))
    if not case.is_worth(saving_ns):
        return []
    rows = case.work.filter(pl.col("event").is_in(members)).with_columns(
        pl.col("op", "shapes", "phase").cast(pl.String)
    )
    table = case.grouped(rows, "num_kernels", "op", "shapes", "phase")
    most = max(runs, key=len)
    one = most[0]
    return one_finding(
        sentence=f"{len(most)} narrow products in a row read the same {one['num_rows']:,} × {one['inner']:,} input "
        f"({size(one['num_rows'] * one['inner'] * ITEM_BYTES.get(_dtype(one), 4))}) and write "
        f"{one['num_columns']:,} columns each, {plural(len(runs) / case.num_steps, 'time')} per step. "
        "With their backward, and the sums of their "
        f"gradients, they take {case.cost_text(rows)}.",
        fix=f"one nn.Linear({one['inner']}, {sum(row['num_columns'] for row in most)}) for all of them, and split or "
        "reshape its result: all heads and q, k, v at once",
        saving_ns=saving_ns,
        derived="the step replayed with one product of all columns at 60 % of the peak, forward and backward, and "
        "without the sums of the input's gradients and the host's time for the others",
        confidence="medium",
        falsified_by="use one product; the finding is wrong if the products do not share their input",
        places=case.places(members),
        evidence=(Evidence("narrow products and their backward", table.head(8).to_dicts()),),
    )


def _runs(case: Case) -> list[list[dict[str, Any]]]:
    """Return runs of narrow forward products with the same input."""
    products = {row["event"]: row for row in products_of(case).iter_rows(named=True)}
    runs: list[list[dict[str, Any]]] = []
    open_run: list[dict[str, Any]] = []
    forward = case.sized.filter(pl.col("phase").cast(pl.String) == "forward").sort("start_ns", "event")
    columns = ("event", "step", "shape", "shapes", "dtypes", "root")
    for event, step, shape, shapes, dtypes, root in forward.select(columns).iter_rows():
        row = products.get(event)
        if row is not None:
            key = (step, row["num_rows"], row["inner"])
            if not open_run or key != open_run[0]["key"] or row["num_columns"] * _NARROW > row["inner"]:
                open_run = []
                runs.append(open_run)
            if row["num_columns"] * _NARROW <= row["inner"]:
                open_run.append({**row, "key": key, "shapes": shapes, "dtypes": dtypes, "root": root})
        elif open_run and shape and prod(shape) >= open_run[0]["num_rows"] * open_run[0]["inner"]:
            open_run = []
    return [run for run in runs if len(run) >= _LEAST_SPLIT]


def _dtype(row: dict[str, Any]) -> str:
    tensors = [one for one in operands(row["shapes"], row["dtypes"]) if isinstance(one, Tensor) and one.dtype]
    return tensors[-1].dtype or "" if tensors else ""


def _sums(case: Case, runs: list[list[dict[str, Any]]]) -> list[int]:
    """Return the sums that add up the gradients of shared inputs: one less than each input's uses."""
    nums: dict[tuple[int, int], int] = {}
    for run in runs:
        one = run[0]
        key = (one["step"], one["num_rows"] * one["inner"])
        nums[key] = nums.get(key, 0) + len(run) - 1
    adds = case.sized.filter(
        pl.col("phase").cast(pl.String) == "backward", pl.col("op").cast(pl.String) == "aten::add_"
    )
    found = []
    for event, step, shape in adds.sort("start_ns").select("event", "step", "shape").iter_rows():
        key = (step, prod(shape or ()))
        if nums.get(key):
            nums[key] -= 1
            found.append(event)
    return found


_LESS_WORK = 0.5  # of the FLOPs in the other order
_SCALING = ("copy_cast", "memset_memcpy")


@rule
def product_order(case: Case) -> list[Finding]:
    """Are three matrices multiplied in the order that makes a large one in between?

    (q kᵀ) v is q (kᵀ v): the same result, if nothing but copies works on the matrix in between.
    """
    case.with_shapes()
    pairs = _pairs(case)
    durations: dict[int, float] = {}
    gone: list[int] = []
    for first, second, share in pairs:
        work = case.work.filter(pl.col("root").is_in([first["root"], second["root"]]))
        size_of = first["batch"] * first["num_rows"] * first["num_columns"]
        moved = case.sized.filter(pl.col("event").is_in(work["event"].implode()), pl.col("class").is_in(_SCALING))
        gone += [event for event, shape in moved.select("event", "shape").iter_rows() if prod(shape or ()) == size_of]
        shorter = work.filter(pl.col("flops") > 0).select("event", "duration_ns").iter_rows()
        durations |= {event: max(LEAST_KERNEL_NS, ns * share) for event, ns in shorter}
    saving_ns = case.saving_ns(case.without(gone, durations))
    if not case.is_worth(saving_ns):
        return []
    first, second, share = pairs[0]
    events = [*durations, *gone]
    rows = case.work.filter(pl.col("event").is_in(events)).with_columns(
        pl.col("op", "shapes", "phase").cast(pl.String)
    )
    wide = f"{first['num_rows']:,} × {first['num_columns']:,}"
    return one_finding(
        sentence=f"{plural(len(pairs) / case.num_steps, 'time')} per step, two products make a {wide} matrix and "
        f"multiply it at once by another, with nothing in between. Forward and backward take {case.cost_text(rows)}. "
        f"In the other order they need {whole_percent(share)} of the FLOPs.",
        fix="q @ (k.transpose(-2, -1) @ v) instead of (q @ k.transpose(-2, -1)) @ v; or torch.linalg.multi_dot",
        saving_ns=saving_ns,
        derived=f"the step replayed with these products at {whole_percent(share)} of their time, and without "
        "copies of the matrix in between",
        confidence="medium",
        falsified_by="change the order; the finding is wrong if the second product does not take the first's result",
        places=case.places(events),
        evidence=(
            Evidence("products", case.grouped(rows, "num_kernels", "op", "shapes", "phase").head(8).to_dicts()),
        ),
    )


def _pairs(case: Case) -> list[tuple[dict[str, Any], dict[str, Any], float]]:
    """Return forward products of which the second takes the first one's result, and the FLOPs that are left."""
    products = {row["event"]: row for row in products_of(case).iter_rows(named=True)}
    forward = case.sized.filter(pl.col("phase").cast(pl.String) == "forward").sort("start_ns", "event")
    found = []
    last: dict[str, Any] | None = None
    for event, kind, shape in forward.select("event", pl.col("class").cast(pl.String), "shape").iter_rows():
        row = products.get(event)
        if row is None:
            is_changed = (
                last is not None and prod(shape or ()) == last["batch"] * last["num_rows"] * last["num_columns"]
            )
            last = None if is_changed and kind not in _SCALING else last
            continue
        sizes = ("batch", "num_rows", "step")
        if last is not None and row["inner"] == last["num_columns"] and all(row[one] == last[one] for one in sizes):
            rows, inner, between, columns = row["num_rows"], last["inner"], row["inner"], row["num_columns"]
            share = inner * columns * (rows + between) / (rows * between * (inner + columns))
            # With one matrix, a layer and the next: their weights must not be multiplied.
            if share < _LESS_WORK and row["batch"] > 1:
                found.append((last, row, share))
        last = row
    return found
