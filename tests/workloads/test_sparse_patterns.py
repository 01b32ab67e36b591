"""The sparse pattern: one rule, told three ways that agree; counted by formula and pair by pair."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from parametrized import parametrized
from stepscope.workloads import sparse_patterns as patterns
from stepscope.workloads.sparse_patterns import SparsePattern

CPU = torch.device("cpu")
PATTERNS = {
    "tiny": SparsePattern(seq_len=512, window=128, global_tokens=16, random_keys=16),
    "tiny scattered": SparsePattern(seq_len=512, window=128, global_tokens=16, random_keys=16, random="scattered"),
    "many random": SparsePattern(seq_len=640, window=32, global_tokens=64, random_keys=130),
    "ragged": SparsePattern(seq_len=450, window=41, global_tokens=5, random_keys=65),
    "ragged scattered": SparsePattern(seq_len=450, window=41, global_tokens=5, random_keys=65, random="scattered"),
    "window only": SparsePattern(seq_len=300, window=10, global_tokens=0, random_keys=0),
    "all": SparsePattern(seq_len=100, window=400, global_tokens=0, random_keys=64),
    "short": SparsePattern(seq_len=7, window=2, global_tokens=1, random_keys=3),
}
each_pattern = pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS.keys())


def rule_of(pattern: SparsePattern, seed: int = 0) -> patterns.Rule:
    return patterns.fixed_rule(pattern, patterns.random_table(pattern, seed))


def mask_of(pattern: SparsePattern, seed: int = 0) -> torch.Tensor:
    return patterns.dense_mask(rule_of(pattern, seed), pattern.seq_len, CPU)


def by_hand(pattern: SparsePattern, table: torch.Tensor) -> torch.Tensor:
    """The mask pair by pair, as the pattern is described: |i − j| ≤ window ÷ 2, global rows and columns, causal."""
    drawn, scattered, half = table.tolist(), pattern.random == "scattered", pattern.window / 2

    def sees(i: int, j: int) -> bool:
        near, is_global = abs(i - j) <= half, i < pattern.global_tokens or j < pattern.global_tokens
        return j <= i and (near or is_global or (drawn[i][j] if scattered else drawn[i // 128][j // 64]))

    return torch.tensor([[sees(i, j) for j in range(pattern.seq_len)] for i in range(pattern.seq_len)])


@parametrized("pattern", PATTERNS.values(), quick=3, ids=PATTERNS.keys())
def test_dense_mask_is_the_description(pattern):
    table = patterns.random_table(pattern)
    assert torch.equal(
        patterns.dense_mask(patterns.fixed_rule(pattern, table), pattern.seq_len, CPU), by_hand(pattern, table)
    )


@each_pattern
def test_flex_mask_and_its_blocks_are_the_dense_mask(pattern):
    dense, block_mask = mask_of(pattern), patterns.flex_block_mask(rule_of(pattern), pattern.seq_len, CPU)
    length = pattern.seq_len

    assert torch.equal(create_mask(block_mask.mask_mod, 1, 1, length, length, device="cpu")[0, 0], dense)
    assert torch.equal(patterns.unfused_mask(block_mask, 1)[0, 0], dense)


@each_pattern
def test_pairs_by_formula_are_the_pairs_of_the_mask(pattern):
    assert pattern.num_pairs() == int(mask_of(pattern).sum())


@each_pattern
def test_touched_blocks_are_those_with_a_pair_in_them(pattern):
    block_mask = patterns.flex_block_mask(rule_of(pattern), pattern.seq_len, CPU)
    dense = mask_of(pattern)
    touched = sum(bool(block.any()) for rows in dense.split(128) for block in rows.split(128, dim=1))

    assert patterns.num_touched_pairs(block_mask) == touched * 128 * 128


@pytest.mark.parametrize("name", ["tiny", "ragged"])
def test_blocks_and_scattered_have_the_same_pairs_in_every_row(name):
    blocks, scattered = mask_of(PATTERNS[name]), mask_of(PATTERNS[f"{name} scattered"])

    assert torch.equal(blocks.sum(1), scattered.sum(1))
    assert not torch.equal(blocks, scattered)
    assert patterns.num_touched_pairs(
        patterns.flex_block_mask(rule_of(PATTERNS[name]), PATTERNS[name].seq_len, CPU)
    ) < patterns.num_touched_pairs(
        patterns.flex_block_mask(rule_of(PATTERNS[f"{name} scattered"]), PATTERNS[name].seq_len, CPU)
    )


def test_every_random_key_adds_a_pair():
    with_random = SparsePattern(seq_len=1024, window=128, global_tokens=16, random_keys=64)
    without = SparsePattern(seq_len=1024, window=128, global_tokens=16, random_keys=0)
    added = mask_of(with_random).sum(1) - mask_of(without).sum(1)

    # The first block that is free of window and global tokens belongs to queries from 256 on.
    assert added.tolist() == [0] * 256 + [64] * 768


@pytest.mark.parametrize("name", ["tiny", "tiny scattered"])
def test_the_seed_decides(name):
    pattern = PATTERNS[name]
    assert torch.equal(patterns.random_table(pattern, 3), patterns.random_table(pattern, 3))
    assert not torch.equal(patterns.random_table(pattern, 3), patterns.random_table(pattern, 4))


def test_drawing_leaves_torchs_generator_alone():
    before = torch.random.get_rng_state()
    patterns.random_table(PATTERNS["tiny"])
    assert torch.equal(before, torch.random.get_rng_state())


def test_decoder_medium_at_8192_touches_less_than_a_quarter_of_the_causal_blocks():
    """What the speed of skipping rests on: 5 blocks of window, 1 global, 1 random for each block of 128 queries."""
    pattern = SparsePattern(seq_len=8192, window=1024, global_tokens=128, random_keys=64)
    free_blocks = [pattern.num_random_blocks(block) for block in range(64)]
    # By blocks of 128: a query block b sees window blocks b − 4 … b, block 0, and half of a random one.
    touched = sum(min(b + 1, 5) + (b >= 5) + free_blocks[b] for b in range(64))

    assert touched == 427
    assert touched / (64 * 65 / 2) < 0.25
    assert pattern.num_pairs() / patterns.causal_pairs(8192) == pytest.approx(0.1645, abs=1e-4)


@pytest.mark.parametrize(
    ("seq_len", "asked", "budget"), [(8192, 128, 64), (8192, 32, 32), (100, 64, 20), (4, 8, 0), (319, 64, 63)]
)
def test_the_dynamic_budget_is_at_most_64_and_a_fifth(seq_len, asked, budget):
    assert patterns.chosen_budget(seq_len, asked) == budget


@pytest.mark.parametrize("name", ["tiny", "ragged", "ragged scattered"])
def test_gathered_keys_serve_just_what_the_rule_leaves_out(name):
    """Folding the gathered columns back to where they came from gives the dense mask, and no pair twice."""
    pattern = PATTERNS[name]
    length, rule = pattern.seq_len, rule_of(pattern)
    chosen = torch.stack([torch.randperm(length)[:20] for _ in range(3)])
    seen = patterns.unfused_mask(patterns.gathered_block_mask(rule, chosen, length), 3)[:, 0]
    gathered, own = seen[:, :, :128].long(), seen[:, :, 128:].long()
    folded = own.scatter_add(2, chosen[:, None].expand(-1, length, -1), gathered[:, :, :20])
    mask = patterns.with_chosen(patterns.dense_mask(rule, length, CPU), chosen)[:, 0]

    assert not gathered[:, :, 20:].any()
    assert torch.equal(folded, mask.long())
    assert patterns.num_chosen_pairs(rule, chosen, length) == int(gathered.sum())


def test_the_gathered_mask_reads_what_is_chosen_when_it_is_used():
    pattern, chosen = PATTERNS["tiny"], torch.arange(100, 120)[None]
    block_mask = patterns.gathered_block_mask(rule_of(pattern), chosen, pattern.seq_len)
    before = patterns.unfused_mask(block_mask, 1)
    chosen += 50

    assert not torch.equal(before, patterns.unfused_mask(block_mask, 1))


def test_gather_puts_chosen_rows_in_front():
    x = torch.arange(24.0).view(2, 1, 6, 2)
    gathered = patterns.gather_chosen(x, torch.tensor([[4, 1], [0, 5]]))

    assert gathered.shape == (2, 1, 134, 2)
    assert gathered[:, 0, :3].tolist() == [[[8, 9], [2, 3], [0, 0]], [[12, 13], [22, 23], [0, 0]]]
    assert torch.equal(gathered[:, :, 128:], x)
