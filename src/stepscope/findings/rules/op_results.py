"""Rules about ops by the line that calls them: results that training does not use, that never change, that
grow, or that one call could compute."""

import re
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import polars as pl

from stepscope.analysis.structure.nesting import with_answers
from stepscope.analysis.structure.op_log import (
    ALLOCATION,
    BACKWARD,
    KEPT,
    MAKES_ZEROS,
    READS_ZEROS,
    TRAINING,
    UNUSED,
    chain_lengths,
)
from stepscope.analysis.time.what_if import Saving, stretches
from stepscope.findings.op_lines import (
    PHASE,
    caller_of,
    first_line,
    followed_of,
    line_text,
    lines_of,
    lines_text,
    logged_of,
    op_share,
    ops_of,
    python_between_ns,
)
from stepscope.findings.rule import Case, Evidence, Finding, one_finding, rule
from stepscope.findings.rules.cpu import least_ns
from stepscope.formatting import count, duration, plural, safe, whole_percent
from stepscope.session.case import WORTH_WITHOUT_GPU

_MOSTLY_ZERO = 0.95
_LEAST_LOOP = 16  # calls of an op by one line per step
_LEAST_WIDTH = 4  # of them that do not need one another
_LATER = 10  # times as many steps, to say what a growing op will take


def _number(case: Case, ops: pl.DataFrame, noun: str = "op") -> str:
    return case.number_text(ops.filter("is_logged"), noun)


def _saving(case: Case, ops: pl.DataFrame, is_loop: bool = False) -> tuple[Saving, pl.DataFrame]:
    """Return what a step saves without some ops of the log, and their work."""
    work = _work_of(case, ops)
    change = case.without(work["event"], is_loop=is_loop)
    if not case.is_on_cpu:  # ops without work on the GPU take time of the host
        spans = [ops.select("start_ns", "end_ns")]
        spans += [change.host.select("start_ns", "end_ns")] if change.host is not None else []
        change = replace(change, host=stretches(pl.concat(spans)))
    return case.saving_ns(change), work


def _work_of(case: Case, ops: pl.DataFrame) -> pl.DataFrame:
    """Return the work that some ops of the log do."""
    return case.work.filter(pl.col("call").is_in(ops["row"].implode()))


@rule
def discarded_gradients(case: Case) -> list[Finding]:
    """Does the backward pass compute gradients that are cleared before anything uses them?"""
    facts = followed_of(case).filter(PHASE == BACKWARD)
    parameters = case.recording.facts.get("parameters") or {}
    others = [one["module"] for one in parameters.get("without_optimizer") or ()]  # `unused_gradients` names those
    module = pl.col("module").cast(pl.String)
    is_named = pl.any_horizontal(
        pl.lit(False), *((module == name) | module.str.starts_with(f"{name}.") for name in others)
    )
    unused = facts.filter(pl.col("use") == UNUSED, ~is_named.fill_null(False))
    saving_ns, work = _saving(case, unused)
    if not case.is_worth(saving_ns):
        return []
    table, caller = lines_of(case, unused), caller_of(unused)
    called = f"; the call of the model is at {line_text(caller)}" if caller else ""
    where = first_line(table) if caller is None else safe(caller.partition(" ")[0], 80)
    return one_finding(
        sentence=f"{_number(case, unused)} of the backward pass compute gradients that no update uses: "
        f"{case.cost_text(float(saving_ns))}. They are cleared, or replaced, before an optimizer reads them. They "
        f"belong to the forward at {lines_text(table)}{called}.",
        fix=f"other(x.detach())  # x: what {where} led to, where it goes to the other loss",
        saving_ns=saving_ns,
        derived="the step without these ops, which were followed from op to op in one step",
        confidence="high",
        falsified_by="look for code that reads these gradients without an op of torch, such as .grad.numpy()",
        places=case.places(work["event"]),
        evidence=(Evidence("lines whose gradients are discarded", table.head(8).to_dicts()),),
    )


