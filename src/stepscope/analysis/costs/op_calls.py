"""One op call from a trace (tensors and arguments), and the registry of formulas."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "complex64": 8, "complex128": 16,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "bool": 1,
}  # fmt: skip
# c10::ScalarType: the number for a dtype argument in a trace.
_SCALAR_TYPES = {
    0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "float16", 6: "float32", 7: "float64",
    9: "complex64", 10: "complex128", 11: "bool", 15: "bfloat16", 23: "float8", 24: "float8", 25: "float8",
    26: "float8", 27: "uint16", 28: "uint32", 29: "uint64", 44: "float8",
}  # fmt: skip


class NotKnown(Exception):
    """The trace does not contain what a formula needs."""


@dataclass(frozen=True)
class Tensor:
    """An input of an op."""

    shape: tuple[int, ...]
    dtype: str | None
    strides: tuple[int, ...] | None = None

    @cached_property  # a trace repeats a few tensors thousands of times
    def num_elements(self) -> int:
        return prod(self.shape)

    @cached_property
    def num_bytes(self) -> int | None:
        """Bytes of memory behind the tensor; broadcast or overlapping elements count once."""
        if self.dtype not in ITEM_BYTES:
            return None
        elements = self.num_elements
        if self.strides is not None and elements:
            distinct = prod(size for size, stride in zip(self.shape, self.strides) if stride)
            extent = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides))
            elements = min(distinct, extent)
        return elements * ITEM_BYTES[self.dtype]

    def like(self, dtype: str | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return a new tensor with this one's shape and dtype unless given."""
        return Tensor(self.shape if shape is None else shape, dtype or self.dtype)


Operand = Tensor | tuple[Tensor, ...] | None
UNSEEN = Tensor((), None)  # A result of unknown size: its bytes are None


class Work(NamedTuple):
    flops: int | None
    reads: list[Tensor]
    writes: list[Tensor]
    dtype: str | None


@dataclass(frozen=True, slots=True)
class Call:
    """One op call: operands by position, argument names, and values as text."""

    name: str
    operands: tuple[Operand, ...]
    values: tuple[str, ...] | None
    arguments: tuple[str, ...] = ()

    def _at(self, argument: str | int, items: tuple[Any, ...]) -> Any:
        if isinstance(argument, str):
            argument = self.arguments.index(argument) if argument in self.arguments else len(items)
        return items[argument] if argument < len(items) else None

    def optional(self, argument: str | int) -> Tensor | None:
        operand = self._at(argument, self.operands)
        return operand if isinstance(operand, Tensor) else None

    def tensor(self, argument: str | int) -> Tensor:
        operand = self.optional(argument)
        if operand is None:
            raise NotKnown
        return operand

    def given(self, *arguments: str | int) -> list[Tensor]:
        return [tensor for argument in arguments if (tensor := self.optional(argument)) is not None]

    def tensors(self, argument: str | int) -> list[Tensor]:
        """Return a tensor list; a trace omits lists of more than 30."""
        operand = self._at(argument, self.operands)
        if not isinstance(operand, tuple) or not operand:
            raise NotKnown
        return list(operand)

    def text(self, argument: str | int) -> str:
        """Return an argument's value; "" is None or a default that was not passed."""
        if self.values is None:
            raise NotKnown
        return self._at(argument, self.values) or ""

    def flag(self, argument: str | int) -> bool:
        text = self.text(argument)
        if text not in ("True", "False"):
            raise NotKnown
        return text == "True"

    def integer(self, argument: str | int) -> int:
        return _integer(self.text(argument))

    def integers(self, argument: str | int, count: int = 0) -> tuple[int, ...]:
        """Return a list of integers; a single one is repeated `count` times."""
        text = self.text(argument).strip()
        numbers = tuple(_integer(part) for part in text.strip("[]").split(",") if part.strip())
        if count and len(numbers) == 1:
            numbers *= count
        if len(numbers) > 64 or (count and len(numbers) != count):
            raise NotKnown
        return numbers

    def mask(self, argument: str | int) -> list[bool]:
        parts = [part.strip() for part in self.text(argument).strip("[]").split(",")]
        if any(part not in ("True", "False") for part in parts):
            raise NotKnown
        return [part == "True" for part in parts]

    def scalar_type(self, argument: str | int) -> str | None:
        text = self.text(argument)
        dtype = _SCALAR_TYPES.get(_integer(text)) if text else None
        if text and dtype is None:
            raise NotKnown
        return dtype


def _integer(text: str) -> int:
    text = text.strip()
    # More digits than an int64 has cannot be a size, and are slow to parse.
    if len(text) > 20:
        raise NotKnown
    try:
        return int(text)
    except ValueError:
        raise NotKnown from None


Formula = Callable[[Call], Work]
FORMULAS: dict[str, tuple[Formula, tuple[str, ...]]] = {}


def formula(signatures: str) -> Callable[[Formula], Formula]:
    """Return a decorator that registers a formula for ops: `names (arguments in order) names (arguments) …`."""

    def register(function: Formula) -> Formula:
        for names, arguments in re.findall(r"([^()]+)\(([^()]*)\)", signatures):
            FORMULAS.update(dict.fromkeys(names.split(), (function, tuple(arguments.split()))))
        return function

    return register


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    rank = max(map(len, shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    result = tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*padded))
    if any(size not in (1, wanted) for shape in padded for size, wanted in zip(shape, result)):
        raise NotKnown
    return result
