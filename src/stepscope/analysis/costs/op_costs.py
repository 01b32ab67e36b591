"""FLOPs and bytes of framework ops from a Kineto trace's shapes, dtypes, strides and values.

Traces are untrusted: no text raises or is evaluated, and absurd ones give None at little cost.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

# Imported because it registers formulas, like the others.
from stepscope.analysis.costs import layer_formulas, matmul_formulas  # noqa: F401
from stepscope.analysis.costs.op_calls import FORMULAS, Call, NotKnown, Operand, Tensor, Work
from stepscope.analysis.costs.traffic_formulas import FREE

if TYPE_CHECKING:
    import polars as pl

# C++ names of tensor types in traces and kernel names.
DTYPES = {
    "float": "float32", "double": "float64", "c10::Half": "float16", "c10::BFloat16": "bfloat16",
    "c10::Float8_e4m3fn": "float8", "c10::Float8_e5m2": "float8", "c10::Float8_e4m3fnuz": "float8",
    "c10::Float8_e5m2fnuz": "float8", "c10::Float8_e8m0fnu": "float8",
    "c10::complex<float>": "complex64", "c10::complex<double>": "complex128",
    "long int": "int64", "long": "int64", "long long": "int64", "int": "int32", "short": "int16",
    "short int": "int16", "signed char": "int8", "char": "int8", "unsigned char": "uint8", "bool": "bool",
    "unsigned short": "uint16", "short unsigned int": "uint16", "unsigned int": "uint32",
    "unsigned long": "uint64", "long unsigned int": "uint64",
}  # fmt: skip
_ON_PARAMETERS = ("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_foreach_")
COLUMNS = ("name", "shapes", "dtypes", "strides", "inputs")
# torch writes lists of up to 30 tensors, and up to 64 dimensions.
_MAX_CHARACTERS = 32_768
_MAX_OPERANDS = 256
_SHORT = 512  # characters of a text that is kept with what it means
_MAX_DIMENSIONS = 64
_MAX_INT64 = 2**63 - 1


class OpCost(NamedTuple):
    """The cost of one op; None if unknown."""

    flops: int | None  # matrix FLOPs, 2 per multiply-add; 0 for ops without matrix products
    read_bytes: int | None
    """The least it must read: each operand once, broadcast elements once. A tensor passed twice counts twice, since a
    trace cannot tell (the gradient in AdamW's `addcmul_`)."""
    written_bytes: int | None
    dtype: str | None  # dtype of the arithmetic in torch's name, all float8 as one; a float32 product may run in TF32


UNKNOWN = OpCost(None, None, None, None)


def op_cost(
    name: str,
    shapes: str | None,
    dtypes: str | None,
    strides: str | None = None,
    inputs: str | None = None,
    *,
    parameter_dtype: str | None = None,
) -> OpCost:
    """Return FLOPs and bytes of one op, from a trace's "Input Dims", "Input type", "Input Strides", "Concrete
    Inputs".

    A trace omits the dtype of a list's tensors: the bytes of `aten::cat` are None, and foreach ops and fused
    optimizers need `parameter_dtype`, that of parameters, gradients and states.

    >>> op_cost("aten::mm", "[[8, 16], [16, 4]]", '["float", "float"]')
    OpCost(flops=1024, read_bytes=768, written_bytes=128, dtype='float32')
    """
    # Checked before the cache, which would keep them.
    if _is_too_long(name, shapes, dtypes, strides, inputs):
        return UNKNOWN
    return _op_cost(name, parameter_dtype, shapes, dtypes, strides, inputs)


@lru_cache(maxsize=1024)
def _op_cost(name: str, parameter_dtype: str | None, *texts: str | None) -> OpCost:
    base = name.removeprefix("aten::")
    if base in FREE:
        return OpCost(0, 0, 0, None)
    try:
        work = _work(name, parameter_dtype, *texts)
    except NotKnown:
        # Only the ops in `matmul_formulas` multiply matrices.
        is_plain = base in FORMULAS and FORMULAS[base][0].__module__ != matmul_formulas.__name__
        return OpCost(0, None, None, None) if is_plain and _is_aten(name) else UNKNOWN
    return OpCost(_sound(work.flops), _total(work.reads), _total(work.writes), work.dtype)


def _is_aten(name: str) -> bool:
    return "::" in name


def _work(name: str, parameter_dtype: str | None, *texts: str | None) -> Work:
    shapes, dtypes, strides, inputs = texts
    base = name.removeprefix("aten::")
    if base not in FORMULAS or not _is_aten(name):
        raise NotKnown
    function, arguments = FORMULAS[base]
    given = _operands(shapes, dtypes, strides, parameter_dtype if base.startswith(_ON_PARAMETERS) else None)
    return function(Call(base, given, argument_values(inputs), arguments))


def is_depthwise(name: str | None, shapes: str | None, dtypes: str | None, inputs: str | None = None) -> bool:
    """Return whether an op convolves each channel by itself, which tensor cores cannot do.

    >>> is_depthwise("aten::_conv_depthwise2d", "[[8, 3, 32, 32], [3, 1, 5, 5]]", '["float", "float"]')
    True
    """
    base = (name or "").removeprefix("aten::")
    if "conv" not in base or base not in FORMULAS or _is_too_long(name, shapes, dtypes, inputs):
        return False
    try:
        return matmul_formulas.is_depthwise(
            Call(base, _operands(shapes, dtypes, None), argument_values(inputs), FORMULAS[base][1])
        )
    except NotKnown:
        return False


def op_tensors(name: str, *texts: str | None) -> tuple[list[Tensor], list[Tensor]] | None:
    """Return the tensors that an op reads and writes, from the texts that `op_cost` takes; None if unknown."""
    return None if _is_too_long(name, *texts) else _op_tensors(name, *texts)


@lru_cache(maxsize=1024)
def _op_tensors(name: str, *texts: str | None) -> tuple[list[Tensor], list[Tensor]] | None:
    try:
        work = _work(name, None, *texts)
    except NotKnown:
        return None
    is_known = _total(work.reads) is not None and _total(work.writes) is not None
    return (work.reads, work.writes) if is_known else None


def op_costs(ops: pl.DataFrame, *, parameter_dtype: str | None = None) -> pl.DataFrame:
    """Return the rows with `flops`, `read_bytes`, `written_bytes` (Int64) and `dtype` (String).

    `ops` has the columns `name`, `shapes`, `dtypes`, `strides`, `inputs`: text or null. Each distinct row is computed
    once.
    """
    import polars as pl

    from stepscope.analysis.structure.nesting import with_answers

    def cost(name: str | None, *texts: str | None) -> OpCost:
        return op_cost(name or "", *texts, parameter_dtype=parameter_dtype)

    sums = dict.fromkeys(("flops", "read_bytes", "written_bytes"), pl.Int64())
    return with_answers(ops, COLUMNS, cost, {**sums, "dtype": pl.String()})


def touched_bytes(shapes: str | None, dtypes: str | None, strides: str | None = None) -> int | None:
    """Return the bytes of all tensors passed to an op: the least that a torch.compile kernel reads or writes.

    Arguments are inputs and results, and a trace does not tell which. One that is both moves twice; a table that is
    only looked up moves less.

    >>> touched_bytes("[[4, 8], [4, 8], []]", '["float", "c10::BFloat16", "Scalar"]')
    192
    """
    try:
        given = _operands(shapes, dtypes, strides)
    except NotKnown:
        return None
    if any(isinstance(operand, tuple) for operand in given):
        return None
    return _total(operand for operand in given if isinstance(operand, Tensor))


def _is_too_long(*texts: str | None) -> bool:
    return any(text is not None and len(text) > _MAX_CHARACTERS for text in texts)


def _total(tensors: Iterable[Tensor]) -> int | None:
    sizes = [tensor.num_bytes for tensor in tensors]
    return None if None in sizes else _sound(sum(filter(None, sizes)))


def _sound(number: int | None) -> int | None:
    """Return a number if it is valid: texts in a trace may hold negative sizes, or ones beyond an int64."""
    return number if number is not None and 0 <= number <= _MAX_INT64 else None


def parsed_list(text: str | None) -> list[Any] | None:
    """Return a list from a trace's text; None for any other text."""
    if text is None or _is_too_long(text):
        return None
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, list) and len(parsed) <= _MAX_OPERANDS else None