@rule
def work_beside_training(case: Case) -> list[Finding]:
    """Do ops compute what no update of the weights uses?"""
    is_discarded = (PHASE == BACKWARD) & (pl.col("use") == UNUSED)  # by another rule
    beside = followed_of(case).filter(pl.col("use") != TRAINING, PHASE != "data", ~is_discarded)
    saving_ns, work = _saving(case, beside, is_loop=True)
    if not case.is_worth(saving_ns):
        return []
    table = lines_of(case, beside)
    kept = beside.filter(pl.col("use") == KEPT)
    kept_share = float(kept["self_ns"].sum()) / max(1, float(beside["self_ns"].sum()))
    what = "they only make tensors that outlive the step" if kept_share > 0.5 else "at most Python code reads them"
    return one_finding(
        sentence=f"{_number(case, beside)} per step compute results that no update of the weights uses: "
        f"{case.cost_text(float(saving_ns))}, and {what}. Most of it is at {lines_text(table)}.",
        fix=f"if step % 100 == 0:  # around {first_line(table)}: metrics, logs, histograms and copies every N steps",
        saving_ns=saving_ns,
        upper_bound=True,
        derived="the step without these ops and the Python code between them; each was followed from op to op in one "
        "step. What you need of it remains",
        confidence="medium",
        falsified_by="leave it out of a run; the finding is wrong if training needs it, for example to choose data",
        places=case.places(work["event"]),
        evidence=(Evidence("lines that training does not use", table.head(8).to_dicts()),),
    )


@rule
def constant_work(case: Case) -> list[Finding]:
    """Is the same result computed again in every step?"""
    same = followed_of(case).filter(pl.col("is_constant"), ~PHASE.is_in([BACKWARD, "data", "optimizer"]))
    saving_ns, work = _saving(case, same, is_loop=True)
    if not case.is_worth(saving_ns):
        return []
    table = lines_of(case, same)
    return one_finding(
        sentence=f"{_number(case, same)} per step compute the same result in every step: "
        f"{case.cost_text(float(saving_ns))}. They read neither weights nor new data, only what was there before and "
        f"has not changed. Most of it is at {lines_text(table)}.",
        fix=f"compute it once, before the loop, and keep it  # {first_line(table)}; in a module: "
        "self.register_buffer(...)",
        saving_ns=saving_ns,
        derived="the step without these ops and the Python code between them: in one step, every op was followed "
        "back to what it reads",
        confidence="high",
        falsified_by="look for code that changes their inputs without an op of torch, such as through numpy",
        places=case.places(work["event"]),
        evidence=(Evidence("lines that compute the same again", table.head(8).to_dicts()),),
    )


def _sized(ops: pl.DataFrame) -> pl.DataFrame:
    """Return ops with the number of elements of their arguments in the trace, as `elements`."""
    ops = ops.with_columns(pl.col("name", "shapes").cast(pl.String))
    return with_answers(ops, ["shapes"], _elements, {"elements": pl.Int64()})


def _elements(shapes: str | None) -> Sequence[int | None]:
    """Return how many elements all tensors have, also those in lists.

    >>> _elements("[[[8, 2], [8, 1]], [], [4]]")
    (28,)
    """
    total = sum(prod(map(int, sizes.split(","))) for sizes in re.findall(r"\[([\d, ]+)\]", shapes or ""))
    return (total if 0 < total < 2**62 else None,)


@rule
def growing_work(case: Case) -> list[Finding]:
    """Does an op take more with every step, or with every turn of a loop, because its input grows?"""
    ops = logged_of(case, of_all_steps=True).filter(pl.col("call").is_not_null(), pl.col("place").is_not_null())
    sized = _sized(ops.filter("is_logged", PHASE != BACKWARD))
    over = _growing_over_steps(sized)
    within = _growing_within_a_step(sized.filter(pl.col("step") == pl.col("step").max()))
    findings = []
    if not over.is_empty():
        findings += _over_steps(case, over)
    if not within.is_empty():
        findings += _within_a_step(case, within)
    return findings


