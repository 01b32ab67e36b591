"""Sums the FLOPs of a step by op, phase and dtype, and by weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from stepscope.recorder.clock import BACKWARD, FORWARD
from stepscope.recorder.ledger.flops import OpFlops, count_flops
from stepscope.recorder.ledger.op_facts import Op


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
        """Return the number of a new parameter, counting from 0."""
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
        if kwargs or not op.is_plain_product:
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
