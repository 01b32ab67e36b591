"""The verb: what it prints for one point, several, several devices; searches; mistakes; what a program prints."""

from __future__ import annotations

import io
import json

import pytest

pytest.importorskip("torch")

from stepscope.cli.main import main

PROGRAM = """
import torch
from torch import nn

print("imported")

class Positions(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(300, width))
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        if x.shape[1] > 300:
            raise ValueError("at most 300 positions")
        return self.linear(x + self.table[: x.shape[1]]).sum()

def model(batch: int = 2, seq_len: int = 64, width: int = 64):
    print("built")
    return Positions(width), lambda: torch.randn(batch, seq_len, width)

def constant(batch: int = 2):
    return nn.Linear(8, 8), lambda: torch.randn(4, 8)

def whole(batch: int = 8):
    layer = nn.Linear(64, 64)

    def step():
        print("stepped")
        layer(torch.randn(batch, 64, device=layer.weight.device)).sum().backward()
        layer.zero_grad()

    return step

def grows(batch: int = 8):
    kept, one = [], torch.zeros(1)

    def step():
        kept.append(one.new_zeros(1 << 20))

    return step

def broken(batch: int = 8):
    def step():
        raise KeyError("a mistake of mine")

    return step
"""


@pytest.fixture
def plan(tmp_path, monkeypatch, capsys):
    """The verb in a folder with the programs: exit code, standard output, standard error."""
    (tmp_path / "mine.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def run(*words):
        code = main(["plan", *words])
        out, err = capsys.readouterr()
        assert all(len(line) <= 100 for line in out.splitlines() if not line.startswith("{")), out
        return code, out, err

    return run


def test_one_point_on_one_device(plan):
    code, out, _ = plan("cs336", "--preset", "tiny")

    assert code == 0
    assert out.splitlines()[1] == "cs336 tiny batch=4 seq_len=128 fp32 step on NVIDIA H100 80GB HBM3"
    assert "fits; the device has 78.5 GiB for tensors" in out and "from step" in out
    assert "least time" in out and "tokens/s" in out


def test_a_cpu(plan):
    _, out, _ = plan("cs336", "--preset", "tiny", "--device", "cpu")

    assert out.splitlines()[1].endswith("fp32 step on cpu")
    assert "reserved" not in out and "least time" not in out


def test_a_whole_step_is_called_one(plan):
    _, out, err = plan("mine.py:whole")

    assert out.splitlines()[1] == "mine.py:whole batch=8, a whole step on NVIDIA H100 80GB HBM3"
    assert "stepped" not in out and err.count("stepped") == 3


def test_points_say_what_differs_and_the_heading_what_does_not(plan):
    words = ("--set", "width=64,128", "--dtype", "fp32,bf16", "--device", "NVIDIA L4,NVIDIA H200,cpu")
    _, out, _ = plan("mine.py:model", *words)
    lines = out.splitlines()

    assert lines[1] == "mine.py:model batch=2 seq_len=64 step"
    (head,) = [number for number, line in enumerate(lines) if line.split()[:3] == ["width", "dtype", "device"]]
    assert len(lines) == head + 1 + 12
    assert [line.split()[:4] for line in lines[head + 1 : head + 4]] == [
        ["64", "fp32", "NVIDIA", "L4"],
        ["64", "fp32", "NVIDIA", "H200"],
        ["64", "fp32", "cpu", lines[head + 3].split()[3]],
    ]


@pytest.mark.long
def test_a_table_without_room_says_what_it_leaves_out(plan):
    names = "NVIDIA GeForce RTX 4090,NVIDIA RTX 6000 Ada Generation"
    words = ("--set", "width=64,128", "--dtype", "fp32,autocast_bf16", "--device", names, "--max-length")
    _, out, _ = plan("mine.py:model", *words)

    head = out.splitlines()[4]
    assert "max seq len" in head and "least time" in head and "limited by" not in head
    assert all(f"{name}  " in out for name in names.split(","))  # in full below


@pytest.mark.long
def test_presets_of_a_family(plan):
    _, out, _ = plan("cs336", "--preset", "tiny,small", "--device", "cpu")

    assert out.splitlines()[1] == "cs336 batch=4 seq_len=128 fp32 step"
    assert [line.split()[0] for line in out.splitlines()[-3:]] == ["preset", "tiny", "small"]


def test_searches_are_bounded_by_the_memory_or_by_the_program(plan):
    code, out, _ = plan("mine.py:model", "--max-length", "--max-batch", "--device", "NVIDIA L4", "--json")
    row = json.loads(out)

    assert code == 0
    assert row["max_seq_len"] == 300 and 100_000 < row["max_batch"] < 1_000_000
    assert list(row["bounded_by"]) == ["max_seq_len"]
    assert row["bounded_by"]["max_seq_len"].startswith("seq_len=301 cannot be planned: ")
    assert row["bounded_by"]["max_seq_len"].endswith("ValueError: at most 300 positions")
    for batch, verdict in ((row["max_batch"], "fits"), (row["max_batch"] + 1, "too close to call")):
        _, out, _ = plan("mine.py:model", "--set", f"batch={batch}", "--device", "NVIDIA L4", "--json")
        assert json.loads(out)["fits"] == {"NVIDIA L4": verdict}


def test_searches_are_told_in_words(plan):
    _, out, _ = plan("mine.py:model", "--max-length", "--device", "NVIDIA L4")
    assert "300: seq_len=301 cannot be planned: " in " ".join(out.split())

    _, out, _ = plan("mine.py:model", "--max-length", "--device", "NVIDIA L4,cpu")
    assert "max seq len" in out
    assert " 300" in out and "a CPU has no fixed memory limit" in out


def test_a_batch_that_changes_nothing_has_no_largest(plan):
    code, out, _ = plan("mine.py:constant", "--max-batch", "--json")

    assert code == 0 and json.loads(out)["max_batch"] is None
    assert json.loads(out)["bounded_by"] == {"max_batch": "batch does not change the memory of a step"}
    _, out, _ = plan("mine.py:constant", "--max-batch")
    assert "unknown: batch does not change the memory of a step" in out


def test_a_program_that_grows_is_told_and_not_searched(plan):
    _, out, _ = plan("mine.py:grows", "--max-batch")

    assert "grows; the device has 78.5 GiB for tensors, full after 20" in out
    assert "and 4.00 MiB more with every" in out
    assert "grows with every step" in out


def test_the_balance_of_experts_is_stated(plan):
    _, out, _ = plan("tsmoe", "--preset", "tiny")
    assert "assumed: experts are filled evenly" in out

    _, out, _ = plan("tsmoe", "--preset", "tiny", "--json")
    assert "assumed: experts are filled evenly" in json.loads(out)["unmodelled"]


def test_what_a_program_prints_is_no_part_of_the_answer(plan):
    code, out, err = plan("mine.py:model", "--max-length", "--device", "NVIDIA L4", "--json")

    assert code == 0 and json.loads(out)["parameters"] == 300 * 64 + 64 * 65
    assert "imported" in err and "built" in err


def test_verdicts_at_the_top_are_those_of_the_first_point(plan):
    words = ("--set", "batch=2,4000000", "--device", "NVIDIA L4,NVIDIA H200", "--json")
    _, out, _ = plan("mine.py:model", *words)
    answer = json.loads(out)

    assert answer["fits"] == {"NVIDIA L4": "fits", "NVIDIA H200": "fits"}
    assert [row["fits"] for row in answer["predictions"]] == ["fits", "fits", "does not fit", "does not fit"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("mine.py:broken",), "mine.py, line 45: KeyError: 'a mistake of mine'"),
        (("mine.py:whole", "--dtype", "bf16"), "a whole step of your own"),
        (("mine.py:whole", "--max-length"), "no knob 'seq_len'"),
        (("mine.py:model", "--set", "batch=,"), "must be a value or a list of values"),
        (("mine.py:model", "--device", "H100"), "NVIDIA H100 80GB HBM3"),
        (("mine.py:model", "--device", "L40S"), "not a known device. Use cpu or a full name: NVIDIA L40S"),
        (("mine.py:model", "--device", "AMD Instinct MI300X"), "only NVIDIA devices can be planned"),
    ],
)
def test_mistakes_are_one_line(plan, words, message):
    code, out, err = plan(*words)

    assert (code, out) == (2, "")
    assert message in err and "Traceback" not in err


def test_a_terminal_is_told_what_is_being_planned_and_is_left_clean(plan, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    plan("mine.py:model", "--max-length", "--device", "NVIDIA L4")

    assert "\rplanning mine.py:model default seq_len=256 on NVIDIA L4 …" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")
