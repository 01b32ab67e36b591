"""Why an allocation has its size, and how it grows: on shapes written by hand and on two real recordings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memories import FF, B, D, H, S, V, transformer
from stepscope.analysis.memory.account import account
from stepscope.analysis.memory.scaling import growth
from stepscope.analysis.memory.size_formulas import find_symbols, formula
from stepscope.errors import UsageError
from stepscope.trace.memory_file import read_memory

SOURCE_FOLDER = Path(__file__).parents[2] / "src"

# A decoder whose dimensions all differ: batch 3, width 20, heads 5, feed-forward 52, vocabulary 67.
SCRIPT = """
import sys
import torch
import torch.nn.functional as F
from torch import nn

length = int(sys.argv[1])
torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(20), nn.Linear(20, 60), nn.Linear(20, 20)
        self.mlp = nn.Sequential(nn.Linear(20, 52), nn.GELU(), nn.Linear(52, 20))
    def forward(self, x):
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, 5, 4)).permute(2, 0, 3, 1, 4)
        scores = torch.softmax(parts[0] @ parts[1].transpose(-1, -2), -1)
        x = x + self.out((scores @ parts[2]).transpose(1, 2).flatten(2))
        return x + self.mlp(x)

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(67, 20)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(20, 67, bias=False)
    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))

