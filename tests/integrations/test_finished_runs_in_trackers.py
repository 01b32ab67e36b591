"""`stepscope log` with the real packages, offline; what they stored is read back."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from handmade import MS, cpu_recording
from stepscope.session import open_session
from stepscope.trackers.figures import FIGURES, OF_STEPS, PREFIX, STEP_VALUES, figures, step_points
from stepscope.trackers.tracker import TRACKERS, Run, Target
from trace_builder import TraceBuilder
from verbs import run_verb

OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "HF_HUB_OFFLINE": "1",
    "STEPSCOPE_CACHE": os.environ.get("STEPSCOPE_CACHE", ""),
}
NUM_STEPS = 12
BLOCK = 32_768


def row(number: int, samples_ns: list[int], variant: str, status: str = "ok") -> dict[str, object]:
    """A point of a sweep, as `stepscope bench` writes it."""
    return {
        "hash": str(number),
        "workload": "w",
        "preset": "small",
        "config": {"variant": variant, "seq_len": 64},
        "run": {"mode": "step", "dtype": "bf16", "device": "cuda", "seed": 0},
        "status": status,
        "reason": None if status == "ok" else "out of memory",
        "samples_device_ns": samples_ns,
        "samples_host_ns": samples_ns,
        "num_tokens": 1000,
        "num_parameters": 10,
        "environment_hash": "e",
    }


def log(path: Path, to: str) -> Path:
    """Log in a process of its own, as packages leave threads and processes behind; return where it ran."""
    words = [sys.executable, "-m", "stepscope", "log", path.name, "--to", to]
    variables = {**os.environ, **OFFLINE, "TRACKIO_DIR": str(path.parent / "trackio")}
    done = subprocess.run(words, cwd=path.parent, env=variables, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return path.parent


@pytest.fixture
def recording(tmp_path) -> Path:
    """12 steps of 10 ms, with a trace."""
    folder = cpu_recording(tmp_path / "my run", started_at="2026-01-01T00:00:00Z", config_hash="abc")
    trace = TraceBuilder().step(1, 1000, 900).op("aten::mm", 1005, 200, id=1).write(tmp_path / "trace.json")
    (folder / "trace").mkdir()
    (folder / "trace" / "rank0.json.gz").write_bytes(gzip.compress(trace.read_bytes()))
    return folder


@pytest.fixture
def sweep(tmp_path) -> Path:
    """Three points, one of which failed."""
    folder = tmp_path / "sweep"
    folder.mkdir()
    rows = [row(1, [2_000_000] * 3, "plain"), row(2, [1_000_000] * 3, "fast"), row(3, [], "big", status="oom")]
    (folder / "results.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    (folder / "sweep.json").write_text(
        json.dumps({"schema_version": 1, "environments": {"e": {"device_name": "NVIDIA H200"}}})
    )
    return folder


def scalars_of(folder: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return events


def test_tensorboard(recording):
    folder = log(recording, "tensorboard:logs") / "logs" / "my_run"

    events = scalars_of(folder)
    times = events.Scalars("stepscope/per_step/time_ms")
    assert [(event.step, event.value) for event in times[:3]] == [(0, 10.0), (1, 10.0), (2, 10.0)]
    assert len(times) == NUM_STEPS and times[0].wall_time == pytest.approx(1767225600.01)
    assert events.Scalars("stepscope/per_step/forward_ms")[4].value == 3.0
    assert events.Scalars("stepscope/tokens_per_second")[0].value == pytest.approx(51_200)
    text = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert "typical step" in text["stepscope/card"] and "train.py --lr 0.1" in text["stepscope/parameters"]
    assert text["stepscope/findings"].startswith(("| rule | finding |", "none"))
    assert (folder / "report.html").stat().st_size > 10_000 and (folder / "rank0.json.gz").is_file()


def test_the_evaluation_after_the_last_step_is_in_its_series(recording):
    steps = [json.loads(line) for line in (recording / "samples.jsonl").read_text().splitlines()]
    begin_ns = max(each["start_ns"] + each["wall_ns"] for each in steps if "start_ns" in each)
    tail = {
        "start_ns": begin_ns,
        "wall_ns": 7 * MS,
        "host_ns": {"evaluation": 7 * MS},
        "num_times": {"evaluation": 1},
    }
    with (recording / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"tail": tail}) + "\n")

    events = scalars_of(log(recording, "tensorboard:logs") / "logs" / "my_run")

    found = events.Scalars("stepscope/per_step/evaluation_ms")
    assert [(event.step, event.value) for event in found] == [(NUM_STEPS - 1, 7.0)]
    assert len(events.Scalars("stepscope/per_step/time_ms")) == NUM_STEPS
    assert len(events.Scalars("stepscope/goodput")) == 1
    sent = step_points(open_session(recording).recording)[-1]
    assert step_points(open_session(recording).recording, begin_ns) == [sent]
    assert step_points(open_session(recording).recording, begin_ns + 7 * MS) == []


@pytest.mark.long
def test_a_run_that_is_logged_again_is_a_run_of_its_own_in_tensorboard(recording):
    folders = [log(recording, "tensorboard:logs") / "logs" / name for name in ("my_run", "my_run-2")]

    for folder in folders:
        assert len(scalars_of(folder).Scalars("stepscope/per_step/time_ms")) == NUM_STEPS


def test_text_in_tensorboard_cannot_become_markup(tmp_path):
    pytest.importorskip("tensorboard")
    run = Target.of(f"tensorboard:{tmp_path}").open_run(Run("mine", {}))
    run.summarize({}, "a name:\n```\n# of a trace")
    run.add_table("findings", [{"finding": "<img src=x> | [a](http://b)\n# c"}])
    run.close()

    events = scalars_of(tmp_path / "mine")
    card, table = (
        events.Tensors(f"stepscope/{name}")[0].tensor_proto.string_val[0].decode() for name in ("card", "findings")
    )
    assert card.startswith("``````\n") and card.endswith("\n``````")
    assert len(table.splitlines()) == 3 and "\\<img src=x\\> \\| \\[a\\](http\\://b)" in table


@pytest.mark.long
def test_a_sweep_in_tensorboard_has_a_run_per_point_with_parameters(sweep):
    folder = log(sweep, "tensorboard:logs") / "logs" / "sweep"
    metadata = pytest.importorskip("tensorboard.plugins.hparams.metadata")

    assert sorted(each.name for each in folder.iterdir()) == ["sweep", "variant=big", "variant=fast", "variant=plain"]
    events = scalars_of(folder / "variant=fast")
    assert events.Scalars("stepscope/step_time_ms")[0].value == 1.0
    assert events.Scalars("stepscope/tokens_per_second")[0].value == pytest.approx(1e6)
    content = events.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    start = metadata.parse_session_start_info_plugin_data(content)
    assert start.hparams["variant"].string_value == "fast" and start.hparams["seq_len"].number_value == 64
    assert (folder / "sweep" / "report.html").is_file()


@pytest.mark.long
def test_a_study_has_the_points_of_all_its_sweeps(tmp_path):
    study = tmp_path / "study"
    shutil.copytree(Path(__file__).parents[2] / "docs" / "results" / "h200" / "study-tsmoe", study)

    folder = log(study, "tensorboard:logs") / "logs" / "study"

    rows = [json.loads(line) for file in study.glob("*/results.jsonl") for line in file.read_text().splitlines()]
    names = {each.name for each in folder.iterdir()}
    assert len(names) == len(rows) + 1 and {"study", "masks_mask=causal"} <= names
    assert (folder / "study" / "report.html").is_file()


@pytest.mark.long
def test_mlflow_in_sqlite(recording):
    pytest.importorskip("mlflow")
    folder = log(recording, "mlflow:sqlite:///ml.db")

    stored = sqlite3.connect(folder / "ml.db")
    query = "select step, value, timestamp from metrics where key = 'stepscope/per_step/time_ms' order by step"
    times = stored.execute(query).fetchall()
    assert len(times) == NUM_STEPS and times[:2] == [(0, 10.0, 1767225600010), (1, 10.0, 1767225600020)]
    assert dict(stored.execute("select key, value from params"))["script"] == "train.py --lr 0.1"
    assert stored.execute("select name, status from runs").fetchall() == [("my run", "FINISHED")]
    latest = dict(stored.execute("select key, value from latest_metrics"))
    stored.close()
    session = open_session(recording)
    expected = figures(session.recording, session.summary)
    assert {name: latest[name] for name in expected} == pytest.approx(expected)
    (artifacts,) = folder.glob("mlruns/*/*/artifacts")
    assert {each.name for each in artifacts.iterdir()} == {
        "card.json", "card.txt", "findings.json", "report.html", "rank0.json.gz",
    }  # fmt: skip
    assert json.loads((artifacts / "card.json").read_text())["stepscope/typical_step_ms"] == 10.0


@pytest.mark.long
@pytest.mark.parametrize("what", ["text", "below a file"])
def test_a_database_of_mlflow_that_cannot_be_opened_ends_at_once(recording, tmp_path, what):
    pytest.importorskip("mlflow")
    (path := tmp_path / "ml.db").write_text("no database" * 200)
    path = path / "ml.db" if what == "below a file" else path
    words = [sys.executable, "-m", "stepscope", "log", str(recording), "--to", f"mlflow:sqlite:///{path}"]

    done = subprocess.run(words, env={**os.environ, **OFFLINE}, capture_output=True, text=True, timeout=120)

    assert done.returncode == 2 and str(path) in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.long
def test_weights_and_biases_offline(recording):
    pytest.importorskip("wandb")
    folder = log(recording, "wandb:my-project")

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    history, records = wandb_records(file)
    steps = [each for each in history if "stepscope/per_step/time_ms" in each]
    assert [each["stepscope/step"] for each in steps] == list(range(NUM_STEPS))
    assert {each["stepscope/per_step/time_ms"] for each in steps} == {10.0, 20.0, 100.0}
    assert [each["stepscope/findings/ncols"] for each in history if "stepscope/findings/path" in each]
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert run.project == "my-project" and run.display_name == "my run"
    summary = {item.key for record in records for item in record.summary.update}
    assert {"verdict", "stepscope/card", "stepscope/goodput"} <= summary
    artifacts = [r.request.log_artifact.artifact.name for r in records if r.request.HasField("log_artifact")]
    artifacts += [record.artifact.name for record in records if record.WhichOneof("record_type") == "artifact"]
    assert {name.partition("-")[2] for name in artifacts} >= {"report", "rank0"}


def wandb_records(file: Path):
    """The rows of the history, and every record of an offline run: a log as LevelDB writes it, after 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole, records = file.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(wandb_internal_pb2.Record.FromString(whole))
            whole = b""
        if BLOCK - place % BLOCK < 7:  # no room for another header
            place += BLOCK - place % BLOCK
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    return rows, records


