"""The timeline of memory as a picture: one SVG, no library, readable on light and on dark."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from stepscope.analysis.memory.account import Account
from stepscope.analysis.memory.timeline import Point
from stepscope.formatting import safe, size

WIDTH, HEIGHT = 960, 380
LEFT, RIGHT, TOP, BOTTOM = 78, 18, 52, 46
ALLOCATED, RESERVED, PEAK, TEXT = "#3b82f6", "#f59e0b", "#ef4444", "#808080"
_NUM_TICKS = 4
_CHARACTER = 6.6
"""Pixels of a character of the labels, about."""


def timeline_svg(account: Account) -> str:
    """The picture: allocated and reserved bytes over the step, its stages marked, the peak named."""
    return "\n".join([*_head(account), *_Plot(account).parts(), "</svg>\n"])


def _head(account: Account) -> Iterator[str]:
    title = f"Memory of {account.device} over a step: peak {size(account.peak_bytes)}"
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="12" fill="{TEXT}">'
    )
    yield f"<title>{_escaped(title)}</title>"


class _Plot:
    """Where things are on the picture."""

    def __init__(self, account: Account) -> None:
        self.account = account
        points = account.timeline
        self.first, self.last = points[0].event, max(points[-1].event, points[0].event + 1)
        reserved = [point.reserved_bytes or 0 for point in points]
        self.most = max(
            account.peak_bytes, account.peak_tracked_bytes, account.peak_reserved_bytes or 0, *reserved, 1
        )
        self.step, self.top = _ticks(self.most)

    def x(self, event: float) -> float:
        return LEFT + (event - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def y(self, num_bytes: float) -> float:
        return HEIGHT - BOTTOM - num_bytes / self.top * (HEIGHT - TOP - BOTTOM)

    def parts(self) -> Iterator[str]:
        yield from self._stages()
        yield from self._axes()
        yield from self._lines()
        yield from self._peak()
        yield from self._legend()

    def _stages(self) -> Iterator[str]:
        stages = self.account.stages if len(self.account.stages) > 1 else ()
        ends = [*(stage.first_event for stage in stages[1:]), self.last]
        for number, (stage, end) in enumerate(zip(stages, ends)):
            begin = self.x(max(stage.first_event, self.first))
            width = self.x(min(end, self.last)) - begin
            if width <= 0:
                continue
            name = _escaped(stage.name)
            yield (
                f'<rect x="{begin:.1f}" y="{TOP}" width="{width:.1f}" height="{HEIGHT - TOP - BOTTOM}" '
                f'fill="{TEXT}" fill-opacity="{0.13 if number % 2 else 0.05}">'
                f"<title>{name}: {size(stage.after_bytes)} when it ended, {size(stage.peak_bytes)} at most</title>"
                "</rect>"
            )
            if width > _CHARACTER * len(safe(stage.name)) + 6:
                yield f'<text x="{begin + width / 2:.1f}" y="{TOP - 8}" text-anchor="middle">{name}</text>'

    def _axes(self) -> Iterator[str]:
        for tick in range(_NUM_TICKS + 1):
            num_bytes = tick * self.step
            if num_bytes > self.top:
                break
            y = self.y(num_bytes)
            yield (
                f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{TEXT}" '
                'stroke-opacity="0.35"/>'
            )
            yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{size(num_bytes)}</text>'
        middle = (LEFT + WIDTH - RIGHT) / 2
        yield (
            f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">allocations and releases, '
            "in order</text>"
        )

    def _lines(self) -> Iterator[str]:
        points, base = self.account.timeline, self.y(0)
        allocated = self._steps(points, [point.allocated_bytes for point in points])
        yield (
            f'<path d="M{self.x(self.first):.1f} {base:.1f}L{allocated}L{self.x(self.last):.1f} {base:.1f}Z" '
            f'fill="{ALLOCATED}" fill-opacity="0.25"/>'
        )
        yield f'<path d="M{allocated}" fill="none" stroke="{ALLOCATED}" stroke-width="1.5"/>'
        held = [(point, point.reserved_bytes) for point in points if point.reserved_bytes is not None]
        if held:
            steps = self._steps([point for point, _ in held], [num_bytes for _, num_bytes in held])
            yield f'<path d="M{steps}" fill="none" stroke="{RESERVED}" stroke-width="1.5"/>'
        elif self.account.peak_reserved_bytes:
            yield from self._level(self.account.peak_reserved_bytes, RESERVED)
        if self.account.remainder_bytes:
            yield from self._level(self.account.peak_bytes, ALLOCATED)

    def _level(self, num_bytes: int, color: str) -> Iterator[str]:
        y = self.y(num_bytes)
        yield (
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{color}" '
            'stroke-dasharray="6 4"/>'
        )

    def _steps(self, points: Sequence[Point], levels: Sequence[int]) -> str:
        """A line that goes across and then up or down."""
        parts = [f"{self.x(points[0].event):.1f} {self.y(levels[0]):.1f}"]
        for point, level in zip(points[1:], levels[1:]):
            parts.append(f"H{self.x(point.event):.1f}V{self.y(level):.1f}")
        return "".join([*parts, f"H{self.x(self.last):.1f}"])

    def _peak(self) -> Iterator[str]:
        found = self.account
        x, y = self.x(max(found.peak_event, self.first)), self.y(found.peak_tracked_bytes)
        is_right = x > (LEFT + WIDTH) / 2
        whose = " in tensors" if found.remainder_bytes else ""
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{PEAK}"/>'
        yield (
            f'<text x="{x + (-9 if is_right else 9):.1f}" y="{y - 6:.1f}" font-weight="bold" '
            f'text-anchor="{"end" if is_right else "start"}">peak {size(found.peak_tracked_bytes)}{whose}</text>'
        )

    def _legend(self) -> Iterator[str]:
        found, x = self.account, float(LEFT)
        has_reserved = any(point.reserved_bytes is not None for point in found.timeline)
        entries = [(ALLOCATED, "", "allocated")]
        if has_reserved:
            entries.append((RESERVED, "", "reserved"))
        elif found.peak_reserved_bytes:
            entries.append((RESERVED, "6 4", f"most reserved, {size(found.peak_reserved_bytes)}"))
        if found.remainder_bytes:
            entries.append((ALLOCATED, "6 4", f"the allocator's own peak, {size(found.peak_bytes)}"))
        y = HEIGHT - 12
        for color, dashes, text in entries:
            yield (
                f'<line x1="{x:.0f}" x2="{x + 22:.0f}" y1="{y - 4}" y2="{y - 4}" stroke="{color}" stroke-width="2" '
                f'stroke-dasharray="{dashes or "none"}"/>'
            )
            yield f'<text x="{x + 28:.0f}" y="{y}">{text}</text>'
            x += 28 + _CHARACTER * len(text) + 24


def _ticks(most: int) -> tuple[int, int]:
    """Bytes between two lines, and at the top: lines at one, two or five times a power of two of some unit.

    >>> _ticks(700), _ticks(3 * 2**30)
    ((200, 728), (1073741824, 3350074490))
    """
    unit = 1
    while most / unit >= 1024:
        unit *= 1024
    step = next(
        unit * times for times in (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500) if unit * times * _NUM_TICKS >= most
    )
    return max(1, int(step)), max(1, int(most * 1.04))


def _escaped(text: str) -> str:
    return html.escape(safe(text))
