"""`stepscope report`: where it writes, what it refuses in one line, what the API gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import stepscope
from handmade import cpu_recording
from report_samples import sample_report
from stepscope.analysis.time import statistics
from stepscope.api.reading import report_target
from stepscope.cli.main import main
from stepscope.document.model import Document
from stepscope.errors import MissingDependencyError, UsageError
from stepscope.render import files, write
from stepscope.session import open_session
from trace_builder import TraceBuilder

SWEEP = Path(__file__).parents[2] / "docs" / "results" / "h200" / "cross_entropy"


@pytest.fixture(autouse=True)
def quick_and_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(statistics, "NUM_RESAMPLES", 5)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def recording(tmp_path) -> str:
    cpu_recording(tmp_path / "run")
    return "run"


def names_in(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


def failed(capsys, *arguments: str) -> str:
    assert main(["report", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_a_recordings_report_is_inside_it_and_is_not_written_over(recording, capsys):
    assert main(["report", recording]) == 0
    assert capsys.readouterr().err == f"stepscope: {Path('run/report.html')}\n"
    assert Path("run/report.html").read_text(encoding="utf-8").startswith("<!doctype html>")

    assert "already exists. Use --force" in failed(capsys, recording)
    Path("run/report.html").write_text("old")
    assert main(["report", recording, "--force"]) == 0
    assert Path("run/report.html").read_text(encoding="utf-8") != "old"
    assert not list(Path("run").glob(".*.part"))


def test_a_traces_report_is_in_the_working_folder(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    trace = TraceBuilder().step(1, 0, 100).op("aten::mm", 10, 20, id=5).launch("gemm", 12, runs=(30, 40), id=5)
    trace.write(tmp_path / "elsewhere" / "mine.pt.trace.json.gz")

    assert main(["report", "elsewhere/mine.pt.trace.json.gz"]) == 0
    assert Path("mine.report.html").is_file()


def test_default_places(recording, tmp_path):
    for name in ("ranks/rank0.json", "ranks/rank1.json", "a/b.json"):
        TraceBuilder().op("aten::mm", 0, 10).write(tmp_path / name)
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "results.jsonl").touch()

    assert report_target(open_session("run")) == Path("run/report.html")
    assert report_target(open_session("sweep")) == Path("sweep/report.html")
    assert report_target(open_session("sweep/results.jsonl")) == Path("sweep/report.html")
    assert report_target(open_session("ranks")) == Path("ranks.report.html")
    assert report_target(open_session("a/b.json")) == Path("b.report.html")


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ([], "no path was given"),
        (["run", "--from", "run"], "PATH and --from both"),
        (["nothing"], "nothing does not exist"),
        (["run", "-o", "report.pdf"], ".html, .md or .json file, or a folder"),
        (["run", "-o", "no/such/report.html"], "folder no/such does not exist"),
        (["run", "-o", "run"], "is not empty. Use --force"),
        (["run", "-o", "."], "is not empty"),
    ],
)
def test_mistakes_are_one_line(recording, capsys, arguments, answer):
    assert answer in failed(capsys, *arguments)


def test_what_is_missing_is_said_before_any_work(recording, capsys, monkeypatch):
    monkeypatch.setattr(files.importlib.util, "find_spec", lambda name: None if name == "plotly" else name)
    assert "pip install plotly" in failed(capsys, recording)


def test_a_missing_package_has_one_hint(monkeypatch, tmp_path):
    monkeypatch.setattr(files.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else name)

    with pytest.raises(MissingDependencyError) as raised:
        write.check_target(tmp_path / "folder", False)
    assert str(raised.value).endswith("pip install 'stepscope[png]'")


def test_a_page_that_cannot_be_written_is_one_line_and_leaves_nothing(recording, capsys, monkeypatch):
    def full(self, target):
        raise OSError(28, "No space left on device")

    before = names_in(recording)
    monkeypatch.setattr(Path, "replace", full)
    assert "could not be written: No space left on device" in failed(capsys, recording)
    assert names_in(recording) == before


def test_rows_of_a_sweep_are_enough(tmp_path):
    (tmp_path / "results.jsonl").write_bytes((SWEEP / "results.jsonl").read_bytes())

    assert main(["report", "--from", "results.jsonl", "-o", "sizes.html"]) == 0
    assert main(["report", "--from", "results.jsonl", "-o", "sizes.json"]) == 0
    assert json.loads(Path("sizes.json").read_text(encoding="utf-8"))


def test_a_folder_has_every_format(recording):
    pytest.importorskip("matplotlib")
    assert main(["report", recording, "-o", "out"]) == 0

    assert {"report.html", "report.md", "report.json", "tables", "charts"} == names_in("out")
    report = stepscope.report(recording)
    assert {f"{table.id}.csv" for table in report.parts(write.Table)} == names_in("out/tables")
    assert {f"{chart.id}.png" for chart in report.parts(write.Chart)} == names_in("out/charts")


def test_two_tables_of_one_name_are_two_files():
    assert files.file_names(["a", "b", "a", "a"]) == ["a", "b", "a-2", "a-3"]


def test_open_shows_the_page(recording, monkeypatch, capsys):
    shown = []
    monkeypatch.setattr("webbrowser.open", lambda address: shown.append(address) or False)

    assert main(["report", recording, "--open"]) == 0
    assert shown == [Path("run/report.html").resolve().as_uri()]
    assert "no browser was found" in capsys.readouterr().err


def test_the_api_gives_a_report_that_is_written_and_shows_itself(recording):
    report = stepscope.report(recording, output="mine.html")

    assert isinstance(report, Document) and Path("mine.html").is_file()
    assert report.verdict in report._repr_html_().replace("&#x27;", "'")
    with pytest.raises(UsageError, match="already exists"):
        stepscope.report(recording, output="mine.html")
    assert stepscope.report(recording, output="mine.html", force=True).sections
    with pytest.raises(UsageError, match=r"\.pdf"):
        stepscope.report(recording, output="mine.pdf")


def test_text_that_is_no_unicode_can_be_written(tmp_path):
    assert write.write_report(sample_report("half a \ud83d pair"), tmp_path / "half.html").is_file()
