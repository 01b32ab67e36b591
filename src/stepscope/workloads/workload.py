"""What a workload is: knobs with their values, presets, a way to build it, and proof of what ran."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

if typing.TYPE_CHECKING:
    import torch

Value = int | float | bool | str
"""What a knob can be set to."""

# Ops of the graphs that torch.compile was given stand beside those that were called, under names of their own: as
# the program wrote them, and as they were handed to the compiler's back end, decomposed.
CAPTURED, LOWERED = "captured ", "lowered "

HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Whether kernels of our own can run on a GPU here; Triton itself is imported when one does."""

Config = TypeVar("Config")
Batch = Mapping[str, "torch.Tensor"]


def knob(default: Any, about: str) -> Any:
    """A field of a family's configuration that a user can set, with the line that explains it."""
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True, kw_only=True, slots=True)
class Knob:
    """One knob of a workload as the command line knows it."""

    name: str
    kind: type
    default: Value
    values: tuple[Value, ...] | None
    """The only values it takes, or None where any of its kind will do."""
    about: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What one traced pass of a built workload left behind; the ground of every proof."""

    device: str
    """"cpu" or "cuda"."""
    ops: Mapping[str, int]
    """Op name (`aten::mm`, an autograd node, a label) → calls on the host; CAPTURED or LOWERED before the name: how
    often it stands in a compiled graph."""
    kernels: Mapping[str, int]
    """Kernel name → launches on the device; empty on a CPU."""
    facts: Mapping[str, float]
    """What the workload counted itself (`Built.facts`) and `dynamo.<counter>` of the compiler."""

    def calls(self, *parts: str) -> int:
        """How often names that contain one of the parts were called, launched, or compiled: the most of these."""
        seen = {"": 0, CAPTURED: 0, LOWERED: 0}
        for name, count in self.ops.items():
            if any(part in name for part in parts):
                seen[_witness(name)] += count
        launches = sum(count for name, count in self.kernels.items() if any(part in name for part in parts))
        return max(launches, *seen.values())

    def written(self, *names: str) -> int:
        """How often the program itself calls ops of exactly these names: called, or in a captured graph.

        Unlike `calls`, it does not see what other ops are made of: a compiled cross entropy has an `amax`.
        """
        called = sum(self.ops.get(f"aten::{name}", 0) for name in names)
        return max(called, sum(self.ops.get(f"{CAPTURED}aten::{name}", 0) for name in names))


def _witness(name: str) -> str:
    return next((prefix for prefix in (CAPTURED, LOWERED) if name.startswith(prefix)), "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """A claim a variant makes about its path, and how a traced pass shows it."""

    claim: str
    """`knob=value`, as the user typed it."""
    shows: Callable[[Evidence], str | None]
    """The evidence in a few words (`aten::_fft_r2c ×12`), or None when the path did not run."""


def ran(claim: str, *parts: str, at_least: int = 1) -> Proof:
    """Proof that names containing one of the parts were called, at least so often."""

    def shows(evidence: Evidence) -> str | None:
        calls = evidence.calls(*parts)
        return f"{' or '.join(parts)} ×{calls}" if calls >= max(1, at_least) else None

    return Proof(claim=claim, shows=shows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """A workload made for one configuration, on the default device of the moment, in float32.

    `module(**batch)` is the forward pass. With `targets` in the batch it returns a scalar loss; without them the
    outputs: a tensor or a tuple of tensors. An op has no targets: its backward starts from a fixed random gradient.
    """

    module: torch.nn.Module
    batch: Callable[[], Batch]
    """A new batch from torch's generator, on the default device; leaves that want gradients ask for them."""
    num_tokens: int = 0
    """Tokens, or items, in a batch; 0 where the word means nothing."""
    forward_flops: int | None = None
    """Model FLOPs of a forward pass by formula: 2 a multiply-add, causal attention counted as half."""
    num_active_parameters: int | None = None
    """Parameters that a token meets, where that is fewer than all."""
    proofs: tuple[Proof, ...] = ()
    facts: Callable[[], Mapping[str, float]] = dict
    """What the last pass counted: executed fraction, dropped tokens, density. The pass must not wait for it."""
    phases_apart: bool = False
    """Whether a row says what the phases take, each: facts `forward_ms`, `backward_ms`; `samples_phase_ns`."""


@dataclass(frozen=True, slots=True)
class WholeStep:
    """A workload that is one whole step of the user's own loop: run and timed as it is, nothing inside is known."""

    step: Callable[[], object]
    num_tokens: int = 0
    """Tokens, or items, in a step; 0 where the word means nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload(Generic[Config]):
    """A family of models, or an op: everything `stepscope bench` needs to run any of its configurations."""

    name: str
    about: str
    """One line."""
    config: type[Config]
    """A frozen dataclass whose fields, made with `knob`, are all the knobs; `Literal` says the only values."""
    presets: Mapping[str, Mapping[str, Value]]
    """Name → the knobs it sets. The first is the default."""
    build: Callable[[Config], Built | WholeStep]
    reference: Mapping[str, Value] = field(default_factory=dict)
    """The knobs of the variant that the others are held against: plainest, surest. Ways to compute the same thing."""
    alternatives: Mapping[str, tuple[tuple[Value, ...], ...]] = field(default_factory=dict)
    """Knobs to compare though what is computed differs → their values, those that compute the same thing together,
    the plainest first; a value that is not listed is alone."""
    gate: Mapping[str, Value] = field(default_factory=dict)
    """Sizes, small enough for float64 on a CPU, at which a variant is held against the reference before timing."""
    mode: str = "step"
    """What is run where nobody says: what has no parameters takes no step."""

    def knobs(self) -> tuple[Knob, ...]:
        """Its knobs, in the order of the configuration's fields."""
        return _knobs(self.config)  # type: ignore[arg-type]  # a class of any kind can be hashed

    def configure(self, preset: str | None = None, **values: Value) -> Config:
        """The configuration of a preset with some knobs set otherwise; keys and values must have been checked."""
        chosen = next(iter(self.presets)) if preset is None else preset
        return self.config(**{**self.presets[chosen], **values})


@functools.cache
def _knobs(config: typing.Any) -> tuple[Knob, ...]:
    kinds = typing.get_type_hints(config)
    return tuple(_knob(declared, kinds[declared.name]) for declared in dataclasses.fields(config))


def _knob(declared: dataclasses.Field[Any], hint: Any) -> Knob:
    literal = typing.get_origin(hint) is Literal
    values: Iterable[Value] | None = typing.get_args(hint) if literal else (True, False) if hint is bool else None
    return Knob(
        name=declared.name,
        kind=type(declared.default) if literal else hint,
        default=typing.cast(Value, declared.default),
        values=None if values is None else tuple(values),
        about=declared.metadata["about"],
    )


def numbers(tensor: Any, assumed: list[int], why: str) -> list[int]:
    """A tensor's values as Python numbers; `assumed` where a plan runs the program without data, and says `why`."""
    assume = getattr(tensor, "assume", None)
    return list(assume(assumed, why) if assume is not None else tensor.tolist())
