"""Faults at every moment: kills, full disks and lost processes, and what must hold after each.

A case is a verb and a number, which is the seed of its fault. The verb's work runs in a fork with the fault; then, in
forks without one, the same command goes on, and what is there is read. `check_case` returns what was broken.
`benchmarks/kills.py` runs many; tests/sweep/test_kills.py some.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[1]
VERBS = ("bench", "study", "report", "cache", "run")
NUM_POINTS = 4
FINE, SENTENCE, BROKEN = 0, 3, 4
FAULT = "STEPSCOPE_TEST_FAULT"
_CHANGES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.utime", "os.chmod"}


@dataclass(frozen=True)
class Fault:
    kind: str  # operation, half a write, limit, disk, signal
    number: int = 0  # the operation at which it strikes, or the byte
    where: str = "driver"  # or point, server, group
    signal: int = signal.SIGKILL
    after_s: float = 0.0


OPERATIONS = {"bench": 33, "study": 65, "report": 3, "cache": 30, "run": 60, "point": 8}
"""How many operations on files each verb does, and a point's process."""


def fault_of(verb: str, number: int) -> Fault:
    """The fault of a case: every second one strikes at an operation on a file, one after the other."""
    chosen = random.Random(f"{verb} {number}")
    has_points = verb in ("bench", "study")
    if number % 2 == 0:
        where = "point" if has_points and number % 8 == 0 else "driver"
        at = number // 8 % OPERATIONS["point"] if where == "point" else number // 2 % OPERATIONS[verb]
        return Fault("half" if number % 6 == 0 else "operation", at, where)
    if number % 8 == 1:
        return Fault("limit", int(10 ** chosen.uniform(0, 4.5)), chosen.choice(["driver", "point"][: 1 + has_points]))
    if number % 8 == 3 and verb in ("bench", "study", "report", "cache"):
        return Fault("disk", 4096 * chosen.randrange(12))
    wheres = ["driver", "group", "server", "point"] if has_points else ["driver", "group"]
    ends = [signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT]
    longest = {"bench": 0.7, "study": 1.0, "report": 0.3, "cache": 0.3, "run": 1.5}[verb]
    return Fault("signal", 0, chosen.choice(wheres), chosen.choice(ends), chosen.uniform(0, longest))


# -- forks --------------------------------------------------------------------------------------------------------


