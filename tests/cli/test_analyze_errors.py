"""`stepscope analyze` where something is wrong: with the file, with the terminal, with what is installed."""

from __future__ import annotations

import bz2
import gzip
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from analyze_verb import analyze, as_json, assert_mistake, training

from parametrized import parametrized
from stepscope.analysis.ranks.rank_account import Analysis
from stepscope.cli.main import VERBS, main
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
        ("cut.json.gz", gzip.compress(b'{"traceEvents": [', mtime=0)[:10], ["cut.json.gz"]),
        ("binary.json", bytes(range(256)), ["not a trace"]),
        ("values.json", b'[1, 2, "a", null, [1], {}]', ["no events that can be read"]),
        ("zip.json", b"PK\x03\x04" + bytes(50), ["is a zip archive"]),
        ("bzip2.json", bz2.compress(b"[]"), ["compressed with bzip2"]),
        ("utf16.json", '{"traceEvents": []}'.encode("utf-16"), ["is UTF-16"]),
    ],
)
def test_what_is_no_trace_is_one_line(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)

    assert_mistake(analyze(path), name, *words)


def test_a_path_that_is_not_there_is_one_line(tmp_path):
    assert_mistake(analyze(tmp_path / "nothing.json"), "nothing.json")


def test_a_link_that_leads_nowhere_is_one_line(tmp_path):
    (tmp_path / "loop.json").symlink_to("loop.json")
    (tmp_path / "gone.json").symlink_to("away.json")

    assert_mistake(analyze(tmp_path / "loop.json"), "loop.json is a link that leads in a circle")
    assert_mistake(analyze(tmp_path / "gone.json"), "gone.json is a link to away.json, which is not there")


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


@parametrized(
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
    ], quick=5,
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


def shell(command: str) -> subprocess.CompletedProcess[str]:
    """A command as people type it, with `stepscope` before it."""
    return subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -m stepscope {command}'], capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "words",
    [
        "analyze {}",
        "analyze --sql {} 'select 1' --csv",
        *(
            pytest.param(words, marks=pytest.mark.long)
            for words in ("analyze {} --json", "analyze --sql {} 'select 1'", "analyze --sql --tables")
        ),
    ],
)
def test_a_closed_output_is_one_line(trace, words):
    verb = "analyze --sql" if "--sql" in words else "analyze"
    done = shell(f"{words.format(trace)} >&-")

    assert done.returncode == 2
    assert done.stderr == f"stepscope {verb}: the answer could not be written: standard output is closed\n"


@pytest.mark.parametrize(
    "words",
    [
        "analyze {} --no-cache",
        pytest.param("analyze {} --json", marks=pytest.mark.long),
        pytest.param("analyze --sql {} 'select 1' --csv", marks=pytest.mark.long),
    ],
)
def test_nowhere_to_complain_costs_no_answer(trace, words):
    expected = shell(words.format(trace))
    done = shell(f"{words.format(trace)} 2>&-")

    assert (done.returncode, done.stdout) == (0, expected.stdout) and done.stdout


def test_a_complaint_that_nobody_can_see_does_not_go_into_the_answer(tmp_path, trace):
    cut = training().write(tmp_path / "cut.json")
    cut.write_bytes(cut.read_bytes()[:-200])
    assert shell(f"analyze --sql {cut} 'select 1 as a' --csv").stderr

    assert shell(f"analyze --sql {cut} 'select 1 as a' --csv 2>&-").stdout == "a\n1\n"
    done = shell(f"analyze {tmp_path / 'nothing.json'} 2>&-")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_full_disk_is_one_line(trace):
    done = shell(f"analyze {trace} > /dev/full")

    assert done.returncode == 2
    assert done.stderr == "stepscope analyze: the answer could not be written: No space left on device\n"


# -- Ctrl-C -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "run"])
def test_ctrl_c_is_one_quiet_line_in_every_verb(verb, monkeypatch, capsys):
    module = importlib.import_module(f"stepscope.cli.{verb.replace('-', '_')}")
    monkeypatch.setattr(module, "add_arguments", lambda parser: None)

    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "main", interrupt)

    assert main([verb]) == 130
    assert capsys.readouterr() == ("", f"stepscope {verb}: interrupted\n")


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("to_all", [True, pytest.param(False, marks=pytest.mark.long)], ids=["terminal", "kill -INT"])
def test_ctrl_c_while_reading_leaves_nothing_behind(tmp_path, to_all):
    """GIVEN a trace that several processes read WHEN a terminal interrupts all of them THEN none is left.

    The compiled scanner reads in threads, so it is taken away.
    """
    event = '{"ph": "X", "cat": "cpu_op", "name": "op", "ts": 1, "dur": 1, "pid": 1, "tid": 1},\n'
    trace = tmp_path / "trace.json"
    trace.write_text("[" + event * (100_000_000 // len(event)))
    start = "from stepscope.cli.main import main; sys.exit(main())"
    code = f"import sys; sys.modules['stepscope.trace.fast._scan'] = None; {start}"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "analyze", str(trace)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "STEPSCOPE_CACHE": str(tmp_path / "cache")},
    )
    children: list[int] = []
    while not children and process.poll() is None:
        time.sleep(0.01)
        children = children_of(process.pid)
    time.sleep(0.5)
    children = children_of(process.pid)
    (os.killpg if to_all else os.kill)(process.pid, signal.SIGINT)
    printed, complained = process.communicate(timeout=60)

    assert (process.returncode, printed, complained) == (130, "", "stepscope analyze: interrupted\n")
    assert children or len(os.sched_getaffinity(0)) == 1
    assert not any(map(is_running, children))
    assert list(tmp_path.iterdir()) == [trace]


def test_a_warning_of_a_library_is_not_shown(trace):
    """What a library is about to change is for us to know, not for the user to read."""
    done = analyze(trace, PYTHONWARNINGS="error")

    assert (done.returncode, done.stderr) == (0, "")


def test_help_has_examples_that_name_the_verb():
    done = analyze("--help")

    assert done.returncode == 0 and "stepscope analyze trace.json.gz" in done.stdout
