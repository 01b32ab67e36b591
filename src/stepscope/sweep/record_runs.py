"""Runs a point of a sweep or a user's script under `stepscope run`, each in a fresh process."""

import errno
import filecmp
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from stepscope.errors import RecordingError, UsageError
from stepscope.recorder import fixes
from stepscope.recorder.files import STATUS_FINISHED
from stepscope.recorder.run_facts import file_hash, git_revision, now
from stepscope.rows import KILLED, LOST, Row
from stepscope.sweep.engines.engine import Engine, ended_by_sigterm
from stepscope.sweep.grid import Point
from stepscope.sweep.process import PARENT_DEATH_SIGNAL, set_process
from stepscope.sweep.protocol import CRASHED, FROM_OUTSIDE, OK, OOM, SKIPPED, TIMEOUT, Failure
from stepscope.sweep.results import LOG_FOLDER, NEW_FILE, json_of, text_of
from stepscope.sweep.runner import identity
from stepscope.sweep.server import descendants

RECORDING_FOLDER = "recordings"
RECORDING = "recording"
PARENT_VARIABLE = "STEPSCOPE_ASKED_BY"
"""Environment variable with the id of the process that waits for a run; the run ends when that process does."""
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|can't allocate memory", re.IGNORECASE)
_NO_SPACE = re.compile("|".join(re.escape(os.strerror(code)) for code in (errno.ENOSPC, errno.EDQUOT)))
_LEAST_SPACE = 1 << 20  # bytes that a run needs for its own files
_CANNOT_RUN = re.compile(r"CannotRun: (.*)")
LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch",
             "deepspeed.launcher.runner")  # fmt: skip
"""Modules whose arguments name the script."""
_RUN = (sys.executable, "-m", "stepscope", "run", "--quiet", "--exit-after", "-o")


def record_point(
    point: Point,
    folder: Path,
    options: Sequence[str],
    timeout_s: float,
    loop: Sequence[str] = (),
    engine: Engine | None = None,
) -> Row:
    """Train a point under `stepscope run` until its last window ends and return its row without writing it.

    `options` go to `stepscope run`, `loop` to sweep/train.py. OSError if the disk is full.
    """
    name = f"{RECORDING_FOLDER}/{point.hash}"
    log = folder / LOG_FOLDER / f"{point.hash}.txt"
    # Under its own name until it ends: the run of a study that was killed just before may still be writing.
    recording = folder / RECORDING_FOLDER / f".{point.hash}.{os.getpid()}"
    for left in (folder / RECORDING_FOLDER).glob(f".{point.hash}.*"):
        shutil.rmtree(left, ignore_errors=True)
    words = [*_RUN, str(recording)]
    batch, length = point.config.get("batch"), point.config.get("seq_len")
    if ":" not in point.workload and isinstance(batch, int) and isinstance(length, int):
        words += ["--tokens-per-step", str(batch * length)]  # `stepscope run` cannot infer it from floats
    words += options
    wanted = {name: identity(point)[name] for name in ("workload", "preset", "config", "run")}
    words += ["-m", "stepscope.sweep.train", json.dumps(wanted), *loop]
    started_at, began = now(), time.monotonic()
    environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
    run = run_process if engine is None else engine.run_process
    failure = run(words, Path.cwd(), environment, log, timeout_s, recording)
    facts = json_of(recording / "recording.json")
    status = _status(failure, log)
    if failure is None and facts.get("status") != STATUS_FINISHED:
        status = {"status": CRASHED, "reason": f"the run left no finished recording; see {log}"}
    if status["status"] == CRASHED:
        _refuse_full_disk(folder, log)
    measured_on, is_there = facts.get("environment"), (recording / "recording.json").is_file()
    shutil.rmtree(folder / name, ignore_errors=True)
    if is_there:
        recording.rename(folder / name)
    return {
        **identity(point),
        **status,
        RECORDING: name if is_there else None,
        "environment": measured_on if isinstance(measured_on, dict) else None,
        "started_at": started_at,
        "finished_at": now(),
        "seconds": round(time.monotonic() - began, 3),
    }


def _status(failure: Failure | None, log: Path) -> Row:
    if failure is None:
        return {"status": OK, "reason": None}
    if failure.is_timeout:
        return {"status": TIMEOUT, "reason": failure.reason}
    if failure.is_lost:
        return {"status": LOST, "reason": failure.reason, KILLED: True}
    output = text_of(log)
    if cannot_run := _CANNOT_RUN.search(output):
        return {"status": SKIPPED, "reason": cannot_run[1]}
    if failure.signal in FROM_OUTSIDE:
        return {"status": CRASHED, "reason": failure.reason, KILLED: True}
    return {"status": OOM if _OUT_OF_MEMORY.search(output) else CRASHED, "reason": failure.reason}


