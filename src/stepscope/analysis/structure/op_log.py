"""What became of each op's result in the probed step: whether training used it, and whether it is always the same.

Storages stand for values: an op that writes to a part of a storage depends on what was in it. Where that is too
coarse, an op counts as used, and as different in every step.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import polars as pl

from stepscope.errors import Unavailable

TRAINING, KEPT, READ, UNUSED = _USES = "training", "kept", "read", "unused"
"""What an op's result leads to: an update; else values that outlive the step; else numbers that Python code reads; or
nothing that an op or Python code was seen to read."""
_STATE = ("parameter", "optimizer_state", "buffer")
_OUTSIDE = -1  # storages that no op made, and those without a byte
ALLOCATION = r"^aten::(new_)?empty(_like|_strided|_permuted)?$"
"""Ops that only take memory: what is in it is unknown."""
_DRAWS = r"^aten::(multinomial|bernoulli|normal)$"
"""Ops that draw from what a model has made. The script goes on with actions and words outside of torch."""
BACKWARD = "backward"
MAKES_ZEROS, READS_ZEROS = "makes", "reads"
_PRODUCT = r"^aten\.(mm|addmm|bmm|baddbmm)$"
_CAST = "aten::to"
_OF_AUTOGRAD = r"^(autograd|torch)::"
_SCHEMA = {
    "call": pl.UInt32, "name": pl.String, "phase": pl.String, "place": pl.String, "caller": pl.String,
    "use": pl.String,
    "is_constant": pl.Boolean, "zero_share": pl.Float64, "zeros": pl.String, "size": pl.Int64,
}  # fmt: skip

Call = Mapping[str, Any]


def logged_ops(memory: Mapping[str, Any], host: pl.DataFrame, work: pl.DataFrame | None = None) -> pl.DataFrame:
    """Return the ops of a trace's steps with what the log of the probed step says of each. With `work` on a GPU,
    `self_ns` is the time of that."""
    calls = logged_calls(memory)
    if calls.is_empty():
        if (memory.get("ops") or {}).get("num_dropped"):
            raise Unavailable("Some ops of the probed step could not be followed, so the use of results is unknown.")
        raise Unavailable("The recording does not say which line calls each op. Record it again.")
    ops = with_calls(host, calls).filter(pl.col("kind") == "op", pl.col("step").is_not_null())
    if work is None:
        return ops
    spent = work.group_by(row="call").agg(pl.col("duration_ns").sum().cast(pl.Int64).alias("self_ns"))
    timed = ops.drop("self_ns").join(spent, on="row", how="left", maintain_order="left")
    return timed.with_columns(pl.col("self_ns").fill_null(0))


def runs_unseen(work: pl.DataFrame) -> bool:
    """Return whether work ran without torch's dispatcher, where no log sees what it reads: compiled code, or on a GPU
    a library's own kernels."""
    op = work["op"].cast(pl.String).fill_null("")
    is_seen = (op.str.contains("::") & ~op.str.contains(_OF_AUTOGRAD)) | (work["class"] == "communication")
    is_kernel = work["kind"].cast(pl.String) == "kernel"
    return bool((work["is_compiled"].fill_null(False) | (is_kernel & ~is_seen)).any())


def logged_calls(memory: Mapping[str, Any]) -> pl.DataFrame:
    """Return the ops of the probed step in order, as `_SCHEMA` says; empty without a log of all of them."""
    log = memory.get("ops")
    if not log or log.get("num_dropped"):  # what reads a result may be among those that are missing
        return pl.DataFrame(schema=_SCHEMA)
    kinds, calls, allocations = log["kinds"], log["calls"], memory["allocations"]
    names = [kind["op"].replace(".", "::", 1) for kind in kinds]
    drawn = {number for number, call in enumerate(calls) if call["reads"] and re.match(_DRAWS, names[call["kind"]])}
    uses = _uses(calls, allocations, log["unchanged"], drawn)
    is_random = [bool(kind["is_random"]) for kind in kinds]
    is_allocation = [bool(re.match(ALLOCATION, name)) for name in names]
    constant = _constants(calls, is_random, is_allocation, allocations, log["unchanged"])
    zeros = {one["call"]: one["share"] for one in log["zeros"]}
    roles = _roles_of_zeros(log, allocations)
    rows = [
        (number, names[call["kind"]], (kind := kinds[call["kind"]])["phase"], kind.get("place"), kind.get("caller"),
         uses[number], number in constant, zeros.get(number, 0.0), roles.get(number), call["size"])
        for number, call in enumerate(calls)
    ]  # fmt: skip
    return pl.DataFrame(rows, schema=_SCHEMA, orient="row")


