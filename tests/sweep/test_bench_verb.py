"""The verb: the table, the files, a kill at any moment, resume, refusals."""

from __future__ import annotations

import csv
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sweep_runs import ODD, bench_words, exit_code, quiet_environment, rows_in

QUICK = ("--device", "cpu", "--mode", "forward+backward", "--warmup", "1", "--steps", "2")


@pytest.mark.long
def test_the_command_of_the_issue(bench, tmp_path):
    grid = ("--set", "seq_len=64,128", "--set", "attention=naive,builtin,sdpa")
    code, out, err = bench("cs336", "--preset", "tiny", *grid, "--mode", "step", "--device", "cpu", "-o", "sweep")

    assert code == 0, err
    rows = rows_in(tmp_path / "sweep")
    assert [row["status"] for row in rows] == ["ok"] * 6
    for seq_len in (64, 128):
        losses = [row["loss"] for row in rows if row["config"]["seq_len"] == seq_len]
        assert max(losses) - min(losses) < 1e-5
    assert "time ms" in out and "× plainest" in out and "6 points: 6 ok" in out and "115,008 parameters" in out
    with (tmp_path / "sweep" / "results.csv").open() as stream:
        records = list(csv.DictReader(stream))
    assert len(records) == 6 and float(records[0]["time_median_ns"]) > 0
    markdown = (tmp_path / "sweep" / "results.md").read_text()
    assert "stepscope bench cs336" in markdown and markdown.count("| naive |") == 2
    assert "6/6" in err


def test_dry_run_prints_the_points_and_runs_nothing(capsys, tmp_path, monkeypatch):
    from stepscope.cli.main import main

    monkeypatch.chdir(tmp_path)
    words = ["bench", f"{ODD}:GATED", "--preset", "small,wide", "--set", "batch=2,3", "--dry-run", "--device", "cpu"]

    assert main(words) == 0
    out = capsys.readouterr().out
    assert "4 points" in out and ["small", "2"] in [line.split() for line in out.splitlines()]
    assert main([*words, "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["config"]["width"] for point in points] == [8, 8, 16, 16]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("cs363",), "did you mean cs336"),
        ((f"{ODD}:GATED", "--set", "widht=3"), "did you mean width"),
        ((f"{ODD}:GATED", "--dtype", "bf61"), "did you mean bf16"),
        ((f"{ODD}:GATED", "--memory-limit", "lots"), "not an amount of memory"),
        ((f"{ODD}:GATED", "--dtype", "autocast_f16"), "did you mean autocast_fp16"),
        ((f"{ODD}:GATED", "--memory-limit", "0"), "not an amount of memory"),
        ((f"{ODD}:GATED", "--timeout", "0"), "must be a positive number"),
        ((f"{ODD}:GATED", "--timeout", "inf"), "must be a positive number"),
        ((f"{ODD}:GATED", "--timeout", "nan"), "must be a positive number"),
        ((f"{ODD}:GATED", "--max-batch", "1GiB", "--memory-limit", "2GiB"), "leave --memory-limit out"),
    ],
)
def test_a_mistake_is_one_line(capsys, words, message):
    assert exit_code(["bench", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import torch\n\ndef build(:\n    pass\n", "mine.py, line 3: SyntaxError: "),
        ("import nobody_has_this\n", "mine.py, line 1: ModuleNotFoundError: No module named 'nobody_has_this'"),
        ("import json\njson.loads('{')\n", "mine.py, line 2: JSONDecodeError: "),
        ("print('hello')\nimport sys\nsys.exit()\n", "mine.py, line 3: SystemExit"),
        ("class Odd(Exception):\n  pass\nraise Odd('two\\nlines')\n", "mine.py, line 3: Odd: two lines"),
    ],
)
def test_a_file_that_fails_is_one_line(capsys, tmp_path, monkeypatch, text, message):
    from stepscope.cli.main import main

    (tmp_path / "mine.py").write_text(text)
    monkeypatch.setattr(sys, "path", list(sys.path))
    grid = ("--grid", f"{tmp_path / 'mine.py'}:points")

    for words in (["bench", f"{tmp_path / 'mine.py'}:build"], ["bench", f"{ODD}:GATED", "--device", "cpu", *grid]):
        assert main(words) == 2
        out, error = capsys.readouterr()
        assert out == "" and message in error and len(error.replace("hello\n", "").splitlines()) == 1


def test_a_grid_function_that_fails_is_one_line_and_the_whole_of_it_when_asked_for(capsys, tmp_path, monkeypatch):
    from stepscope.cli.main import main

    (tmp_path / "mine.py").write_text("def points():\n  yield {'width': 1}\n  yield {'width': 1 // 0}\n")
    words = ["bench", f"{ODD}:GATED", "--device", "cpu", "--grid", f"{tmp_path / 'mine.py'}:points"]

    assert main(words) == 2
    error = capsys.readouterr().err
    assert "mine.py, line 3: ZeroDivisionError: " in error and error.count("\n") == 1
    monkeypatch.setenv("STEPSCOPE_DEBUG", "1")
    assert main(words) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="pipes of a shell")
