"""A study from its declaration to its report: real points on a CPU, resumed, reported again, its sentences' data."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stepscope import read
from stepscope.cli.main import main
from stepscope.document.model import Facts, Missing, Table, Text
from stepscope.errors import RecordingError, Unavailable, UsageError
from stepscope.studies import Question, Recordings, Study, Sweep
from stepscope.studies.execute import begin, plan_of, run
from stepscope.studies.figures import compared, crossing, growth
from stepscope.studies.registry import find_study
from stepscope.studies.report import report_of_study
from stepscope.studies.stored import Recorded, Rows, Stored
from stepscope.studies.write import study_of, write_study
from verbs import run_verb

EXAMPLE = Path(__file__).parents[2] / "examples" / "study_activation.py"

TOML = """
title = "How does it grow?"

[[sweep]]
id = "widths"
workload = "{example}:build"
quick = {{ width = [16, 64], mode = "forward", steps = 2 }}

[[question]]
title = "How does a step grow with the width?"
of = "widths"
x = "width"
y = "time_median_ns"
"""


ONE = """
title = 'x'
[[{}]]
id = '{}'
workload = 'w'
quick = {{}}
[[question]]
title = 'q'
of = 'a'
x = 'b'
y = 'c'
"""


def stepscope(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stepscope", *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def studied(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    done = stepscope("study", EXAMPLE, "--quick", "--device", "cpu", "-o", "out", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "out"


@pytest.mark.long
def test_a_study_of_ones_own_is_under_thirty_lines_and_gives_a_report(studied):
    assert len(EXAMPLE.read_text().splitlines()) < 30
    report = (studied / "report" / "report.md").read_text()

    assert "Is ReLU faster?" in report and "At width 64 relu is" in report
    assert all((studied / "report" / name).stat().st_size > 1000 for name in ("report.html", "report.json"))
    rows = [json.loads(line) for line in (studied / "widths" / "results.jsonl").read_text().splitlines()]
    assert [row["status"] for row in rows] == ["ok"] * 4


def test_the_sentence_follows_the_data(studied, tmp_path):
    """GIVEN the same rows with ReLU's times made 10 times longer THEN the answer is another."""
    changed = shutil.copytree(studied, tmp_path / "changed")
    path = changed / "widths" / "results.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row["config"]["activation"] == "relu":
            row["samples_device_ns"] = [1_000_000_000] * 10
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    study = find_study(str(EXAMPLE))

    before, after = (report_of_study(study, Stored(folder)).verdict for folder in (studied, changed))
    assert before != after and "times slower than gelu" in after


@pytest.mark.long
def test_what_is_done_is_not_done_again(studied):
    rows = (studied / "widths" / "results.jsonl").read_text().splitlines(keepends=True)
    (studied / "widths" / "results.jsonl").write_text("".join(rows[:-1]))

    plan = plan_of(find_study(str(EXAMPLE)), "quick", "cpu")
    with pytest.raises(UsageError, match="--resume"):
        begin(plan, studied, str(EXAMPLE), "", False, "stepscope study --resume")
    done = stepscope("study", EXAMPLE, "--quick", "--device", "cpu", "-o", studied, "--resume", cwd=studied)

    assert done.returncode == 0 and done.stderr.count("widths ") == 1
    after = (studied / "widths" / "results.jsonl").read_text().splitlines(keepends=True)
    assert after[:-1] == rows[:-1] and json.loads(after[-1])["hash"] == json.loads(rows[-1])["hash"]


def test_a_report_does_not_run_somebody_elses_program(studied):
    command = f"stepscope study study_activation.py --quick --device cpu -o {studied} --resume"
    with pytest.raises(UsageError, match=re.escape(command)):
        study_of(studied)


@pytest.mark.long
def test_the_command_that_makes_the_report_of_what_was_only_measured_is_one_that_works(studied, tmp_path):
    measured = shutil.copytree(studied, tmp_path / "out")
    words = ("study", EXAMPLE, "--quick", "--device", "cpu", "--no-report", "-o", measured, "--resume")
    told = stepscope(*words, cwd=tmp_path).stderr.strip().splitlines()[-1]

    (command,) = re.findall(r"stepscope (study .* --resume)", told)
    assert "--no-report" not in command
    assert stepscope(*shlex.split(command), cwd=tmp_path).returncode == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_one_line_before_anything_runs(tmp_path):
    done = run_verb("study", "nano", "--quick", "--device", "cuda", "-o", "out", cwd=tmp_path)

    assert done.returncode == 2 and "--device cuda" in done.stderr and "no CUDA device" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_study_does_not_stop_for_pictures(tmp_path, monkeypatch, capsys):
    """It may have taken hours, and the page draws its charts without matplotlib."""
    folder = tmp_path / "tsmoe"
    shutil.copytree(Path(__file__).parents[2] / "docs" / "results" / "h200" / "study-tsmoe", folder)
    shutil.rmtree(folder / "report")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))

    assert main(["report", str(folder)]) == 0

    assert (folder / "report" / "report.html").is_file() and not list(folder.rglob("*.png"))
    assert ".png" not in (folder / "report" / "report.md").read_text(encoding="utf-8")
    assert "pip install 'stepscope[png]' && stepscope report" in capsys.readouterr().err


