"""A script that runs one op of a trace alone, with its shapes, dtypes and strides, and times it.

Everything in the script that comes from the trace is a number, a name of letters, or a quoted text.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import polars as pl

from stepscope.analysis.costs.op_calls import Operand, Tensor
from stepscope.analysis.costs.op_costs import argument_values, operands
from stepscope.analysis.kernels.ops import ops
from stepscope.analysis.structure.links import Linked
from stepscope.errors import UsageError
from stepscope.formatting import duration, plural, safe

ENDINGS = (".py",)
_OP = re.compile(r"([A-Za-z_]\w*)::([A-Za-z_]\w*)(?:\.\w+)?")
_DTYPES = {"float8": "float8_e4m3fn"}
_KEYS = ["shapes", "dtypes", "strides", "inputs"]


def repro_texts(linked: Linked, asked: str, source: str) -> Iterator[str]:
    """Yield the script of an op: by its name, or by its place in the list of ops, 1 for the one with most time."""
    name = _name(linked, asked)
    namespace, op = _parts(name)
    texts, num_calls, total_ns, is_device = _usual_call(linked, name)
    values = argument_values(texts["inputs"])
    if texts["shapes"] is None or values is None:
        raise UsageError(
            f"the trace does not have the arguments of {name}: record it with `stepscope run`, or with "
            "record_shapes=True"
        )
    given = operands(texts["shapes"], texts["dtypes"], texts["strides"])
    if len(given) != len(values):
        raise UsageError(f"the arguments of {name} in the trace cannot be read: choose another op")
    tensors = [one for operand in given for one in (operand if isinstance(operand, tuple) else [operand]) if one]
    usual = next((one.dtype for one in tensors if one.dtype), "float32")
    high = min((size for one in tensors for size in one.shape if size), default=1)
    arguments = [_argument(one, value, usual) for one, value in zip(given, values)]
    where = "on the GPU" if is_device else "on the host"
    seen = f"{plural(num_calls, 'call')} with these arguments took {duration(total_ns)} {where}"
    yield _SCRIPT.format(
        title=f"{namespace}::{op} as in {json.dumps(safe(source))[1:-1]}: {seen} in all".replace('"""', ""),
        op=f"torch.ops.{namespace}.{op}",
        arguments="".join(f"    {argument},\n" for argument in arguments),
        high=high,
        traced_ns=total_ns // num_calls,
        where=where,
        contiguous="" if texts["strides"] else "\nThe trace has no strides: tensors are contiguous.",
        lists="\nThe trace has no dtypes of tensors in lists: they are taken to be those of the others."
        if any(isinstance(operand, tuple) for operand in given)
        else "",
    )


def _name(linked: Linked, asked: str) -> str:
    table = ops(linked).drop_nulls("op")
    names = table["op"].to_list()
    if asked.isascii() and asked.isdecimal():
        callable_names = [name for name in names if _OP.fullmatch(name)]
        if not 1 <= int(asked[:9]) <= len(callable_names):
            raise UsageError(f"no op {asked}: the trace has {plural(len(callable_names), 'op')} that can be called")
        return str(callable_names[int(asked[:9]) - 1])
    full = asked if "::" in asked else f"aten::{asked}"
    if full not in names:
        some = ", ".join(safe(name, 60) for name in names[:6])
        raise UsageError(f"the trace has no op {safe(asked)}: it has {some}" if names else "the trace has no ops")
    return full


def _parts(name: str) -> tuple[str, str]:
    found = _OP.fullmatch(name)
    if found is None:
        raise UsageError(f"{safe(name)} is a label and not an op: name one inside it, such as aten::mm")
    return found.group(1), found.group(2)


def _usual_call(linked: Linked, name: str) -> tuple[dict[str, str | None], int, int, bool]:
    """Return the arguments that most of the op's time was spent with, as the trace has them, and how often."""
    calls = linked.host.filter(pl.col("kind") == "op", pl.col("name").cast(pl.String) == name)
    work = linked.device.group_by(row="op").agg(ns=pl.col("duration_ns").sum())
    calls = calls.join(work, on="row", how="left")
    is_device = bool(calls["ns"].is_not_null().any())
    time = pl.col("ns").fill_null(0) if is_device else pl.col("duration_ns")
    texts = calls.with_columns(pl.col(_KEYS).cast(pl.String), time=time)
    best = texts.group_by(_KEYS).agg(num=pl.len(), ns=pl.col("time").sum()).sort("ns", *_KEYS, descending=True).row(0)
    return dict(zip(_KEYS, best)), int(best[-2]), int(best[-1]), is_device


