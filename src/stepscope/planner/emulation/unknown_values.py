"""What a program gets where only data could decide: a number that nothing may depend on, or an error."""

from __future__ import annotations

from typing import Any

from stepscope.recorder.frames import place, script_frames


class DataNeeded(Exception):
    """The program needs data. The message says what it needs, where, and what may help."""

    def __init__(self, what: str, advice: str = "") -> None:
        where = users_place()
        super().__init__(f"{what}{f' at {where}' if where else ''}{f' ({advice})' if advice else ''}")
        self.what, self.where, self.advice = what, where, advice


def users_place() -> str | None:
    """Return `train.py:42 step`, the innermost frame of the program; plus its caller if it is in a package."""
    frames = script_frames()
    first = next(frames, None)
    if first is None:
        return None
    found = f"{place(first)} {first.f_code.co_name}"
    if "site-packages" in first.f_code.co_filename:
        users = next((frame for frame in frames if "site-packages" not in frame.f_code.co_filename), None)
        if users is not None:
            found += f", called from {place(users)} {users.f_code.co_name}"
    return found


class UnknownNumber(float):
    """The result of `.item()` without data: it can be computed with and printed, but nothing may depend on it.

    From a floating-point tensor it counts as 1.0, so that a check for infinities passes. From integers it is `nan`,
    so that no size can follow from it. It prints as `nan`.
    """

    def __repr__(self) -> str:
        return "nan"

    __str__ = __repr__
    __hash__ = float.__hash__

    def __format__(self, spec: str) -> str:
        return format(float("nan"), f"{spec[:-1]}f" if spec[-1:] in ("d", "x", "X", "o", "b") else spec)

    def __round__(self, ndigits: Any = None) -> Any:
        return self if ndigits is not None else self.__int__()

    def __int__(self) -> int:
        raise DataNeeded("an integer from a tensor's value (int(), range(), an index, a size)")

    __index__ = __trunc__ = __floor__ = __ceil__ = __int__


def _computed(name: str) -> Any:
    method = getattr(float, name)

    def call(self: UnknownNumber, *others: Any) -> Any:
        found = method(self, *others)
        return UnknownNumber(found) if isinstance(found, float) else found

    return call


def _refused(self: UnknownNumber, *others: Any) -> Any:
    raise DataNeeded("a decision that depends on a tensor's value (a comparison, if, while, min(), max())")


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
for _name in (*_ARITHMETIC, *(f"r{name}" for name in _ARITHMETIC), "neg", "pos", "abs"):
    setattr(UnknownNumber, f"__{_name}__", _computed(f"__{_name}__"))
for _name in ("bool", "eq", "ne", "lt", "le", "gt", "ge"):
    setattr(UnknownNumber, f"__{_name}__", _refused)