@pytest.mark.long
def test_a_study_in_toml_is_reported_again_from_its_folder_alone(tmp_path, monkeypatch):
    (tmp_path / "grow.toml").write_text(TOML.format(example=EXAMPLE))
    done = stepscope("study", "grow.toml", "--device", "cpu", "-o", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "grow.toml").unlink()
    first = (tmp_path / "out/report/report.md").read_text()
    shutil.rmtree(tmp_path / "out/report")

    monkeypatch.chdir(tmp_path)
    write_study(study_of(Path("out")), Path("out"))

    assert (tmp_path / "out/report/report.md").read_text() == first
    assert "at width 16" in first and "growing" in first


@pytest.mark.long
def test_a_point_can_be_recorded_and_its_recording_asked(tmp_path):
    measure = Recordings(
        id="step", workload="cs336", about="a step", full=(),
        quick=[{"preset": "tiny", "seq_len": 16}, {"preset": "tiny", "seq_len": 16, "dtype": "tf32"}],
        options=("--warmup", "2", "--clean", "3", "--trace", "1"),
    )  # fmt: skip

    def answer(stored):
        found = stored.recording("step", dtype="fp32")
        yield Text(read(found.folder).verdict)
        assert stored.recording("step", dtype="tf32").status == "skipped"
        stored.recording("step", dtype="tf32").source  # noqa: B018

    question = Question(title="How long?", answer=answer)
    study = Study(name="one", title="One", about="", measures=(measure,), questions=(question,))
    plan = plan_of(study, "quick", "cpu")
    begin(plan, tmp_path / "out", "one.py", "stepscope study one.py", False, "")
    told = []
    run(plan, tmp_path / "out", "stepscope study one.py", "", 120.0, lambda _, row, done: told.append((row, done)))

    assert [row["status"] for row, _ in told if row] == ["ok", "skipped"] and told[-1][1] == 2
    parts = report_of_study(study, Stored(tmp_path / "out")).sections[1].parts
    assert isinstance(parts[0], Text) and parts[0].text.startswith("A step takes")
    assert isinstance(parts[1], Missing) and "tf32" in parts[1].text and "NVIDIA" in parts[1].text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("titel = 'x'", "unknown key 'titel'"),
        ("title = 'x'", "question is missing"),
        ("title = 'x'\nquestion = 3\n[[sweep]]\nid='a'\nworkload='w'\nquick={}", "[[question]]"),
        ("title = 'x'\n[[question]]\ntitle = 'a'\nof = 'b'\nx = 'c'\ny = 'd'", "measures nothing"),
        ("title = 'x'\n[[sweep]]\nid = 'a'\n[[question]]", "quick is missing"),
        ("title = 5", 'title = 5 must be "text"'),
        ("title = 'x'\nquestion = []\n[[sweep]]\nquick = 3", "quick = 3 must be { a table } or"),
        ("title = 'x'\nquestion = []\n[[sweep]]\ntrace = 'no'", "trace = 'no' must be true or false"),
        (ONE.format("recordings", "a"), "of = 'a' is not the id of a [[sweep]]: "),
        (ONE.format("sweep", "lengths"), "of = 'a' is not the id of a [[sweep]]: one of: lengths"),
    ],
)
def test_a_mistake_in_toml_is_one_line_with_the_key(tmp_path, text, message):
    (tmp_path / "s.toml").write_text(text)
    with pytest.raises(UsageError, match=re.escape(message)):
        find_study(str(tmp_path / "s.toml"))


@pytest.mark.parametrize("name", ["nanno", "no/such.py", "no/such.toml"])
def test_a_study_that_is_not_there_is_one_line(name):
    with pytest.raises(UsageError, match=r"no study|not found|No such file|no file|there is no"):
        find_study(name)


