"""Ops of a program that are the handwritten form of a built-in function."""

import re
from collections.abc import Iterator
from itertools import groupby

import polars as pl

from stepscope.analysis.costs.op_calls import Tensor
from stepscope.analysis.costs.op_costs import argument_values, operands

_CASTS = ("aten::to", "aten::_to_copy", "aten::type_as")
_ARITHMETIC = ("add", "sub", "mul", "div")
_SQUARE = "(pow:2|square|mul:same)"
_NORMALIZED = "(add:number )?(rsqrt mul:rows|sqrt (sub:rows )?div:rows)"
_RMS_NORM = f"{_SQUARE} mean {_NORMALIZED}"
_LAYER_NORM = (
    f"(mean sub:rows (sub:rows )?{_SQUARE} mean (sub:rows )?|(mean var:0|var:0 mean) sub:rows ){_NORMALIZED}"
)
_CUBE_AND_TANH = (
    "((pow:3 mul:number|mul:same mul:same mul:number|mul:number mul:same mul:same) add:same mul:number"
    "|mul:number mul:number mul:same add:number mul:same) tanh"
)
_HALVED = "(mul:number {0} add:number mul:same|{0} add:number (mul:same mul:number|mul:number mul:same))"
# The calls of each handwritten form, in order; the longest form comes first. SiLU is missing: a trace does not tell
# x * sigmoid(x) from a gate, a * sigmoid(b).
_FORMS = (
    (_HALVED.format(_CUBE_AND_TANH), 'F.gelu(x, approximate="tanh")'),
    (_HALVED.format("(div|mul):number erf"), "F.gelu(x)"),
    (f"{_LAYER_NORM} mul:last add:last", "F.layer_norm(x, (size,), weight, bias, eps)"),
    (_LAYER_NORM, "F.layer_norm(x, (size,), eps=eps)"),
    (f"{_RMS_NORM} mul:last", "F.rms_norm(x, (size,), weight, eps)"),
    (_RMS_NORM, "F.rms_norm(x, (size,), eps=eps)"),
    ("(amax|max) sub:rows exp sum div:rows", "torch.softmax(x, -1)"),
)


def handwritten_builtin(run: pl.DataFrame) -> tuple[str, list[str]] | None:
    """Return a built-in function and the ops of a run of work that compute the same, or None.

    What counts is what the program called: `aten::logsumexp` is one call, whatever it is made of. Between the calls
    of a form there may be casts, and nothing else.
    """
    words = list(_words(run))
    text = "".join(f" {word}" for word in words)
    for form, builtin in _FORMS:
        found = re.search(rf"(?<= ){form}(?= |$)", text)
        if found:
            return builtin, [word.partition(":")[0] for word in found.group().split()]
    return None


def _words(run: pl.DataFrame) -> Iterator[str]:
    """Yield what the program called, by time: the name and, where it matters, what it works on."""
    texts = run.sort("start_ns", "event").with_columns(pl.col("root_op", "op").cast(pl.String))
    rows = texts.select("root", "root_op", "op", "shapes", "inputs").iter_rows()
    for (_, root_op), group in groupby(rows, lambda row: row[:2]):
        if root_op in _CASTS:
            continue
        name = str(root_op).removeprefix("aten::").rstrip("_")
        # A call can cast what it reads first.
        own = [(shapes, inputs) for _, _, op, shapes, inputs in group if op == root_op]
        kind = _kind(name, *own[-1]) if own else None
        yield f"{name}:{kind}" if kind else name


def _kind(name: str, shapes: str | None, inputs: str | None) -> str | None:
    """Return what arithmetic combines, or the exponent of a power, or the correction of a variance."""
    if name in _ARITHMETIC:
        return _operand_kind(shapes)
    values = argument_values(inputs) or ()
    place = {"pow": 1, "var": 2}.get(name)
    if place is None or place >= len(values):
        return None
    return values[place].removesuffix(".0").removesuffix(".").replace("False", "0")


def _operand_kind(shapes: str | None) -> str:
    """Return what a tensor is combined with: a `number`, the `same` shape, one value for each of its `rows`, the
    `last` dimension, or something `else`.

    >>> _operand_kind("[[8, 16], [8, 1], []]")
    'rows'
    """
    tensors = [one.shape for one in operands(shapes, None) if isinstance(one, Tensor)]
    if len(tensors) != 2:
        return "number" if len(tensors) == 1 else "else"
    smaller, larger = sorted(tensors, key=lambda shape: (len(shape), shape))
    if smaller == larger:
        return "same"
    if smaller == (*larger[:-1], 1):
        return "rows"
    return "last" if smaller == larger[-1:] else "else"