def test_trackio(recording):
    pytest.importorskip("trackio", reason="needs trackio")
    folder = log(recording, "trackio:mine")

    stored = sqlite3.connect(folder / "trackio" / "mine.db")
    rows = [(step, json.loads(metrics)) for step, metrics in stored.execute("select step, metrics from metrics")]
    stored.close()
    times = [values["stepscope/per_step/time_ms"] for _, values in rows if "stepscope/per_step/time_ms" in values]
    assert len(times) == NUM_STEPS and times[0] == 10.0
    assert any("stepscope/card" in values for _, values in rows)
    assert any("stepscope/findings" in values for _, values in rows)
    files = {each.name for each in (folder / "trackio").rglob("files/*")}
    assert files == {"my run-report.html", "my run-rank0.json.gz"}


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_missing_package_is_named_with_its_extra(tracker, recording, monkeypatch):
    monkeypatch.setitem(sys.modules, tracker, None)

    done = run_verb("log", recording, "--to", tracker)

    assert done.returncode == 2 and f"pip install 'stepscope[{tracker}]'" in done.stderr


def test_what_cannot_be_logged_is_said(recording, tmp_path):
    trace = tmp_path / "trace.json"

    unknown = run_verb("log", recording, "--to", "neptune")
    a_trace = run_verb("log", trace, "--to", f"tensorboard:{tmp_path}/logs")
    no_folder = run_verb("log", recording, "--to", f"tensorboard:{trace}/logs")

    assert "'neptune' is not a tracker: choose one of mlflow, wandb, tensorboard, trackio" in unknown.stderr
    assert "is not a recording, a sweep or a study" in a_trace.stderr
    assert f"logging to tensorboard:{trace}/logs failed: NotADirectoryError" in no_folder.stderr
    assert {done.returncode for done in (unknown, a_trace, no_folder)} == {2}


def test_a_target_keeps_colons_in_its_address():
    assert Target.of("prometheus:a:b").where == "a:b" and str(Target.of("prometheus:a:b")) == "prometheus:a:b"


def test_the_documentation_defines_every_name():
    page = (Path(__file__).parents[2] / "docs" / "trackers.md").read_text(encoding="utf-8")
    names = [*(PREFIX + name for name in FIGURES), *(OF_STEPS + name for name in STEP_VALUES)]
    assert [name for name in names if f"`{name}`" not in page] == []
