"""What became of each op of the probed step, on logs that are written by hand."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from stepscope.analysis.structure.op_log import chain_lengths, logged_calls, with_calls
from trace_builder import TraceBuilder

WEIGHT, GRADIENT, DATA, HISTORY, FREE, OTHER_FREE, LATER = range(7)


def storage(owner: str = "temporary", born: int | None = 0, died: int | None = 1, **more: Any) -> dict[str, Any]:
    fields = {"owner": owner, "born": born, "died": died, "module": None, "shape": [4], "dtype": "float32"}
    return fields | more


STORAGES = [
    storage("parameter", None, None, shape=[8]),
    storage("gradient", None, 5, shape=[8]),
    storage("other", None, None, shape=[100]),
    storage("other", None, 3, shape=[50]),
    storage(),
    storage(),
    storage(died=None, shape=[51]),
]


def log(*calls: tuple[str, list[int], list[int]], unchanged: tuple[int, ...] = (), **changed: Any) -> dict[str, Any]:
    """A step of calls: `op phase`, what each reads, what it writes. A `!` marks an op that draws numbers."""
    kinds = [
        {"op": name.split()[0].strip("!"), "phase": name.split()[1], "place": "train.py:7", "is_random": "!" in name}
        for name, _, _ in calls
    ]
    entries = [
        {"kind": number, "reads": reads, "writes": writes, "size": 4}
        for number, (_, reads, writes) in enumerate(calls)
    ]
    ops = {"kinds": kinds, "calls": entries, "zeros": [], "unchanged": list(unchanged)}
    return {"allocations": changed.get("storages", STORAGES), "ops": ops}


def uses(memory: dict[str, Any]) -> list[str]:
    return logged_calls(memory)["use"].to_list()


def constants(memory: dict[str, Any]) -> list[bool]:
    return logged_calls(memory)["is_constant"].to_list()


def test_what_leads_to_an_update_is_training_and_what_python_reads_is_not():
    found = uses(log(
        ("aten.mm forward", [WEIGHT, DATA], [FREE]), ("aten.sum forward", [FREE], [OTHER_FREE]),
        ("aten._local_scalar_dense forward", [OTHER_FREE], []), ("aten.mm backward", [FREE, DATA], [GRADIENT]),
        ("aten.add_ optimizer", [WEIGHT, GRADIENT], [WEIGHT]),
    ))  # fmt: skip

    assert found == ["training", "read", "read", "training", "training"]


def test_a_gradient_that_is_overwritten_before_the_update_is_not_used():
    calls = [("aten.mm backward", [DATA], [FREE]), ("aten.add_ backward", [GRADIENT, FREE], [GRADIENT])]
    update = ("aten.add_ optimizer", [WEIGHT, GRADIENT], [WEIGHT])

    assert uses(log(*calls, update)) == ["training"] * 3
    cleared = uses(
        log(*calls, ("aten.zero_ other", [], [GRADIENT]), ("aten.mm backward", [DATA], [GRADIENT]), update)
    )
    assert cleared[:3] == ["unused"] * 3, "what is added to a gradient that is then cleared"
    assert cleared[3:] == ["training"] * 2


def test_gradients_that_live_on_are_used_only_if_those_of_the_step_before_are():
    two = [*STORAGES, storage("gradient", died=None, shape=[8])]
    makes = ("aten.mm backward", [DATA], [len(two) - 1])

    assert uses(log(makes, storages=two)) == ["unused"]
    assert uses(log(("aten.add_ optimizer", [GRADIENT, WEIGHT], [WEIGHT]), makes, storages=two))[1] == "training"


def test_what_outlives_the_step_is_kept_or_serves_the_next_step():
    kept = log(("aten.cat other", [HISTORY, DATA], [LATER]))
    assert uses(kept) == ["kept"], "nothing of this step uses the history"

    state = [*STORAGES, storage("other", None, 2, shape=[51])]
    steps = ("aten.add forward", [len(state) - 1], [WEIGHT]), ("aten.tanh forward", [DATA], [LATER])
    carried = log(*steps, storages=state)
    assert uses(carried) == ["training", "training"], "a state of that size is handed from step to step"


def test_what_reads_only_what_never_changes_is_constant():
    calls = [
        ("aten.arange forward", [], [FREE]), ("aten.mul forward", [FREE, DATA], [OTHER_FREE]),
        ("aten.mm forward", [OTHER_FREE, WEIGHT], [LATER]),
    ]  # fmt: skip

    assert constants(log(*calls, unchanged=(DATA,))) == [True, True, False]
    assert constants(log(*calls)) == [True, False, False], "the data are new in every step"


@pytest.mark.parametrize("spoils", [("aten.rand! forward", [], [FREE]), ("aten.copy_ forward", [-1], [FREE])])
def test_drawn_numbers_and_data_from_outside_are_not_constant(spoils):
    assert constants(log(("aten.zeros forward", [], [FREE]), spoils)) == [False, False], "nor what they overwrite"


def test_memory_alone_is_not_a_constant_result():
    """What fills it may be no op at all, such as a kernel of an extension."""
    taken, read = ("aten.empty forward", [], [FREE]), ("aten.mul forward", [FREE], [OTHER_FREE])

    assert constants(log(taken, read)) == [False, False]
    assert constants(log(taken, ("aten.fill_ forward", [], [FREE]), read)) == [False, True, True]


def test_data_from_outside_are_not_constant_because_an_op_wrote_such_data():
    assert constants(log(("aten.arange forward", [], [-1]), ("aten.mul forward", [-1], [FREE]))) == [False, False]


def test_a_result_beside_an_empty_one_can_be_constant():
    """In evaluation, a batch norm returns two tensors without elements."""
    norm = ("aten.native_batch_norm forward", [DATA], [-1, FREE])

    assert constants(log(norm, norm, unchanged=(DATA,))) == [True, True]


def test_an_op_is_as_constant_and_as_useful_as_what_is_in_it():
    """batch_norm takes memory, which nothing uses, before it normalizes new data."""
    calls = logged_calls(log(
        ("aten.zeros forward", [], [FREE]), ("aten.native_batch_norm forward", [DATA], [WEIGHT]),
        ("aten.tril forward", [], [OTHER_FREE]),
    ))  # fmt: skip
    trace = TraceBuilder().step(1, 0, 400)
    trace.op("aten::batch_norm", 10, 90).op("aten::_batch_norm_impl_index", 20, 70)
    trace.op("aten::zeros", 30, 5).op("aten::native_batch_norm", 40, 40)
    trace.op("aten::mask", 110, 30).op("aten::tril", 120, 10)

    table = with_calls(trace.linked().host, calls).filter(pl.col("kind") == "op")

    assert table.select(pl.col("name").cast(pl.String), "is_constant", "use").rows() == [
        ("aten::batch_norm", False, "training"), ("aten::_batch_norm_impl_index", False, "training"),
        ("aten::zeros", True, "unused"), ("aten::native_batch_norm", False, "training"),
        ("aten::mask", True, "unused"), ("aten::tril", True, "unused"),
    ]  # fmt: skip


def test_an_op_is_not_constant_if_one_in_it_is_unknown():
    """The traced step calls aten::mul once, the probed one twice."""
    calls = logged_calls(log(
        ("aten.zeros forward", [], [FREE]), ("aten.mul forward", [DATA], [LATER]),
        ("aten.mul forward", [DATA], [LATER]),
    ))  # fmt: skip
    trace = TraceBuilder().step(1, 0, 400)
    trace.op("aten::scaled", 10, 90).op("aten::zeros", 30, 5).op("aten::mul", 40, 40)

    table = with_calls(trace.linked().host, calls).filter(pl.col("kind") == "op")

    assert table["is_constant"].to_list() == [False, True, None]


def test_what_autocast_casts_is_what_the_probe_saw_inside():
    """The trace has aten::addcmul with its casts in it, and in it again; copy_ in copy_ is one copy."""
    calls = logged_calls(log(
        ("aten._to_copy forward", [DATA], [FREE]), ("aten.addcmul forward", [FREE], [LATER]),
        ("aten._to_copy forward", [DATA], [OTHER_FREE]), ("aten.copy_ forward", [OTHER_FREE], [LATER]),
    ))  # fmt: skip
    trace = TraceBuilder().step(1, 0, 400)
    trace.op("aten::addcmul", 10, 90).op("aten::to", 20, 30).op("aten::_to_copy", 30, 10).op("aten::addcmul", 60, 30)
    trace.op("aten::_to_copy", 110, 50).op("aten::copy_", 170, 50).op("aten::copy_", 180, 10)

    table = with_calls(trace.linked().host, calls).filter(pl.col("kind") == "op")

    assert table["call"].to_list() == [0, 0, 0, 1, 2, 3, 3]
    assert table.filter("is_logged")["start_ns"].to_list() == [30_000, 60_000, 110_000, 180_000]


def test_a_tensor_that_the_step_itself_changes_is_not_constant():
    assert constants(log(("aten.add_ other", [DATA], [DATA]), unchanged=(DATA,))) == [False]


def test_calls_that_need_one_another_are_a_chain():
    many = [storage() for _ in range(9)]
    steps = [("aten.tanh forward", [number], [number + 1]) for number in range(8)]
    heads = [("aten.mm forward", [0], [number + 1]) for number in range(8)]

    lengths = chain_lengths(log(*steps, *heads, storages=many), least_calls=8)

    assert lengths == {("aten::tanh", "train.py:7"): 8, ("aten::mm", "train.py:7"): 1}


def test_without_a_log_there_is_nothing():
    assert logged_calls({"allocations": STORAGES}).is_empty()
    assert chain_lengths({"allocations": STORAGES}, 1) == {}
