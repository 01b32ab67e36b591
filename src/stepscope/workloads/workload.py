"""The definition of a workload: its knobs, presets, how to build it, and proof of what ran."""

import dataclasses
import functools
import importlib.util
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

if typing.TYPE_CHECKING:
    import torch

Value = int | float | bool | str  # the value of a knob

# Prefixes for ops in graphs that torch.compile compiled: as captured from the program, and as decomposed for the
# compiler's backend.
CAPTURED, LOWERED = "captured ", "lowered "

HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Whether Stepscope's own kernels can run on a GPU; Triton is imported when one does."""

Config = TypeVar("Config")
Batch = Mapping[str, "torch.Tensor"]


def knob(default: Any, about: str) -> Any:
    """Return a configuration field that users can set, with its one-line description."""
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True, kw_only=True, slots=True)
class Knob:
    """One knob of a workload, as on the command line."""

    name: str
    kind: type
    default: Value
    values: tuple[Value, ...] | None  # the allowed values; None if any value of its kind is allowed
    about: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What one traced pass of a built workload shows; the basis of every proof."""

    device: str  # "cpu" or "cuda"
    ops: Mapping[str, int]
    """Op name (`aten::mm`, an autograd node, a label) → calls on the host. With the prefix CAPTURED or LOWERED: its
    occurrences in compiled graphs."""
    kernels: Mapping[str, int]  # kernel name → launches on the device; empty on a CPU
    facts: Mapping[str, float]
    """What the workload counted (`Built.facts`), and the compiler's counters as `dynamo.<counter>`."""

    def calls(self, *parts: str) -> int:
        """Return how often names containing one of the parts were called, launched or compiled, whichever is most."""
        seen = {"": 0, CAPTURED: 0, LOWERED: 0}
        for name, count in self.ops.items():
            if any(part in name for part in parts):
                seen[next((prefix for prefix in (CAPTURED, LOWERED) if name.startswith(prefix)), "")] += count
        return max(self.launches(*parts), *seen.values())

    def launches(self, *parts: str) -> int:
        """Return how often kernels whose names contain one of the parts were launched."""
        return sum(count for name, count in self.kernels.items() if any(part in name for part in parts))

    def written(self, *names: str) -> int:
        """Return how often the program itself calls ops with exactly these names, eagerly or in a captured graph.

        Unlike `calls`, this ignores decompositions: a compiled cross entropy contains an `amax`.
        """
        called = sum(self.ops.get(f"aten::{name}", 0) for name in names)
        return max(called, sum(self.ops.get(f"{CAPTURED}aten::{name}", 0) for name in names))


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """A claim about which code path ran, and how a traced pass proves it."""

    claim: str  # `knob=value`, as typed by the user
    shows: Callable[[Evidence], str | None]
    """Returns the evidence as text (`aten::_fft_r2c ×12`), or None if the path did not run."""


def ran(claim: str, *parts: str, at_least: int = 1) -> Proof:
    """Return proof that names containing one of the parts were called at least that often."""

    def shows(evidence: Evidence) -> str | None:
        calls = evidence.calls(*parts)
        return f"{' or '.join(parts)} ×{calls}" if calls >= max(1, at_least) else None

    return Proof(claim=claim, shows=shows)