def _growing_over_steps(sized: pl.DataFrame) -> pl.DataFrame:
    """Return the calls that read more in each traced step, and again more in the probed one, by `call`."""
    known = sized.drop_nulls("elements").sort("step")
    by_call = known.group_by("call").agg(
        pl.col("elements"), pl.col("size").first(), pl.col("step").n_unique().alias("num")
    )
    # Steps are one after the other, the probed one last. The same increase twice is no accident of lengths.
    both = by_call.filter(pl.col("num") >= 2, pl.col("elements").list.len() == pl.col("num")).with_columns(
        pl.col("elements").list.get(-1).alias("last"), pl.col("elements").list.get(-2).alias("before")
    )
    more = pl.col("last") - pl.col("before")
    return both.filter(more > 0, pl.col("size") - pl.col("last") == more).select("call", "last", more.alias("more"))


def _over_steps(case: Case, growing: pl.DataFrame) -> list[Finding]:
    ops = logged_of(case).join(growing, on="call")
    saving_ns, work = _saving(case, ops, is_loop=True)
    step = int(ops["step"].max() or 0)  # type: ignore[arg-type]
    num_more = _LATER * step
    shares = growing.join(ops.group_by("call").agg(pl.col("self_ns").sum()), on="call")
    each_ns = float((shares["self_ns"] * shares["more"] / shares["last"]).sum()) * op_share(case) / case.num_steps
    later_ns = float(saving_ns) + each_ns * num_more
    if later_ns < WORTH_WITHOUT_GPU * case.step_ns:
        return []
    table = lines_of(case, ops)
    growth = float(growing["more"].sum()) / max(1.0, float(growing["last"].sum()))
    return one_finding(
        sentence=f"{_number(case, ops)} read more in every step, although the batch does not grow: "
        f"{whole_percent(growth)} more than in the step before, at step {step}. They take "
        f"{case.cost_text(float(saving_ns))}, and will take about {duration(later_ns, 3)} at step "
        f"{step + num_more:,}. They are at {lines_text(table)}.",
        fix=f"keep sums or the last N entries instead of the whole history  # {first_line(table)}",
        saving_ns=saving_ns if case.is_worth(saving_ns) else None,
        derived="the step without these ops, as far as the run had grown when it was traced",
        confidence="high",
        falsified_by="record later steps, with a longer warm-up; the finding is wrong if these ops take no longer",
        places=case.places(work["event"]),
        evidence=(Evidence("lines whose input grows", table.head(8).to_dicts()),),
    )


def _growing_within_a_step(sized: pl.DataFrame) -> pl.DataFrame:
    """Return `place` and `name` of ops whose input grows by as much with each of many calls, and their calls."""
    known = sized.drop_nulls("elements").sort("start_ns")
    more = (pl.col("elements") - pl.col("elements").shift(1)).over("place", "name").alias("more")
    groups = known.with_columns(more).group_by("place", "name").agg(
        pl.len().alias("num"), pl.col("more").drop_nulls().median().alias("usual"),
        (pl.col("more") > 0).sum().alias("num_more"),
        (pl.col("more") == pl.col("more").drop_nulls().median()).sum().alias("num_usual"),
    )  # fmt: skip
    return groups.filter(
        pl.col("num") >= _LEAST_LOOP, pl.col("usual") > 0, pl.col("num_usual") >= 0.8 * (pl.col("num") - 1)
    )