def test_a_knob_that_is_not_there_is_told_before_anything_runs():
    sweep = Sweep(id="a", workload="cs336", about="", quick=[{"seqlen": 16}], full=())
    with pytest.raises(UsageError, match="seq_len"):
        plan_of(Study(name="a", title="", about="", measures=(sweep,), questions=()), "quick", "cpu")


@pytest.mark.parametrize(("ids", "grids"), [("aa", [{}]), (["report"], [{}]), (["../a"], [{}]), ("a", [])])
def test_what_a_study_declares_is_checked_before_anything_runs(ids, grids):
    """GIVEN one id twice, one that is the report's, one that leaves the folder, no point at all."""
    measures = tuple(Sweep(id=id, workload="cs336", about="", quick=grids, full=()) for id in ids)
    with pytest.raises(UsageError, match=r"folder name|measures nothing with --quick"):
        plan_of(Study(name="a", title="", about="", measures=measures, questions=()), "quick", "cpu")


def test_one_grid_needs_no_brackets():
    sweep = Sweep(id="a", workload="cs336", about="", quick={"seq_len": [16, 32]}, full=())
    plan = plan_of(Study(name="a", title="", about="", measures=(sweep,), questions=()), "quick", "cpu")

    assert [point.config["seq_len"] for point in plan.points["a"]] == [16, 32]


def test_a_folder_that_cannot_be_one_and_that_of_another_study_are_one_line(tmp_path):
    sweep = Sweep(id="a", workload="cs336", about="", quick=[{}], full=())
    plan = plan_of(Study(name="a", title="", about="", measures=(sweep,), questions=()), "quick", "cpu")
    (tmp_path / "file").write_text("")
    begin(plan, tmp_path / "other", "b.py", "", False, "")

    with pytest.raises(UsageError, match=r"cannot write to .*file"):
        begin(plan, tmp_path / "file", "a.py", "", False, "")
    with pytest.raises(UsageError, match=r"holds study b\.py, not a\.py"):  # and not: go on with --resume
        begin(plan, tmp_path / "other", "a.py", "", False, "")


def test_a_mistake_in_an_answer_costs_that_answer_alone(tmp_path):
    (tmp_path / "study.json").write_text('{"study": "x"}')
    told = []

    def wrong(stored):
        told.append(stored)
        yield Text("Before it.")
        {}["time_medain"]

    def right(_stored):
        yield Text("Right.")

    questions = tuple(Question(title=answer.__name__, answer=answer) for answer in (wrong, right))
    study = Study(name="x", title="", about="", measures=(), questions=questions)
    stored = Stored(tmp_path)

    report = report_of_study(study, stored)
    assert report == report_of_study(study, stored) and len(told) == 1  # an answer is computed once
    (missing,) = report.parts(Missing)
    assert missing.text.startswith("Not answered: KeyError: 'time_medain' (test_study_core.py, line ")
    assert [part.text for part in report.parts(Text)] == ["Before it.", "Right."]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("a string", "yields parts of stepscope.document.model, such as Text, not str"),
        (None, "not NoneType"),
        (Table("../x", "", {"a": [1]}, 9), "the id '../x' must be a file name"),
        (SystemExit(0), "SystemExit: 0"),
    ],
)
def test_what_is_no_part_of_a_report_costs_itself_alone(tmp_path, part, message):
    (tmp_path / "study.json").write_text('{"study": "x"}')

    def answer(_stored):
        yield Table("before", "", {"a": [1]}, 9)
        if isinstance(part, SystemExit):
            raise part
        yield part

    study = Study(name="x", title="", about="", measures=(), questions=(Question(title="x", answer=answer),))
    report = report_of_study(study, Stored(tmp_path))

    (missing,) = report.parts(Missing)
    assert message in missing.text and report.verdict == missing.text
    assert [table.id for table in report.parts(Table)] == ["before", "measures"]


def test_the_only_row_is_only_one_and_a_knob_is_spelt_right():
    rows = Rows("widths", [{"width": 1, "norm": name, "status": "ok"} for name in ("layer", "rms")])

    assert rows.one(norm="rms")["norm"] == "rms"
    with pytest.raises(Unavailable, match="there are 2 rows of widths with width=1"):
        rows.one(width=1)
    with pytest.raises(Unavailable, match="there is no row of widths with width=2"):
        rows.one(width=2)
    with pytest.raises(Unavailable, match="widths has no 'wdith': did you mean width"):
        rows.where(wdith=1)
    assert not len(Rows("widths", []).where(wdith=1))  # of nothing nothing is known