def wrote(
    claim: str,
    *names: str,
    at_least: int = 1,
    without: tuple[str, ...] = (),
    unless_written: tuple[str, ...] = (),
    note: str = "",
) -> Proof:
    """Return proof that the program itself calls ops with these names, and does not run what is excluded."""

    def shows(evidence: Evidence) -> str | None:
        calls = evidence.written(*names)
        if calls < max(1, at_least) or evidence.calls(*without) or evidence.written(*unless_written):
            return None
        return f"{names[0]} ×{calls}{note}"

    return Proof(claim=claim, shows=shows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """A workload built for one configuration, on the current default device, in float32.

    `module(**batch)` is the forward pass. With `targets` in the batch it returns a scalar loss, otherwise a tensor or
    a tuple of tensors. An op has no targets; its backward pass starts from a fixed random gradient.
    """

    module: "torch.nn.Module"
    batch: Callable[[], Batch]  # returns a new batch from torch's generator, on the default device
    num_tokens: int = 0  # tokens, or items, per batch; 0 if it has none
    forward_flops: int | None = None
    """Model FLOPs of a forward pass by formula: 2 per multiply-add, causal attention counted as half."""
    num_active_parameters: int | None = None  # parameters used per token, if fewer than all
    proofs: tuple[Proof, ...] = ()
    facts: Callable[[], Mapping[str, float]] = dict
    """Returns what the last pass counted, such as dropped tokens. The pass itself must not synchronize for it."""
    phases_apart: bool = False
    """Whether a row has the times of each phase: facts `forward_ms`, `backward_ms`; `samples_phase_ns`."""


@dataclass(frozen=True, slots=True)
class WholeStep:
    """A workload that is one complete step of the user's own loop, run and timed as a black box."""

    step: Callable[[], object]
    num_tokens: int = 0  # tokens, or items, per step; 0 if it has none


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload(Generic[Config]):
    """A model family or an op: everything `stepscope bench` needs to run any of its configurations."""

    name: str
    about: str  # one line
    config: type[Config]
    """A frozen dataclass whose fields, made with `knob`, are the knobs; `Literal` lists the allowed values."""
    presets: Mapping[str, Mapping[str, Value]]  # name → the knobs it sets; the first is the default
    build: Callable[[Config], Built | WholeStep]
    reference: Mapping[str, Value] = field(default_factory=dict)
    """Knobs of the plainest variant, which the others are checked against. They do not change the result."""
    alternatives: Mapping[str, tuple[tuple[Value, ...], ...]] = field(default_factory=dict)
    """Knobs that are compared although they change the result → groups of values with equal results, plainest first;
    a value that is not listed is its own group."""
    gate: Mapping[str, Value] = field(default_factory=dict)
    """Sizes at which a variant is checked against the reference, small enough for float64 on a CPU."""
    mode: str = "step"  # the default mode; a workload without parameters cannot run `step`

    def knobs(self) -> tuple[Knob, ...]:
        """Return its knobs in the order of the configuration's fields."""
        return _knobs(self.config)  # type: ignore[arg-type]  # a class of any kind can be hashed

    def configure(self, preset: str | None = None, **values: Value) -> Config:
        """Return the configuration of a preset with some knobs changed; keys and values must be valid."""
        chosen = next(iter(self.presets)) if preset is None else preset
        return self.config(**{**self.presets[chosen], **values})


@functools.cache
def _knobs(config: typing.Any) -> tuple[Knob, ...]:
    hints, knobs = typing.get_type_hints(config), []
    for declared in dataclasses.fields(config):
        hint, default = hints[declared.name], typing.cast(Value, declared.default)
        literal = typing.get_origin(hint) is Literal
        kind, about = type(default) if literal else hint, declared.metadata["about"]
        values = typing.get_args(hint) if literal else (True, False) if hint is bool else None
        knobs.append(Knob(name=declared.name, kind=kind, default=default, values=values, about=about))
    return tuple(knobs)


def numbers(tensor: Any, assumed: list[int], why: str) -> list[int]:
    """Return a tensor's values as Python numbers; a plan, which has no data, uses `assumed` and reports `why`."""
    assume = getattr(tensor, "assume", None)
    return list(assume(assumed, why) if assume is not None else tensor.tolist())


def facts_of(workload: Workload[Any], *, has_parameters: bool) -> dict[str, Any]:
    """Return presets, knobs and reference values; parameters are counted on tensors without data."""
    return {
        "name": workload.name,
        "about": workload.about,
        "presets": [
            {"name": preset, "sets": dict(values), **(_parameters(workload, preset) if has_parameters else {})}
            for preset, values in workload.presets.items()
        ],
        "knobs": [{**dataclasses.asdict(knob), "kind": knob.kind.__name__} for knob in workload.knobs()],
        "reference": dict(workload.reference),
    }


def _parameters(workload: Workload[Any], preset: str) -> dict[str, int | None]:
    import torch

    with torch.device("meta"):
        built = workload.build(workload.configure(preset))
    assert isinstance(built, Built)
    total = sum(parameter.numel() for parameter in built.module.parameters())
    return {"num_parameters": total, "num_active_parameters": built.num_active_parameters}
