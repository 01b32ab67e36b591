"""How ranks train a model together: what `stepscope plan` is asked to plan for one of them."""

from dataclasses import dataclass

from stepscope.errors import UsageError

MOST_RANKS = 16384
DTYPES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """One way to spread a model over ranks; every rank has its own batch, except those of a tensor-parallel group."""

    fsdp: int | None = None  # ranks that shard the model with FSDP2
    replicas: int = 1  # groups of such ranks, each with a whole model: hybrid sharding
    ddp: int | None = None  # ranks with DistributedDataParallel
    tp: int | None = None  # ranks that split the model's layers with parallelize_module
    param_dtype: str | None = None  # of FSDP2's MixedPrecisionPolicy
    reduce_dtype: str | None = None
    offload: bool = False  # whether saved activations wait for the backward in host memory

    def __post_init__(self) -> None:
        ways = [name for name in ("fsdp", "ddp", "tp") if getattr(self, name) is not None]
        if len(ways) > 1:
            raise UsageError(f"--{ways[0]} and --{ways[1]} cannot be planned together: leave one out")
        for name in (*ways, "replicas"):
            number = getattr(self, name)
            if not (1 if name == "replicas" else 2) <= number <= MOST_RANKS or self.num_ranks > MOST_RANKS:
                raise UsageError(
                    f"{name}={number}: the number of ranks must be from 2 to {MOST_RANKS}. For one, leave it out"
                )
        if self.fsdp is None and (self.param_dtype or self.reduce_dtype):
            raise UsageError("--mixed-precision is FSDP2's: use it with --fsdp, or name a --dtype")
        for dtype in (self.param_dtype, self.reduce_dtype):
            if dtype is not None and dtype not in DTYPES:
                raise UsageError(f"--mixed-precision {dtype}: choose from {', '.join(DTYPES)}")

    @property
    def num_ranks(self) -> int:
        return (self.fsdp or self.ddp or self.tp or 1) * self.replicas

    def __str__(self) -> str:
        """Return it as text, such as `FSDP2, 2 replicas of 8 ranks, parameters in bf16`."""
        if self.fsdp:
            words = [f"FSDP2, {self.replicas} replicas of {self.fsdp} ranks" if self.replicas > 1 else "FSDP2"]
        else:
            words = ["DDP"] * (self.ddp is not None) + ["tensor parallelism"] * (self.tp is not None)
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
) -> Parallel | None:
    """Return what these options say: `8`, `2x8` (replicas × ranks), `bf16` or `bf16:fp32`; None for one device.

    >>> parallel_of(fsdp="2x8", mixed_precision="bf16:fp32").num_ranks
    16
    """
    if fsdp is ddp is tp is mixed_precision is None and not offload:
        return None
    replicas, shards = fsdp.split("x", 1) if isinstance(fsdp, str) and "x" in fsdp else ("1", fsdp)
    param, _, reduce = (mixed_precision or "").partition(":")
    return Parallel(
        fsdp=_number(shards, "fsdp"),
        replicas=_number(replicas, "fsdp") or 1,
        ddp=_number(ddp, "ddp"),
        tp=_number(tp, "tp"),
        param_dtype=param or None,
        reduce_dtype=reduce or None,
        offload=offload,
    )


def _number(given: int | str | None, name: str) -> int | None:
    text = str(given)
    if given is None:
        return None
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"--{name} {given}: the number of ranks must be an integer from 2 to {MOST_RANKS}")
    return int(text)