def test_nobody_need_listen_and_closed_streams_are_left_alone(tmp_path):
    words = shlex.join(bench_words(f"{ODD}:build", *QUICK, "--set", "width=2,3,4", "--json"))
    # Nobody reads standard error; then there is none.
    script = f"{{ {words} -o gone 2>&3 >gone.json; }} 3>&1 | true; {words} -o closed 2>&- >closed.json"
    done = subprocess.run(script, shell=True, cwd=tmp_path, env=quiet_environment(), timeout=200)

    assert done.returncode == 0
    for name in ("gone", "closed"):
        assert [row["status"] for row in rows_in(tmp_path / name)] == ["ok"] * 3
        assert len(json.loads((tmp_path / f"{name}.json").read_text())["points"]) == 3
        assert (tmp_path / name / ".lock").read_bytes() == b""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_the_server_dies_with_its_parent_while_it_imports_torch(tmp_path):
    (tmp_path / "torch.py").write_text("import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(60)\n")
    code = (
        "from stepscope.sweep.protocol import Request\nfrom stepscope.sweep.server import Server\n"
        "request = Request(workload='', preset=None, config={}, run={}, result_path='', log_path='')\n"
        "Server('fork').run(request)"
    )
    environment = {
        **quiet_environment(),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    }
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment, stderr=subprocess.PIPE)
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), process)
    pid = int((tmp_path / "pid").read_text())
    assert is_running(pid)

    process.kill()
    process.wait()  # not for the end of its streams: the server has them too
    process.stderr.close()

    end = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < end, "the server outlived its sweep"
        time.sleep(0.02)


def start(tmp_path, *words):
    return subprocess.Popen(
        bench_words(f"{ODD}:build", *QUICK, "-o", "sweep", *words),
        cwd=tmp_path,
        env=quiet_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(condition, process, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError(process.stderr.read() if process.poll() is not None else "it took too long")


def num_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.long
@pytest.mark.slow
def test_killed_at_any_moment_a_sweep_is_finished_without_redoing_or_losing_a_row(bench, tmp_path):
    results = tmp_path / "sweep" / "results.jsonl"
    widths = ",".join(map(str, range(2, 14)))
    generator = random.Random(4)
    kept: list[dict] = []

    for number in (2, 6):
        process = start(tmp_path, "--set", f"width={widths}", *(["--resume"] if kept else []))
        wait_for(lambda number=number: num_lines(results) >= number, process)
        time.sleep(generator.uniform(0, 0.3))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        before = [json.loads(line) for line in results.read_text().splitlines(keepends=True) if line.endswith("\n")]
        assert before[: len(kept)] == kept and len(before) > len(kept)
        kept = before

    code, _, err = bench(f"{ODD}:build", *QUICK, "-o", "sweep", "--set", f"width={widths}", "--resume")

    assert code == 0, err
    rows = rows_in(tmp_path / "sweep")
    assert rows[: len(kept)] == kept
    assert [row["config"]["width"] for row in rows] == list(range(2, 14))


@pytest.mark.long
@pytest.mark.slow
def test_when_the_sweep_is_killed_its_point_dies_and_two_sweeps_are_refused(bench, tmp_path):
    pid_file = tmp_path / "pid"
    process = start(tmp_path, "--set", "kind=hang", "--set", f"pid_file={pid_file}")
    wait_for(lambda: pid_file.exists() and pid_file.read_text(), process)
    pid = int(pid_file.read_text())

    code, _, err = bench(f"{ODD}:build", *QUICK, "-o", "sweep")
    assert code == 2 and "Another sweep is writing to sweep" in err

    assert is_running(pid)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    end = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < end, "the point outlived its sweep"
        time.sleep(0.02)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.long
def test_an_interrupted_sweep_says_how_to_go_on(bench, tmp_path):
    pid_file = tmp_path / "pid"
    process = start(tmp_path, "--set", "kind=ok,hang", "--set", f"pid_file={pid_file}")
    wait_for(lambda: num_lines(tmp_path / "sweep" / "results.jsonl") == 1, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)

    assert process.returncode == 130
    assert "stepscope bench" in err and err.rstrip().endswith("--resume")
    assert "Traceback" not in err
    assert (tmp_path / "sweep" / "results.csv").exists()


@pytest.mark.long
def test_rows_that_are_not_ok_are_told_and_the_exit_code_is_1(bench, tmp_path, capsys):
    from stepscope.cli.main import main

    code, out, _ = bench(f"{ODD}:build", *QUICK, "--set", "kind=ok,raise", "--start", "spawn", "-o", "sweep")

    assert code == 1
    assert "ValueError in stage build: no such thing" in out and "2 points: 1 ok, 1 crashed" in out
    assert main(["bench", f"{ODD}:build", *QUICK, "--set", "kind=ok", "-o", str(tmp_path / "sweep")]) == 2
    error = capsys.readouterr().err
    assert "2 rows" in error and "--resume" in error