def test_a_study_that_moved_with_its_folder_goes_on(tmp_path):
    sweep = Sweep(id="a", workload="cs336", about="", quick=[{}], full=())
    plan = plan_of(Study(name="a", title="", about="", measures=(sweep,), questions=()), "quick", "cpu")
    begin(plan, tmp_path / "out", "/there/mine.py", "", False, "")
    begin(plan, tmp_path / "out", "/here/mine.py", "", True, "")

    facts = json.loads((tmp_path / "out" / "study.json").read_text())
    assert facts["study"] == "/here/mine.py" and facts["num_points"] == {"a": 1}


def test_what_was_taken_from_the_folder_costs_what_is_made_from_it_alone(studied, tmp_path):
    """GIVEN a study without the rows of a measure, as a kill at its first point leaves it THEN the report says so."""
    copy = shutil.copytree(studied, tmp_path / "copy")
    (copy / "widths" / "results.jsonl").write_text("")

    report = report_of_study(find_study(str(EXAMPLE)), Stored(copy))

    assert ["no point of the sweep was finished" in part.text for part in report.parts(Missing)] == [True]
    with pytest.raises(Unavailable, match="is not here"):
        Recorded({}, "ok", None, tmp_path / "gone").source  # noqa: B018


def test_a_knob_that_no_row_has_is_told_with_the_nearest(studied, tmp_path):
    (tmp_path / "s.toml").write_text(TOML.format(example=EXAMPLE).replace('x = "width"', 'x = "widht"'))

    (missing,) = report_of_study(find_study(str(tmp_path / "s.toml")), Stored(studied)).parts(Missing)

    assert "x = 'widht' is in no row: did you mean width?" in missing.text


def test_a_damaged_study_is_one_line(tmp_path):
    (tmp_path / "study.json").write_text("{")
    with pytest.raises(RecordingError, match=r"study\.json"):
        Stored(tmp_path)


def test_a_command_that_was_given_twice_is_told_once(tmp_path):
    (tmp_path / "study.json").write_text('{"study": "x", "commands": ["one --resume", "two", "one --resume"]}')
    study = Study(name="x", title="", about="", measures=(), questions=())

    rows = report_of_study(study, Stored(tmp_path)).parts(Facts)[0].rows
    assert [row.value for row in rows if row.title == "made by"] == ["one --resume", "two"]


def test_figures_of_sentences():
    rows = [{"n": n, "t": 5.0 * n} for n in (64, 128, 256)]
    steep = [{"n": n, "t": n * n / 100} for n in (64, 128, 256, 1024)]

    assert growth(rows, "n", "t") == pytest.approx(1.0)
    assert growth(steep, "n", "t") == pytest.approx(2.0)
    assert crossing(steep, [*rows, {"n": 1024, "t": 5120.0}], "n", "t") == pytest.approx(500.0)
    assert crossing(rows, steep, "n", "t") is None or crossing(rows, steep, "n", "t") == 64.0
    assert compared(1.0, 1.0, "it") == "as fast as it"
    with pytest.raises(Unavailable):
        growth(rows[:1], "n", "t")


def test_the_documentation_shows_the_example_as_it_is():
    page = (EXAMPLE.parents[1] / "docs" / "studies.md").read_text()
    assert EXAMPLE.read_text().rstrip() in page


def test_the_method_counts_noise_and_names_what_failed_by_its_knobs(tmp_path):
    run = {"mode": "step", "dtype": "fp32"}
    rows = [
        {"hash": "a", "workload": "w", "preset": None, "config": {"width": 1}, "run": run, "status": "ok",
         "samples_device_ns": [100, 100, 130, 130], "num_parameters": 1},
        {"hash": "b", "workload": "w", "preset": None, "config": {"width": 2}, "run": run, "status": "crashed",
         "reason": "ValueError in /home/me/src/model/layers.py:3"},
    ]  # fmt: skip
    (tmp_path / "study.json").write_text('{"schema_version": 1, "study": "x", "mode": "quick"}')
    (tmp_path / "widths").mkdir()
    (tmp_path / "widths" / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sweep = Sweep(id="widths", workload="w", about="", quick=(), full=())
    study = Study(name="x", title="", about="", measures=(sweep,), questions=())

    measured, failed = report_of_study(study, Stored(tmp_path)).sections[-1].parts

    assert (measured.columns["num_points"], measured.columns["num_noisy"]) == ([2], [1])
    assert (failed.columns["point"], failed.columns["reason"]) == (["width=2"], ["ValueError in model/layers.py:3"])
