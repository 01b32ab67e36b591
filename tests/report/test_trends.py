"""Figures over time on a terminal, and what needs a look."""

from __future__ import annotations

import pytest

from stepscope.document.model import Document, Notes, Section, Trend, Trends
from stepscope.render.terminal import sparkline, terminal_text

ROWS = (
    Trend("throughput", "81.2 k tokens/s", [1.0, 2.0, 4.0], "per_s", "8 ranks"),
    Trend("loss", "2.1", [9.0, None, 2.0], "loss", "step 3,000", from_zero=False),
)


def lines(width: int, *parts) -> list[str]:
    return terminal_text(Document("run", "", (Section("run", "Run", parts),)), width).splitlines()


def test_a_trend_is_one_line_with_its_value_and_what_it_was_before():
    first, second = lines(80, Trends(ROWS, "2 h"))

    assert first.split() == ["throughput", "81.2", "k", "tokens/s", "▃▄▇", "8", "ranks"]
    assert "▇ ▁" in second and second.endswith("step 3,000")


def test_on_a_narrow_terminal_the_details_go_first_and_then_the_line():
    assert [line.split()[-1] for line in lines(56, Trends(ROWS, "2 h"))] == ["▃▄▇", "▁"]
    assert [line.split()[-1] for line in lines(36, Trends(ROWS, "2 h"))] == ["tokens/s", "2.1"]


@pytest.mark.parametrize("values", [[], [None], [float("nan")], [0.0] * 9, [float("inf"), 1.0], [-1.0, 1.0]])
def test_a_line_has_a_place_for_every_value_whatever_it_is(values):
    assert len(sparkline(values, 40)) == len(values)
    assert len(sparkline(values, 1)) == min(1, len(values))


def test_a_note_is_marked_and_its_control_characters_are_not_printed():
    assert lines(40, Notes(("Rank 3 is silent.", "evil \x1b[31m name"))) == [
        "! Rank 3 is silent.",
        "! evil ?[31m name",
    ]