def _within_a_step(case: Case, growing: pl.DataFrame) -> list[Finding]:
    ops = logged_of(case).with_columns(pl.col("name").cast(pl.String))
    keys = ["place", "name"]
    own = ops.join(growing.select(keys), on=keys, how="semi")
    calls = own["call"].unique()
    inside = ops.filter(pl.col("call").is_in(calls.implode()))
    backward = ops.filter(pl.col("forward").is_in(inside["row"].implode()), PHASE == BACKWARD)
    both = pl.concat([inside, backward]).unique("row", maintain_order=True)
    num = float(growing["num"].sum()) / growing.height
    work = _work_of(case, both)
    # One call for all of them reads what the last one reads.
    left = {event: ns * 2 / (num + 1) for event, ns in work.select("event", "duration_ns").iter_rows()}
    saving_ns = case.saving_ns(case.without([], left))
    if not case.is_worth(saving_ns):
        return []
    table = lines_of(case, both)
    return one_finding(
        sentence=f"A loop makes a tensor longer piece by piece: {plural(num, 'call')} per step, each of which copies "
        f"all that is there. They take {case.cost_text(float(table['duration_ns'].sum()))} with their backward, at "
        f"{lines_text(table)}.",
        fix=f"pieces.append(x) in the loop, torch.cat(pieces) once after it  # {first_line(table)}",
        saving_ns=saving_ns,
        derived="the time of these ops, but for one call as long as the last",
        confidence="high",
        falsified_by="collect the pieces in a list; the finding is wrong if the step is as long",
        places=case.places(work["event"]),
        evidence=(Evidence("lines with such a loop", table.head(8).to_dicts()),),
    )


@rule
def mostly_zeros(case: Case) -> list[Finding]:
    """Do matrix products multiply by matrices that are nearly all zeros?"""
    ops = logged_of(case)
    products = ops.filter(pl.col("zero_share") >= _MOSTLY_ZERO)
    places = products.filter(PHASE != BACKWARD)["place"].drop_nulls().unique()
    of_matrix = pl.col("place").is_in(places.implode())
    return [
        *_zeros(
            case,
            products.filter(of_matrix),
            "a matrix that is",
            "nn.Embedding instead of one_hot and a product  # {}; or weight[index], index_add, a sparse matrix",
        ),
        *_zeros(
            case,
            products.filter(~of_matrix.fill_null(False)),
            "gradients that are",
            "compute only the positions that the loss uses, such as hidden[:, 0], before the last layers  # {}",
        ),
    ]


def _zeros(case: Case, products: pl.DataFrame, what: str, fix: str) -> list[Finding]:
    """Return the finding for products with a matrix of zeros, with the ops that make it, if they take long enough."""
    if products.is_empty():
        return []
    ops = logged_of(case)
    used = products.filter(pl.col("zeros") == READS_ZEROS)
    made = ops.filter(pl.col("zeros") == MAKES_ZEROS) if used.height else ops.clear()
    # The gradient of that matrix: what its product and what made it have in the backward.
    either = pl.concat([used["row"], made["row"]])
    is_backward = pl.col("forward").is_in(either.implode()) & (PHASE == BACKWARD)
    beside = pl.concat([made, ops.filter(is_backward)]).join(products, on="row", how="anti").unique("row")
    share = float(products["zero_share"].min())  # type: ignore[arg-type]
    shares = dict.fromkeys(beside["row"], share) | dict(products.select("row", "zero_share").iter_rows())
    work = case.work.filter(pl.col("call").is_in(list(shares)))
    each = work.select("event", "call", "duration_ns").iter_rows()
    saving_ns = case.saving_ns(case.without([], {event: ns * (1 - shares[call]) for event, call, ns in each}))
    if not case.is_worth(saving_ns):
        return []
    table = lines_of(case, ops.filter(pl.col("row").is_in(list(shares))))
    making = " with making that matrix and its gradient," if beside.height else ""
    return one_finding(
        sentence=f"{_number(case, products, 'matrix product')} per step multiply by {what} "
        f"{100 * share:.1f} % zeros:{making} {case.cost_text(float(saving_ns))} "
        f"is spent on zeros. They are at {lines_text(table)}.",
        fix=fix.format(first_line(table)),
        saving_ns=saving_ns,
        derived="the time of these products times the share of zeros, which was counted in one step"
        + (", and of the ops that make the matrix and its gradient" if making else ""),
        confidence="high",
        falsified_by="leave the zeros out; the finding is wrong if the step is as long",
        places=case.places(work["event"]),
        evidence=(Evidence("lines that multiply by zeros", table.head(8).to_dicts()),),
    )


