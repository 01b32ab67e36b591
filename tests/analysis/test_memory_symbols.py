"""Letters and formulas where models are not written as transformers usually are."""

from __future__ import annotations

import math
from typing import Any

import pytest

from memories import tensor
from stepscope.analysis.memory.scaling import growth
from stepscope.analysis.memory.size_formulas import find_symbols, formula


def made(shape: list[int], owner: str = "activation", **fields: Any) -> dict[str, Any]:
    born = None if owner == "parameter" else 0
    return tensor(4 * math.prod(shape), owner, born, shape=shape, device="cpu") | fields


def of(*allocations: dict[str, Any]) -> dict[str, Any]:
    return {"device": "cpu", "allocations": list(allocations)}


def attention(batch: int, length: int, width: int, heads: int, *, length_first: bool = False) -> dict[str, Any]:
    """`nn.MultiheadAttention`: batch and heads are one dimension of the scores."""
    batch_and_length = [length, batch] if length_first else [batch, length]
    return of(
        made([3 * width, width], "parameter"),
        made([width, width], "parameter"),
        made([width, 17], "parameter"),
        made([*batch_and_length, 17], "input"),
        made([batch * length, 3 * width]),
        made([3, length, batch, width]),
        made([batch * heads, length, length]),
        made([batch * heads, length, width // heads]),
    )


@pytest.mark.parametrize("length_first", [False, True])
def test_heads_are_told_from_scores_in_which_they_are_one_with_the_batch(length_first):
    memory = attention(6, 24, 40, 5, length_first=length_first)
    symbols = find_symbols(memory)

    assert symbols == {"B": 6, "S": 24, "d": 40, "H": 5}  # 17 leads nowhere back: no feed-forward
    *_, mixed, scores, values = memory["allocations"]
    assert formula(scores, symbols) == "B·H·S²·4"
    assert formula(values, symbols) == "B·S·d·4"
    assert formula(mixed, symbols) == "3·B·S·d·4"


def test_heads_that_are_as_many_as_the_batch_are_not_beside_the_whole_width():
    memory = attention(4, 24, 40, 4)
    symbols = find_symbols(memory)

    *_, mixed, scores, _ = memory["allocations"]
    assert symbols["B"] == symbols["H"] == 4
    assert (formula(mixed, symbols), formula(scores, symbols)) == ("3·B·S·d·4", "B·H·S²·4")


def test_a_recurrent_model_is_as_wide_as_its_state_and_not_as_its_gates():
    width = 24
    gates = [made([4 * width, width], "parameter") for _ in range(4)] + [made([4 * width], "parameter")] * 4
    symbols = find_symbols(of(*gates, made([50, width], "parameter", module="embedding"), made([4, 20], "input")))

    assert (symbols["d"], symbols["V"]) == (width, 50)


def test_a_gated_feed_forward_has_two_ways_in():
    symbols = find_symbols(of(made([2 * 28, 8], "parameter"), made([8, 28], "parameter"), made([8, 8], "parameter")))

    assert symbols == {"d": 8, "ff": 28}


def test_logits_are_not_explained_by_a_feed_forward_of_half_the_vocabulary():
    batch, length, width, inner = 4, 24, 40, 64
    weights = [
        made([2 * inner, width], "parameter", module="head"),
        made([2 * inner, width], "parameter", module="tokens.embedding"),
        made([inner, width], "parameter", module="blocks.0.mlp.up"),
        made([width, inner], "parameter", module="blocks.0.mlp.down"),
    ]
    symbols = find_symbols(of(*weights, made([batch, length], "input", dtype="int64")))
    assert symbols == {"B": batch, "S": length, "d": width, "ff": inner, "V": 2 * inner}

    def explained(module: str | None) -> str | None:
        return formula(made([batch * length, 2 * inner], module=module), symbols)

    assert [explained("head"), explained(None), explained("blocks.0.mlp.up")] == ["B·S·V·4", "B·S·V·4", "2·B·S·ff·4"]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ([2, 6, 12], "12·B·S·4"),  # three times the width, or the feed-forward
        ([2, 6, 4], "B·S·d·4"),
        ([2, 4], "4·B·4"),  # the width, or tokens
        ([2, 2, 2, 2], "8·B·4"),  # a batch has no second batch
        ([2, 7, 6, 6], "7·B·S²·4"),
    ],
)
def test_a_size_that_several_names_fit_is_a_number(shape, expected):
    symbols = {"B": 2, "S": 4 if shape == [2, 4] else 6, "d": 4, "ff": 12}

    assert formula(made(shape, module="blocks.0.mlp.up"), symbols) == expected


def test_what_was_there_before_is_matched_by_owner():
    def step(length: int) -> dict[str, Any]:
        before = {"born": None, "op": "before the window", "phase": None}
        first = made([2, length, length], "left_alive", **before)
        others = [made([2, 1000], "other", **before), made([2, length, 8], "left_alive", **before)]
        # The order in which strangers are found is any.
        found = [first, *others] if length == 6 else [others[0], first, others[1]]
        return of(*found, made([2, length], "input", dtype="int64"), made([8, 8], "parameter"))

    grown = growth(step(6), step(12))
    kinds = {(row.owner, row.growth) for row in grown.rows}

    assert kinds >= {("left_alive", "quadratic"), ("left_alive", "linear"), ("other", "constant")}
    assert grown.num_unmatched == (0, 0)
