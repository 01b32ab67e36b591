"""The line that says how far long work has come."""

from __future__ import annotations

import io

import pytest

from stepscope.cli.support import output
from stepscope.cli.support.output import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Gone(Terminal):
    def write(self, text):
        raise BrokenPipeError


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    return now


def drawn(monkeypatch, stream=None):
    stream = stream or Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    return stream


def test_time_left_is_of_what_was_done_now(monkeypatch, clock):
    stream = drawn(monkeypatch)
    line = Progress("8 points", silent_s=0.0, resumes=True)
    line(0.5)
    assert "8 points ████████████              50%" in stream.getvalue() and "left" not in stream.getvalue()

    clock[0] += 10
    line(0.75)
    assert stream.getvalue().count("left") == 1 and "75%  10 s left" in stream.getvalue()


def test_short_work_is_done_in_silence_and_others_are_drawn_now_and_then(monkeypatch, clock):
    stream = drawn(monkeypatch)
    with Progress("reading") as line:
        line(0.5)
        assert stream.getvalue() == ""
        clock[0] += 2
        line(0.6)
        line(0.7)
        assert "60%  1 s left" in stream.getvalue() and "70%" not in stream.getvalue()
        line.clear()
        line(0.8)
        assert "80%" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_a_terminal_that_is_gone_ends_nothing(monkeypatch, clock):
    drawn(monkeypatch, Gone())
    with Progress("reading", silent_s=0.0) as line:
        line(0.5)
        line.clear()
