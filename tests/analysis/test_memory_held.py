"""What variables hold from before the step: one sum for each variable, whatever the sizes of its tensors."""

from __future__ import annotations

from stepscope.analysis.memory.account import account
from stepscope.document.sections.memory import memory_document
from stepscope.render.terminal import terminal_text
from stepscope.session.memory import RECORDING, MemoryReport
from stepscope.session.memory_scaling import MemoryAnalysis

LOSSES, SEEN = "train.py:9 losses", "train.py:12 seen"


def kept(num_bytes, caller, owner="other"):
    return {
        "bytes": num_bytes, "device": "cpu", "owner": owner, "op": "before the window", "phase": None,
        "module": None, "dtype": "float32", "shape": [num_bytes // 4], "caller": caller, "born": None, "died": None,
    }  # fmt: skip


MEMORY = {
    "device": "cpu",
    "allocations": [
        *(kept(4, LOSSES) for _ in range(100)),
        *(kept(4 * size, SEEN) for size in range(1, 11)),
        kept(64, None),
        kept(64, None, "parameter"),
    ],
}


def test_tensors_are_summed_by_the_variable_that_holds_them():
    found = account(MEMORY)

    assert [(part.name, part.bytes, part.num_allocations) for part in found.held] == [
        (LOSSES, 400, 100),
        (SEEN, 220, 10),
    ]
    rows = {large.caller: (large.bytes, large.num_allocations) for large in found.largest if large.caller}
    assert rows == {LOSSES: (4, 100), SEEN: (40, 10)}


def test_the_screen_names_the_variables_and_their_sums():
    report = MemoryReport("run", RECORDING, account(MEMORY), None, ())

    text = terminal_text(memory_document(MemoryAnalysis((report,), None)))

    assert "400 B in 100 tensors at train.py:9 losses" in text
    assert "220 B in 10 tensors at train.py:12 seen" in text
