"""What the pictures share: texts that the font can draw, ticks and legends."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from stepscope.formatting import fit_names, safe
from stepscope.render.axes import finite, log_ticks, tick_text


def drawn(text: object, most: int = 60) -> str:
    """Somebody else's text as the font can draw it, in one line; □ for what it has no sign for."""
    return "".join(sign if ord(sign) in _signs() else "□" for sign in safe(text, most))


def drawn_apart(names: Sequence[object], room: int) -> list[str]:
    """Names in so many characters, different ones still different where that can be."""
    return fit_names([drawn(name, 1000) for name in names], room)


@cache
def _signs() -> frozenset[int]:
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())


def plain_ticks(axis: Any, values: Sequence[float], is_log: bool, exact: bool = False) -> None:
    """Figures on an axis, without powers of ten; `exact`: at whole ones."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value)))
    if exact and not is_log and all(value == round(value) for value in finite(values)):
        axis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    if is_log and (ticks := log_ticks(values, exact)):
        axis.set_minor_formatter(NullFormatter())
        axis.set_major_locator(FixedLocator(ticks))


def legend(axes: Any, handles: Sequence[Any], names: Sequence[str], title: str = "") -> None:
    """Names beside the chart, never on it."""
    if not handles:
        return
    # A name that begins with a low line would be left out.
    texts = [f" {name}" if name.startswith("_") else name for name in drawn_apart(names, 28)]
    size = 10 if len(names) <= 24 else 7
    axes.legend(handles, texts, loc="upper left", bbox_to_anchor=(1.01, 1.0), title=title or None, fontsize=size)