def _refuse_full_disk(folder: Path, log: Path) -> None:
    """Raise OSError if a run may have failed because the disk was full: that says nothing about its point."""
    if _NO_SPACE.search(text_of(log)):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    probe = folder / ".space"
    try:
        with probe.open("wb") as stream:
            stream.write(bytes(_LEAST_SPACE))
            os.fsync(stream.fileno())
    finally:
        probe.unlink(missing_ok=True)


@dataclass(frozen=True)
class Command:
    """A command in a folder: `train.py --lr 1`, or `-m package.train --lr 1`."""

    words: tuple[str, ...]
    folder: Path
    tokens_per_step: int | None = None
    file: Path | None = None  # the recorded script

    @property
    def text(self) -> str:
        return shlex.join(self.words)

    @property
    def whole_text(self) -> str:
        """What runs, as a shell would take it."""
        return f"cd {shlex.quote(str(self.folder))} && python {self.text}"

    def changed(self, name: str, text: str) -> "Command":
        """Return the command with a change made by hand; `text` is the new script, and its arguments if they change.

        A launcher before the script stays, unless `text` begins with one.
        """
        words = shlex.split(text)
        if words[0] != "-m":
            if not Path(words[0]).is_file():
                raise UsageError(f"--fix {name}={text}: {words[0]} is not a file")
            if self.folder != Path.cwd():
                words[0] = str(Path(words[0]).absolute())
        old = self._script()
        if words[:2] not in [["-m", launcher] for launcher in LAUNCHERS]:
            is_script_alone = len(words) == (2 if words[0] == "-m" else 1)
            before, after = (Path(self.folder, each) for each in (self.words[old.start], words[0]))
            if is_script_alone and before.is_file() and after.is_file() and filecmp.cmp(before, after, shallow=False):
                raise UsageError(f"--fix {name}={text}: {_same(words[0], self.words[old.start])}")
            words = [*self.words[: old.start], *words, *(self.words[old.stop :] if is_script_alone else ())]
        if tuple(words) == self.words:
            raise UsageError(f"--fix {name}={text}: that is the same command")
        return replace(self, words=tuple(words), file=None)

    def _script(self) -> range:
        """Return which words name the script: the first file in Python, after the words of a launcher."""
        if self.words[0] == "-m" and self.words[1] not in LAUNCHERS:
            return range(2)
        for place, word in enumerate(self.words):
            if word.endswith(".py") and (self.folder / word).is_file():
                return range(place, place + 1)
        raise UsageError(f"{self.text}: which word is the script? Begin the change with -m and the launcher")


def _same(new: str, old: str) -> str:
    if Path(new).name == Path(old).name:
        in_place = f"If you changed it in place, keep the old one too: git show HEAD:./{new} > before.py"
        return f"that is the same script. Name a copy of it that has the change. {in_place}"
    return f"{new} has the same content as {old}. Make the change in it first"


@dataclass(frozen=True, kw_only=True)
class Options:
    warmup: int = 8
    clean: int = 20
    timeout_s: float = 1800
    free: int | None = None  # steps after those; None: until the throughput is known


def recorded_command(folder: Path, facts: Mapping[str, Any]) -> Command:
    """Return a recording's command, running nothing; RecordingError if it cannot be rerun."""
    command = facts.get("command") or {}
    argv = [str(word) for word in command.get("argv") or []]
    where = Path(str(command.get("folder") or ""))
    by_hand = "Verify the script directly: stepscope verify SCRIPT ARGUMENTS… --fix ID"
    if not argv or not argv[0]:
        raise RecordingError(f"{folder} does not say which script was run (a notebook?). {by_hand}")
    ranks, launched = int((facts.get("environment") or {}).get("world_size") or 1), command.get("script")
    if ranks > 1 and not launched:
        raise RecordingError(
            f"{folder} has {ranks} ranks and does not say what started them. Record it with the launcher after "
            "`stepscope run`: stepscope run -m torch.distributed.run --nproc-per-node N SCRIPT"
        )
    if not where.is_dir():
        raise RecordingError(f"{folder} was recorded in {where}, which no longer exists. {by_hand}")
    file = where / argv[0]
    if command.get("module"):
        file = Path(argv[0])
        argv = ["-m", command.get("program") or _module_name(file, where), *argv[1:]]
    if launched and (where / launched).is_file():
        file = where / launched
    if not file.is_file():
        raise RecordingError(f"{folder} is a recording of {file}, which no longer exists. {by_hand}")
    tokens = (facts.get("config") or {}).get("tokens_per_step")
    return Command(tuple(argv), where, tokens if isinstance(tokens, int) else None, file)


