"""Renders a line chart as one SVG, without any library, readable on light and dark backgrounds."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from stepscope.document.model import Lines, Series
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
    return "\n".join([*_Plot(chart).elements(), "</svg>\n"])


class _Plot:
    """Where things are on the picture."""

    def __init__(self, chart: Lines) -> None:
        self.chart = chart
        every_x = [x for series in chart.series for x in series.x] or [0.0]
        self.first, self.last = min(every_x), max(*every_x, min(every_x) + 1)
        most = largest([y for series in chart.series for y in series.y]) or 1.0
        self.tick, self.top = _tick(chart.y, most), most * 1.04

    def x(self, value: float) -> float:
        return LEFT + (value - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.top * (HEIGHT - TOP - BOTTOM)

    def elements(self) -> Iterator[str]:
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
            f'height="{HEIGHT}" role="img" font-family="system-ui, sans-serif" font-size="12" fill="{TEXT}">'
        )
        yield f"<title>{_escaped(self.chart.title)}</title>"
        yield from self._axes()
        colors = colors_of(self.chart.series)
        for series, color in zip(self.chart.series, colors):
            if steps := self._path(series):
                yield f'<path d="{steps}" fill="none" stroke="{color}" stroke-width="1.5"/>'
        yield from self._marks()
        yield from self._legend(colors)

    def _axes(self) -> Iterator[str]:
        for number in range(int(self.top / self.tick) + 1):
            y = self.y(number * self.tick)
            yield _line(LEFT, WIDTH - RIGHT, y, y, TEXT, 'stroke-opacity="0.35"')
            yield _text(LEFT - 8, y + 4, cell(self.chart.y, number * self.tick), "end")
        middle = (LEFT + WIDTH - RIGHT) / 2
        yield _text(middle, HEIGHT - BOTTOM + 18, f"{title_of(self.chart.x)}, in order", "middle")

    def _path(self, series: Series) -> str:
        points = [(self.x(x), self.y(y)) for x, y in zip(series.x, series.y) if y is not None]
        across = "H{0:.1f}V{1:.1f}" if self.chart.style == "steps" else "L{0:.1f} {1:.1f}"
        return "".join(("M{0:.1f} {1:.1f}" if not i else across).format(*point) for i, point in enumerate(points))

    def _marks(self) -> Iterator[str]:
        """Yield the marks, their names in turn one below the other."""
        for number, mark in enumerate(sorted(self.chart.marks, key=lambda mark: mark.x)):
            x, y = self.x(mark.x), TOP - 8 - _LINE * (number % 3)
            is_right = x > (LEFT + WIDTH) / 2
            yield _line(x, x, y, HEIGHT - BOTTOM, TEXT, 'stroke-dasharray="2 4"')
            yield _text(x + (-4 if is_right else 4), y + 4, mark.name, "end" if is_right else "start")

    def _legend(self, colors: Sequence[str]) -> Iterator[str]:
        x, y = float(LEFT), HEIGHT - 12
        for series, color in zip(self.chart.series, colors):
            yield _line(x, x + 22, y - 4, y - 4, color, 'stroke-width="2"')
            yield _text(x + 28, y, series.name, "start")
            x += 52 + _CHARACTER * len(series.name)


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