def in_fork(work: Callable[[], Any], folder: Path, fault: Fault | None = None) -> tuple[int, Any]:
    """Return how a fork with this work ended (FINE, SENTENCE, BROKEN, or minus a signal) and what it returned."""
    answer = folder.parent / "answer"
    answer.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        _be(work, folder, fault, answer)
    if fault is not None and fault.kind == "signal":
        threading.Thread(target=_strike, args=(pid, fault), daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, json.loads(answer.read_text()) if answer.exists() else None


def _be(work: Callable[[], Any], folder: Path, fault: Fault | None, answer: Path) -> None:
    """Be the fork. Does not return."""
    from stepscope.errors import StepscopeError

    code = BROKEN
    try:
        os.setsid()
        signal.alarm(100)
        # A pipe has no size: what a limit hits must not be the log.
        (folder.parent / "log").write_text("")
        log = _pipe_to(folder.parent / "log")
        for number in (1, 2):
            os.dup2(log, number)
            setattr(sys, "stdout" if number == 1 else "stderr", os.fdopen(number, "w", closefd=False))
        if fault is not None:
            os.environ[FAULT] = json.dumps([fault.kind, fault.number, fault.where, str(folder)])
            arm("driver")
        found = work()
        code = FINE
        if fault is None:
            answer.write_text(json.dumps(found))
    except (StepscopeError, KeyboardInterrupt) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = SENTENCE
    except SystemExit as error:
        code = FINE if not error.code else SENTENCE
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


def _pipe_to(path: Path) -> int:
    """Return the end of a pipe, whose other end a process of its own writes to a file."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(writing)
        with path.open("ab") as stream:
            while data := os.read(reading, 1 << 16):
                stream.write(data)
                stream.flush()
        os._exit(0)
    os.close(reading)
    return writing


def arm(process: str) -> None:
    """Let the fault of the environment strike in this process, if it is for it."""
    kind, number, where, folder = json.loads(os.environ.get(FAULT, '["", 0, "", ""]'))
    if where != process:
        return
    if kind == "limit":
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (number, hard))
    elif kind in ("operation", "half"):
        _arm_operation(number, folder, half=kind == "half")


def _arm_operation(number: int, folder: str, half: bool) -> None:
    done = 0

    def next_operation() -> bool:
        nonlocal done
        done += 1
        return done > number

    def hook(event: str, arguments: tuple) -> None:
        if event not in _CHANGES or not arguments or not isinstance(arguments[0], (str, bytes, os.PathLike)):
            return
        if os.fsdecode(arguments[0]).startswith(folder) and next_operation():
            os.kill(os.getpid(), signal.SIGKILL)

    def write(descriptor: int, data: bytes) -> int:
        if descriptor > 2 and next_operation():
            if half:
                real_write(descriptor, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return real_write(descriptor, data)

    real_write, os.write = os.write, write
    sys.addaudithook(hook)


def _strike(pid: int, fault: Fault) -> None:
    time.sleep(fault.after_s)
    with contextlib.suppress(ProcessLookupError, PermissionError, IndexError):
        if fault.where == "group":
            os.killpg(pid, fault.signal)
        elif fault.where == "driver":
            os.kill(pid, fault.signal)
        else:
            server = children_of(pid)[0]
            os.kill(server if fault.where == "server" else children_of(server)[0], fault.signal)


def children_of(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@contextlib.contextmanager
def small_disk(folder: Path, fault: Fault) -> Iterator[None]:
    """The folder as a disk of its own with so many bytes left, if the fault is one and mounting is allowed."""
    is_mounted = False
    if fault.kind == "disk":
        command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
        is_mounted = subprocess.run(command, capture_output=True).returncode == 0
    try:
        if is_mounted:
            status = os.statvfs(folder)
            (folder / ".filler").write_bytes(bytes(max(0, status.f_bavail * status.f_frsize - fault.number)))
        yield
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def preload(verbs: tuple[str, ...]) -> None:
    """Import what forks need: it takes seconds and is the same for all. Nothing may start a thread."""
    import report_samples  # noqa: F401

    if "run" in verbs:
        import torch._dynamo
        import torch.profiler  # noqa: F401


# -- verbs --------------------------------------------------------------------------------------------------------


def check_case(verb: str, number: int) -> tuple[Fault, int, list[str]]:
    """Run one case. Return its fault, how the work ended, and what was broken."""
    fault = fault_of(verb, number)
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as name:
        folder = Path(name) / "work"
        folder.mkdir()
        with small_disk(folder, fault):
            code, broken = CHECKS[verb](folder, fault)
    return fault, code, broken


def _check_sweep(work: Callable[[], Any], folder: Path, rows_file: Path, fault: Fault) -> tuple[int, list[str]]:
    """Run, let it go on, and compare rows before and after."""
    from stepscope.rows import BadRow, read_rows

    code, _ = in_fork(work, folder, fault)
    broken = [f"traceback: {(folder.parent / 'log').read_text()[-600:]}"] if code == BROKEN else []
    (folder / ".filler").unlink(missing_ok=True)
    try:
        before = {row["hash"]: row for row in read_rows(rows_file).rows}
    except FileNotFoundError:
        before = {}
    except (OSError, BadRow) as error:
        return code, [*broken, f"unreadable after the fault: {error}"]
    false = [row["reason"] for row in before.values() if row["status"] != "ok" and not row.get("killed")]
    if false:
        broken.append(f"false status: {false}")
    again, rows = in_fork(work, folder)
    if again != FINE:
        return code, [*broken, f"does not go on: {(folder.parent / 'log').read_text()[-600:]}"]
    after = {row["hash"]: row for row in rows}
    if len(rows) != NUM_POINTS or len(after) != NUM_POINTS:
        broken.append(f"{len(rows)} rows of {len(after)} points")
    if any(row["status"] != "ok" for row in rows):
        broken.append(f"not ok: {[row['reason'] for row in rows]}")
    changed = [name for name, row in before.items() if not row.get("killed") and after.get(name) != row]
    if changed:
        broken.append(f"rows changed: {changed}")
    return code, broken


def points() -> list[Any]:
    from stepscope.sweep.grid import Point

    run = {"mode": "step", "dtype": "fp32", "device": "cpu", "optimizer": "adamw", "compile": "off"}
    return [
        Point(workload="fake", preset=None, config={"width": width}, run=run, hash=f"{width:012x}")
        for width in range(1, NUM_POINTS + 1)
    ]


def fake_server() -> Any:
    """A real server with real processes, whose points do nothing and need no torch."""
    from stepscope.sweep.server import Server

    class Fake(Server):
        def _begin(self) -> Any:
            return Forked()

    return Fake("fork")


class Forked:
    """A fork of this process that serves, as `subprocess.Popen` shows one. A new interpreter would take a second."""

    def __init__(self) -> None:
        requests, answers, parent_id = os.pipe(), os.pipe(), os.getpid()
        self.pid, self.returncode = os.fork(), None
        if self.pid == 0:
            try:
                os.setsid()
                os.dup2(requests[0], 0)
                os.dup2(answers[1], 1)
                os.closerange(3, 256)  # the sweep's lock too, as a new interpreter would not have it
                _serve(parent_id)
            finally:
                os._exit(1)
        os.close(requests[0])
        os.close(answers[1])
        self.stdin, self.stdout = os.fdopen(requests[1], "wb"), os.fdopen(answers[0], "rb")

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        return self._wait(0)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode


def _serve(parent_id: int) -> None:
    """Answer requests as `stepscope.sweep.server` does. Does not return."""
    from stepscope.sweep import server

    def run_stages(request: Any, report: Any) -> None:
        arm("point")
        for stage in ("build", "warm-up", "samples"):
            report.stage(stage)
            time.sleep(0.01)
        report.fields.update(
            status="ok", samples_device_ns=[1000, 1001], samples_host_ns=[1000, 1001], environment={"torch": "2"}
        )

    sys.modules["stepscope.sweep.point_stages"] = SimpleNamespace(run_stages=run_stages)
    server._import_torch, server._has_touched_cuda = lambda: None, lambda: False
    server.serve("fork", parent_id)
    os._exit(0)


def _bench(folder: Path, fault: Fault) -> tuple[int, list[str]]:
    def work() -> Any:
        from stepscope.api.sweeps import write_tables
        from stepscope.sweep.results import Place
        from stepscope.sweep.runner import Options, Runner, run_points

        place = Place(folder=folder / "sweep", command="test", resume=True, resume_command="test --resume")
        with place.open() as results:
            with fake_server() as server:
                runner = Runner(SimpleNamespace(gate={}), server, results, Options(timeout_s=60))
                run_points(points(), results, runner.run)
            write_tables(results, "test")
        text = (folder / "sweep" / "results.csv").read_text()
        assert len(text.splitlines()) == NUM_POINTS + 1 and text.endswith("\n")
        return results.rows

    return _check_sweep(work, folder, folder / "sweep" / "results.jsonl", fault)


def _study(folder: Path, fault: Fault) -> tuple[int, list[str]]:
    def work() -> Any:
        from stepscope.render import files
        from stepscope.studies import execute, write
        from stepscope.studies.stored import Stored
        from stepscope.studies.study import Question, Study, Sweep, TableOf
        from stepscope.sweep.engines import start

        table = TableOf("times", "Time per step", "times", "width time_median_ns")
        study = Study(
            name="fake",
            title="A study",
            about="Of nothing.",
            measures=(Sweep("times", "fake", "one step", quick={}, full={}),),
            questions=(Question("How long?", lambda tables: "So long.", (table,)),),
            files={"times.csv": "times"},
        )
        execute.find = lambda name: SimpleNamespace(gate={})
        start.Server = lambda how: fake_server()
        files.need = write.need = lambda package: None
        plan = execute.Plan(study=study, mode="quick", device="cpu", points={"times": points()})
        where = folder / "study"
        execute.begin(plan, where, "fake", "test", True, "test --resume")
        execute.run(plan, where, "test", "test --resume", 60, lambda measure, row, num_done: None)
        page = write.write_study(study, where)
        rows = list(Stored(where).sweep("times").rows)
        assert page.read_text().endswith("</html>\n")
        assert any(row["status"] != "ok" for row in rows) or "1000" in (where / "times.csv").read_text()
        return rows

    return _check_sweep(work, folder, folder / "study" / "times" / "results.jsonl", fault)


def _report(folder: Path, fault: Fault) -> tuple[int, list[str]]:
    """A report of a sweep over an older one: each file is the old one or the new one, whole."""
    target = folder / ("report.html" if fault.number % 3 else "report.md" if fault.number % 2 else "report.json")

    def work(name: str, to: Path) -> None:
        from report_samples import table
        from stepscope.document.model import Document, Section
        from stepscope.render.write import write_report

        write_report(Document(name, "", (Section("one", "One", (table(name, 400),)),)), to)

    whole = {}
    for name in ("old", "new"):
        sample = folder.parent / f"{name}{target.suffix}"
        assert in_fork(lambda name=name, sample=sample: work(name, sample), folder)[0] == FINE
        whole[name] = sample.read_bytes()
    filler = folder / ".filler"
    if filler.exists():
        os.truncate(filler, max(0, filler.stat().st_size - 8192 - len(whole["old"])))
    target.write_bytes(whole["old"])
    code, _ = in_fork(lambda: work("new", target), folder, fault)
    broken = [f"traceback: {(folder.parent / 'log').read_text()[-600:]}"] if code == BROKEN else []
    found = target.read_bytes()
    if found not in whole.values():
        broken.append(f"{target.name} is neither old nor new: {len(found)} bytes")
    elif code == FINE and found != whole["new"]:
        broken.append("said to be written, but is not")
    filler.unlink(missing_ok=True)
    if in_fork(lambda: work("new", target), folder)[0] != FINE or target.read_bytes() != whole["new"]:
        broken.append("cannot be written again")
    return code, broken


def _cache(folder: Path, fault: Fault) -> tuple[int, list[str]]:
    """A trace that is read and kept, and the ceilings of a device beside it."""
    trace = folder.parent / "trace.json"
    events = [
        {"ph": "X", "cat": "cpu_op", "name": f"op{i}", "pid": 1, "tid": 1, "ts": i, "dur": 1} for i in range(300)
    ]
    trace.write_text(json.dumps({"traceEvents": events}))
    os.environ["STEPSCOPE_CACHE"] = str(folder / "cache")

    def work(may_read: bool = True) -> Any:
        from stepscope.devices import Ceilings, load_ceilings, save_ceilings
        from stepscope.trace import cache

        cache.WORTH_KEEPING, cache._SETTLED_NS = 1, 0
        if not may_read:
            cache.read_trace = None
        found = cache.open_trace(trace)
        before = load_ceilings("x")
        save_ceilings(Ceilings("x", {"fp32": 1}, 2, "now", "2"))
        return [found.host.height, found.host["name"].cast(str).to_list()[-1], before and before.copy_bytes_per_s]

    code, _ = in_fork(work, folder, fault)
    broken = [f"traceback: {(folder.parent / 'log').read_text()[-600:]}"] if code == BROKEN else []
    (folder / ".filler").unlink(missing_ok=True)
    for may_read in (True, False):
        again, found = in_fork(lambda may_read=may_read: work(may_read), folder)
        if (
            again != FINE
            or found[:2] != [300, "op299"]
            or found[2] not in (None, 2)
            or (not may_read and not found[2])
        ):
            broken.append(
                f"{'read' if may_read else 'kept'}: {again}, {found}; {(folder.parent / 'log').read_text()}"
            )
    return code, broken


SCRIPT = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(30):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def _run(folder: Path, fault: Fault) -> tuple[int, list[str]]:
    script, recording = folder.parent / "train.py", folder / "recording"
    script.write_text(SCRIPT)

    def work() -> None:
        from stepscope.cli.main import main

        os.chdir(folder.parent)
        words = ["run", "-o", str(recording), "--force", "--quiet", "--trace", "1", "--warmup", "2", "--clean", "4"]
        raise SystemExit(main([*words, str(script)]))

    def read() -> Any:
        from stepscope.trace.recording import read_recording

        found = read_recording(recording)
        return [found.status, len(found.samples), (found.facts.get("steps") or {}).get("num_lines_dropped", 0)]

    code, _ = in_fork(work, folder, fault)
    broken = [f"traceback: {(folder.parent / 'log').read_text()[-600:]}"] if code == BROKEN else []
    if (recording / "recording.json").exists():
        ended, found = in_fork(read, folder)
        if ended != FINE:
            broken.append(f"unreadable: {(folder.parent / 'log').read_text()[-600:]}")
        elif found[0] not in ("finished", "interrupted", "failed") or (found[0] == "finished" and code != FINE):
            broken.append(f"false status: ended with {code}, says {found}")
        elif found[0] == "finished" and found[1] + found[2] < 30:  # a line cut at its end is read and counted
            broken.append(f"steps lost without a word: {found}")
    again, _ = in_fork(work, folder)
    ended, found = in_fork(read, folder)
    if (again, ended, found) != (FINE, FINE, ["finished", 30, 0]):
        broken.append(f"does not go on: {again}, {found}: {(folder.parent / 'log').read_text()[-600:]}")
    return code, broken


CHECKS = {"bench": _bench, "study": _study, "report": _report, "cache": _cache, "run": _run}
