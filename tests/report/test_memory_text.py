"""An account of memory as text and as a picture: what it says, in any width, whatever the names are."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from memories import S, a_step, snapshot, tensor, transformer, write_memory
from stepscope.analysis.memory.account import account
from stepscope.document.memory_charts import allocator_timeline
from stepscope.document.sections.memory import memory_document
from stepscope.render.svg import svg_of
from stepscope.render.terminal import terminal_text
from stepscope.session import open_session
from stepscope.session.memory_scaling import analyze_memory

EVIL = "evil\x1b[31m\x1b]0;title\x07\x9b2J‮</text><script>alert('&')</script>\r\n"
SVG = "{http://www.w3.org/2000/svg}"


def of(path: Path, *others: Path, width: int = 100) -> str:
    analysis = analyze_memory([open_session(each) for each in (path, *others)])
    return terminal_text(memory_document(analysis), width)


@pytest.fixture
def recording(tmp_path) -> Path:
    return write_memory(tmp_path / "run" / "memory.json.gz", a_step())


def line_of(text: str, *words: str) -> str:
    (line,) = (line for line in text.splitlines() if all(word in line for word in words))
    return line


def test_the_screen_says_what_the_peak_is_made_of(recording):
    text = of(recording)

    said = " ".join(text.split())
    assert "4.00 KiB is allocated at the peak, in forward: activation 29.3 %, parameter 24.4 %" in said
    assert line_of(text, "activation  ", "1.17 KiB", "29.3 %").split()[-1] == "2"
    assert line_of(text, "in no tensor", "800 B", "19.5 %")
    assert line_of(text, "  yes").split()[0] == "forward" and "3.22 KiB" in line_of(text, "  yes")
    assert line_of(text, "blocks.*.mlp", "600 B", "aten.mm")
    assert line_of(text, "allocator", "5.86 KiB reserved", "1.86 KiB of it not allocated")
    assert "retries after releasing the cache: 1" in said
    assert line_of(text, "MulBackward0", "77 B", "3") and "held at: train.py:9 losses" in said
    assert line_of(text, "other device", "48.8 KiB", "cpu")


def test_kept_for_backward_is_told_by_module(recording):
    text = of(recording)

    header = line_of(text, "module", "activations", "saved")
    row = text.splitlines()[text.splitlines().index(header) + 1]
    assert row.split() == ["blocks.*.mlp", "1.17", "KiB", "1.07", "KiB"]


def test_modules_that_have_no_row_are_one(tmp_path):
    memory = a_step()
    memory["allocations"].append(tensor(64, "activation", 8, module="head"))
    memory["saved"].append({"module": None, "bytes": 32, "num_tensors": 1})
    path = write_memory(tmp_path / "memory.json.gz", memory)

    text = terminal_text(memory_document(analyze_memory([open_session(path)]), num_rows=1))

    assert line_of(text, "blocks", "1.17 KiB", "1.07 KiB")
    assert line_of(text, "other modules", "64 B", "32 B")


def test_formulas_and_their_letters_are_shown(tmp_path):
    text = of(write_memory(tmp_path / "memory.json.gz", transformer(S)))

    assert line_of(text, "aten._softmax", "blocks.*.attn", "B·H·S²·4")
    assert "S = 6 (length)" in text and line_of(text, "aten.odd", " – ")


def test_letters_that_are_the_same_number_are_said_to_be(tmp_path):
    text = of(write_memory(tmp_path / "memory.json.gz", transformer(8)))

    assert "Here S = d," in " ".join(text.split())


def test_two_recordings_show_how_memory_grows(tmp_path):
    one = write_memory(tmp_path / "short" / "memory.json.gz", transformer(S))
    other = write_memory(tmp_path / "long" / "memory.json.gz", transformer(2 * S))

    text = of(one, other)

    assert "How memory grows with length" in text and "S=6 in " in text
    assert line_of(text, "aten._softmax", "blocks.*.attn", "quadratic", "B·H·S²·4")
    assert line_of(text, "aten.gelu", "blocks.*.mlp", "linear")
    assert "^0." in line_of(text, "aten.odd", "^")


def test_a_snapshot_shows_places_in_python_and_its_end(tmp_path):
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(snapshot()))

    text = of(path)

    assert "16.0 MiB is allocated at the peak: train.py:10 step 50.0 %" in text
    assert line_of(text, "model.py:31 forward", "4.00 MiB", "25.0 %")
    assert "Alive at the end" in text and "unknown" in text
    oom = " ".join(text[text.index("out of memory") :].split())
    assert "64.0 MiB requested at model.py:31 forward: CUDA had 32.0 MiB free" in oom
    text = " ".join(text.split())
    assert "22.0 MiB reserved in 2 segments" in text and "no owners, modules" in text


def test_a_snapshot_without_a_history_says_so(tmp_path):
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(snapshot() | {"device_traces": []}))

    text = of(path)

    assert "history was not recorded" in text and "all of it from before the step" in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_terminal(width, tmp_path, recording):
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(snapshot()))
    one = write_memory(tmp_path / "short" / "memory.json.gz", transformer(S))
    other = write_memory(tmp_path / "long" / "memory.json.gz", transformer(2 * S))
    for text in (of(path, width=width), of(recording, width=width), of(one, other, width=width)):
        assert max(map(len, text.splitlines())) <= width


def evil_step() -> dict:
    names = dict.fromkeys(("op", "module", "phase", "caller", "dtype", "owner", "device"), EVIL)
    memory = a_step(allocations=[tensor(64, born=i) | names for i in range(3)], device=EVIL)
    memory["stages"] = [{"name": EVIL, "event": 0}]
    memory["saved"] = [{"module": EVIL, "bytes": 5, "num_tensors": 1}]
    memory["left_alive"] = [{"bytes": 5, "num_tensors": 1, "op": EVIL, "module": EVIL, "frame": EVIL}]
    return memory


def test_names_cannot_speak_to_the_terminal(tmp_path):
    text = of(write_memory(tmp_path / "memory.json.gz", evil_step()))

    assert "evil" in text
    assert all(character.isprintable() or character == "\n" for character in text)


# -- the picture --------------------------------------------------------------------------------------------------


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_the_picture_has_the_peak_the_stages_and_the_lines():
    svg = svg_of(allocator_timeline(account(a_step())))

    shown = texts(svg)
    assert "peak 3.22 KiB in tensors" in shown and {"data", "forward", "backward"} <= set(shown)
    assert "reserved at most, 5.86 KiB" in shown and "the allocator's own peak, 4.00 KiB" in shown
    root = ElementTree.fromstring(svg)
    allocated, *_ = [element.get("d") or "" for element in root.iter(f"{SVG}path")]
    levels = [float(level) for level in re.findall(r"V([\d.]+)", allocated)]
    at_peak = re.findall(r"H([\d.]+)V", allocated)[levels.index(min(levels))]
    assert any(line.get("x1") == line.get("x2") == at_peak for line in root.iter(f"{SVG}line"))
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "") and "<script" not in svg


def test_the_picture_of_a_snapshot_has_both_lines(tmp_path):
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(snapshot()))
    svg = svg_of(allocator_timeline(analyze_memory([open_session(path)]).reports[0].account))

    assert {"allocated", "reserved", "peak 16.0 MiB"} <= set(texts(svg))


@pytest.mark.parametrize(
    "memory",
    [evil_step(), a_step(allocations=[]), a_step(allocations=[tensor(2**62, born=0)], allocator=None)],
    ids=["evil", "empty", "huge"],
)
def test_the_picture_is_sound_whatever_it_shows(memory):
    svg = svg_of(allocator_timeline(account(memory)))

    assert "<script" not in svg and "nan" not in svg and "\x1b" not in svg
    for element in ElementTree.fromstring(svg).iter():
        for name in ("x", "y", "cx", "cy", "x1", "x2", "y1", "y2", "width", "height"):
            assert 0 <= float(element.get(name, 0)) <= 1000