def _uses(
    calls: Sequence[Call],
    allocations: Sequence[Mapping[str, Any]],
    unchanged: Collection[int],
    drawn: Collection[int],
) -> list[str]:
    """Return one of TRAINING, KEPT, READ and UNUSED for each call."""
    state = {index for index, one in enumerate(allocations) if one["owner"] in _STATE} | {_OUTSIDE}
    alive = {index for index, one in enumerate(allocations) if one["died"] is None and one["owner"] != "gradient"}
    trained, needed = _contributing(calls, state, drawn)
    # Steps are alike: what lives on is used in the next step if its like from the step before is used in this one.
    before = [index for index in needed - state - set(unchanged) if allocations[index]["born"] is None]
    carried = {_likeness(allocations[index]) for index in before}
    lives_on = {index for index, one in enumerate(allocations) if one["died"] is None} - state
    again = {index for index in lives_on if _likeness(allocations[index]) in carried}
    if again:
        trained, _ = _contributing(calls, state | again, drawn)
    kept, _ = _contributing(calls, state | again | alive)
    read, _ = _contributing(calls, (), with_reads=True)
    uses = dict.fromkeys(read, READ) | dict.fromkeys(kept, KEPT) | dict.fromkeys(trained, TRAINING)
    return [uses.get(number, UNUSED) for number in range(len(calls))]


def _likeness(allocation: Mapping[str, Any]) -> tuple[Any, ...]:
    whose = allocation["module"] if allocation["owner"] == "gradient" else None
    return allocation["owner"] == "gradient", whose, tuple(allocation["shape"] or ()), allocation["dtype"]


def _contributing(
    calls: Sequence[Call], results: Iterable[int], wanted: Collection[int] = (), with_reads: bool = False
) -> tuple[set[int], set[int]]:
    """Return the calls that contribute to what some storages hold at the end, or to wanted calls, and what is needed
    at the start; with reads, also those that contribute to what an op hands to Python code."""
    needed, found = set(results), set()
    for number in range(len(calls) - 1, -1, -1):
        reads, writes = calls[number]["reads"], calls[number]["writes"]
        is_read = with_reads and reads and not writes
        if needed.isdisjoint(writes) and number not in wanted and not is_read:
            continue
        found.add(number)
        needed.difference_update(one for one in writes if one not in reads and one != _OUTSIDE)
        needed.update(reads)
    return found, needed


def _constants(
    calls: Sequence[Call],
    is_random: Sequence[bool],
    is_allocation: Sequence[bool],
    allocations: Sequence[Mapping[str, Any]],
    unchanged: Collection[int],
) -> set[int]:
    """Return the calls whose result is the same in every step: all that they read is. The kinds of calls that draw
    numbers or only take memory never are."""
    written = {one for call in calls for one in call["writes"]}
    constant = set(unchanged) - written
    known = constant | {index for index, one in enumerate(allocations) if one["born"] is None}
    found: set[int] = set()
    writers: dict[int, list[int]] = {}  # constant calls by what they wrote
    for number, call in enumerate(calls):
        if is_allocation[call["kind"]]:
            continue  # what is in the memory is not known until something fills it
        reads, writes = call["reads"], set(call["writes"]) - {_OUTSIDE}
        is_new = all(one in constant or one not in known for one in writes)
        known.update(writes)
        if writes and is_new and not is_random[call["kind"]] and constant.issuperset(reads):
            found.add(number)
            constant.update(writes)
            for one in writes:
                writers.setdefault(one, []).append(number)
            continue
        constant.difference_update(writes)
        for one in writes:  # filled with something else later: it has to be made again
            found.difference_update(writers.pop(one, ()))
    return found


