"""Torch's global switches of precision: what they are, set in one call, and put back exactly.

Torch keeps the precision of float32 products twice. `set_float32_matmul_precision` and `allow_tf32` are the old way;
`fp32_precision` of a back end and an op, inherited from the back end and from `torch.backends`, came with torch 2.9.
Setting the old way sets the new one too, and reading the old one after the new one was set raises. So what is
remembered here is both, the new one without what it inherits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

MATMUL_PRECISIONS = ("highest", "high", "medium")
REDUCTIONS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")

# Where the new way keeps what the old one sets too; and the parents that these inherit from.
_OWN = {"matmul": (("cuda", "matmul"), ("mkldnn", "matmul")), "cudnn": (("cuda", "conv"), ("cuda", "rnn"))}
_PARENTS = (("generic", "all"), ("cuda", "all"), ("mkldnn", "all"))

Setting = str | bool


def precision_settings() -> dict[str, Setting]:
    """What holds now, by the name that torch gives it: JSON values.

    >>> sorted(precision_settings())[:2]
    ['cuda.matmul.allow_bf16_reduced_precision_reduction', 'cuda.matmul.allow_fp16_reduced_precision_reduction']
    """
    matmul = torch.backends.cuda.matmul
    with _quiet():
        return {
            "float32_matmul_precision": _matmul_precision(),
            "cuda.matmul.allow_tf32": _is_tf32("cuda", "matmul", lambda: matmul.allow_tf32),
            "cudnn.allow_tf32": any(
                _is_tf32(*place, lambda: torch.backends.cudnn.allow_tf32) for place in _OWN["cudnn"]
            ),
            **{f"cuda.matmul.{name}": bool(getattr(matmul, name)) for name in REDUCTIONS},
        }


@dataclass(frozen=True)
class Changed:
    """One switch before and after."""

    old: Setting
    new: Setting


class PrecisionChange:
    """What `configure_precision` changed: `changed` by name. `undo()`, or leaving the `with` block, puts it back."""

    def __init__(
        self, before: dict[str, Setting], after: dict[str, Setting], restore: list[Callable[[], None]]
    ) -> None:
        self.changed = {name: Changed(old, after[name]) for name, old in before.items() if old != after[name]}
        self.settings = after
        """All switches, as they are since the call."""
        self._restore = restore

    def undo(self) -> None:
        """Put every switch that the call touched back to what it was; a second time does nothing."""
        restore, self._restore = self._restore, []
        with _quiet():
            for put_back in reversed(restore):
                put_back()

    def __enter__(self) -> PrecisionChange:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _traceback: TracebackType | None) -> None:
        self.undo()

    def __repr__(self) -> str:
        if not self.changed:
            return "precision: nothing changed"
        width = max(map(len, self.changed))
        lines = [f"  {name:<{width}}  {one.old} → {one.new}" for name, one in self.changed.items()]
        return "\n".join(["precision:", *lines])


def configure_precision(
    allow_tf32: bool | None = None,
    allow_bf16_reduced_precision_reduction: bool | None = None,
    allow_fp16_reduced_precision_reduction: bool | None = None,
    matmul_precision: str | None = None,
) -> PrecisionChange:
    """Set torch's switches of precision; what is left out stays. ValueError for arguments that contradict each other.

    `allow_tf32` is of matrix products and of cuDNN's convolutions, which torch sets apart.

    >>> with configure_precision(allow_tf32=True) as precision:
    ...     precision_settings()["cuda.matmul.allow_tf32"]
    True
    """
    reductions = dict(
        zip(REDUCTIONS, (allow_bf16_reduced_precision_reduction, allow_fp16_reduced_precision_reduction))
    )
    _check(allow_tf32, matmul_precision, reductions)
    before, restore = precision_settings(), []
    with _quiet():
        if matmul_precision is not None:
            restore.append(_remembered_matmul())
            torch.set_float32_matmul_precision(matmul_precision)
        elif allow_tf32 is not None and not _agrees(
            "matmul", lambda: torch.backends.cuda.matmul.allow_tf32, allow_tf32
        ):
            restore.append(_remembered_matmul())
            _set_matmul(allow_tf32)
        if allow_tf32 is not None and not _agrees("cudnn", lambda: torch.backends.cudnn.allow_tf32, allow_tf32):
            restore.append(_remembered_cudnn())
            _set_cudnn(allow_tf32)
        for name, allowed in reductions.items():
            if allowed is not None and allowed != before[f"cuda.matmul.{name}"]:
                restore.append(_remembered_reduction(name))
                setattr(torch.backends.cuda.matmul, name, allowed)
    return PrecisionChange(before, precision_settings(), restore)


def _check(allow_tf32: bool | None, matmul_precision: str | None, reductions: dict[str, bool | None]) -> None:
    for name, value in {"allow_tf32": allow_tf32, **reductions}.items():
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{name}={value!r}: True, False, or left out")
    if matmul_precision is None:
        return
    if matmul_precision not in MATMUL_PRECISIONS:
        raise ValueError(f"matmul_precision={matmul_precision!r}: one of {', '.join(MATMUL_PRECISIONS)}")
    if allow_tf32 is not None and allow_tf32 != (matmul_precision != "highest"):
        means = "forbids" if matmul_precision == "highest" else "allows"
        raise ValueError(
            f'allow_tf32={allow_tf32} contradicts matmul_precision="{matmul_precision}", which {means} TF32 '
            "products: leave one of them out"
        )


def _is_tf32(backend: str, op: str, by_the_old_way: Callable[[], bool]) -> bool:
    """Whether a kernel of this op would take TF32 now: the new way decides where torch has it."""
    get = getattr(torch._C, "_get_fp32_precision_getter", None)
    return get(backend, op) == "tf32" if get is not None else bool(by_the_old_way())


def _agrees(what: str, by_the_old_way: Callable[[], bool], wanted: bool) -> bool:
    """Whether both ways say so already, for every op that it is about."""
    places = [place for place in _OWN[what] if place[0] == "cuda"]
    try:
        return bool(by_the_old_way()) == wanted and all(_is_tf32(*p, by_the_old_way) == wanted for p in places)
    except RuntimeError:  # they contradict each other
        return False


def _matmul_precision() -> str:
    """The old way's word, also after the new way has contradicted it, when torch raises."""
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:
        with _set_aside(_OWN["matmul"], "ieee"):
            return str(torch.get_float32_matmul_precision())