def argument_values(text: str | None) -> tuple[str, ...] | None:
    """Return a call's arguments as text, from a trace's "Concrete Inputs"; None if unknown.

    >>> argument_values('["", "2", "[0, 1]"]')
    ('', '2', '[0, 1]')
    """
    parsed = parsed_list(text)
    return None if parsed is None else tuple(value if isinstance(value, str) else "" for value in parsed)


def argument_place(op: str, *names: str) -> int | None:
    """Return the position of the first of these arguments that an op has, by its formula's signature.

    >>> argument_place("aten::_efficient_attention_backward", "attn_mask", "bias")
    4
    """
    arguments = FORMULAS[op.removeprefix("aten::")][1] if op.removeprefix("aten::") in FORMULAS else ()
    return next((arguments.index(name) for name in names if name in arguments), None)


def operands(shapes: str | None, dtypes: str | None, strides: str | None = None) -> tuple[Operand, ...]:
    """Return a call's tensors by position, None for other arguments; empty if unknown.

    >>> operands("[[8, 16], []]", '["float", "Scalar"]')
    (Tensor(shape=(8, 16), dtype='float32', strides=None), None)
    """
    try:
        return _operands(shapes, dtypes, strides)
    except NotKnown:
        return ()


def _operands(
    shapes: str | None, dtypes: str | None, strides: str | None, list_dtype: str | None = None
) -> tuple[Operand, ...]:
    is_short = (
        shapes is not None and len(shapes) < _SHORT and len(dtypes or "") < _SHORT and len(strides or "") < _SHORT
    )
    return (_kept_operands if is_short else _new_operands)(shapes, dtypes, strides, list_dtype)


