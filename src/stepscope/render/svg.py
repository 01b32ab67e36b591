"""Renders a line chart as one SVG, without any library, readable on light and dark backgrounds."""

import html
from collections.abc import Iterator

from stepscope.document.model import Lines
from stepscope.formatting import cell, safe, title_of
from stepscope.render.axes import largest
from stepscope.render.colors import colors_of

WIDTH, HEIGHT = 960, 380
LEFT, RIGHT, TOP, BOTTOM = 78, 18, 52, 46
TEXT = "#808080"
_NUM_TICKS = 4
_CHARACTER = 6.6  # pixels of a character of the labels, about
_LINE = 14  # pixels between two lines of text


def svg_of(chart: Lines) -> str:
    """Return the chart as SVG: its series as steps or lines, its marks as dotted lines with their names."""
    return "\n".join([*_elements(chart), "</svg>\n"])


def _elements(chart: Lines) -> Iterator[str]:
    every_x = [x for series in chart.series for x in series.x] or [0.0]
    first, last = min(every_x), max(*every_x, min(every_x) + 1)
    most = largest(y for series in chart.series for y in series.y) or 1.0
    tick, top = _tick(chart.y, most), most * 1.04

    def across(value: float) -> float:
        return LEFT + (value - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def up(value: float) -> float:
        return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" role="img" font-family="system-ui, sans-serif" font-size="12" fill="{TEXT}">'
    )
    yield f"<title>{_escaped(chart.title)}</title>"
    for number in range(int(top / tick) + 1):
        y = up(number * tick)
        yield _line(LEFT, WIDTH - RIGHT, y, y, TEXT, 'stroke-opacity="0.35"')
        yield _text(LEFT - 8, y + 4, cell(chart.y, number * tick), "end")
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM + 18, f"{title_of(chart.x)}, in order", "middle")
    colors, legend, place = colors_of(chart.series), list[str](), float(LEFT)
    form = "H{0:.1f}V{1:.1f}" if chart.style == "steps" else "L{0:.1f} {1:.1f}"
    for series, color in zip(chart.series, colors):
        points = [(across(x), up(y)) for x, y in zip(series.x, series.y) if y is not None]
        if path := "".join((form if i else "M{0:.1f} {1:.1f}").format(*point) for i, point in enumerate(points)):
            yield f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>'
        legend.append(_line(place, place + 22, HEIGHT - 16, HEIGHT - 16, color, 'stroke-width="2"'))
        legend.append(_text(place + 28, HEIGHT - 12, series.name, "start"))
        place += 52 + _CHARACTER * len(series.name)
    # The names of marks are in turn one below the other.
    for number, mark in enumerate(sorted(chart.marks, key=lambda mark: mark.x)):
        x, y = across(mark.x), TOP - 8 - _LINE * (number % 3)
        is_right = x > (LEFT + WIDTH) / 2
        yield _line(x, x, y, HEIGHT - BOTTOM, TEXT, 'stroke-dasharray="2 4"')
        yield _text(x + (-4 if is_right else 4), y + 4, mark.name, "end" if is_right else "start")
    yield from legend


def _tick(name: str, most: float) -> float:
    """Return the distance between two grid lines, a round number of the unit that the axis is written in.

    >>> _tick("peak_bytes", 700), _tick("peak_bytes", 3 * 2**30) / 2**30
    (200, 1.0)
    """
    base = 1024 if name.endswith("bytes") else 1000
    unit = 1
    while most / unit >= base:
        unit *= base
    return next(unit * n for n in (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500) if unit * n * _NUM_TICKS >= most)


def _line(x1: float, x2: float, y1: float, y2: float, color: str, more: str) -> str:
    return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" stroke="{color}" {more}/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_escaped(text)}</text>'


def _escaped(text: str) -> str:
    return html.escape(safe(text))
