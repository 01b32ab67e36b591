"""FLOPs of one op from its shapes: torch's own formulas, and the few it lacks.

Conventions (docs/measurement.md): a multiply-add is 2 FLOPs. Causal attention counts half of its scores. The *model*
FLOPs of attention's backward are twice its forward: recomputed scores are hardware FLOPs only.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from stepscope.recorder.clock import BACKWARD, FORWARD
from stepscope.recorder.machine.environment import float32_matmul
from stepscope.recorder.values import stored, tensors_in

_DTYPES = {torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "int8"}


def _attention(query: Any, key: Any, value: Any, *_args: Any, **_kwargs: Any) -> int:
    """Return the FLOPs of (batch, heads, length, width) attention. Keys may have fewer heads."""
    batch, heads, length, width = query.shape
    return int(2 * batch * heads * length * key.shape[2] * (width + value.shape[3]))


def _attention_backward(_grad_out: Any, query: Any, key: Any, value: Any, *_args: Any, **_kwargs: Any) -> int:
    """Return the FLOPs of the recomputed scores and of the gradients of both products."""
    batch, heads, length, width = query.shape
    return int(2 * batch * heads * length * key.shape[2] * (3 * width + 2 * value.shape[3]))


def _grouped_product(rows: Any, weights: Any, *_args: Any, **_kwargs: Any) -> int:
    """Return the FLOPs of one product per group: groups split the rows, or the inner dimension."""
    if rows.dim() == 3 and weights.dim() == 3:
        return int(2 * rows.shape[0] * rows.shape[1] * rows.shape[2] * weights.shape[2])
    return int(2 * rows.shape[-2] * rows.shape[-1] * weights.shape[-1])


# Products whose FLOPs depend only on shapes that repeat in every layer, if none of the operands is sparse.
_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")

# Formulas where torch counts nothing (attention on a CPU, grouped products) or where older versions fail on keys with
# fewer heads than queries.
_FORMULAS: dict[str, Callable[..., int]] = {
    f"aten._scaled_dot_product_{kind}": formula
    for backend in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    for kind, formula in ((backend, _attention), (f"{backend}_backward", _attention_backward))
} | {"aten._grouped_mm": _grouped_product}


def _sparse_product(name: str, args: Any) -> int | None:
    """Return the FLOPs of a sparse matrix times a dense one, or of a dense one times it; None for any other op."""
    if name not in _PRODUCTS[:2]:
        return None
    left, right = args[-2:]
    if left.layout != torch.strided and right.layout == torch.strided:
        return 2 * _num_stored(left) * int(right.shape[-1])
    if left.layout == torch.strided:
        return 2 * _num_stored(right) * int(left.shape[0])
    return None


def _num_stored(tensor: Any) -> int:
    return int(stored(tensor)[-1].numel())


@dataclass(frozen=True)
class OpFlops:
    """FLOPs that one op call executes, how many of them the model needs, and their dtype."""

    flops: int
    model_flops: int
    dtype: str


def count_flops(func: Any, args: Any, kwargs: Any, out: Any) -> OpFlops | None:
    name = op_name(func)
    packet = getattr(func, "_overloadpacket", func)
    if any(tensor.layout != torch.strided for tensor in tensors_in(args)):
        flops = _sparse_product(name, args)
        return None if flops is None else OpFlops(flops, flops, _dtype(func, args, kwargs))
    if name in _FORMULAS:
        flops = _FORMULAS[name](*args, **kwargs)
    elif packet in flop_registry:
        flops = int(flop_registry[packet](*args, **kwargs, out_val=out))
    else:
        return None
    model_flops = flops
    if "attention" in name:
        if "backward" in name:
            # Its arguments are (grad_out, query, key, value, …). Three of its five products are as wide as the
            # queries, the first of them the recomputed scores, and two are as wide as the values.
            width, value_width = args[1].shape[-1], args[3].shape[-1]
            model_flops = int(flops * (2 * width + 2 * value_width) // (3 * width + 2 * value_width))
        if _argument(func, args, kwargs, ("is_causal", "custom_mask_type")):
            flops, model_flops = flops // 2, model_flops // 2
    return OpFlops(flops, model_flops, _dtype(func, args, kwargs))


def has_formula(func: Any) -> bool:
    return getattr(func, "_overloadpacket", func) in flop_registry or op_name(func) in _FORMULAS


def op_name(func: Any) -> str:
    """Return the op's name without its overload: `aten.mm`."""
    packet = getattr(func, "_overloadpacket", None)
    return str(packet) if packet is not None else str(func)


