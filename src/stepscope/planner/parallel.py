"""How ranks train a model together: what `stepscope plan` is asked to plan for one of them."""

import re
from dataclasses import dataclass, field
from typing import Any

from stepscope.errors import UsageError

MOST_RANKS = 16384
DTYPES = ("bf16", "fp16", "fp32")
WAYS = ("fsdp", "ddp", "tp", "pp")
SCHEDULES = ("1f1b", "gpipe")


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """One way to spread a model over ranks; every rank has its own batch, except those of a tensor-parallel group."""

    fsdp: int | None = None  # ranks that shard the model with FSDP2
    replicas: int = 1  # groups of such ranks, each with a whole model: hybrid sharding
    ddp: int | None = None  # ranks with DistributedDataParallel
    tp: int | None = None  # ranks that split the model's layers with parallelize_module
    param_dtype: str | None = None  # of FSDP2's MixedPrecisionPolicy
    reduce_dtype: str | None = None
    pp: int | None = None  # stages of a pipeline
    split: tuple[str, ...] = ()  # the modules where its stages begin, except the first; () for even shares of blocks
    stage: int = 0  # which of them is planned
    num_microbatches: int = 1  # in which a pipeline takes the batch
    schedule: str = "1f1b"
    pipes: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)  # split once for all stages
    offload: bool = False  # whether saved activations wait for the backward in host memory

    def __post_init__(self) -> None:
        ways = [name for name in WAYS if getattr(self, name) is not None]
        if len(ways) > 1:
            raise UsageError(f"--{ways[0]} and --{ways[1]} cannot be planned together: leave one out")
        for name in (*ways, "replicas"):
            number = getattr(self, name)
            if not (1 if name == "replicas" else 2) <= number <= MOST_RANKS or self.num_ranks > MOST_RANKS:
                raise UsageError(
                    f"{name}={number}: the number of ranks must be from 2 to {MOST_RANKS}. For one, leave it out"
                )
        if len(set(self.split)) < len(self.split):
            raise UsageError(f"--pp {','.join(self.split)}: name every module once")
        if self.pp is not None and self.schedule not in SCHEDULES:
            raise UsageError(f"--schedule {self.schedule}: choose from {', '.join(SCHEDULES)}")
        if self.pp is not None and self.num_microbatches < (self.pp if self.schedule == "1f1b" else 1):
            each = f" for each of {self.pp} stages. Use more, or --schedule gpipe" * (self.num_microbatches > 0)
            raise UsageError(f"--microbatches {self.num_microbatches}: {self.schedule} needs at least one{each}")
        if self.fsdp is None and (self.param_dtype or self.reduce_dtype):
            raise UsageError("--mixed-precision is FSDP2's: use it with --fsdp, or name a --dtype")
        for dtype in (self.param_dtype, self.reduce_dtype):
            if dtype is not None and dtype not in DTYPES:
                raise UsageError(f"--mixed-precision {dtype}: choose from {', '.join(DTYPES)}")

    @property
    def num_ranks(self) -> int:
        return (self.fsdp or self.ddp or self.tp or self.pp or 1) * self.replicas

    @property
    def way(self) -> str | None:
        """The name of its option; None if there is one rank."""
        return next((name for name in WAYS if getattr(self, name) is not None), None)

    def __str__(self) -> str:
        """Return it as text, such as `FSDP2, 2 replicas of 8 ranks, parameters in bf16`."""
        if self.fsdp:
            words = [f"FSDP2, {self.replicas} replicas of {self.fsdp} ranks" if self.replicas > 1 else "FSDP2"]
        else:
            words = ["DDP"] * (self.ddp is not None) + ["tensor parallelism"] * (self.tp is not None)
        if self.pp:
            words = [f"pipeline, {self.num_microbatches} micro-batches, {self.schedule}"]
        words += [f"parameters in {self.param_dtype}"] * (self.param_dtype is not None)
        words += [f"gradients reduced in {self.reduce_dtype}"] * (self.reduce_dtype is not None)
        words += ["saved activations in host memory"] * self.offload
        return ", ".join(words)


def parallel_of(
    fsdp: int | str | None = None,
    ddp: int | str | None = None,
    tp: int | str | None = None,
    mixed_precision: str | None = None,
    offload: bool = False,
    pp: int | str | None = None,
    microbatches: int | str | None = None,
    schedule: str | None = None,
) -> Parallel | None:
    """Return what these options say: `8`, `2x8` (replicas × ranks), `bf16` or `bf16:fp32`; None for one device.

    `pp` is a number of stages, or the names of the modules where the stages after the first begin.

    >>> parallel_of(fsdp="2x8", mixed_precision="bf16:fp32").num_ranks
    16
    """
    if pp is None and (microbatches or schedule):
        raise UsageError("--microbatches and --schedule are a pipeline's: use them with --pp")
    if fsdp is ddp is tp is pp is mixed_precision is None and not offload:
        return None
    replicas, shards = (
        fsdp.split("x", 1) if isinstance(fsdp, str) and re.fullmatch("[0-9]+x[0-9]+", fsdp) else (1, fsdp)
    )
    names = tuple(filter(None, pp.split(","))) if isinstance(pp, str) and ("," in pp or pp[:1].isidentifier()) else ()
    stages = len(names) + 1 if names else _number(pp, "pp")
    param, _, reduce = (mixed_precision or "").partition(":")
    if mixed_precision is not None and not (param or reduce):
        raise UsageError(
            f"--mixed-precision {mixed_precision}: choose from {', '.join(DTYPES)}, or two as in bf16:fp32"
        )
    return Parallel(
        fsdp=_number(shards, "fsdp"),
        replicas=int(replicas),
        ddp=_number(ddp, "ddp"),
        tp=_number(tp, "tp"),
        param_dtype=param or None,
        reduce_dtype=reduce or None,
        offload=offload,
        pp=stages,
        split=names,
        num_microbatches=stages or 1 if microbatches is None else _number(microbatches, "microbatches", "1 on") or 0,
        schedule=schedule or SCHEDULES[0],
    )


def _number(given: int | str | None, name: str, range_of: str = f"2 to {MOST_RANKS}") -> int | None:
    text = str(given)
    if given is None:
        return None
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"--{name} {given}: it must be an integer from {range_of}")
    return int(text)
