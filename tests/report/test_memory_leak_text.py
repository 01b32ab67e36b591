"""A leak is the first thing that is said: how much, who holds it, what to do."""

from __future__ import annotations

import pytest

from memories import a_step, tensor, write_memory
from stepscope.analysis.memory.account import account
from stepscope.document.sections.memory import memory_document
from stepscope.render.terminal import terminal_text
from stepscope.session import open_session
from stepscope.session.memory_scaling import analyze_memory


def left(num_bytes: int, frame: str | None = "train.py:9 losses") -> dict:
    return {"bytes": num_bytes, "num_tensors": 3, "op": "MulBackward0", "module": None, "frame": frame}


def leaking(*entries: dict) -> dict:
    memory = a_step(left_alive=list(entries), allocator=None)
    memory["allocations"].append(tensor(sum(entry["bytes"] for entry in entries), "left_alive"))
    return memory


def said(tmp_path, memory: dict, width: int = 100) -> list[str]:
    path = write_memory(tmp_path / "memory.json.gz", memory)
    return terminal_text(memory_document(analyze_memory([open_session(path)])), width).splitlines()


def test_a_leak_is_a_part_of_the_peak():
    found, without = account(leaking(left(3300))), account(a_step(left_alive=[], allocator=None))

    assert found.peak_bytes == without.peak_bytes + 3300 == 6600
    first = found.live_at_peak.by_owner[0]
    assert (first.name, first.bytes, first.share) == ("left_alive", 3300, 0.5)
    for parts in vars(found.live_at_peak).values():
        assert sum(part.bytes for part in parts) == found.peak_bytes


def test_it_is_said_first_with_its_bytes_its_variable_and_what_to_do(tmp_path):
    lines = said(tmp_path, leaking(left(3000), left(300, "train.py:11 log")))
    text = " ".join(lines)

    assert text.startswith("Leak: 3.22 KiB of earlier steps' graphs (50.0 % of the peak)")
    assert "losses (train.py:9) holds 2.93 KiB in 3 tensors" in text
    assert ".item()" in text and text.index(".detach()") < text.index("allocated at the peak")
    assert sum("held at: train.py" in line for line in lines) == 2


@pytest.mark.parametrize("width", [40, 60, 100])
def test_it_fits_whatever_it_is_called(tmp_path, width):
    for frame in ("x" * 300 + ".py:9 " + "y" * 300, "\x1b[31m\n", None):
        lines = said(tmp_path, leaking(left(3000, frame)), width)
        text = " ".join(lines)

        assert all(len(line) <= width for line in lines[:6])
        assert "\x1b" not in text
        assert ("No variable" in text) == (frame is None)


def test_without_a_leak_nothing_is_said(tmp_path):
    assert not [line for line in said(tmp_path, a_step(left_alive=[])) if "eak:" in line or "still alive" in line]


def test_of_what_was_there_before_the_owner_is_named_and_not_the_op(tmp_path):
    lines = said(tmp_path, leaking(left(3000)))
    begin = next(number for number, line in enumerate(lines) if line.startswith("Largest allocations"))

    assert lines[begin + 2].startswith("  before") and "left_alive" in lines[begin + 2]
    assert "parameter" in lines[begin + 3]