def _argument(func: Any, args: Any, kwargs: Any, names: tuple[str, ...]) -> Any:
    """Return the value of the first argument with one of these names, or None if the op has none."""
    schema = getattr(func, "_schema", None)
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name in names:
            return args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
    return None


def _dtype(func: Any, args: Any, kwargs: Any) -> str:
    tensors = list(tensors_in((args, kwargs)))
    # The operands decide, not a wider bias or output; or the op has an argument for it.
    operand = next((t for t in tensors if t.dim() >= 2), tensors[0])
    dtype = _argument(func, args, kwargs, ("product_dtype",)) or operand.dtype
    if dtype == torch.float32:
        if not operand.is_cuda:
            return "fp32"
        return float32_matmul(operand.device.index or 0, is_convolution="convolution" in op_name(func))
    if "float8" in str(dtype):
        return "fp8"
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))


# Libraries of torch that only communicate and copy: collectives, and what FSDP2 packs around them. `symm_mem` is not
# among them: it fuses collectives with products.
_TRANSFERS = (
    "c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "fsdp", "prim",
    "profiler",
)  # fmt: skip
# Copies, lookups and fills that no tag of torch marks.
_MOVES = (
    "aten._chunk_cat", "aten._foreach_copy_", "aten._foreach_zero_", "aten._local_scalar_dense", "aten._to_copy",
    "aten._unsafe_view", "aten.cat", "aten.clone", "aten.constant_pad_nd", "aten.copy_", "aten.embedding",
    "aten.fill_", "aten.flip", "aten.gather", "aten.index", "aten.index_select", "aten.repeat", "aten.roll",
    "aten.stack", "aten.zero_",
)  # fmt: skip


class Op:
    __slots__ = (
        "decomposes", "has_formula", "is_higher_order", "is_plain_product", "is_view", "may_hide_product",
        "moves_data", "name",
    )  # fmt: skip

    def __init__(self, func: Any) -> None:
        self.name = op_name(func)
        self.has_formula = has_formula(func)
        self.is_plain_product = self.name in _PRODUCTS
        self.is_view = getattr(func, "is_view", False)
        tags = {tag.name for tag in getattr(func, "tags", ())}
        is_view = self.is_view or not tags.isdisjoint(("view_copy", "inplace_view"))
        self.moves_data = is_view or self.name in _MOVES or _transfers_or_fills(func)
        self.may_hide_product = not self.moves_data and not tags & {"pointwise", "reduction"}
        self.is_higher_order = isinstance(func, torch._ops.HigherOrderOperator)
        # It may consist of ops that have formulas.
        self.decomposes = not self.has_formula and not self.is_higher_order and _has_decomposition(func)


