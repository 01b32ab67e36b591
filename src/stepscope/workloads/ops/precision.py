"""How much accuracy a narrow dtype costs: the same sum, matmul or norm, accumulated in a given dtype.

Each experiment reports its result and its error relative to float64 as facts. There is no reference check: the error
is the measurement. The audit reports the output dtype of each kind of op in a small model under autocast.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepscope.workloads.workload import Built, Evidence, Proof, Workload, knob

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
ADDEND = 0.01
SLICE = 64  # columns per partial matmul, between two additions


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig:
    experiment: Literal["accumulate", "matmul", "norm", "reduction", "audit"] = knob(
        "accumulate",
        "accumulate: adds 0.01 repeatedly; matmul: adds up partial matmuls; norm: x ÷ √mean x²; reduction: sum; "
        "audit: dtypes in a two-layer model under autocast",
    )
    value_dtype: Literal["fp16", "bf16", "fp32", "fp64"] = knob(
        "fp32", "dtype of the terms; for the audit, the autocast dtype (fp16 or bf16) unless one is active"
    )
    accumulate_dtype: Literal["fp16", "bf16", "fp32", "fp64"] = knob("fp32", "dtype of the running sum")
    terms: int = knob(1000, "terms of a sum; columns of the matmul; width of the norm")
    rows: int = knob(128, "rows of the matmul and of the norm")
    scale: float = knob(1.0, "standard deviation of the values; at 300, fp16 sums of squares overflow")


class Experiment(nn.Module):
    """x → the experiment's result, in the dtype of the running sum."""

    def __init__(self, config: PrecisionConfig) -> None:
        super().__init__()
        self.experiment = config.experiment
        self.value, self.running = DTYPES[config.value_dtype], DTYPES[config.accumulate_dtype]
        self.last: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        result: Tensor = getattr(self, self.experiment)(x, y, self.value, self.running)
        self.last = tuple(tensor.detach() for tensor in (x, y, result) if tensor is not None)
        return result

    def exact(self, *inputs: Tensor) -> Tensor:
        """Return the result in float64; the repeated addition as one product, which rounds once."""
        x, y = (*(tensor.double() for tensor in inputs), None)[:2]
        if self.experiment == "accumulate":
            return torch.full((), ADDEND * x.numel(), dtype=torch.float64, device=x.device)
        if self.experiment == "matmul":
            return x @ y
        result: Tensor = getattr(self, self.experiment)(x, y, torch.float64, torch.float64)
        return result

    @staticmethod
    def accumulate(x: Tensor, _: Tensor | None, value: torch.dtype, running: torch.dtype) -> Tensor:
        total = torch.zeros((), dtype=running, device=x.device)
        for term in x.to(value):
            total = total + term.to(running)
        return total

    @staticmethod
    def matmul(x: Tensor, y: Tensor, value: torch.dtype, running: torch.dtype) -> Tensor:
        total = torch.zeros(x.shape[0], y.shape[1], dtype=running, device=x.device)
        for left, right in zip(x.to(value).split(SLICE, 1), y.to(value).split(SLICE)):
            total = total + (left @ right).to(running)
        return total

    @staticmethod
    def norm(x: Tensor, _: Tensor | None, value: torch.dtype, running: torch.dtype) -> Tensor:
        wide = x.to(value).to(running)
        return wide * (wide.square().sum(-1, keepdim=True) / x.shape[-1]).rsqrt()

    @staticmethod
    def reduction(x: Tensor, _: Tensor | None, value: torch.dtype, running: torch.dtype) -> Tensor:
        return x.to(value).sum(-1, dtype=running)


