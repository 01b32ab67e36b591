"""`stepscope watch` on terminals, in pipes and as a page: what it prints, how it ends, and what it leaves behind."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from history_maker import Run, a_week, write_history
from parametrized import parametrized
from stepscope.cli.main import main
from verbs import run_verb

COMMAND = [sys.executable, "-m", "stepscope", "watch"]
TAKEN, GIVEN_BACK = b"\x1b[?1049h", b"\x1b[?1049l"


@pytest.fixture
def run(tmp_path) -> Path:
    return write_history(tmp_path / "run", Run(num_steps=1000, noise=0.0, ends=None))


def finish(run: Path, status: str = "finished") -> None:
    path = run / "recording.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": status}))


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, *words: object, columns: int = 100, lines: int = 40, **env: str) -> None:
        self.master, slave = pty.openpty()
        self.resize(columns, lines)
        self.modes = termios.tcgetattr(slave)
        variables = {
            name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")
        }
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, words)],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env={**variables, "TERM": "xterm", **env}, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        self.slave = slave
        self.seen = b""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read(self, seconds: float = 0.1) -> bytes:
        if select.select([self.master], [], [], seconds)[0]:
            with contextlib.suppress(OSError):
                self.seen += os.read(self.master, 1 << 16)
        return self.seen

    def wait_for(self, text: bytes, after: int = 0) -> int:
        """Wait until a text was printed, and return where it ends."""
        until = time.monotonic() + 60
        while (at := self.read().find(text, after)) < 0:
            assert time.monotonic() < until and self.process.poll() is None, self.seen[after:]
        return at + len(text)

    def end(self) -> int:
        """Wait until the process has ended, and return its exit code."""
        until = time.monotonic() + 60
        while self.process.poll() is None:
            self.read()
            assert time.monotonic() < until
        while len(self.read(0.05)) != len(self.seen):
            pass
        self.read(0.05)
        return self.process.returncode


@pytest.fixture
def terminal() -> Iterator[type[Terminal]]:
    made: list[Terminal] = []

    def make(*words: object, **settings) -> Terminal:
        made.append(Terminal(*words, **settings))
        return made[-1]

    yield make
    for each in made:
        each.process.kill()
        each.process.wait()
        os.close(each.master)
        os.close(each.slave)


def is_given_back(terminal: Terminal) -> bool:
    """Whether the terminal is as it was before."""
    same = termios.tcgetattr(terminal.slave)[:4] == terminal.modes[:4]
    return same and terminal.seen.count(TAKEN) == terminal.seen.count(GIVEN_BACK) == terminal.seen.count(b"\x1b[?25l")


def test_a_screen_grows_with_the_run_and_ends_with_it(run, terminal):
    shown = terminal(run, "--every", "0.05", "--steps", "2000")
    at = shown.wait_for(b"Step 1,000 of 2,000")
    lines = (run / "history.jsonl").read_text().splitlines(keepends=True)
    last = json.loads(lines[-1])
    last |= {"step": 1000, "num_steps": 7, "start_ns": last["start_ns"] + last["wall_ns"]}
    with (run / "history.jsonl").open("a") as stream:
        stream.write(json.dumps(last) + "\n")
    shown.wait_for(b"Step 1,007 of 2,000", at)
    finish(run)

    assert shown.end() == 0 and is_given_back(shown)
    after = shown.seen[shown.seen.rfind(GIVEN_BACK) :]
    assert b"The run finished" in after and b"throughput" in after  # it stays on the terminal


@parametrized(("how", "code"), [("q", 0), ("interrupt", 130), ("terminate", -15), ("hang up", -1)], quick=2)
def test_whatever_ends_it_the_terminal_is_as_before(run, terminal, how, code):
    shown = terminal(run, "--every", "30")
    shown.wait_for(b"q quits")
    if how == "q":
        os.write(shown.master, b"q")
    elif how == "interrupt":
        os.write(shown.master, b"\x03")
    else:
        shown.process.send_signal(signal.SIGTERM if how == "terminate" else signal.SIGHUP)

    assert shown.end() in (code, 128 - code) and is_given_back(shown)
    assert b"Traceback" not in shown.seen


def test_another_size_is_drawn_at_once(run, terminal):
    shown = terminal(run, "--every", "300", columns=110, lines=44)
    at = shown.wait_for(b"q quits", shown.wait_for(b"q quits"))  # the second one has the rules' answers
    shown.resize(50, 12)
    end = shown.wait_for(b"more lines with --once", at)
    frame = re.sub(rb"\x1b\[[?0-9;]*[a-zA-Z]", b"", shown.seen[at:end]).decode()
    drawn = frame[frame.index("Step 1,000") :].splitlines()

    assert len(drawn) == 12 and max(map(len, drawn[:-1])) <= 50


def test_it_stops_and_goes_on(run, terminal):
    shown = terminal(run, "--every", "30")
    at = shown.wait_for(b"q quits")
    os.write(shown.master, b"\x1a")
    at = shown.wait_for(GIVEN_BACK, at)
    os.kill(shown.process.pid, signal.SIGCONT)
    shown.wait_for(TAKEN, at)
    os.write(shown.master, b"q")

    assert shown.end() == 0 and is_given_back(shown)


def test_colors_are_left_out_on_request(run, terminal):
    shown = terminal(run, "--once", NO_COLOR="1")
    assert shown.end() == 0 and b"Step 1,000" in shown.seen and b"\x1b" not in shown.seen
    colored = terminal(run, "--once")
    assert colored.end() == 0 and b"\x1b[1mStep 1,000" in colored.seen


def test_a_dumb_terminal_gets_lines(run, terminal):
    shown = terminal(run, "--every", "0.05", TERM="dumb")
    shown.wait_for(b"step 1,000  81.9 k tokens/s  loss 2.7")
    finish(run)

    assert shown.end() == 0 and b"\x1b" not in shown.seen.replace(b"\x1b[1m", b"").replace(b"\x1b[0m", b"").replace(
        b"\x1b[2m", b""
    )


def test_a_pipe_gets_lines_until_nobody_reads(run):
    words = [*COMMAND, run, "--every", "0.05"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        lines = [process.stdout.readline() for _ in range(3)]
        process.stdout.close()

        assert all(re.fullmatch(rb"\d\d:\d\d:\d\d  step 1,000  81.9 k tokens/s .*\n", line) for line in lines)
        assert process.wait(60) == 0 and process.stderr.read() == b""


def test_json_is_one_object_per_update(run):
    words = [*COMMAND, run, "--every", "0.05", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        first = json.loads(process.stdout.readline())
        finish(run, "failed")
        last = [json.loads(line) for line in process.stdout][-1]

    assert process.returncode == 0
    assert (first["state"], last["state"], last["num_steps"]) == ("running", "failed", 1000)
    assert first["per_s"] == 81_920 and first["schema_version"] == 1 and "series" not in first


def test_a_warning_is_printed_once(run, tmp_path):
    write_history(run / "rank1", Run(num_steps=1000, ends="failed"))
    with subprocess.Popen([*COMMAND, run, "--every", "0.05"], stdout=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline() for _ in range(5)]
        finish(run)
        lines += process.stdout.readlines()

    assert process.returncode == 0 and "The run failed" in lines[-1]
    assert sum("warning: Rank 1" in line for line in lines) == 1


def test_once_in_json_and_as_text(run):
    text, found = run_verb("watch", run, "--once"), run_verb("watch", run, "--once", "--json", "--steps", 1500)

    assert (text.returncode, found.returncode) == (0, 0)
    assert text.stdout.startswith("Step 1,000, 81.9 k tokens/s.")
    assert json.loads(found.stdout)["left_s"] == pytest.approx(50.0)


def test_the_latest_run_is_watched(tmp_path):
    write_history(tmp_path / "runs" / "one", Run(num_steps=10))
    assert "after 20 s and 10 steps" in run_verb("watch", cwd=tmp_path).stdout.replace("21 s", "20 s")
    assert run_verb("watch", cwd=tmp_path / "runs").returncode == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "nothing"),
        (["run", "--port", "80"], "--port is for --serve"),
        (["run", "--serve", "--json"], "--json"),
        (["run", "--steps", "0"], "positive integer"),
        (["run", "--every", "-1"], "positive number"),
    ],
)
def test_a_mistake_is_one_line(run, words, said):
    done = run_verb("watch", *words, cwd=run.parent)

    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_folder_that_is_deleted_ends_it_with_one_line(run, monkeypatch, terminal):
    program = "import sys; from stepscope.cli.main import main; from stepscope.session import watch; "
    program += "watch.GONE_S = 0.2; sys.exit(main())"
    monkeypatch.setattr(sys.modules[__name__], "COMMAND", [sys.executable, "-c", program, "watch"])
    shown = terminal(run, "--every", "0.05")
    shown.wait_for(b"q quits")
    shutil.rmtree(run)

    assert shown.end() == 2 and is_given_back(shown)
    assert (
        b"is not a recording any more" in shown.seen[shown.seen.rfind(GIVEN_BACK) :]
        and b"Traceback" not in shown.seen
    )


def test_the_page_is_served_until_it_is_interrupted(run):
    process = subprocess.Popen(
        [*COMMAND, run, "--serve", "--every", "0.05", "--steps", "2000"], stdout=subprocess.PIPE, text=True
    )
    address = process.stdout.readline().strip()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{22}/", address) and "ssh -N -L" in process.stdout.readline()
    state = json.loads(urllib.request.urlopen(f"{address}state", timeout=30).read())
    assert "Step 1,000 of 2,000" in state["verdict"] and state["is_over"] is False
    assert b"GPU clock" not in urllib.request.urlopen(address, timeout=30).read()
    finish(run)
    assert any("The page stays" in process.stdout.readline() for _ in range(2))
    assert json.loads(urllib.request.urlopen(f"{address}state", timeout=30).read())["is_over"] is True
    process.send_signal(signal.SIGINT)

    assert process.wait(60) == 0
    process.stdout.close()


def test_a_port_that_is_taken(run):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run_verb("watch", run, "--serve", "--port", taken.getsockname()[1])

    assert done.returncode == 2 and "cannot be used" in done.stderr


@pytest.mark.long
def test_a_week_needs_little_memory_and_reads_its_file_once(tmp_path):
    """6 million steps: what it reads and keeps; docs/watch.md has the seconds."""
    run = write_history(tmp_path / "run", a_week())
    program = "from stepscope.cli.main import main; main(); print(open('/proc/self/status').read())"
    words = [sys.executable, "-c", program, "watch", run, "--once"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)

    assert "6,000,000 steps" in done.stdout
    assert int(re.search(r"VmHWM:\s+(\d+) kB", done.stdout)[1]) < 200 * 1024
    assert (run / "history.jsonl").stat().st_size < 20e6


def test_trigger_takes_the_latest_run_too(tmp_path, monkeypatch, capsys):
    finish(write_history(tmp_path / "runs" / "train", Run(num_steps=100, ends=None)))
    monkeypatch.chdir(tmp_path)
    assert main(["trigger"]) == 2
    assert "the run in runs/train has ended (finished)" in capsys.readouterr().err


def test_files_without_permission_are_one_line(run, monkeypatch, capsys):
    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied", str(run / "history.jsonl"))

    monkeypatch.setattr("stepscope.cli.watch.main", refuse)
    assert main(["watch", str(run)]) == 2
    assert capsys.readouterr().err == f"stepscope watch: {run}/history.jsonl cannot be opened: Permission denied\n"