def _transfers_or_fills(func: Any) -> bool:
    """Return whether an op only communicates, or fills a new tensor without reading another."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False
    namespace, _, name = schema.name.partition("::")
    if namespace in _TRANSFERS:
        return True
    reads = any("Tensor" in str(argument.type) for argument in schema.arguments)
    return namespace == "aten" and (not reads or name.startswith("new_") or name.endswith("_like"))


def _has_decomposition(func: Any) -> bool:
    """Return whether an op always runs as other ops.

    Some ops have both a decomposition and kernels (`silu_backward`, `_fused_rms_norm`). Decomposed, they would use
    memory that the program does not.
    """
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if func.namespace == "prim" or any(has(func.name(), device) for device in ("CPU", "CUDA")):
        return False
    return key in func.py_kernels or has(func.name(), key)


class FlopTally:
    """Counts each op. `weights_of` returns the weights among an op's arguments, as numbers from `add_weight`."""

    def __init__(self, weights_of: Callable[[Any], set[int]]) -> None:
        self._weights_of = weights_of
        self.backward_makes_graph = False  # whether the current backward creates a graph to be differentiated again
        self._known: dict[Any, OpFlops | None] = {}
        self._flops: Counter[tuple[str, str, str, bool]] = Counter()
        self._model_flops: Counter[str] = Counter()
        self._uncounted: dict[str, list[int]] = {}
        self._num_elements: list[int] = []
        self._num_dimensions: list[int] = []
        self._weight_flops: Counter[int] = Counter()
        self._activation_flops = 0  # forward products of two activations, as in attention
        self._looked_up: set[int] = set()
        self._touched: set[int] = set()
        self._hidden: dict[str, None] = {}  # ops that multiply by a weight and have no formula

    def add_weight(self, parameter: torch.Tensor) -> int:
        self._num_elements.append(parameter.numel())
        self._num_dimensions.append(parameter.dim())
        return len(self._num_elements) - 1

    def count(
        self, op: Op, func: Any, args: Any, kwargs: Any, out: Any, outputs: tuple[torch.Tensor, ...], phase: str
    ) -> None:
        """Count an op. `outputs` are the tensors in `out`."""
        given = (args, kwargs) if kwargs else args
        if op.has_formula:
            flops = self._flops_of(op, func, args, kwargs, out)
            if flops is not None and flops.flops:
                self._add(flops, op.name, phase, self._weights_of(given) if phase == FORWARD else set())
        elif not op.is_view and out is not None:
            num_elements = sum(tensor.numel() for tensor in outputs)
            if not op.moves_data:
                entry = self._uncounted.setdefault(op.name, [0, 0])
                entry[0] += 1
                entry[1] += num_elements
            if phase == FORWARD and (weights := self._weights_of(given)):
                if op.may_hide_product and any(self._num_dimensions[index] > 1 for index in weights):
                    self._hidden.setdefault(op.name)
                if num_elements:  # an expert that received no token is called with an empty tensor
                    self._touched |= weights
        if op.name == "aten.embedding":
            self._looked_up |= self._weights_of(args[:1])

    def table(self, compiled: bool, error: str | None) -> dict[str, Any]:
        """Return all counts as JSON values. `error` is the first op error, if any."""
        return {
            "by_op": [
                {"op": op, "phase": phase, "dtype": dtype, "recomputed": recomputed, "flops": flops}
                for (op, phase, dtype, recomputed), flops in self._flops.most_common()
            ],
            "model_flops_by_dtype": dict(self._model_flops),
            "uncounted": [
                {"op": op, "num_calls": calls, "num_elements": elements}
                for op, (calls, elements) in sorted(self._uncounted.items(), key=lambda item: -item[1][1])
            ],
            "forward_activation_flops": self._activation_flops,
            "compiled": compiled,
            "hidden_products": list(self._hidden),
            "error": error,
            "weights": [
                {
                    "num_elements": num_elements,
                    "forward_flops": self._weight_flops.get(index, 0),
                    "looked_up": index in self._looked_up,
                    # The parameters that compiled code reads are not visible.
                    "used": compiled or index in self._touched or index in self._weight_flops,
                }
                for index, num_elements in enumerate(self._num_elements)
            ],
        }

    def _flops_of(self, op: Op, func: Any, args: Any, kwargs: Any, out: Any) -> OpFlops | None:
        is_plain = op.is_plain_product and not kwargs
        if not is_plain or any(t.layout != torch.strided for t in args if isinstance(t, torch.Tensor)):
            return count_flops(func, args, kwargs, out)
        key = (func, *[(t.shape, t.dtype, t.device) for t in args if isinstance(t, torch.Tensor)])
        if key not in self._known:
            self._known[key] = count_flops(func, args, kwargs, out)
        return self._known[key]

    def _add(self, op: OpFlops, name: str, phase: str, weights: set[int]) -> None:
        # Backward formulas run with gradients off, unless a graph of them is requested. A checkpointed forward that
        # runs again turns gradients on.
        recomputed = phase == BACKWARD and torch.is_grad_enabled() and not self.backward_makes_graph
        self._flops[name, phase, op.dtype, recomputed] += op.flops
        if not recomputed:
            self._model_flops[op.dtype] += op.model_flops
        if phase == FORWARD:
            for index in weights:
                self._weight_flops[index] += op.flops
            if not weights:
                self._activation_flops += op.model_flops