class Audit(nn.Module):
    """x → the mean loss of a two-layer classifier; `dtypes` counts the output dtypes of each kind of op."""

    def __init__(self, width: int, autocast: torch.dtype) -> None:
        super().__init__()
        self.autocast = autocast if autocast in (torch.float16, torch.bfloat16) else None
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.dtypes: Counter[str] = Counter()

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        if self.autocast is None or torch.is_autocast_enabled(device):
            return self._classify(x)
        with torch.autocast(device, dtype=self.autocast):
            return self._classify(x)

    def _classify(self, x: Tensor) -> Tensor:
        found: list[tuple[str, Tensor]] = []
        for norm, linear in zip(self.norms, self.linears):
            normed = norm(x)
            multiplied = linear(normed)
            x = x + functional.gelu(multiplied)
            found += [("norm", normed), ("linear", multiplied), ("residual", x)]
        weights = multiplied.softmax(-1)
        loss = functional.cross_entropy(multiplied, torch.zeros(len(x), dtype=torch.long, device=x.device))
        found += [("softmax", weights), ("loss", loss)]
        self.dtypes = Counter(f"{kind}_{NAMES[tensor.dtype]}" for kind, tensor in found)
        return loss


def build_audit(config: PrecisionConfig) -> Built:
    """Return the small model, with the number of its linear layers, norms etc. per output dtype as facts."""
    module = Audit(config.rows, DTYPES[config.value_dtype])

    def shows(evidence: Evidence) -> str | None:
        seen = {name: count for name, count in module.dtypes.items() if name.startswith("linear_")}
        if evidence.written("linear") < len(module.linears) or not seen:
            return None
        return ", ".join(f"{name} ×{count}" for name, count in seen.items())

    return Built(
        module=module,
        batch=lambda: {"x": torch.randn(config.rows, config.rows) * config.scale},
        num_tokens=config.rows,
        proofs=(Proof(claim="experiment=audit", shows=shows),),
        facts=lambda: {name: float(count) for name, count in module.dtypes.items()},
    )


def build(config: PrecisionConfig) -> Built:
    if config.experiment == "audit":
        return build_audit(config)
    module = Experiment(config)

    def batch() -> Mapping[str, Tensor]:
        if config.experiment == "accumulate":
            return {"x": torch.full((config.terms,), ADDEND).requires_grad_()}
        x = torch.randn(config.rows, config.terms) * config.scale
        if config.experiment == "reduction":
            x = x.abs()  # a sum that grows, as a running loss does
        numbers = {"x": x.requires_grad_()}
        if config.experiment == "matmul":
            numbers["y"] = (torch.randn(config.terms, config.rows) * config.scale).requires_grad_()
        return numbers

    def facts() -> Mapping[str, float]:
        *inputs, result = module.last
        exact, found = module.exact(*inputs), result.double()
        error = (found - exact).abs()
        return {
            "result": float(found.flatten()[0]),
            "exact": float(exact.flatten()[0]),
            "largest_error": float(error.max()),
            "relative_error": float(error.norm() / exact.norm()),
            "not_finite": float((~found.isfinite()).sum()),
        }

    def shows(evidence: Evidence) -> str | None:
        op = {"matmul": "aten::mm", "accumulate": "aten::add", "norm": "aten::rsqrt", "reduction": "aten::sum"}
        calls = evidence.calls(op[config.experiment])
        dtype = next((t.dtype for t in module.last[-1:]), None)
        return f"{op[config.experiment]} ×{calls} into {dtype}" if calls and dtype is module.running else None

    return Built(
        module=module,
        batch=batch,
        num_tokens=config.terms,
        forward_flops=2 * config.rows**2 * config.terms if config.experiment == "matmul" else None,
        proofs=(Proof(claim=f"accumulate_dtype={config.accumulate_dtype}", shows=shows),),
        facts=facts,
    )


WORKLOAD = Workload(
    name="precision",
    about="a sum, matmul or norm accumulated in fp16, bf16 or fp32: accuracy and speed",
    config=PrecisionConfig,
    presets={
        "fp32": {},
        "fp16": {"value_dtype": "fp16", "accumulate_dtype": "fp16"},
        "bf16": {"value_dtype": "bf16", "accumulate_dtype": "bf16"},
        "mixed": {"value_dtype": "fp16", "accumulate_dtype": "fp32"},
        "tiny": {"terms": 100, "rows": 8},
    },
    build=build,
    mode="forward",
)
