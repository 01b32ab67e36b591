"""Execution traces of PyTorch: the ops of a run with the shapes, types and strides of their inputs, but no times.

`ExecutionTraceObserver` writes one beside a trace of the profiler. A call has the same number in both files, so an
execution trace fills in what a trace without `record_shapes=True` lacks.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from stepscope.border import read_file
from stepscope.trace.tables import HOST, Trace

_BEGINNING = re.compile(rb'\s*\{\s*"schema"\s*:\s*"[^"]{1,80}"\s*,\s*"pid"\s*:\s*(\d{1,18})\s*,[^{}\[\]]*"nodes"\s*:')
_FILLED = ("shapes", "dtypes", "strides", "inputs")
_SCALARS = {"Int": "Scalar", "Double": "Scalar", "Bool": "Scalar"}
_SCHEMA = {"record_function": pl.Int64(), "_name": pl.String(), **{f"_{name}": pl.String() for name in _FILLED}}


class _Inputs(msgspec.Struct):
    values: list[Any]
    shapes: list[Any]
    types: list[str]
    strides: list[Any] | None = None  # from schema 1.1 on


class _Attribute(msgspec.Struct):
    name: str
    value: Any = None


class _Node(msgspec.Struct):
    name: str
    inputs: _Inputs
    attrs: list[_Attribute]


class _File(msgspec.Struct):
    nodes: list[_Node]


def process_of(beginning: bytes) -> str | None:
    """Return the process of an execution trace from the first bytes of its file; None for any other file."""
    match = _BEGINNING.match(beginning)
    return match.group(1).decode() if match else None


def with_inputs(trace: Trace, path: Path) -> Trace:
    """Return a trace whose ops have the inputs that an execution trace of the same process recorded.

    Only calls with the same number and name are filled, and only where the trace itself says nothing.
    """
    try:
        nodes = msgspec.json.decode(read_file(path), type=_File).nodes
        calls = pl.DataFrame(_rows(nodes), schema=_SCHEMA, orient="row")
    except (OSError, ValueError, RecursionError, OverflowError) as error:
        why = f"{path.name} cannot be read as an execution trace: {error}"
        return replace(trace, warnings=(*trace.warnings, why))
    host = trace.host.join(
        calls.unique("record_function", keep="first"), on="record_function", how="left", maintain_order="left"
    )
    is_same = pl.col("name").cast(pl.String) == pl.col("_name")
    is_filled = {name: is_same & pl.col(name).is_null() for name in _FILLED}
    num = host.select(pl.any_horizontal(is_filled.values()).sum()).item()
    filled = [
        pl.when(where).then(pl.col(f"_{name}").cast(pl.Categorical())).otherwise(name).alias(name)
        for name, where in is_filled.items()
    ]
    told = f"the inputs of {num:,} ops come from {path.name}"
    told = told if num else f"{path.name} adds nothing: the trace has its own inputs, or no call is the same"
    return replace(
        trace,
        host=host.with_columns(filled).select(HOST.schema.names()),
        facts=replace(trace.facts, has_shapes=trace.facts.has_shapes or num > 0),
        warnings=(*trace.warnings, told),
    )


def _rows(nodes: Sequence[_Node]) -> Iterator[tuple[Any, ...]]:
    for node in nodes:
        number = next((each.value for each in node.attrs if each.name == "rf_id"), None)
        given, strides = node.inputs, node.inputs.strides
        num = len(given.types)
        is_whole = all(len(each) == num for each in (given.values, given.shapes, strides or given.shapes))
        if isinstance(number, int) and 0 < number < 2**63 and is_whole and num:
            types = [_type(each) for each in given.types]
            is_tensor = [each not in ("", "Scalar", "ScalarList") for each in types]
            sizes, steps = (
                None if each is None else json.dumps([value if has else [] for value, has in zip(each, is_tensor)])
                for each in (given.shapes, strides)
            )
            values = [_value(value) if each.startswith("Scalar") else "" for value, each in zip(given.values, types)]
            yield number, node.name, sizes, json.dumps(types), steps, json.dumps(values)


def _type(text: str) -> str:
    """Return a type as the profiler writes it.

    >>> [_type(text) for text in ("Tensor(c10::Half)", "GenericList[Tensor(float)]", "GenericList[Int]", "Int")]
    ['c10::Half', 'TensorList', 'ScalarList', 'Scalar']
    """
    if text.startswith("Tensor(") and text.endswith(")"):
        return text[7:-1]
    if text.startswith("GenericList["):
        return "TensorList" if text.startswith("GenericList[Tensor(") else "ScalarList"
    return _SCALARS.get(text, "")


def _value(value: Any) -> str:
    """Return a value that is not a tensor; none for fractions, which the file rounds to six digits (1e-8 is 0)."""
    if isinstance(value, list):
        return "" if any(isinstance(each, float) for each in value) else f"[{', '.join(map(_value, value))}]"
    return "" if isinstance(value, float) else str(value)
