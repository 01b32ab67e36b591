"""`stepscope export`: what is not there is refused with what is, what is there already is not written over."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from parametrized import parametrized
from stepscope.cli import analyze, export
from stepscope.cli.main import main
from stepscope.exporters.export import export_target
from trace_builder import TraceBuilder

STEP = re.compile(r"--step (\d+)")
PAGE = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")


ARGUMENTS = {
    "Input Dims": [[8, 4], [4, 8]],
    "Input type": ["float", "float"],
    "Input Strides": [[4, 1], [8, 1]],
    "Concrete Inputs": ["", ""],
}


@pytest.fixture
def trace(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    made = training()
    made.write(tmp_path / "mine.json.gz")
    return "mine.json.gz"


def training(**fields: object) -> TraceBuilder:
    made = TraceBuilder(**fields)
    for step in (24, 25, 26):
        at = 100 * step
        made.step(step, at, 90).annotation("stepscope.module/blocks.0.mlp", at + 1, 40)
        made.op("aten::mm", at + 2, 20, id=step, **ARGUMENTS).launch("gemm", at + 3, (at + 10, 5), id=step)
    return made


def failed(capsys, *arguments: str) -> str:
    assert main(["export", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (["--step", "99"], "no step 99; the trace has 24 to 26: did you mean 26?"),
        (["--module", "blocks.0.mpl"], "no module 'blocks.0.mpl': did you mean blocks.0.mlp?"),
        (["--rank", "7"], "no rank 7"),
        (["-o", "out.txt"], ".json or .json.gz"),
        (["-o", "no/such/out.json"], "folder no/such does not exist"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(trace, capsys, asked, answer):
    assert answer in failed(capsys, trace, "perfetto", *asked)
    assert sorted(path.name for path in Path().iterdir()) == ["mine.json.gz"]


def test_the_format_may_come_first_and_the_path_may_be_the_latest_run(trace, capsys):
    assert main(["export", "perfetto", trace, "-o", "first.json"]) == 0
    capsys.readouterr()
    assert "x.json is not a format: choose from perfetto, speedscope" in failed(capsys, trace, "x.json")
    assert "runs" in failed(capsys, "flame")  # there is none here


def test_a_path_that_is_not_there(trace, capsys):
    assert "other.json does not exist" in failed(capsys, "other.json", "perfetto")


def test_a_trace_without_modules_says_how_to_have_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    TraceBuilder().op("aten::mm", 0, 10).write(tmp_path / "bare.json")

    assert "names no modules" in failed(capsys, "bare.json", "speedscope", "--module", "x")
    assert "the trace does not mark where steps end" in failed(capsys, "bare.json", "csv", "--step", "1")


@parametrized("form", ["perfetto", "speedscope", "csv", "parquet"], quick=2)
def test_a_file_is_written_once_unless_it_is_forced(trace, capsys, form):
    target = export_target(Path(trace), form)
    assert main(["export", trace, form, "--step", "25"]) == 0
    said = capsys.readouterr().err
    assert str(target) in said and "4 host events, 1 GPU event" in said
    assert target.exists()
    assert "--force" in failed(capsys, trace, form)
    assert main(["export", trace, form, "--force"]) == 0
    assert "12 host events, 3 GPU events" in capsys.readouterr().err


def test_names_by_themselves():
    assert str(export_target(Path("a/trace.json.gz"), "perfetto")) == "trace.perfetto.json.gz"
    assert str(export_target(Path("rank0.pt.trace.json.gz"), "perfetto")) == "rank0.perfetto.json.gz"
    assert str(export_target(Path("runs/x-1"), "speedscope")) == "x-1.speedscope.json"
    assert str(export_target(Path("a/b.json"), "csv")) == "b-csv"


def test_parts_left_out_are_said(trace, capsys):
    assert main(["export", trace, "perfetto", "-o", "plain.json"]) == 0

    assert "no memory counter" in capsys.readouterr().err
    assert json.loads(Path("plain.json").read_text())["traceEvents"]


def test_a_star_is_every_number(trace, capsys):
    assert main(["export", trace, "perfetto", "--module", "blocks.*.mlp", "--step", "26", "-o", "one.json"]) == 0
    assert "1 GPU event" in capsys.readouterr().err


def test_what_the_documentation_types_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("runs/train-20260101-120000/trace.json", "trace.json.gz", "traces/rank2.json"):
        training().write(tmp_path / name)
    training(distributedInfo={"rank": 3}).write(tmp_path / "traces" / "rank3.json")
    commands = re.findall(r"^stepscope export .*", PAGE, re.MULTILINE)

    assert len(commands) == 8
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0, (command, capsys.readouterr().err)
    capsys.readouterr()
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(code, {})
    assert "blocks.0.mlp" in capsys.readouterr().out


def test_steps_that_the_documentation_names_are_those_that_a_run_traces():
    from stepscope.recorder.windows import TRACE, Windows

    numbers = [int(number) for text in (PAGE, analyze.__doc__, export.__doc__) for number in STEP.findall(text)]

    assert len(numbers) == 3 and {Windows().at(number) for number in numbers} == {TRACE}
