"""`stepscope analyze` where something is wrong: with the file, with the terminal, with what is installed."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys

import pytest
from analyze_verb import analyze, as_json, assert_mistake, training

from stepscope.analysis.traces import Analysis
from trace_builder import TraceBuilder


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return training().write(tmp_path_factory.mktemp("analyze") / "trace.json.gz")


# -- what is no trace -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.json", b"", ["is empty"]),
        ("blank.json", b" \n", ["byte"]),
        ("text.json", b"hello", ["not a trace", "byte 0"]),
        ("list.json", b"[]", ["no events"]),
        ("none.json", b'{"traceEvents": []}', ["no events"]),
        ("object.json", b'{"a": 1}', ["trace"]),
        ("cut.json.gz", gzip.compress(b'{"traceEvents": [')[:10], ["cut.json.gz"]),
        ("binary.json", bytes(range(256)), ["not a trace"]),
    ],
)
def test_what_is_no_trace_is_one_line(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)

    assert_mistake(analyze(path), name, *words)


def test_a_path_that_is_not_there_is_one_line(tmp_path):
    assert_mistake(analyze(tmp_path / "nothing.json"), "nothing.json")


def test_a_folder_without_traces_is_one_line(tmp_path):
    assert_mistake(analyze(tmp_path), str(tmp_path))
    (tmp_path / "settings.json").write_text('{"a": 1}')
    assert_mistake(analyze(tmp_path), "no trace")


def test_a_trace_that_was_cut_off_is_accounted_for_with_a_warning(tmp_path):
    path = training().write(tmp_path / "trace.json")
    path.write_bytes(path.read_bytes()[:-200])

    found = as_json(path)
    assert found["trace"]["warnings"] and all("byte" in warning for warning in found["trace"]["warnings"])
    assert found["ranks"][0]["gpu_time"]["busy_ns"] > 0
    done = analyze(path)
    assert done.returncode == 0 and "warning" in done.stdout


@pytest.mark.parametrize(
    "build",
    [
        lambda: TraceBuilder().kernel("alone", 0, 5),
        lambda: TraceBuilder().kernel("point", 0, 0),
        lambda: TraceBuilder().op("aten::mm", 0, 5),
        lambda: TraceBuilder().op("autograd::engine::evaluate_function: MmBackward0", 0, 5),
        lambda: TraceBuilder().python("f.py(1): f", 0, 5),
        lambda: TraceBuilder().memory(5, 512),
        lambda: TraceBuilder().annotation("label", 0, 5),
        lambda: TraceBuilder().raw(ph="M", name="process_name", pid=1, tid=0, args={"name": "python"}),
        lambda: TraceBuilder().op("aten::mm", 10, 5, id=5).launch("gemm", 10, (30, 40), took=6, id=5),
        lambda: TraceBuilder().kernel("", 0, 5).op("", 0, 5),
        lambda: TraceBuilder().kernel("void f<" + "<" * 2000, 0, 5),
    ],
    ids=[
        "kernel", "point", "op", "backward", "frame", "memory", "label", "metadata", "call around its op", "no names",
        "brackets",
    ],
)  # fmt: skip
def test_the_smallest_traces_are_accounted_for(tmp_path, build):
    done = analyze(build().write(tmp_path / "trace.json"))

    assert (done.returncode, done.stderr) == (0, "")
    assert json.dumps(Analysis.of([build().account()]).to_json(), allow_nan=False)


# -- manners ----------------------------------------------------------------------------------------------------


def test_it_works_where_torch_cannot_be_imported(trace, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('torch is not for this test')\n")
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))}
    blocked = subprocess.run(
        [sys.executable, "-c", "import torch"], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert "not for this test" in blocked.stderr

    assert as_json(trace, **environment) == as_json(trace)


def test_a_reader_that_has_seen_enough_is_no_error(trace):
    command = f'"{sys.executable}" -m stepscope analyze "{trace}" --json | head -c 1'
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert done.stdout == "{" and done.stderr == ""

    # AND one that has left before the first line
    process = subprocess.Popen(
        [sys.executable, "-m", "stepscope", "analyze", str(trace)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), errors) == (0, b"")


def test_a_warning_of_a_library_is_not_shown(trace):
    """What a library is about to change is for us to know, not for the user to read."""
    done = analyze(trace, PYTHONWARNINGS="error")

    assert (done.returncode, done.stderr) == (0, "")


def test_help_has_examples_that_name_the_verb():
    done = analyze("--help")

    assert done.returncode == 0 and "stepscope analyze trace.json.gz" in done.stdout
