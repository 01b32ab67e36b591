"""Runs that are logged while they go on: the series, the file for Prometheus, a collector, trackers that are down."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from test_finished_runs_in_trackers import OFFLINE, scalars_of
from torch import nn

import stepscope
from handmade import cpu_recording, write_recording
from stepscope.errors import MissingDependencyError, UsageError
from stepscope.recorder.windows import Windows
from stepscope.session import open_session
from stepscope.trackers import follow
from stepscope.trackers.figures import figures
from stepscope.trackers.follow import LiveLog, targets_of
from stepscope.trackers.prometheus import Prometheus
from stepscope.trackers.tracker import Point, Target

# Trains until the file for Prometheus shows figures of the running script, then fails.
SCRIPT = """
import sys, time
from pathlib import Path
import torch
from torch import nn
model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
file, num_steps, deadline = Path("metrics.prom"), 0, time.monotonic() + 120
has_figures = lambda: file.exists() and "stepscope_step_time_ms{" in file.read_text()
while num_steps < 60 or (not has_figures() and time.monotonic() < deadline):
    model(torch.randint(16, (2, 5))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    num_steps += 1
    time.sleep(0.005)
Path("seen.prom").write_text(file.read_text())
raise ValueError("the script fails")
"""


class Collector(HTTPServer):
    """A collector of OTLP over HTTP that keeps what it gets."""

    def __init__(self, num_refused=0):
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[bytes] = []
        self.num_refused = num_refused
        self.thread = threading.Thread(target=self.serve_forever, daemon=True)
        self.thread.start()

    def stop(self):
        self.shutdown()
        self.server_close()
        self.thread.join()

    def gauges(self) -> dict[str, list[float]]:
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

        found: dict[str, list[float]] = {}
        for body in self.bodies:
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                names = {each.key: each.value.string_value for each in resource.resource.attributes}
                assert names["service.name"] == "stepscope" and names["stepscope.run"] == "recording"
                for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                    values = [each.as_double or float(each.as_int) for each in metric.gauge.data_points]
                    found.setdefault(metric.name, []).extend(values)
        return found


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        if refuses := self.server.num_refused > 0:
            self.server.num_refused -= 1
        else:
            self.server.bodies.append(body)
        self.send_response(400 if refuses else 200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def lived(tmp_path_factory):
    """A script that was logged to TensorBoard, W&B without an account, Prometheus and a collector, and failed."""
    pytest.importorskip("tensorboard"), pytest.importorskip("wandb"), pytest.importorskip("opentelemetry.sdk")
    folder = tmp_path_factory.mktemp("live")
    (folder / "train.py").write_text(SCRIPT)
    collector = Collector()
    options = ["--warmup", "2", "--clean", "4", "--trace", "1", "--quiet", "-o", "recording"]
    options += ["--log-to", "tensorboard:logs", "--log-to", "wandb", "--otlp"]
    words = [sys.executable, "-m", "stepscope", "run", *options, "--metrics-file", "metrics.prom", "train.py"]
    variables = {
        **os.environ,
        **OFFLINE,
        "STEPSCOPE_LOG_SECONDS": "0.2",
        "WANDB_MODE": "online",  # without an account, and with a server that is down
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "HOME": str(folder),
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}",
    }
    done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, timeout=280)
    collector.stop()
    return folder, done, collector


def values_of(text: str) -> dict[str, float]:
    parser = pytest.importorskip("prometheus_client.parser")
    found = {}
    for family in parser.text_string_to_metric_families(text):
        assert family.documentation and family.type == "gauge"
        for sample in family.samples:
            assert sample.labels == {"run": "recording", "rank": "0"}
            found[sample.name] = sample.value
    return found


def figures_of(folder: Path) -> dict[str, float]:
    session = open_session(folder)
    return figures(session.recording, session.summary)


def test_the_script_ends_as_it_would_alone_and_a_tracker_that_is_down_is_one_line(lived):
    _, done, _ = lived

    assert done.returncode == 1 and done.stderr.rstrip().splitlines()
    assert "ValueError: the script fails" in done.stderr
    warnings = [line for line in done.stderr.splitlines() if line.startswith("stepscope:")]
    assert len(warnings) == 1 and re.match(r"stepscope: logging to wandb failed: .*API key.*", warnings[0])


def test_prometheus_sees_the_figures_while_the_script_runs_and_those_of_the_card_at_the_end(lived):
    folder, _, _ = lived
    running, ended = (values_of((folder / name).read_text()) for name in ("seen.prom", "metrics.prom"))

    assert running["stepscope_running"] == 1 and ended["stepscope_running"] == 0
    assert 0 < running["stepscope_steps"] <= ended["stepscope_steps"]
    expected = {name.replace("/", "_"): value for name, value in figures_of(folder / "recording").items()}
    assert {name: ended[name] for name in expected} == pytest.approx(expected)
    assert [each.name for each in folder.glob(".*.tmp")] == []


def test_tensorboard_has_every_step_once_and_the_card_of_the_failed_run(lived):
    folder, _, _ = lived
    session = open_session(folder / "recording")

    events = scalars_of(folder / "logs" / "recording")
    assert [event.step for event in events.Scalars("stepscope/per_step/time_ms")] == [
        sample.step for sample in session.recording.samples
    ]
    card = events.Tensors("stepscope/card")[0].tensor_proto.string_val[0].decode()
    assert "failed with exit code 1 (ValueError: the script fails)" in " ".join(card.split())
    assert len(events.Scalars("stepscope/step_time_ms")) > 1  # as it ran, and at the end


def test_a_collector_gets_the_figures(lived):
    folder, _, collector = lived

    found = collector.gauges()
    expected = figures_of(folder / "recording")
    assert {name: found[name.replace("/", ".")][-1] for name in expected} == pytest.approx(expected)
    assert len(found["stepscope.steps"]) > 1


def test_record_logs_too(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPSCOPE_LOG_SECONDS", "0.2")
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    windows = Windows(warmup=2, clean=4, trace=0, memory=0)
    with stepscope.record(tmp_path / "recording", model=model, windows=windows, metrics_file=tmp_path / "m.prom"):
        for _ in range(12):
            model(torch.randint(16, (2, 5))).square().mean().backward()
            optimizer.step()

    found = values_of((tmp_path / "m.prom").read_text())
    assert found["stepscope_steps"] == 12 and found["stepscope_running"] == 0
    expected = figures_of(tmp_path / "recording")
    assert found["stepscope_tokens_per_second"] == pytest.approx(expected["stepscope/tokens_per_second"])


def test_ranks_other_than_the_first_only_have_a_metrics_file_of_their_own(tmp_path):
    first, third = (targets_of(["tensorboard"], tmp_path / "m.prom", False, rank) for rank in (0, 3))

    assert [each.tracker for each in first] == ["prometheus", "tensorboard"]
    assert [(each.tracker, Path(each.where).name) for each in third] == [("prometheus", "m-rank3.prom")]


def test_a_mistake_is_said_before_the_script_starts(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)

    with pytest.raises(MissingDependencyError, match=r"pip install 'stepscope\[wandb\]'"):
        stepscope.record(tmp_path / "run", log_to="wandb").__enter__()
    with pytest.raises(UsageError, match="the folder of the metrics file does not exist"):
        stepscope.record(tmp_path / "run", metrics_file=tmp_path / "none" / "m.prom").__enter__()
    with pytest.raises(UsageError, match="'prometheus' is not a tracker"):
        stepscope.record(tmp_path / "run", log_to=["prometheus:x"]).__enter__()
    assert not (tmp_path / "run").exists()


def test_the_run_is_that_of_the_folder_while_its_ranks_still_record(tmp_path):
    folder = write_recording(tmp_path / "recording", {"status": "interrupted"}, [])
    cpu_recording(folder / "rank0", status="interrupted", trace=None)
    stop, start = os.pipe()
    os.write(start, b"\n")
    words = [sys.executable, "-m", "stepscope", "log", folder, "--to", f"prometheus:{tmp_path}/m.prom"]

    subprocess.run([*words, "--follow", "0"], stdin=stop, check=True, timeout=120)

    os.close(stop), os.close(start)
    assert values_of((tmp_path / "m.prom").read_text())["stepscope_steps"] == 12  # of rank 0, with the folder's name


@pytest.mark.long
def test_a_collector_that_is_down_is_one_line(tmp_path):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    folder = cpu_recording(tmp_path / "recording", trace=None)
    words = ["-m", "stepscope", "log", folder, "--to", "otlp:http://127.0.0.1:9/v1/metrics", "--follow", "0"]
    variables = {**os.environ, "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}

    done = subprocess.run(
        [sys.executable, *words], input="\n", env=variables, capture_output=True, text=True, timeout=120
    )

    (line,) = done.stderr.splitlines()
    assert line.startswith("stepscope: logging to otlp:http://127.0.0.1:9/v1/metrics failed: ConnectionError: ")


def test_a_collector_that_comes_back_gets_the_figures(tmp_path):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    folder = cpu_recording(tmp_path / "recording", trace=None)
    collector = Collector(num_refused=1)
    to = f"otlp:http://127.0.0.1:{collector.server_port}/v1/metrics"
    words = [sys.executable, "-m", "stepscope", "log", folder, "--to", to, "--follow", "0"]
    variables = {**os.environ, "STEPSCOPE_LOG_SECONDS": "0.05"}
    with subprocess.Popen(words, env=variables, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for _ in range(600):
            if collector.bodies:
                break
            time.sleep(0.1)
        _, stderr = process.communicate("\n")
    collector.stop()

    assert stderr.count("stepscope: logging to otlp") == 1 and collector.num_refused == 0
    assert collector.gauges()["stepscope.steps"][0] == 12


def test_a_script_that_is_killed_is_logged_to_its_end(tmp_path):
    folder = cpu_recording(tmp_path / "recording", status="interrupted", trace=None)
    source = f"""
import os, pathlib, time
from stepscope.trackers.follow import LiveLog, targets_of
LiveLog(pathlib.Path({str(folder)!r}), targets_of([], {str(tmp_path / "m.prom")!r}, False, 0), 0)
if worker := os.fork():  # which has all that the script has open
    print(worker, flush=True)
time.sleep(600)
"""
    variables = {**os.environ, "STEPSCOPE_LOG_SECONDS": "0.2"}
    killed = subprocess.Popen([sys.executable, "-c", source], env=variables, stdout=subprocess.PIPE)

    def wait_for(running: int) -> dict[str, float]:
        for _ in range(300):
            found = values_of((tmp_path / "m.prom").read_text()) if (tmp_path / "m.prom").exists() else {}
            if found.get("stepscope_running") == running and "stepscope_steps" in found:
                return found
            time.sleep(0.1)
        raise AssertionError(found)

    worker = int(killed.stdout.readline())
    try:
        wait_for(1)
        killed.kill()
        assert wait_for(0)["stepscope_steps"] == 12
    finally:
        killed.kill()
        os.kill(worker, signal.SIGKILL)
        killed.communicate()


def test_a_pause_that_is_no_number_is_a_mistake(monkeypatch):
    monkeypatch.setenv("STEPSCOPE_LOG_SECONDS", "often")
    with pytest.raises(UsageError, match="STEPSCOPE_LOG_SECONDS must be a number of seconds, not 'often'"):
        targets_of(["tensorboard"], None, False, 0)


def test_a_logging_process_that_died_is_said_at_the_end(tmp_path):
    told: list[str] = []
    live = LiveLog(tmp_path, [Target("prometheus", str(tmp_path / "m.prom"))], 0)
    live._process.kill()
    live.end(told.append)

    assert told == ["logging failed (exit code -9): log this run with `stepscope log`"]


def test_a_slow_tracker_is_waited_for_with_a_word(tmp_path, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(follow, "QUIET_S", 0.0)
    live = LiveLog(tmp_path, [Target("prometheus", str(tmp_path / "m.prom"))], 0)
    live.end(told.append)

    assert told == ["waiting up to 60 s for trackers to receive the end of this run"]


def test_labels_and_names_are_escaped(tmp_path):
    parser = pytest.importorskip("prometheus_client.parser")
    name = 'a "run"\\ of\nmine'
    file = Prometheus(tmp_path / "m.prom", {"run": name, "rank": "0"})

    file.log([Point(3, 0.0, {"stepscope/odd name-é": 2.5, "stepscope/per_step/time_ms": 1.0})])

    families = list(parser.text_string_to_metric_families((tmp_path / "m.prom").read_text()))
    assert [family.name for family in families] == ["stepscope_running", "stepscope_odd_name__"]
    assert families[1].samples[0].labels["run"] == name and families[1].samples[0].value == 2.5
