"""One rank of tensor parallelism: PyTorch's own `parallelize_module` and DTensor on planned tensors.

The plan is the model's own: `tp_plan` or, as in Transformers, `_tp_plan`, which maps names of modules with `*` for
numbers to `colwise`, `rowwise` or a ParallelStyle.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch._subclasses import fake_tensor
from torch.distributed import _functional_collectives
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from stepscope.errors import UsageError
from stepscope.planner.emulation.dataless import DatalessMode
from stepscope.planner.emulation.ranks import LocalDatalessMode, Ranks
from stepscope.workloads.workload import Batch

_STYLES = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
}


class TensorParallel(Ranks):
    """While the context is active, `shard` applies the model's own plan."""

    def dataless_mode(self, kernels: Any) -> DatalessMode:
        mode = LocalDatalessMode(self._device, kernels, self._saw)
        mode.mixes = True
        return mode

    def _replacements(self) -> Iterator[tuple[Any, str, Any]]:
        # The wrapper of a result that is not there yet asks Python for the device, and PyTorch may not have that one.
        yield _functional_collectives, "_maybe_wrap_tensor", lambda result: result
        yield fake_tensor.log, "exception", lambda *_: None  # DTensor asks for shapes; it raises the error too

    def shard(self, module: nn.Module, batch: Batch) -> nn.Module:
        styles = styles_of(module)
        num_ranks = self._parallel.num_ranks
        self._mesh._device_type = _SameDevice(self._mesh.device_type)
        try:
            parallelize_module(module, self._mesh, styles, src_data_rank=None)
        except (NotImplementedError, ValueError, AssertionError, RuntimeError) as error:
            raise UsageError(f"--tp: parallelize_module rejects the model's plan: {error}") from None
        if uneven := next(_uneven(module, num_ranks), None):
            _explain(module, f"--tp {num_ranks}: {uneven}, and the model needs equal shares. Use a divisor of it")
        ranks = f"one of {num_ranks} ranks with the same batch; parallelize_module on {len(styles)} modules"
        optimizers = "PyTorch's foreach and fused optimizers want all parameters distributed: replicate the others"
        self._note("tensor parallelism", f"{ranks}. {optimizers}")
        return module


def _uneven(module: nn.Module, num_ranks: int) -> Iterator[str]:
    """Yield what the ranks cannot share evenly: attention heads, and sizes of the weights that the plan splits."""
    config = next((part.config for part in module.modules() if hasattr(part, "config")), None)
    for name in ("num_attention_heads", "num_key_value_heads"):
        number = getattr(config, name, None)
        if isinstance(number, int) and number % num_ranks:
            yield f"the model has {name}={number}"
    for name, parameter in module.named_parameters():
        for placement in parameter.placements if isinstance(parameter, DTensor) else ():
            if isinstance(placement, Shard) and (size := parameter.shape[placement.dim]) % num_ranks:
                yield f"{name.removeprefix('module.')} has size {size} where the plan splits it"


def _explain(module: nn.Module, why: str) -> None:
    """Let a forward that fails say why."""
    forward = module.forward

    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except (RuntimeError, ValueError, AssertionError):
            raise UsageError(why) from None

    module.forward = explained


class _SameDevice(str):
    """The mesh's device type, to PyTorch that of planned tensors. DTensor must not move them from their own."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other in ("cpu", "cuda")

    def __ne__(self, other: object) -> bool:
        return not self == other


def styles_of(module: nn.Module) -> dict[str, ParallelStyle]:
    """Return the model's plan with a style for each module that it names; UsageError if it has none."""
    found: dict[str, ParallelStyle] = {}
    for name, part in module.named_modules():
        plan = getattr(part, "tp_plan", None) or getattr(part, "_tp_plan", None)
        if not isinstance(plan, Mapping):
            continue
        for pattern, style in plan.items():
            matches = re.compile(re.escape(str(pattern)).replace(r"\*", "[^.]+")).fullmatch
            for inner, _ in part.named_modules():
                if matches(inner):
                    found.setdefault(f"{name}.{inner}".lstrip("."), _style(style, str(pattern)))
        break
    if not found:
        raise UsageError(
            "--tp: the model has no tensor-parallel plan. Set model.tp_plan = {'layers.*.up': 'colwise', "
            "'layers.*.down': 'rowwise'}"
        )
    return found


def _style(style: Any, pattern: str) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if style not in _STYLES:
        raise UsageError(f"--tp: style {style!r} of {pattern} is unknown: use a ParallelStyle, {', '.join(_STYLES)}")
    return _STYLES[style]()
