"""A mixture-of-experts layer with six ways to dispatch tokens to experts and back.

A token is routed to `top_k` experts: it fills that many *slots*. The experts read *rows*. The ways differ in the
order of the rows, in the matmul over them, and in how the outputs are combined:

    loop      the naive version: rows sorted by expert, one matmul per expert (the host waits for counts), index_add
    one_hot   rows ordered by running counts of a one-hot mask, no sort; grouped matmul, index_add
    capacity  the same number of rows for every expert, the excess is dropped; batched matmul
    tile      rows sorted, every expert's count rounded up to 128; grouped matmul
    grouped   rows sorted, no padding, nothing dropped; grouped matmul
    indexed   the naive version of `capacity`: unfilled rows read token 0, all by x[index], so the backward pass adds
              the gradients of all those rows to one token, one after another

`capacity`, `tile` and `grouped` use gathers in both directions, also in the backward pass, so there are no atomic
additions. They also compute the router and the shared expert's gate in one matmul.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepscope.errors import UsageError
from stepscope.workloads import gelu
from stepscope.workloads.custom_op import GatherRows
from stepscope.workloads.gelu import Gelu, gelu_by
from stepscope.workloads.ops.random_inputs import built_over_rows
from stepscope.workloads.workload import Built, Evidence, Proof, Value, Workload, knob, numbers

Dispatch = Literal["loop", "capacity", "one_hot", "tile", "grouped", "indexed"]
Routing = Literal["learned", "balanced"]
TILE_ROWS = 128
_GATHERED = ("capacity", "tile", "grouped")
Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertKnobs:
    experts: int = knob(8, "routed experts, not counting the shared one")
    top_k: int = knob(2, "experts per token")
    d_expert: int = knob(3072, "hidden width of a routed expert")
    dispatch: Dispatch = knob("loop", "how tokens get to their experts and back")  # noqa: RUF009  a field
    capacity_factor: float = knob(1.25, "rows per expert over the mean, with dispatch=capacity; the rest is dropped")
    routing: Routing = knob(  # noqa: RUF009  knob() is a dataclass field
        "learned", "balanced: a hash routes as evenly as a trained router; an untrained one fills two of eight"
    )
    gelu: Gelu = knob("torch", "kept: one kernel per direction, its output kept for the backward pass")  # noqa: RUF009  a field


GATE: Mapping[str, Value] = {"experts": 4, "top_k": 2, "d_expert": 40, "capacity_factor": 2.0}
"""Sizes for the gate. The capacity factor is experts ÷ top_k, so no token is dropped, whatever the router does."""


class MixtureOfExperts(nn.Module):
    """Σ over the chosen experts of softmax(router x) · W2 gelu(W1 x), not renormalized, + a gated shared expert."""

    def __init__(self, width: int, shared_width: int, knobs: ExpertKnobs) -> None:
        super().__init__()
        self.knobs, self.top_k = knobs, knobs.top_k
        num_experts, expert_width = knobs.experts, knobs.d_expert
        if not 1 <= self.top_k <= num_experts:
            raise UsageError(f"top_k={self.top_k}: must be between 1 and the number of experts ({num_experts})")
        if knobs.capacity_factor <= 0:
            raise UsageError(f"capacity_factor={knobs.capacity_factor}: must be positive")
        self.router = nn.Linear(width, num_experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(num_experts, width, expert_width) * width**-0.5)
        self.w2 = nn.Parameter(torch.randn(num_experts, expert_width, width) * expert_width**-0.5)
        self.shared_w1 = nn.Linear(width, shared_width, bias=False)
        self.shared_w2 = nn.Linear(shared_width, width, bias=False)
        self.shared_gate = nn.Linear(width, 1, bias=False)
        # Updated in place, like a running mean: works in a CUDA graph and needs no synchronization.
        self.register_buffer("slots_per_expert", torch.zeros(num_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("last_rows", torch.zeros(num_experts, dtype=torch.int32), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's output for x [..., width], and E · Σ_e share_e · mean probability_e: 1 if balanced."""
        tokens = x.reshape(-1, x.shape[-1])
        logits, gate = self._gates(tokens)
        probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        weights, experts = self._route(probabilities)
        num_experts = self.w1.shape[0]
        chosen = torch.arange(num_experts, device=x.device)[:, None] == experts.reshape(-1)
        counts = chosen.sum(1)
        shares = counts.to(probabilities.dtype) / experts.numel()
        balance = num_experts * (shares * probabilities.mean(0)).sum()

        routed = self._routed(tokens, weights, experts.reshape(-1), chosen, counts)
        shared = self.shared_w2(gelu_by(self.knobs.gelu, self.shared_w1(tokens)))
        out = routed + gate.sigmoid() * shared
        self.slots_per_expert.copy_(counts)
        return out.reshape(x.shape), balance

    def _gates(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        if self.knobs.dispatch not in _GATHERED:
            return self.router(tokens), self.shared_gate(tokens)
        # One matmul of aligned width for both: a matmul of width 1 is just as slow, and its backward slower.
        num_experts = self.w1.shape[0]
        weight = torch.cat((self.router.weight, self.shared_gate.weight))
        both = functional.linear(tokens, functional.pad(weight, (0, 0, 0, -len(weight) % 16)))
        return both[:, :num_experts], both[:, num_experts : num_experts + 1]

    def _route(self, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        if self.knobs.routing == "learned":
            weights, experts = probabilities.topk(self.top_k, dim=-1)
            return weights, experts
        # The first expert is a multiplicative hash of the position (Knuth, vol. 3, 6.4), the others follow it. The
        # factors are small because compiled code uses 32-bit index arithmetic.
        num_tokens, num_experts = probabilities.shape
        places = torch.arange(num_tokens, device=probabilities.device)[:, None]
        others = torch.arange(self.top_k, device=probabilities.device)
        experts = ((places * 167 + places // 256 * 89) % 256 * num_experts // 256 + others) % num_experts
        return probabilities.gather(1, experts), experts

    def _routed(self, x: Tensor, weights: Tensor, experts: Tensor, chosen: Tensor, counts: Tensor) -> Tensor:
        dispatch, num_experts = self.knobs.dispatch, counts.shape[0]
        if dispatch == "loop":
            return self._loop(x, weights, experts)
        if dispatch == "one_hot":
            return self._one_hot(x, weights, chosen, counts)
        if dispatch in ("capacity", "indexed"):
            capacity = rows_per_expert(experts.numel(), num_experts, self.knobs.capacity_factor)
            if dispatch == "indexed":
                return self._indexed(x, weights, experts, counts, capacity)
            starts = torch.arange(num_experts, device=x.device) * capacity
            placement = _padded(experts, counts, starts, num_experts * capacity, capacity)
            return self._gathered(x, weights, placement, torch.bmm, (num_experts, capacity, x.shape[1]))
        if dispatch == "tile":
            tiled = (counts + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
            ends = tiled.cumsum(0)
            # Enough rows for any routing; the last expert's tail is computed but never read.
            num_rows = math.ceil((experts.numel() + num_experts * (TILE_ROWS - 1)) / TILE_ROWS) * TILE_ROWS
            placement = _padded(experts, counts, ends - tiled, num_rows, None)
            ends = torch.cat((ends[:-1], ends.new_full((1,), num_rows)))
        else:
            order = experts.argsort(stable=True)
            placement, ends = _Placement(_inverse(order), order), counts.cumsum(0)
        return self._gathered(x, weights, placement, self._grouped(ends))

    def _grouped(self, ends: Tensor) -> Product:
        ends = ends.to(torch.int32)
        self.last_rows.copy_(ends)
        return lambda rows, weights: grouped_matmul(rows, weights, ends)

    def _loop(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        order = experts.argsort(stable=True)
        token = order // self.top_k
        even, rest = divmod(experts.numel(), self.w1.shape[0])
        balanced = [even + (expert < rest) for expert in range(self.w1.shape[0])]
        counts = torch.bincount(experts, minlength=self.w1.shape[0])
        rows = x[token]
        y = torch.empty_like(rows)
        begin = 0
        for count, w1, w2 in zip(numbers(counts, balanced, "experts are filled evenly"), self.w1, self.w2):
            end = begin + count
            if count:
                y[begin:end] = gelu_by(self.knobs.gelu, rows[begin:end] @ w1) @ w2
            begin = end
        y = y * weights.reshape(-1)[order][:, None].to(y.dtype)
        return y.new_zeros(x.shape).index_add(0, token, y)

    def _one_hot(self, x: Tensor, weights: Tensor, chosen: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0)
        # Scanned along the last dimension, where GPUs scan in parallel.
        row_of_slot = ((chosen.cumsum(1) + (ends - counts)[:, None] - 1) * chosen).sum(0)
        slot_of_row = _inverse(row_of_slot)
        token = slot_of_row // self.top_k
        y = self._experts(x.index_select(0, token), self._grouped(ends))
        y = y * weights.reshape(-1).index_select(0, slot_of_row)[:, None].to(y.dtype)
        return y.new_zeros(x.shape).index_add(0, token, y)

    def _indexed(self, x: Tensor, weights: Tensor, experts: Tensor, counts: Tensor, capacity: int) -> Tensor:
        num_rows = counts.shape[0] * capacity
        rank = _inverse(experts.argsort(stable=True)) - (counts.cumsum(0) - counts)[experts]
        kept = rank < capacity
        slots = torch.arange(experts.numel(), device=x.device)
        row_of_slot = experts * capacity + rank.clamp(max=capacity - 1)
        # Dropped slots go to an extra last row, which is removed.
        token_of_row = torch.zeros(num_rows + 1, dtype=torch.int64, device=x.device)
        token_of_row[torch.where(kept, row_of_slot, num_rows)] = slots // self.top_k
        rows = x[token_of_row[:-1]].view(counts.shape[0], capacity, -1)
        y = self._experts(rows, torch.bmm).view(num_rows, -1)[row_of_slot].view(*weights.shape, -1)
        return (y * (weights * kept.view(weights.shape))[..., None].to(y.dtype)).sum(1)

    def _gathered(
        self, x: Tensor, weights: Tensor, at: "_Placement", product: Product, shape: tuple[int, ...] | None = None
    ) -> Tensor:
        rows = GatherRows.apply(x, at.slot_of_row, at.row_of_slot, at.kept, self.top_k)
        y = self._experts(rows if shape is None else rows.view(shape), product).view(-1, x.shape[1])
        slots = GatherRows.apply(y, at.row_of_slot, at.slot_of_row, at.filled, 1).view(*weights.shape, -1)
        if at.kept is not None:
            weights = weights * at.kept.view(weights.shape)
        return (slots * weights[..., None].to(slots.dtype)).sum(1)

    def _experts(self, rows: Tensor, product: Product) -> Tensor:
        return product(gelu_by(self.knobs.gelu, product(rows, self.w1)), self.w2)


def grouped_matmul(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return rows [R, D] × weights [E, D, F] as [R, F]; `ends[e]` is the end of the rows of expert e.

    One grouped matmul in bfloat16, the only dtype with a kernel (torch 2.8 on CUDA, 2.10 elsewhere). Otherwise one
    matmul per expert; then `aten::_grouped_mm` is missing from the trace, and the claim is unproven.
    """
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        # Autocast does not cover the grouped matmul.
        dtype = torch.get_autocast_dtype(device)
        rows, weights = rows.to(dtype), weights.to(dtype)
    if rows.dtype is torch.bfloat16:
        if hasattr(functional, "grouped_mm"):
            return functional.grouped_mm(rows, weights, offs=ends)
        if hasattr(torch, "_grouped_mm") and device == "cuda":
            return torch._grouped_mm(rows, weights, offs=ends)
    even = [rows.shape[0] * (expert + 1) // ends.shape[0] for expert in range(ends.shape[0] - 1)]
    parts = rows.tensor_split(numbers(ends[:-1], even, "experts are filled evenly"))
    return torch.cat([part @ weight for part, weight in zip(parts, weights)])


def rows_per_expert(num_slots: int, num_experts: int, capacity_factor: float) -> int:
    """Return the rows per expert under `capacity`: factor × mean, rounded up to 8, at most the number of slots.

    >>> rows_per_expert(131_072, 8, 1.25)
    20480
    """
    wanted = math.ceil(capacity_factor * num_slots / num_experts)
    return min(math.ceil(wanted / 8) * 8, num_slots)


class _Placement(NamedTuple):
    """Which row each slot has, and which slot each row."""

    row_of_slot: Tensor
    slot_of_row: Tensor
    kept: Tensor | None = None  # which slots have a row; None: all
    filled: Tensor | None = None  # which rows have a slot; None: all


def _padded(experts: Tensor, counts: Tensor, starts: Tensor, num_rows: int, capacity: int | None) -> _Placement:
    """Place the slots of expert e in rows from `starts[e]`, at most `capacity` of them."""
    order = experts.argsort(stable=True)
    first = counts.cumsum(0) - counts
    rank = _inverse(order) - first[experts]
    row_of_slot = (starts[experts] + rank).clamp(max=num_rows - 1)
    rows = torch.arange(num_rows, device=experts.device)
    owner = torch.searchsorted(starts, rows, right=True) - 1
    rank_of_row = rows - starts[owner]
    # A row without a slot repeats another token; its output is not read, and its gradient is set to zero.
    slot_of_row = order[(first[owner] + rank_of_row).clamp(max=experts.numel() - 1)]
    kept = None if capacity is None else rank < capacity
    return _Placement(row_of_slot, slot_of_row, kept, rank_of_row < counts[owner])


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))


def facts(layers: Sequence[MixtureOfExperts]) -> Mapping[str, float]:
    """Return figures of the last pass: dropped slots, the busiest expert's load over the mean, padding rows.

    `dropped_flops` counts a forward pass: two matmuls per slot.
    """
    counts = torch.stack([layer.slots_per_expert for layer in layers]).cpu()
    ends = torch.stack([layer.last_rows for layer in layers]).cpu()
    layer, knobs, num_slots = layers[0], layers[0].knobs, int(counts[0].sum())
    found = {"load_max_over_mean": float((counts.max(1).values / counts.double().mean(1)).max())}
    dropped, num_rows, every = 0, num_slots, max(1, num_slots * len(layers))
    if knobs.dispatch in ("capacity", "indexed"):
        capacity = rows_per_expert(num_slots, counts.shape[1], knobs.capacity_factor)
        dropped, num_rows = int((counts - capacity).clamp(min=0).sum()), counts.shape[1] * capacity
    elif knobs.dispatch == "tile":
        num_rows = int(ends[0, -1])
    if knobs.dispatch in ("tile", "grouped", "one_hot"):
        found["unaligned_experts"] = float((ends % TILE_ROWS != 0).sum())
    return found | {
        "dropped_slots": float(dropped),
        "dropped_share": dropped / every,
        "dropped_flops": float(dropped * 4 * layer.w1.shape[1] * layer.w1.shape[2]),
        "padded_share": ((num_rows - num_slots) * len(layers) + dropped) / every,
    }


def with_experts(built: Built, layers: Sequence[MixtureOfExperts], knobs: ExpertKnobs) -> Built:
    """Return the workload with the proofs, facts and parameters per token of these layers."""
    idle = (knobs.experts - knobs.top_k) * 2 * layers[0].w1.shape[1] * knobs.d_expert * len(layers)
    dispatched = proof(knobs.dispatch, len(layers), knobs.experts)
    return replace(
        built,
        num_active_parameters=sum(p.numel() for p in built.module.parameters()) - idle,
        proofs=(dispatched, *gelu.proofs(knobs.gelu, 2 * len(layers)), *built.proofs),
        facts=lambda: facts(layers),
    )


def proof(dispatch: Dispatch, num_layers: int, num_experts: int) -> Proof:
    num_layers = max(1, num_layers)
    # A matmul and its calls per layer, an op that runs once per layer, and ops that only other ways write. The math
    # backend of attention calls bmm too, so an op that only `capacity` and `tile` call must have run as well.
    matmul, num_matmuls, op, others = {
        "loop": ("aten::mm", 2 * num_experts, "aten::bincount", ()),
        "capacity": ("aten::bmm", 2, "searchsorted", ("tensor_split", "bincount")),
        "indexed": ("aten::bmm", 2, "index_put", ("searchsorted", "tensor_split", "bincount")),
    }.get(dispatch, ("", 0, "", ()))

    def matmuls(evidence: Evidence) -> str | None:
        if evidence.calls("grouped_mm") or evidence.written(*others):
            return None
        calls = evidence.calls(op) if dispatch == "indexed" else evidence.written(op.removeprefix("aten::"))
        products = evidence.calls(matmul)
        enough = products >= num_matmuls * num_layers and calls >= num_layers
        return f"{matmul} ×{products}, {op} ×{calls}" if enough else None

    def one_hot(evidence: Evidence) -> str | None:
        # Compiled in bfloat16, index_add becomes an accumulating index_put.
        added, num_sorted = evidence.calls("index_add", "index_put"), evidence.calls("aten::sort", "argsort")
        return f"index_add or index_put ×{added}, no aten::sort" if added >= num_layers and not num_sorted else None

    def grouped(evidence: Evidence) -> str | None:
        # On a GPU the op falls back to one matmul per group without a kernel, so the kernel itself must have run.
        on_cuda = evidence.device == "cuda"
        parts = ("grouped", "GroupProblemShape") if on_cuda else ("aten::_grouped_mm",)
        calls = evidence.launches(*parts) if on_cuda else evidence.calls(*parts)
        unaligned = int(evidence.facts.get("unaligned_experts", 1))
        if calls < num_layers or (dispatch == "tile" and unaligned):
            return None
        return f"{' or '.join(parts)} ×{calls}" + (f", all rows by {TILE_ROWS}" if dispatch == "tile" else "")

    shows = {"one_hot": one_hot, "tile": grouped, "grouped": grouped}.get(dispatch, matmuls)
    return Proof(claim=f"dispatch={dispatch}", shows=shows)


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig(ExpertKnobs):
    width: int = knob(768, "width of a token")
    d_shared: int = knob(3072, "hidden width of the shared expert")
    seq_len: int = knob(4096, "tokens per sequence")
    batch: int = knob(16, "sequences per batch")


class Layer(nn.Module):
    """x → the layer's output and its balance loss."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.moe = MixtureOfExperts(config.width, config.d_shared, config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, balance = self.moe(x)
        return out, balance


def build(config: MoeConfig) -> Built:
    layer, tokens = Layer(config), config.batch * config.seq_len
    products = config.experts + 1 + 2 * (config.top_k * config.d_expert + config.d_shared)
    built = built_over_rows(layer, config, forward_flops=2 * config.width * products * tokens)
    return with_experts(built, [layer.moe], config)


WORKLOAD = Workload(
    name="moe",
    about="one mixture-of-experts layer: six ways to dispatch tokens",
    config=MoeConfig,
    presets={
        "538m": {},
        "23m": {"width": 384, "d_expert": 192, "d_shared": 192},
        "tiny": {"width": 64, "experts": 4, "d_expert": 64, "d_shared": 64, "seq_len": 64, "batch": 2},
    },
    build=build,
    reference={"dispatch": "loop", "gelu": "torch"},
    gate={**GATE, "width": 32, "d_shared": 48, "seq_len": 48, "batch": 2},
)
