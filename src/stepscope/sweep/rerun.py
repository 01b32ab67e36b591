"""Runs somebody's script again, each time in a fresh process under `stepscope run`, with or without a fix."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.errors import RecordingError, UsageError
from stepscope.recorder import fixes
from stepscope.recorder.origin import file_hash, git_revision


@dataclass(frozen=True)
class Command:
    """What is run: `train.py --lr 1`, or `-m package.train --lr 1`, in a folder."""

    words: tuple[str, ...]
    folder: Path
    tokens_per_step: int | None = None

    @property
    def text(self) -> str:
        return shlex.join(self.words)


@dataclass(frozen=True, kw_only=True)
class Options:
    """How every run is measured."""

    warmup: int = 8
    clean: int = 20
    timeout_s: float = 1800


def recorded_command(folder: Path, facts: Mapping[str, Any]) -> tuple[Command, list[str]]:
    """The command of a recording, to run it again, and what is not as it was; RecordingError where it cannot be."""
    command = facts.get("command") or {}
    argv = [str(word) for word in command.get("argv") or []]
    where = Path(str(command.get("folder") or ""))
    by_hand = "verify the script itself: stepscope verify SCRIPT ARGUMENTS… --fix ID"
    if not argv or not argv[0]:
        raise RecordingError(f"{folder} does not say what was run (a notebook?): {by_hand}")
    ranks = int((facts.get("environment") or {}).get("world_size") or 1)
    if ranks > 1:
        raise RecordingError(
            f"{folder} is of {ranks} ranks, and a fix is verified in one process: record the script without torchrun"
        )
    if not where.is_dir():
        raise RecordingError(f"{where}, the folder that {folder} was recorded in, is gone: {by_hand}")
    if command.get("module"):
        words = ["-m", command.get("program") or _module_name(Path(argv[0]), where), *argv[1:]]
        file = Path(argv[0])
    else:
        words, file = argv, where / argv[0]
    if not file.is_file():
        raise RecordingError(f"{file}, which {folder} is of, is not there any more: {by_hand}")
    config = facts.get("config") or {}
    tokens = config.get("tokens_per_step")
    return Command(tuple(words), where, tokens if isinstance(tokens, int) else None), _changes(file, facts)


def _changes(file: Path, facts: Mapping[str, Any]) -> list[str]:
    """What is not as it was when the recording was made."""
    told = []
    known = (facts.get("command") or {}).get("sha256")
    if known and file_hash(file) != known:
        told.append(f"{file.name} has changed since it was recorded: what was expected may not hold")
    before, now = facts.get("git") or {}, git_revision(file.parent) or {}
    if before.get("revision") and before["revision"] != now.get("revision"):
        revisions = f"{str(before['revision'])[:10]}, now {str(now.get('revision'))[:10]}"
        told.append(f"the repository was at {revisions}: what was expected may not hold")
    elif now.get("modified") and not before.get("modified"):
        told.append("the repository has uncommitted changes that it had not when the script was recorded")
    return told


def _module_name(file: Path, folder: Path) -> str:
    """`package.train` from its file, for recordings that do not have it."""
    if not file.is_relative_to(folder):
        raise RecordingError(
            f"the recording does not say which module {file} is: stepscope verify -m MODULE ARGUMENTS… --fix ID"
        )
    words = [*file.relative_to(folder).with_suffix("").parts]
    return ".".join(words[:-1] if words[-1] == "__main__" else words)


def script_command(words: list[str], is_module: bool) -> Command:
    """A script or module named on the command line."""
    if not is_module and not Path(words[0]).is_file():
        raise UsageError(f"there is no script and no recording {words[0]}")
    return Command(("-m", *words) if is_module else tuple(words), Path.cwd())


def run_again(command: Command, output: Path, options: Options, fix: str | None, rehearses: bool) -> str | None:
    """Run the script into a recording at `output`; what ended it in a line, None when it ran through.

    Its output goes to a text file beside. A rehearsal also counts the products of a step, by their dtype.
    """
    words = [sys.executable, "-m", "stepscope", "run", "-o", str(output), "--quiet", "--exit-after", "--trace", "0"]
    words += ["--warmup", str(options.warmup), "--clean", str(options.clean)]
    words += [] if rehearses else ["--no-memory"]
    words += ["--tokens-per-step", str(command.tokens_per_step)] if command.tokens_per_step else []
    environment = {name: value for name, value in os.environ.items() if name != fixes.VARIABLE}
    environment |= {fixes.VARIABLE: fix} if fix is not None else {}
    log = output.with_name(f"{output.name}.txt")
    failure = run_process([*words, *command.words], command.folder, environment, log, options.timeout_s)
    return None if failure is None else failure.reason


@dataclass(frozen=True)
class Failure:
    """Why a process did not run through, in a line."""

    reason: str
    is_timeout: bool = False


def run_process(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path, timeout_s: float
) -> Failure | None:
    """Run a command with its output in `log`; None when it ran through. What it started ends with it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # with all that it starts
        )
        try:
            exit_code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _end(process)
            return Failure(f"still running after {timeout_s:g} s (--timeout)", is_timeout=True)
        except BaseException:
            _end(process)
            raise
    if exit_code < 0:
        return Failure(f"killed by {signal.Signals(-exit_code).name}; its output is in {log}")
    return None if exit_code == 0 else Failure(_last_line(log, exit_code))


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _last_line(log: Path, exit_code: int) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {exit_code}, and not a word"
