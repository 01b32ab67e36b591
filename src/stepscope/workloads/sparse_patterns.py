"""Which keys a query sees in sparse attention, as one rule: a dense mask, a FlexAttention block mask, and counts.

The fixed pattern, for query i and key j ≤ i: j lies in the window (i − j ≤ window ÷ 2), or among the first
`global_tokens`, or was drawn at random. Global rows need no rule of their own: where i is among the first tokens,
every j ≤ i is too.

Random keys are drawn from what the window and the global tokens leave over, so that each one adds a pair. `blocks`:
`random_keys`, rounded up to whole blocks of 64, drawn once for each block of 128 queries, the tile in which the GPU
works. `scattered`: every query draws for itself just as many keys as `blocks` would give it. So both have the same
number of pairs in every row, and differ only in what a kernel can skip.

The dynamic pattern has no fixed global tokens. Each sequence chooses its own, by score, as columns: every later query
sees them. They may lie anywhere, in every block of keys, so that nothing could be skipped; therefore their keys and
values are gathered in front of the others, and serve the pairs that the fixed rule leaves out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

# FlexAttention's default kernels for bfloat16 on Hopper work in tiles of 128 × 128 and refuse smaller mask blocks.
FLEX_BLOCK = 128
QUERY_BLOCK = 128
RANDOM_BLOCK = 64
MAX_CHOSEN = 64
"""Global tokens that the dynamic pattern may choose; they fill half of one gathered block."""

Rule = Callable[[Tensor, Tensor], Tensor]
"""(query positions, key positions), broadcast together → bool, True where the query sees the key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SparsePattern:
    """The fixed pattern of one sequence length."""

    seq_len: int
    window: int
    global_tokens: int
    random_keys: int
    random: Literal["blocks", "scattered"] = "blocks"

    @property
    def reach(self) -> int:
        """How many keys before itself a query sees in its window."""
        return self.window // 2

    def free_blocks(self, query_block: int) -> range:
        """The blocks of 64 keys that no query of a block of 128 sees through its window or as global tokens."""
        first = -(-self.global_tokens // RANDOM_BLOCK)
        end = max(0, query_block * QUERY_BLOCK - self.reach) // RANDOM_BLOCK
        return range(first, max(first, end))

    def num_random_blocks(self, query_block: int) -> int:
        """How many blocks of 64 keys a block of 128 queries draws."""
        return min(-(-self.random_keys // RANDOM_BLOCK), len(self.free_blocks(query_block)))

    def num_pairs(self) -> int:
        """How many (query, key) pairs attention computes, of seq_len²."""
        pairs = 0
        for query in range(self.seq_len):
            before_window = max(0, query - self.reach)
            pairs += query + 1 - before_window + min(self.global_tokens, before_window)
            pairs += RANDOM_BLOCK * self.num_random_blocks(query // QUERY_BLOCK)
        return pairs


def causal_pairs(seq_len: int) -> int:
    """How many pairs causal attention has: every key up to the query."""
    return seq_len * (seq_len + 1) // 2


def chosen_budget(seq_len: int, global_tokens: int) -> int:
    """How many global tokens the dynamic pattern chooses: at most 64 and a fifth of the sequence."""
    return min(global_tokens, MAX_CHOSEN, seq_len // 5)


def random_table(pattern: SparsePattern, seed: int = 0) -> Tensor:
    """What was drawn, bool: [query blocks, key blocks] for `blocks`, [queries, keys] for `scattered`.

    Drawn on the CPU whatever the device, so that a pattern is the same everywhere, then put on the default device.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    num_query_blocks, num_key_blocks = -(-pattern.seq_len // QUERY_BLOCK), -(-pattern.seq_len // RANDOM_BLOCK)
    scattered = pattern.random == "scattered"
    shape = (pattern.seq_len, pattern.seq_len) if scattered else (num_query_blocks, num_key_blocks)
    table = torch.zeros(shape, dtype=torch.bool, device="cpu")
    for block in range(num_query_blocks):
        num_blocks, free = pattern.num_random_blocks(block), pattern.free_blocks(block)
        if not num_blocks:
            continue
        if scattered:
            rows = table[block * QUERY_BLOCK : (block + 1) * QUERY_BLOCK]
            draws = torch.rand(rows.shape, generator=generator, device="cpu")
            positions = torch.arange(pattern.seq_len, device="cpu")
            queries = positions[block * QUERY_BLOCK :][: len(rows), None]
            taken = (positions < pattern.global_tokens) | (positions >= queries - pattern.reach)
            keys = draws.masked_fill(taken, -1.0).topk(num_blocks * RANDOM_BLOCK).indices
            rows.scatter_(1, keys, torch.ones_like(keys, dtype=torch.bool))
        else:
            drawn = torch.randperm(len(free), generator=generator, device="cpu")[:num_blocks]
            table[block, drawn + free.start] = True
    return table.to(torch.empty(0).device)


def fixed_rule(pattern: SparsePattern, table: Tensor) -> Rule:
    """The fixed pattern as a function of positions, pointwise, so that FlexAttention can compile it."""
    reach, global_tokens = pattern.reach, pattern.global_tokens
    most = max(pattern.num_random_blocks(block) for block in range(-(-pattern.seq_len // QUERY_BLOCK)))
    drawn = _drawn_keys(table) if pattern.random == "scattered" else _drawn_blocks(table, most)

    def rule(query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & ((query - key <= reach) | (key < global_tokens) | drawn(query, key))

    return rule


def _drawn_keys(table: Tensor) -> Rule:
    return lambda query, key: table[query, key]


def _drawn_blocks(table: Tensor, most: int) -> Rule:
    """Whether a query's block drew the key's: compared with the few numbers, at most `most`, that the block drew.

    A kernel then looks up a number a query, where the table would cost it one for every pair.
    """
    counts = table.sum(1)
    ranks = table.cumsum(1) * table
    # The m-th block that each block of queries drew; −1, which is no block, where it drew fewer.
    numbers = [torch.where(counts >= m, (ranks == m).int().argmax(1), -1) for m in range(1, most + 1)]

    def drawn(query: Tensor, key: Tensor) -> Tensor:
        block = key // RANDOM_BLOCK
        found = torch.zeros_like(query, dtype=torch.bool) & (block < 0)
        for number in numbers:
            found = found | (number[query // QUERY_BLOCK] == block)
        return found

    return drawn


def dense_mask(rule: Rule, seq_len: int, device: torch.device) -> Tensor:
    """The rule as a mask [seq_len, seq_len], True where a query sees a key."""
    positions = torch.arange(seq_len, device=device)
    return rule(positions[:, None], positions[None, :])


def with_chosen(mask: Tensor, chosen: Tensor) -> Tensor:
    """The mask [seq_len, seq_len] with the chosen columns [batch, budget]: [batch, 1, queries, keys]."""
    seq_len = mask.shape[-1]
    is_chosen = torch.zeros(chosen.shape[0], seq_len, dtype=torch.bool, device=mask.device)
    columns = is_chosen.scatter(1, chosen, torch.ones_like(chosen, dtype=torch.bool))
    causal = torch.ones_like(mask).tril()
    return (mask | (columns[:, None, :] & causal))[:, None]


def num_chosen_pairs(rule: Rule, chosen: Tensor, seq_len: int) -> int:
    """How many pairs the chosen tokens [batch, budget] add to those of the rule, over the whole batch."""
    queries = torch.arange(seq_len, device=chosen.device)[:, None, None]
    return int(((chosen <= queries) & ~rule(queries, chosen)).sum())


def flex_block_mask(rule: Rule, seq_len: int, device: torch.device) -> Any:
    """The rule as a BlockMask of FlexAttention: which 128 × 128 blocks to compute, and the rule inside them."""
    from torch.nn.attention.flex_attention import create_block_mask

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return rule(query, key)

    return create_block_mask(mask_mod, None, None, seq_len, seq_len, device=device, BLOCK_SIZE=FLEX_BLOCK)


def gathered_block_mask(rule: Rule, chosen: Tensor, seq_len: int) -> Any:
    """A BlockMask over `gather_chosen`'s keys: one block of chosen ones, then the sequence's own.

    Which blocks are computed does not depend on what is chosen, so that the mask is made once; the rule inside the
    first block reads `chosen` [batch, budget] anew in every pass.
    """
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    budget = chosen.shape[-1]

    def may_be_seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = rule(query, (key - FLEX_BLOCK).clamp(min=0))
        return torch.where(key < FLEX_BLOCK, key < budget, own)

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        gathered = key < FLEX_BLOCK
        position = torch.where(gathered, chosen[batch, key.clamp(max=budget - 1)], key - FLEX_BLOCK)
        by_rule = rule(query, position)
        added = (key < budget) & (position <= query) & ~by_rule
        return torch.where(gathered, added, by_rule)

    num_keys = FLEX_BLOCK + seq_len
    blocks = create_block_mask(
        may_be_seen, None, None, seq_len, num_keys, device=chosen.device, BLOCK_SIZE=FLEX_BLOCK
    )
    return BlockMask.from_kv_blocks(
        blocks.kv_num_blocks,
        blocks.kv_indices,
        blocks.full_kv_num_blocks,
        blocks.full_kv_indices,
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(seq_len, num_keys),
    )


def gather_chosen(x: Tensor, chosen: Tensor) -> Tensor:
    """x [batch, heads, seq_len, width] with a block of 128 in front: its rows at `chosen`, then zeros."""
    rows = x.gather(2, chosen[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
    return torch.cat((functional.pad(rows, (0, 0, 0, FLEX_BLOCK - chosen.shape[1])), x), dim=2)


def num_touched_pairs(block_mask: Any) -> int:
    """How many pairs lie in the blocks that FlexAttention computes."""
    blocks = block_mask.kv_num_blocks.sum()
    if block_mask.full_kv_num_blocks is not None:
        blocks = blocks + block_mask.full_kv_num_blocks.sum()
    return int(blocks) * FLEX_BLOCK**2


def unfused_mask(block_mask: Any, batch: int) -> Tensor:
    """What a BlockMask lets through, bool [batch, 1, queries, keys]: listed blocks, and its rule inside them."""
    from torch.nn.attention.flex_attention import create_mask

    num_queries, num_keys = block_mask.seq_lengths
    listed = block_mask.to_dense().bool().repeat_interleave(FLEX_BLOCK, -2).repeat_interleave(FLEX_BLOCK, -1)
    seen = create_mask(block_mask.mask_mod, batch, 1, num_queries, num_keys, device=block_mask.kv_indices.device)
    return seen & listed[..., :num_queries, :num_keys]