model = Decoder()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(8):
    tokens = torch.randint(67, (3, length + 1))
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def recordings(tmp_path_factory) -> list[dict]:
    """The decoder's memory at lengths 16 and 48, as `stepscope run` records it."""
    folder = tmp_path_factory.mktemp("lengths")
    (folder / "train.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(SOURCE_FOLDER), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    options = ("--warmup", "2", "--clean", "2", "--trace", "0", "--quiet")
    for length in ("16", "48"):
        command = [sys.executable, "-m", "stepscope", "run", "-o", length, *options, "train.py", length]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    return [read_memory(folder / length / "memory.json.gz") for length in ("16", "48")]


def test_symbols_come_from_shapes():
    assert find_symbols(transformer(S)) == {"B": B, "S": S, "d": D, "ff": FF, "V": V, "H": H}


def test_a_matrix_that_does_not_lead_back_to_the_width_is_no_feed_forward():
    memory = transformer(S)
    memory["allocations"] += [dict(memory["allocations"][0], shape=[9, 17], module="adapter")] * 5

    assert find_symbols(memory)["ff"] == FF


def test_without_shapes_there_are_no_symbols():
    assert find_symbols({"device": "cpu", "allocations": [{"bytes": 8, "device": "cpu"}]}) == {}


@pytest.mark.parametrize(
    ("shape", "dtype", "owner", "expected"),
    [
        ([B, S, D], "float32", "activation", "B·S·d·4"),
        ([B * S, D], "bfloat16", "activation", "B·S·d·2"),
        ([B, H, S, S], "float32", "activation", "B·H·S²·4"),
        ([B * H, S, S], "float32", "temporary", "B·H·S²·4"),
        ([B, H, S, D // H], "float32", "activation", "B·S·d·4"),
        ([B * S, 3 * D], "float32", "activation", "3·B·S·d·4"),
        ([B, S, FF], "float32", "activation", "B·S·ff·4"),
        ([B * S, V], "float32", "activation", "B·S·V·4"),
        ([V, D], "float32", "gradient", "d·V·4"),
        ([D, D], "float32", "optimizer_state", "d²·4"),
        ([B, 1, S], "bool", "temporary", "B·S·1"),
        ([B, S, 5], "float32", "temporary", "5·B·S·4"),
        ([B, S, 13], "float32", "temporary", "13·B·S·4"),
        ([5], "float32", "temporary", None),
        ([], "float32", "temporary", None),
        ([B, S], "float4_e2m1fn_x2", "temporary", None),
        (None, "float32", "temporary", None),
    ],
)
def test_the_formula_gives_the_bytes_or_is_none(shape, dtype, owner, expected):
    symbols = find_symbols(transformer(S))
    item_bytes = {"float32": 4, "bfloat16": 2, "bool": 1}.get(dtype, 1)
    num_bytes = item_bytes
    for size in shape or ():
        num_bytes *= size

    found = formula({"shape": shape, "dtype": dtype, "owner": owner, "bytes": num_bytes}, symbols)

    assert found == expected


def value_of(text: str, symbols: dict[str, int]) -> int:
    product = 1
    for factor in text.split("·"):
        name, power = (factor[:-1], "²³".index(factor[-1]) + 2) if factor[-1] in "²³" else (factor, 1)
        product *= (int(name) if name.isdecimal() else symbols[name]) ** power
    return product


def test_a_formula_that_a_storage_is_larger_than_is_none():
    symbols = find_symbols(transformer(S))

    # One of three chunks was seen first: the storage is three times as large.
    assert formula({"shape": [B, S, D], "dtype": "float32", "bytes": 3 * B * S * D * 4}, symbols) == "3·B·S·d·4"
    assert formula({"shape": [B, S, D], "dtype": "float32", "bytes": B * S * D * 4 + 4}, symbols) is None


def test_the_growth_is_told_from_two_lengths():
    found = growth(transformer(S), transformer(2 * S))

    assert (found.symbol, found.values, found.num_unmatched) == ("S", (S, 2 * S), (0, 0))
    rows = {(row.op, row.module): row for row in found.rows}
    scores = rows["aten._softmax", "blocks.*.attn"]
    assert (scores.growth, scores.num_allocations, scores.formula) == ("quadratic", 2, "B·H·S²·4")
    assert scores.bytes == (2 * B * H * S * S * 4, 2 * B * H * 4 * S * S * 4)
    assert (rows["aten.gelu", "blocks.*.mlp"].growth, rows["aten.gelu", "blocks.*.mlp"].exponent) == ("linear", 1.0)
    assert rows["aten.mm", "blocks.*.attn.qkv"].growth == "constant"
    odd = rows["aten.odd", ""]
    assert odd.growth == "other" and 0 < odd.exponent < 1 and odd.formula is None
    assert {row.growth for row in found.at_peak} == {"constant", "linear", "quadratic", "other"}
    assert sum(row.bytes[0] for row in found.at_peak) == found.peak_bytes[0]


def test_two_lengths_tell_symbols_apart_that_are_the_same_number_in_one():
    # GIVEN a length that is the width in the one recording
    one, other = transformer(D), transformer(2 * D)

    rows = {(row.op, row.module): row for row in growth(one, other).rows}

    assert rows["aten._softmax", "blocks.*.attn"].formula == "B·H·S²·4"
    assert rows["aten.embedding", "embedding"].formula == "B·S·d·4"


def test_counterparts_are_found_in_order_of_birth():
    more = transformer(2 * S)
    more["allocations"].append(dict(more["allocations"][-1], bytes=4, shape=[1], born=1000))
    one = transformer(S)
    one["allocations"].append(dict(one["allocations"][-1], bytes=4, shape=[1], born=1000))
    more["allocations"].reverse()

    odd = [row for row in growth(one, more).rows if row.op == "aten.odd"]

    assert sorted(row.growth for row in odd) == ["constant", "other"]


def test_the_growth_in_batch():
    found = growth(transformer(S), transformer(S, batch=3 * B))

    assert (found.symbol, found.values) == ("B", (B, 3 * B))
    assert {row.growth for row in found.rows if row.owner == "activation"} == {"linear"}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (transformer(S), "nothing"),
        (transformer(2 * S, batch=2 * B), "batch"),
        ({"device": "cpu", "allocations": []}, "no model input"),
    ],
)
def test_what_cannot_be_compared_is_refused(other, words):
    with pytest.raises(UsageError, match=words):
        growth(transformer(S), other)


def test_allocations_without_a_counterpart_are_counted():
    more = transformer(2 * S)
    more["allocations"].append(dict(more["allocations"][-1], op="aten.more"))

    assert growth(transformer(S), more).num_unmatched == (0, 1)


@pytest.mark.long
def test_a_real_decoder_at_two_lengths(recordings):
    # GIVEN recordings of two lengths by `stepscope run`
    one, other = recordings

    # WHEN its sizes are explained
    symbols = find_symbols(one)
    found = growth(one, other)

    # THEN the letters are the model's own numbers, every large allocation has its formula, and attention is quadratic
    assert symbols == {"B": 3, "S": 16, "d": 20, "ff": 52, "V": 67, "H": 5}
    large = account(one).largest[:10]
    assert all(each.formula and value_of(each.formula, symbols) == each.bytes for each in large)
    assert (found.symbol, found.values) == ("S", (16, 48))
    quadratic = [row for row in found.rows if row.growth == "quadratic"]
    assert quadratic and {row.formula for row in quadratic} == {"B·H·S²·4"}
    assert any(row.op == "aten._softmax" for row in quadratic)
    linear = [row for row in found.rows if row.growth == "linear" and row.owner == "activation"]
    assert len(linear) > 5
    assert {row.growth for row in found.rows if row.owner in ("parameter", "optimizer_state")} == {"constant"}
    assert {row.growth: row.bytes[1] / row.bytes[0] for row in found.at_peak if row.growth != "other"} == {
        "constant": 1,
        "linear": 3,
        "quadratic": 9,
    }
