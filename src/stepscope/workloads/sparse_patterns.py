"""Which keys a query sees in sparse attention, as one rule: a dense mask, a FlexAttention block mask, and counts.

In the fixed pattern, query i sees key j ≤ i if j is in the window (i − j ≤ window ÷ 2), is one of the first
`global_tokens`, or was drawn at random. Global rows need no extra rule: if i is a global token, so is every j ≤ i.

Random keys are drawn outside the window and the global tokens, so that each one adds a pair. With `blocks`,
`random_keys` is rounded up to whole blocks of 64, drawn once per block of 128 queries, the GPU's tile. With
`scattered`, every query draws the same number of keys individually. Both have the same number of pairs in every row
and differ only in what a kernel can skip.

The dynamic pattern has no fixed global tokens. Each sequence chooses its own by score, and every later query sees
them. They may be in any block of keys, so no block could be skipped. Therefore their keys and values are gathered in
front of the others and serve the pairs that the fixed rule leaves out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

# FlexAttention's default bfloat16 kernels on Hopper use tiles of 128 × 128 and reject smaller mask blocks.
FLEX_BLOCK = 128
QUERY_BLOCK = 128
RANDOM_BLOCK = 64
MAX_CHOSEN = 64  # the most global tokens that the dynamic pattern chooses; they fill half of one gathered block

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
        """Return how many earlier keys a query sees in its window."""
        return self.window // 2

    def free_blocks(self, query_block: int) -> range:
        """Return the blocks of 64 keys outside the window and the global tokens of a block of 128 queries."""
        first = -(-self.global_tokens // RANDOM_BLOCK)
        end = max(0, query_block * QUERY_BLOCK - self.reach) // RANDOM_BLOCK
        return range(first, max(first, end))

    def num_random_blocks(self, query_block: int) -> int:
        """Return how many blocks of 64 keys a block of 128 queries draws."""
        return min(-(-self.random_keys // RANDOM_BLOCK), len(self.free_blocks(query_block)))

    def num_pairs(self) -> int:
        """Return how many of the seq_len² (query, key) pairs attention computes."""
        pairs = 0
        for query in range(self.seq_len):
            before_window = max(0, query - self.reach)
            pairs += query + 1 - before_window + min(self.global_tokens, before_window)
            pairs += RANDOM_BLOCK * self.num_random_blocks(query // QUERY_BLOCK)
        return pairs


def causal_pairs(seq_len: int) -> int:
    return seq_len * (seq_len + 1) // 2


def chosen_budget(seq_len: int, global_tokens: int) -> int:
    """Return how many global tokens the dynamic pattern chooses: at most 64 and a fifth of the sequence."""
    return min(global_tokens, MAX_CHOSEN, seq_len // 5)


def random_table(pattern: SparsePattern, seed: int = 0) -> Tensor:
    """Return what was drawn, as bool: [query blocks, key blocks] for `blocks`, [queries, keys] for `scattered`.

    Drawn on the CPU, so that a pattern is the same everywhere, then moved to the default device.
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
    """Return the fixed pattern as a pointwise function of positions, which FlexAttention can compile."""
    reach, global_tokens = pattern.reach, pattern.global_tokens
    most = max(pattern.num_random_blocks(block) for block in range(-(-pattern.seq_len // QUERY_BLOCK)))
    drawn: Rule = (
        (lambda query, key: table[query, key]) if pattern.random == "scattered" else _drawn_blocks(table, most)
    )

    def rule(query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & ((query - key <= reach) | (key < global_tokens) | drawn(query, key))

    return rule


def _drawn_blocks(table: Tensor, most: int) -> Rule:
    """Return a rule that compares the key's block with the blocks, at most `most`, that the query's block drew.

    A kernel then needs one lookup per query; with the table it would need one per pair.
    """
    counts = table.sum(1)
    ranks = table.cumsum(1) * table
    # The m-th block drawn by each block of queries; −1 if it drew fewer.
    numbers = [torch.where(counts >= m, (ranks == m).int().argmax(1), -1) for m in range(1, most + 1)]

    def drawn(query: Tensor, key: Tensor) -> Tensor:
        block = key // RANDOM_BLOCK
        found = torch.zeros_like(query, dtype=torch.bool) & (block < 0)
        for number in numbers:
            found = found | (number[query // QUERY_BLOCK] == block)
        return found

    return drawn


def dense_mask(rule: Rule, seq_len: int, device: torch.device) -> Tensor:
    """Return the rule as a mask [seq_len, seq_len], True where a query sees a key."""
    positions = torch.arange(seq_len, device=device)
    return rule(positions[:, None], positions[None, :])


def with_chosen(mask: Tensor, chosen: Tensor) -> Tensor:
    """Return the mask with the chosen columns [batch, budget] added, as [batch, 1, queries, keys]."""
    seq_len = mask.shape[-1]
    is_chosen = torch.zeros(chosen.shape[0], seq_len, dtype=torch.bool, device=mask.device)
    columns = is_chosen.scatter(1, chosen, torch.ones_like(chosen, dtype=torch.bool))
    causal = torch.ones_like(mask).tril()
    return (mask | (columns[:, None, :] & causal))[:, None]


def num_chosen_pairs(rule: Rule, chosen: Tensor, seq_len: int) -> int:
    """Return how many pairs the chosen tokens [batch, budget] add to the rule's, over the whole batch."""
    queries = torch.arange(seq_len, device=chosen.device)[:, None, None]
    return int(((chosen <= queries) & ~rule(queries, chosen)).sum())


def flex_block_mask(rule: Rule, seq_len: int, device: torch.device) -> Any:
    """Return the rule as a FlexAttention BlockMask: which 128 × 128 blocks to compute, and the rule inside them."""
    from torch.nn.attention.flex_attention import create_block_mask

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return rule(query, key)

    return create_block_mask(mask_mod, None, None, seq_len, seq_len, device=device, BLOCK_SIZE=FLEX_BLOCK)


def gathered_block_mask(rule: Rule, chosen: Tensor, seq_len: int) -> Any:
    """Return a BlockMask over the keys of `gather_chosen`: one block of chosen keys, then the sequence's own.

    Which blocks are computed does not depend on the choice, so the mask is made once. The rule inside the first
    block reads `chosen` [batch, budget] in every pass.
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
    """Return x [batch, heads, seq_len, width] with a block of 128 in front: its rows at `chosen`, then zeros."""
    rows = x.gather(2, chosen[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
    return torch.cat((functional.pad(rows, (0, 0, 0, FLEX_BLOCK - chosen.shape[1])), x), dim=2)


def num_touched_pairs(block_mask: Any) -> int:
    """Return the number of pairs in the blocks that FlexAttention computes."""
    blocks = block_mask.kv_num_blocks.sum()
    if block_mask.full_kv_num_blocks is not None:
        blocks = blocks + block_mask.full_kv_num_blocks.sum()
    return int(blocks) * FLEX_BLOCK**2


def unfused_mask(block_mask: Any, batch: int) -> Tensor:
    """Return a BlockMask as a bool mask [batch, 1, queries, keys]: its blocks, and its rule inside them."""
    from torch.nn.attention.flex_attention import create_mask

    num_queries, num_keys = block_mask.seq_lengths
    listed = block_mask.to_dense().bool().repeat_interleave(FLEX_BLOCK, -2).repeat_interleave(FLEX_BLOCK, -1)
    seen = create_mask(block_mask.mask_mod, batch, 1, num_queries, num_keys, device=block_mask.kv_indices.device)
    return seen & listed[..., :num_queries, :num_keys]