def _argument(operand: Operand, value: str, usual: str) -> str:
    if isinstance(operand, tuple):
        return "[" + ", ".join(_tensor(one, usual) for one in operand) + "]"
    return _literal(value) if operand is None else _tensor(operand, usual)


def _tensor(tensor: Tensor, usual: str) -> str:
    dtype = tensor.dtype or usual
    return f"tensor({list(tensor.shape)}, {list(tensor.strides or ()) or None}, torch.{_DTYPES.get(dtype, dtype)})"


def _literal(value: str) -> str:
    """Return a value as Python text: numbers, True, False, lists of them; anything else is quoted, nothing is None.

    >>> [_literal(value) for value in ("", "1e-05", "[0, 1]", "False", "cuda:0", "-inf")]
    ['None', '1e-05', '[0, 1]', 'False', "'cuda:0'", "float('-inf')"]
    """
    text = value.strip()
    if not text:
        return "None"
    if text in ("True", "False"):
        return text
    if text.startswith("[") and text.endswith("]"):
        return "[" + ", ".join(_literal(part) for part in text[1:-1].split(",") if part.strip()) + "]"
    try:
        number: Any = int(text) if re.fullmatch(r"-?\d{1,19}", text) else float(text)
    except ValueError:
        return repr(safe(text))
    return repr(number) if repr(number)[-1].isdigit() else f"float({str(number)!r})"


_SCRIPT = '''"""{title}.

Values are random, and indices lie inside every tensor: an op whose time depends on values may take another time here.
Caches are warm, unlike in a step.{contiguous}{lists}
"""

import statistics
import sys
import time

import torch

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"
HIGH = {high}  # integers are below the smallest size
FORMATS = [torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d]
DTYPES = {{
    0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64, 5: torch.float16, 6: torch.float32,
    7: torch.float64, 9: torch.complex64, 10: torch.complex128, 11: torch.bool, 15: torch.bfloat16,
}}


def tensor(shape, strides, dtype):
    if strides is None:
        made = torch.empty(shape, dtype=dtype, device=DEVICE)
    else:
        made = torch.empty_strided(shape, strides, dtype=dtype, device=DEVICE)
    if dtype.is_floating_point or dtype.is_complex:
        filled = torch.rand(shape, device=DEVICE)
    else:
        filled = torch.randint(0, 2 if dtype is torch.bool else HIGH, shape, device=DEVICE)
    if 0 in (strides or ()) and made.numel():
        return made.zero_()  # its elements share memory
    return made.copy_(filled.to(dtype))


def fitting(kind, value):
    """Return a value of the trace as an argument of this kind."""
    if value is not None and "ScalarType" in kind and "List" not in kind:
        return DTYPES.get(value)
    if value is not None and "MemoryFormat" in kind:
        return FORMATS[value]
    if "Device" in kind:
        return None if value is None else DEVICE
    return None if "Layout" in kind or "Generator" in kind else value


def bound(op, values):
    """Return the op's overload that takes these values, as a function without arguments."""
    refused = []
    for name in op.overloads():
        form = getattr(op, name)
        if len(form._schema.arguments) != len(values):
            continue
        pairs = [(each, fitting(str(each.type), value)) for each, value in zip(form._schema.arguments, values)]
        positional = [value for each, value in pairs if not each.kwarg_only]
        named = {{each.name: value for each, value in pairs if each.kwarg_only and value is not None}}
        try:
            form(*positional, **named)
        except (RuntimeError, TypeError, IndexError, ValueError) as error:
            refused.append(f"{{name}}: {{str(error).splitlines()[0]}}")
            continue
        return lambda: form(*positional, **named)
    sys.exit("no overload of this op takes these arguments here:\\n" + "\\n".join(refused or ["none has as many"]))


torch.manual_seed(0)
call = bound({op}, [
{arguments}])


def once():
    if DEVICE.startswith("cuda"):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e6
    start = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - start


def timed(most, seconds):
    """Return the times of up to `most` calls that begin within these seconds, and of at least one."""
    end, times = time.perf_counter() + seconds, [once()]
    while len(times) < most and time.perf_counter() < end:
        times.append(once())
    return times


with torch.no_grad():
    timed(10, 2)
    times = timed(100, 10)
print(f"{{statistics.median(times) / 1000:.1f}} µs (median of {{len(times)}}), {traced_ns} ns {where} in the trace")
'''