def _roles_of_zeros(log: Mapping[str, Any], allocations: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Return which calls make a matrix that is mostly zeros, and which products read one that a step made.

    Of what makes it, what is about as large as the matrix counts: not the indices that say where its ones are.
    """
    kinds, calls = log["kinds"], log["calls"]
    sizes = [prod(one["shape"] or ()) for one in allocations]
    operands = {
        one["call"]: index
        for one in log["zeros"]
        if kinds[calls[one["call"]]["kind"]]["phase"] != BACKWARD
        and (index := one.get("storage") or 0) != _OUTSIDE
        and allocations[index]["born"] is not None
    }
    found: dict[int, str] = {}
    wanted: dict[int, float] = {}  # storages, and how many elements what makes them has at least
    for number in range(len(calls) - 1, -1, -1):
        reads, writes = calls[number]["reads"], calls[number]["writes"]
        made = [one for one in writes if one in wanted]
        if made and not re.match(_PRODUCT, kinds[calls[number]["kind"]]["op"]):
            found[number] = MAKES_ZEROS
            least = min(wanted[one] for one in made)
            larger = [one for one in reads if one != _OUTSIDE and sizes[one] >= least]
            wanted |= {one: least for one in larger if allocations[one]["born"] is not None}
        for one in made:
            if one not in reads:
                wanted.pop(one)
        if number in operands:
            found[number] = READS_ZEROS
            wanted[operands[number]] = sizes[operands[number]] / 2
    return found


def chain_lengths(memory: Mapping[str, Any], least_calls: int) -> dict[tuple[str, str], int]:
    """Return, for each op that a line calls often in the forward, the longest chain of such calls in which each needs
    the one before it."""
    log = memory.get("ops")
    if not log:
        return {}
    kinds, calls = log["kinds"], log["calls"]
    of_kind = [(kind["op"].replace(".", "::", 1), kind.get("place") or "") for kind in kinds]
    counts = Counter(
        of_kind[call["kind"]] for call in calls if kinds[call["kind"]]["phase"] != BACKWARD and call["writes"]
    )
    found = {}
    for key, num in counts.items():
        if num < least_calls:
            continue
        depth: dict[int, int] = {}
        longest = 0
        for call in calls:
            if kinds[call["kind"]]["phase"] == BACKWARD:
                continue
            reached = max((depth.get(one, 0) for one in call["reads"]), default=0)
            reached += of_kind[call["kind"]] == key
            longest = max(longest, reached)
            for one in call["writes"]:
                depth[one] = reached
        found[key] = longest
    return found


def with_calls(host: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Return the host table with the columns of `calls`, of the op that each op of a step is or belongs to.

    An op is that with the same number among those of its name, in the backward or outside of it, if there are as many
    in its step (`is_logged`); ops inside it belong to it. An op around it that the probe did not see belongs to the
    first one inside. It is constant if all of them are, and of use if one of them is. Where autocast casts, the trace
    has an op inside one of the same name, and the probe only what is inside.
    """
    names = set(calls["name"])
    text = host["name"].cast(pl.String).to_list()
    is_op = ((host["kind"] == "op") & host["step"].is_not_null()).to_list()
    parents = host["parent"].to_list()
    children: dict[int, list[str]] = {}
    for row, above in enumerate(parents):
        if above is not None and is_op[row]:
            children.setdefault(above, []).append(text[row])
    is_seen = [is_op[row] and text[row] in names for row in range(host.height)]
    for row, named in children.items():
        if is_seen[row] and named.count(text[row]) == 1 and {*named} <= {text[row], _CAST}:
            is_seen[row] = False
    inside = [False] * host.height  # an op that the probe saw, or one in it
    seen = []
    ordered = sorted(range(host.height), key=host["start_ns"].to_list().__getitem__)
    for row in ordered:
        above = parents[row]
        is_within = above is not None and inside[above]
        if is_seen[row] and not is_within:
            seen.append(row)
        inside[row] = is_within or is_seen[row]
    side = (pl.col("phase").cast(pl.String) == BACKWARD).fill_null(False).alias("side")
    rows = host.select("row", pl.col("name").cast(pl.String), "step", side).gather(seen)
    keys = ("name", "side")
    place_in, num = pl.int_range(pl.len()).alias("place_in"), pl.len().alias("num")
    rows = rows.with_columns(place_in.over("step", *keys), num.over("step", *keys))
    logged = calls.select("call", "name", side).with_columns(place_in.over(keys), num.over(keys))
    matched = rows.join(logged, on=[*keys, "place_in", "num"], how="inner").select("row", "call")
    answers: list[int | None] = [None] * host.height
    for row, call in matched.iter_rows():
        answers[row] = call
    for row in ordered:
        above = parents[row]
        if answers[row] is None and is_op[row] and above is not None and inside[above]:
            answers[row] = answers[above]
    uses = [_USES.index(use) for use in calls["use"]]
    constant = calls["is_constant"].to_list()
    # What the probe did not see although it saw ops of that name may read and change anything.
    found = {row: answers[row] for row in seen}
    use = {row: 0 if call is None else uses[call] for row, call in found.items()}
    is_constant = {row: call is not None and constant[call] for row, call in found.items()}
    for row in reversed(ordered):
        above = parents[row]
        if row in use and above is not None and is_op[above] and not inside[above]:
            answers[above] = answers[above] if answers[row] is None else answers[row]
            use[above] = min(use[row], use.get(above, use[row]))
            is_constant[above] = is_constant[row] and is_constant.get(above, True)
    is_logged = host["row"].is_in(matched["row"].implode()).alias("is_logged")
    table = host.with_columns(pl.Series("call", answers, dtype=pl.UInt32), is_logged)
    facts = calls.select("call", "place", "caller", "use", "is_constant", "zero_share", "zeros", "size")
    table = table.join(facts, on="call", how="left", maintain_order="left")
    around = pl.DataFrame(
        [(row, _USES[use[row]], is_constant[row]) for row in use if answers[row] is not None],
        schema={"row": pl.UInt32, "use": pl.String, "is_constant": pl.Boolean}, orient="row",
    )  # fmt: skip
    return table.update(around, on="row")