@rule
def independent_calls(case: Case) -> list[Finding]:
    """On a CPU: does a loop call the same ops many times where one call could do all?"""
    ops = ops_of(case)
    lengths = chain_lengths(case.allocations, _LEAST_LOOP)
    ops = ops.with_columns(pl.col("name", "shapes").cast(pl.String))
    is_called = pl.col("place").is_not_null() & ~pl.col("name").str.contains(ALLOCATION)
    forward = ops.filter(PHASE == "forward", is_called)
    # Of one micro-batch: those of several are not calls that one could replace.
    num_passes = case.num_steps * max(1, case.summary.num_micro_batches)
    alike = forward.filter("is_logged").group_by("place", "name", "shapes").agg((pl.len() / num_passes).alias("num"))
    rows: list[dict[str, Any]] = []
    for place, name, num in alike.select("place", "name", "num").sort("num", descending=True).iter_rows():
        chain = lengths.get((name, place), 1)
        width = num / max(1, chain)
        if num >= _LEAST_LOOP and width >= _LEAST_WIDTH:
            rows.append({"place": place, "name": name, "num_calls": num, "chain": chain, "width": width})
    if not rows:
        return []
    widths: dict[str, float] = {}
    for row in rows:
        widths[row["place"]] = max(widths.get(row["place"], 0.0), row["width"])
    places = pl.Series(list(widths))
    looped = ops.filter(pl.col("place").is_in(places.implode()), PHASE.is_in(["forward", BACKWARD]))
    work = _work_of(case, looped).join(
        looped.select(pl.col("row").alias("call"), "place"), on="call", how="left", maintain_order="left"
    )
    work = work.with_columns(least_ns(case).fill_null(0.0).clip(0, pl.col("duration_ns")))
    once = pl.col("place").replace_strict({place: 1 / width for place, width in widths.items()}, default=1.0)
    left = work.select("event", pl.col("least_ns") + (pl.col("duration_ns") - pl.col("least_ns")) * once)
    saved_ns = case.saving_ns(case.without([], dict(left.iter_rows())))
    between_ns = python_between_ns(case, looped) * (1 - 1 / max(widths.values()))
    saving_ns = Saving(saved_ns + between_ns, saved_ns.change)
    if not case.is_worth(saving_ns):
        return []
    table = lines_of(case, looped)
    first = max(rows, key=lambda row: (row["num_calls"], row["name"]))
    in_all = case.cost_text(float(table["duration_ns"].sum()))
    return one_finding(
        sentence=f"A loop calls {safe(first['name'], 40)} {first['num_calls']:,.0f} times per forward with the same "
        f"shapes at {line_text(first['place'])}, and {count(round(first['width']))} of these calls at a time do not "
        f"need one another. The lines of such loops take {in_all} with their backward: {lines_text(table)}.",
        fix=f"one call for all of them: stack the inputs, or the weights, in a new dimension (bmm, one wider Linear, "
        f"torch.vmap)  # {first_line(table)}",
        saving_ns=saving_ns,
        upper_bound=True,
        derived="their time beyond what their FLOPs and bytes take at the rates of the trace's fast ops, and the "
        "Python code between them, but for one call of each",
        confidence="medium",
        falsified_by="make one call; the finding is wrong if the step is as long",
        places=case.places(work["event"]),
        evidence=(Evidence("ops that a loop calls", rows[:8]), Evidence("lines of loops", table.head(8).to_dicts())),
    )