def _new_operands(
    shapes: str | None, dtypes: str | None, strides: str | None, list_dtype: str | None
) -> tuple[Operand, ...]:
    if _is_too_long(dtypes, strides) or (sizes := parsed_list(shapes)) is None:
        raise NotKnown
    rows = zip(sizes, _one_each(sizes, parsed_list(dtypes)), _one_each(sizes, parsed_list(strides)))
    return tuple(_operand(size, name, steps, list_dtype) for size, name, steps in rows)


_kept_operands = lru_cache(maxsize=4096)(_new_operands)  # a trace repeats a few texts thousands of times


def _one_each(sizes: list[Any], parsed: Any) -> list[Any]:
    """Return `parsed` if it has one entry per size; otherwise as many times None."""
    return parsed if isinstance(parsed, list) and len(parsed) == len(sizes) else [None] * len(sizes)


def _operand(sizes: Any, name: Any, steps: Any, list_dtype: str | None) -> Operand:
    if not isinstance(sizes, list):
        raise NotKnown
    if any(isinstance(size, list) for size in sizes):
        return tuple(_tensor(size, list_dtype, step) for size, step in zip(sizes, _one_each(sizes, steps)))
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    # Numbers have an empty shape too: only the dtype tells a zero-dimensional tensor from them.
    return None if not sizes and dtype is None else _tensor(sizes, dtype, steps)


def _tensor(sizes: Any, dtype: str | None, steps: Any) -> Tensor:
    shape = _numbers(sizes)
    if shape is None:
        raise NotKnown
    strides = _numbers(steps)
    return Tensor(shape, dtype, strides if strides is not None and len(strides) == len(shape) else None)


def _numbers(parsed: Any) -> tuple[int, ...] | None:
    if not isinstance(parsed, list) or len(parsed) > _MAX_DIMENSIONS:
        return None
    if not all(type(number) is int and 0 <= number <= _MAX_INT64 for number in parsed):
        return None
    return tuple(parsed)
