"""The Python API: every name is documented, unknown keys are errors, and small inputs run in this process."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

import stepscope
from handmade import cpu_recording
from stepscope.errors import UsageError
from trace_builder import TraceBuilder

NAMES = [name for name in stepscope.__all__ if name != "__version__"]
FUNCTIONS = [name for name in NAMES if not isinstance(getattr(stepscope, name), type)]
TINY = {"preset": "tiny", "set": {"seq_len": 16, "batch": 1}}


@pytest.fixture
def trace(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "cache"))
    made = TraceBuilder()
    for step in (1, 2):
        at = 1000 * step
        made.step(step, at, 900).op("aten::mm", at + 5, 200, id=step).launch("gemm", at + 10, (at + 30, 333), id=step)
    return made.write(tmp_path / "mine.json")


def is_one_line(result: object) -> bool:
    return "\n" not in repr(result) and len(repr(result)) < 200 and repr(result).startswith("<")


@pytest.mark.parametrize("name", NAMES)
def test_every_name_resolves_and_says_what_it_is(name):
    thing = getattr(stepscope, name)

    assert name in dir(stepscope)
    assert inspect.getdoc(thing)
    if name in FUNCTIONS:
        assert inspect.getdoc(thing).startswith("Return ")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_signature_is_written_out(name):
    parameters = inspect.signature(getattr(stepscope, name)).parameters.values()

    assert not [each for each in parameters if each.kind is each.VAR_KEYWORD]
    assert all(each.annotation is not each.empty for each in parameters)


@pytest.mark.parametrize("name", ["bench", "plan", "tune"])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"set": {"seq_length": 16}}, "did you mean seq_len"),
        ({"set": {"dtype": "bf61"}}, "did you mean bf16"),
        ({"set": {"batch": []}}, "batch"),
        ({"set": {"mode": "step"}, "mode": "forward"}, "twice"),
        ({"preset": "tini"}, "did you mean tiny"),
    ],
)
def test_unknown_keys_are_errors_that_name_the_nearest(name, arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UsageError, match=said):
        getattr(stepscope, name)("cs336", **arguments)
    with pytest.raises(TypeError, match="seq_len"):
        getattr(stepscope, name)("cs336", seq_len=16)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: stepscope.plan("cs336", device="H200"), "NVIDIA H200"),
        (lambda: stepscope.plan("cs336", preset="tiny", fsdp=1), "fsdp=1"),
        (lambda: stepscope.bench("cs363"), "did you mean cs336"),
        (lambda: stepscope.bench("cs336", timeout_s=0), "timeout_s=0"),
        (lambda: stepscope.tune("cs336", minutes=-1), "minutes=-1"),
        (lambda: stepscope.open("nothing"), "nothing"),
        (lambda: stepscope.compare([], []), "compare"),
    ],
)
def test_wrong_values_are_errors(call, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UsageError, match=said):
        call()


@pytest.mark.long
def test_bench_returns_the_figures_of_its_points(tmp_path):
    shares, lines = [], []
    sweep = stepscope.bench(
        "cs336",
        preset="tiny",
        set={"seq_len": [16, 32], "batch": 1},
        mode="forward",
        device="cpu",
        warmup=1,
        steps=2,
        output=tmp_path / "sweep",
        progress=shares.append,
        on_line=lines.append,
    )

    assert isinstance(sweep, stepscope.SweepSummary) and is_one_line(sweep)
    assert [point.status for point in sweep.points] == ["ok", "ok"]
    assert [point.axes["seq_len"] for point in sweep.points] == [16, 32]
    assert shares == [0.0, 0.5, 1.0] and len(lines) == 2 and lines[1].startswith("2/2")
    assert {"results.jsonl", "results.csv", "results.md", "sweep.json"} <= {
        p.name for p in (tmp_path / "sweep").iterdir()
    }
    assert stepscope.open(tmp_path / "sweep").sweep_summary.num_by_status == {"ok": 2}
    with pytest.raises(UsageError, match="resume=True"):
        stepscope.bench("cs336", device="cpu", output=tmp_path / "sweep")


def test_plan_returns_predictions_and_the_json_of_the_verb(capsys):
    from stepscope.cli.main import main

    plan = stepscope.plan("cs336", **TINY, device=["NVIDIA H200", "cpu"])

    assert isinstance(plan, stepscope.Plan) and is_one_line(plan)
    gpu, cpu = plan.predictions
    assert (gpu.device, gpu.fits, cpu.device, cpu.fits) == ("NVIDIA H200", "fits", "cpu", None)
    assert gpu.peak_allocated_bytes > 0 and is_one_line(gpu)
    assert str(gpu.device) in str(plan) and "<table" in plan._repr_html_()
    capsys.readouterr()
    words = ["--preset", "tiny", "--set", "seq_len=16", "--set", "batch=1", "--device", "NVIDIA H200,cpu", "--json"]
    assert main(["plan", "cs336", *words]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(plan.to_json()))


def test_sql_returns_a_frame(trace):
    found = stepscope.sql(trace, "select name, sum(duration_ns) as ns from device group by name")

    assert found.rows() == [("gemm", 666_000)]
    with pytest.raises(UsageError, match="no other file"):
        stepscope.sql(trace, "select * from read_csv('x')")


def test_export_returns_the_path_it_wrote(trace):
    notes = []
    written = stepscope.export(trace, "perfetto", step=1, warn=notes.append)

    assert written == Path("mine.perfetto.json.gz") and written.is_file()
    assert any("memory" in note for note in notes)
    with pytest.raises(UsageError, match="--force"):
        stepscope.export(trace, "perfetto")
    with pytest.raises(UsageError, match="perfetto, speedscope"):
        stepscope.export(trace, "perfeto")
    with pytest.raises(UsageError, match="did you mean 2"):
        stepscope.export(trace, "csv", step=9)


def test_report_returns_the_document_and_writes_it(trace):
    document = stepscope.report(trace, output="out.md")

    assert isinstance(document, stepscope.Document) and is_one_line(document)
    assert document.verdict and Path("out.md").read_text(encoding="utf-8").strip()


def test_results_are_one_line_and_a_session_has_views(trace, tmp_path):
    for result in (stepscope.analyze(trace), stepscope.diagnose(trace), stepscope.what_if(trace, host=0.5)):
        assert is_one_line(result) and str(result).count("\n") > 1
    session = stepscope.open(cpu_recording(tmp_path / "run"))

    assert isinstance(session, stepscope.Session) and is_one_line(session)
    assert is_one_line(stepscope.read(tmp_path / "run")) and session.summary.num_clean
    with pytest.raises(stepscope.Unavailable):
        _ = session.sweep
