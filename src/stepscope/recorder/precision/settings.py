"""Reads torch's global precision settings, sets them in one call, and restores them exactly.

Torch stores the precision of float32 products twice. `set_float32_matmul_precision` and `allow_tf32` are the old
settings. `fp32_precision`, per backend and op and inherited from the backend and from `torch.backends`, came with
torch 2.9. Writing the old setting also writes the new one, and reading the old one after the new one was set raises.
So both are remembered here, the new one without inherited values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from stepscope.recorder.wall import caught_warnings

MATMUL_PRECISIONS = ("highest", "high", "medium")
REDUCTIONS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")

# Where the new settings store what the old ones also set, and the parents that they inherit from.
_OWN = {"matmul": (("cuda", "matmul"), ("mkldnn", "matmul")), "cudnn": (("cuda", "conv"), ("cuda", "rnn"))}
_PARENTS = (("generic", "all"), ("cuda", "all"), ("mkldnn", "all"))

Setting = str | bool


def precision_settings() -> dict[str, Setting]:
    """Return the current settings by torch's names, as JSON values.

    >>> sorted(precision_settings())[:2]
    ['cuda.matmul.allow_bf16_reduced_precision_reduction', 'cuda.matmul.allow_fp16_reduced_precision_reduction']
    """
    matmul = torch.backends.cuda.matmul
    with caught_warnings():
        return {
            "float32_matmul_precision": _matmul_precision(),
            "cuda.matmul.allow_tf32": _is_tf32("matmul", ("cuda", "matmul")),
            "cudnn.allow_tf32": any(_is_tf32("cudnn", place) for place in _OWN["cudnn"]),
            **{f"cuda.matmul.{name}": bool(getattr(matmul, name)) for name in REDUCTIONS},
        }


@dataclass(frozen=True)
class Changed:
    old: Setting
    new: Setting


class PrecisionChange:
    """The settings that `configure_precision` changed. `undo()` or leaving the `with` block restores them."""

    def __init__(
        self, before: dict[str, Setting], after: dict[str, Setting], restore: list[Callable[[], None]]
    ) -> None:
        self.changed = {name: Changed(old, after[name]) for name, old in before.items() if old != after[name]}
        self.settings = after  # all settings, as they are after the call
        self._restore = restore

    def undo(self) -> None:
        """Restore every setting that the call changed. A second call does nothing."""
        restore, self._restore = self._restore, []
        with caught_warnings():
            for put_back in reversed(restore):
                put_back()

    def __enter__(self) -> "PrecisionChange":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        if not self.changed:
            return "precision: nothing changed"
        width = max(map(len, self.changed))
        lines = [f"  {name:<{width}}  {one.old} → {one.new}" for name, one in self.changed.items()]
        return "\n".join(["precision:", *lines])


def configure_precision(
    allow_tf32: bool | None, matmul_precision: str | None, reductions: dict[str, bool | None]
) -> PrecisionChange:
    """Set torch's precision settings; None leaves one unchanged. Raises ValueError if arguments are contradictory.

    `allow_tf32` applies to matrix products and to cuDNN convolutions, which torch sets separately. `reductions` are
    values by the names in `REDUCTIONS`.
    """
    _check(allow_tf32, matmul_precision, reductions)
    before, restore = precision_settings(), []
    with caught_warnings():
        if matmul_precision is not None:
            restore.append(_remembered_matmul())
            torch.set_float32_matmul_precision(matmul_precision)
        elif allow_tf32 is not None and not _agrees("matmul", allow_tf32):
            restore.append(_remembered_matmul())
            if allow_tf32:
                torch.backends.cuda.matmul.allow_tf32 = True
            else:  # `allow_tf32 = False` would leave oneDNN at "high", and torch would raise when it is read
                torch.set_float32_matmul_precision("highest")
        if allow_tf32 is not None and not _agrees("cudnn", allow_tf32):
            restore.append(_remembered_cudnn())
            torch.backends.cudnn.allow_tf32 = allow_tf32
            if not allow_tf32:  # the old setting writes "none" here, which inherits torch.backends.fp32_precision
                _put_back(dict.fromkeys(_own(_OWN["cudnn"]), "ieee"))
        for name, allowed in reductions.items():
            if allowed is not None and allowed != before[f"cuda.matmul.{name}"]:
                restore.append(_remembered_reduction(name))
                setattr(torch.backends.cuda.matmul, name, allowed)
    return PrecisionChange(before, precision_settings(), restore)


def _check(allow_tf32: bool | None, matmul_precision: str | None, reductions: dict[str, bool | None]) -> None:
    for name, value in {"allow_tf32": allow_tf32, **reductions}.items():
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} must be True, False, or left out")
    if matmul_precision is None:
        return
    if matmul_precision not in MATMUL_PRECISIONS:
        raise ValueError(f"matmul_precision={matmul_precision!r} must be one of {', '.join(MATMUL_PRECISIONS)}")
    if allow_tf32 is not None and allow_tf32 != (matmul_precision != "highest"):
        means = "forbids" if matmul_precision == "highest" else "allows"
        raise ValueError(
            f'allow_tf32={allow_tf32} contradicts matmul_precision="{matmul_precision}", which {means} TF32 '
            "products: leave one of them out"
        )


def _allows_tf32(what: str) -> bool:
    """Return the old setting; raises RuntimeError if the new one contradicts it."""
    return bool((torch.backends.cuda.matmul if what == "matmul" else torch.backends.cudnn).allow_tf32)


def _is_tf32(what: str, place: tuple[str, str]) -> bool:
    """Return whether a kernel of a backend and op would use TF32 now. The new setting decides if torch has it."""
    get = getattr(torch._C, "_get_fp32_precision_getter", None)
    return get(*place) == "tf32" if get is not None else _allows_tf32(what)


def _agrees(what: str, wanted: bool) -> bool:
    """Return whether the old and the new settings already have this value for every op concerned."""
    places = [place for place in _OWN[what] if place[0] == "cuda"]
    try:
        return _allows_tf32(what) == wanted and all(_is_tf32(what, place) == wanted for place in places)
    except RuntimeError:
        return False


def _matmul_precision() -> str:
    """Return the old setting, even if the new one contradicts it and torch would raise."""
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:
        own = _own(_OWN["matmul"])
        try:
            _put_back(dict.fromkeys(own, "ieee"))
            return str(torch.get_float32_matmul_precision())
        finally:
            _put_back(own)


def _own(places: tuple[tuple[str, str], ...]) -> dict[tuple[str, str], str]:
    """Return `fp32_precision` of backends and ops without inherited values; empty if torch does not have it."""
    get = getattr(torch._C, "_get_fp32_precision_getter", None)
    set_to = getattr(torch._C, "_set_fp32_precision_setter", None)
    if get is None or set_to is None:
        return {}
    parents: dict[tuple[str, str], str] = {}
    try:
        for parent in _PARENTS:  # from the top, so that each next one shows its own value
            if parent not in places:
                parents[parent] = get(*parent)
                set_to(*parent, "none")
        return {place: get(*place) for place in places}
    finally:
        for parent, value in parents.items():
            set_to(*parent, value)


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
        allowed = _allows_tf32("cudnn")
    except RuntimeError:  # the new setting was used, and `own` has its value
        allowed = own.get(("cuda", "conv")) == "tf32"

    def restore() -> None:
        torch.backends.cudnn.allow_tf32 = allowed
        _put_back(own)

    return restore


def _remembered_reduction(name: str) -> Callable[[], None]:
    matmul = torch.backends.cuda.matmul
    old: Any = getattr(matmul, name)
    try:  # newer torch also stores whether products may be split
        old = (old, getattr(matmul, f"{name}_split_k"))
    except AttributeError:
        pass
    return lambda: setattr(matmul, name, old)