@contextmanager
def _set_aside(places: tuple[tuple[str, str], ...], value: str) -> Iterator[None]:
    """Some `fp32_precision`s at `value` for a moment; nothing where torch has none."""
    set_to = getattr(torch._C, "_set_fp32_precision_setter", None)
    before = _own(places)
    try:
        for place in before:
            set_to(*place, value)  # type: ignore[misc]  # it is there where there are values
        yield
    finally:
        for place, old in before.items():
            set_to(*place, old)  # type: ignore[misc]  # as above


def _own(places: tuple[tuple[str, str], ...]) -> dict[tuple[str, str], str]:
    """`fp32_precision` of back ends and ops without what they inherit."""
    get, set_to = (getattr(torch._C, f"_{name}", None) for name in _FUNCTIONS)
    if get is None or set_to is None:
        return {}
    parents: dict[tuple[str, str], str] = {}
    try:
        for parent in _PARENTS:  # from the top: what the next one says then is its own
            if parent not in places:
                parents[parent] = get(*parent)
                set_to(*parent, "none")
        return {place: get(*place) for place in places}
    finally:
        for parent, value in parents.items():
            set_to(*parent, value)


_FUNCTIONS = ("get_fp32_precision_getter", "set_fp32_precision_setter")


def _put_back(values: dict[tuple[str, str], str]) -> None:
    for place, value in values.items():
        torch._C._set_fp32_precision_setter(*place, value)


def _remembered_matmul() -> Callable[[], None]:
    precision, own = _matmul_precision(), _own(_OWN["matmul"])

    def restore() -> None:
        torch.set_float32_matmul_precision(precision)
        _put_back(own)

    return restore


def _remembered_cudnn() -> Callable[[], None]:
    own = _own(_OWN["cudnn"])
    try:
        allowed = bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # the new way was used: which of the two holds is in `own`
        allowed = own.get(("cuda", "conv")) == "tf32"

    def restore() -> None:
        torch.backends.cudnn.allow_tf32 = allowed
        _put_back(own)

    return restore


def _set_matmul(allowed: bool) -> None:
    if allowed:
        torch.backends.cuda.matmul.allow_tf32 = True
    else:  # `allow_tf32 = False` would leave oneDNN what "high" gave it, and torch then raises when it is asked
        torch.set_float32_matmul_precision("highest")


def _set_cudnn(allowed: bool) -> None:
    torch.backends.cudnn.allow_tf32 = allowed
    if not allowed:  # the old way says "none" here, which inherits torch.backends.fp32_precision
        _put_back(dict.fromkeys(_own(_OWN["cudnn"]), "ieee"))


def _remembered_reduction(name: str) -> Callable[[], None]:
    matmul = torch.backends.cuda.matmul
    old: Any = getattr(matmul, name)
    try:  # newer torch also has whether products may be split at all
        old = (old, getattr(matmul, f"{name}_split_k"))
    except AttributeError:
        pass
    return lambda: setattr(matmul, name, old)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some torch would have us use a name that older torch has not
        yield