def changes_since(command: Command, facts: Mapping[str, Any]) -> list[str]:
    """Return what has changed since a command was recorded. Runs git there, whose settings can name programs."""
    changes, file = [], command.file
    assert file is not None
    recorded = facts.get("command") or {}
    is_launched = recorded.get("script") and file.name == Path(recorded["script"]).name
    known = recorded.get("script_sha256") if is_launched else recorded.get("sha256")
    if known and file_hash(file) != known:
        changes.append(f"{file.name} has changed since it was recorded; the predicted saving may not hold")
    before, now = facts.get("git") or {}, git_revision(file.parent) or {}
    if before.get("revision") and before["revision"] != now.get("revision"):
        revisions = f"{str(before['revision'])[:10]}, now {str(now.get('revision'))[:10]}"
        changes.append(f"the repository was at {revisions}; the predicted saving may not hold")
    elif now.get("modified") and not before.get("modified"):
        changes.append("the repository has uncommitted changes that were not there when the script was recorded")
    return changes


def _module_name(file: Path, folder: Path) -> str:
    """Return `package.train` for a file, for recordings that do not store it."""
    if not file.is_relative_to(folder):
        raise RecordingError(
            f"The recording does not name the module of {file}. Use: stepscope verify -m MODULE ARGUMENTS… --fix ID"
        )
    words = [*file.relative_to(folder).with_suffix("").parts]
    return ".".join(words[:-1] if words[-1] == "__main__" else words)


def script_command(words: list[str], is_module: bool) -> Command:
    """Return the command for a script or module named on the command line."""
    if not is_module and not Path(words[0]).is_file():
        raise UsageError(f"{words[0]} is neither a script nor a recording")
    return Command(("-m", *words) if is_module else tuple(words), Path.cwd())


def run_again(
    command: Command,
    output: Path,
    options: Options,
    fix: str | None,
    rehearses: bool,
    num_traced: int = 0,
    engine: Engine | None = None,
) -> Failure | None:
    """Record the script at `output`; return why it failed, None if it succeeded.

    Its output goes to a text file next to the recording. A rehearsal also counts the matmuls per step by dtype.
    """
    words = [*_RUN, str(output), "--trace", str(num_traced)]
    words += ["--warmup", str(options.warmup), "--clean", str(options.clean)]
    words += [] if rehearses else ["--no-memory"]
    words += [] if options.free is None else ["--free", str(options.free)]
    words += ["--tokens-per-step", str(command.tokens_per_step)] if command.tokens_per_step else []
    environment = {name: value for name, value in os.environ.items() if name != fixes.VARIABLE}
    environment |= {fixes.VARIABLE: fix} if fix is not None else {}
    log = output.with_name(f"{output.name}.txt")
    run = run_process if engine is None else engine.run_process
    return run([*words, *command.words], command.folder, environment, log, options.timeout_s, output)


_END_WITH_PARENT = partial(set_process, PARENT_DEATH_SIGNAL, signal.SIGKILL) if sys.platform == "linux" else None
"""Asks the kernel to end a run when its parent is killed: otherwise the run would go on."""


def run_process(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path, timeout_s: float,
    _output: Path | None = None,
) -> Failure | None:  # fmt: skip
    """Run a command with its output in `log`; None if it succeeded. Its child processes end with it.

    On an engine, `_output` is the folder to bring back.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | NEW_FILE, 0o644), "wb") as stream:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its children can be killed too
            preexec_fn=_END_WITH_PARENT,
        )
        try:
            with ended_by_sigterm():
                exit_code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _end(process)
            return Failure(f"still running after {timeout_s:g} s (--timeout)", is_timeout=True)
        except BaseException:
            _end(process)
            raise
    if exit_code == 0:
        return None
    if exit_code < 0:
        return Failure(f"killed by {signal.Signals(-exit_code).name}; see {log}", signal=-exit_code)
    lines = [line.strip() for line in text_of(log).splitlines() if line.strip()]
    return Failure(lines[-1] if lines else f"exit code {exit_code}, no output")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a run with all that it has started: launchers give their ranks process groups of their own."""
    started = descendants(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pid in started:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
