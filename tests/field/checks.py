"""Runs a case bare and under `stepscope run`, and says in what the two differ and where the card is not the truth."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from case import Case

from forks import Forks
from stepscope import read

SOURCE_FOLDER = Path(__file__).parents[2] / "src"
TIMEOUT_S = 240
ROWS_MAY_MISS_SHARE = 0.01


@dataclass(frozen=True)
class Ended:
    """What a finished process left."""

    exit_code: int
    stdout: str
    stderr: str
    recording: Path

    def card(self) -> dict[str, Any]:
        card: dict[str, Any] = read(self.recording).to_json()
        return card


def settings() -> dict[str, str]:
    """Return what every run has: one thread, no GPU, no network."""
    return {
        "PYTHONPATH": os.pathsep.join([str(SOURCE_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def run(command: list[str], folder: Path, environment: tuple[tuple[str, str], ...] = ()) -> Ended:
    """Run a command as a user does, in a new folder."""
    folder.mkdir(parents=True)
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | settings() | dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    return Ended(done.returncode, done.stdout, done.stderr, folder / "recording")


def run_in_fork(
    forks: Forks, command: list[str], folder: Path, environment: tuple[tuple[str, str], ...] = ()
) -> Ended:
    """Run a command in a fork of a process that has torch: a second instead of ten on a busy machine."""
    folder.mkdir(parents=True)
    return Ended(*forks.run(command[1:], folder, settings() | dict(environment)), folder / "recording")


def bare_command(case: Case, num_steps: int | None = None) -> list[str]:
    words = case.words(num_steps)
    if case.launch and not case.launch[0].startswith("-"):  # a program that stands beside python
        return [str(Path(sys.executable).with_name(words[0])), *words[1:]]
    return [sys.executable, *words]


def stepscope_command(case: Case, num_steps: int | None = None, options: tuple[str, ...] = ("--quiet",)) -> list[str]:
    # Quiet, because then standard output is the script's alone. The card is read from the recording.
    return [sys.executable, "-m", "stepscope", "run", "-o", "recording", *options, *case.words(num_steps)]


def both(case: Case, folder: Path) -> tuple[Ended, Ended]:
    """The case bare and, at the same time, under Stepscope."""
    with ThreadPoolExecutor(2) as pool:
        bare = pool.submit(run, bare_command(case), folder / "bare", case.environment)
        recorded = pool.submit(run, stepscope_command(case), folder / "recorded", case.environment)
        return bare.result(), recorded.result()


def both_in_forks(case: Case, folder: Path, forks: Forks) -> tuple[Ended, Ended]:
    return (
        run_in_fork(forks, bare_command(case), folder / "bare", case.environment),
        run_in_fork(forks, stepscope_command(case), folder / "recorded", case.environment),
    )


def differences(case: Case, bare: Ended, recorded: Ended) -> list[str]:
    """What Stepscope changed in the script."""
    found = []
    if bare.exit_code != case.exit_code:
        found.append(f"bare: exit code {bare.exit_code}, not {case.exit_code}: {bare.stderr[-2000:]}")
    if recorded.exit_code != bare.exit_code:
        found.append(f"exit code {recorded.exit_code}, bare {bare.exit_code}: {recorded.stderr[-2000:]}")
    if recorded.stdout != bare.stdout:
        found.append(f"standard output {recorded.stdout[-500:]!r}, bare {bare.stdout[-500:]!r}")
    return found


def mistakes(case: Case, card: dict[str, Any], num_steps: int | None = None) -> list[str]:
    """What the card says that is not so."""
    found = []

    def expect(what: str, value: Any, truth: Any, is_right: bool) -> None:
        if not is_right:
            found.append(f"{what}: {value}, truth {truth}")

    truth = num_steps or case.steps
    expect("num_steps", card.get("num_steps"), truth, card.get("num_steps") == truth)
    if case.micro_batches is not None and case.training:
        value = card.get("num_micro_batches")
        expect("num_micro_batches", value, case.micro_batches, value == case.micro_batches)
    throughput = card.get("throughput") or {}
    if case.per_step is not None:
        value, unit = throughput.get("per_step") or 0.0, throughput.get("unit")
        expect("unit", unit, case.unit, unit == case.unit)
        is_near = abs(value - case.per_step) <= case.per_step_may_miss_share * case.per_step
        expect("per_step", value, case.per_step, is_near)
    return found + _mistakes_of_loop(case, card.get("loop"), throughput, truth)


def _mistakes_of_loop(case: Case, loop: dict[str, Any] | None, throughput: dict[str, Any], steps: int) -> list[str]:
    if loop is None:
        return ["loop: not on the card"]
    found = []
    rows = {row["name"]: row for row in loop["rows"]}
    if loop["num_steps"] != steps:
        found.append(f"loop.num_steps: {loop['num_steps']}, truth {steps}")
    total = sum(row["ns"] for row in loop["rows"])
    if abs(total - loop["wall_ns"]) > ROWS_MAY_MISS_SHARE * loop["wall_ns"]:
        found.append(f"rows sum to {total} ns, the wall clock to {loop['wall_ns']}")
    for name in (*case.between, *(("training",) if case.training else ())):
        if not rows.get(name, {}).get("ns"):
            found.append(f"no row {name!r}: {sorted(rows)}")
    for name in case.absent:
        if rows.get(name, {}).get("ns"):
            found.append(f"a row {name!r} that the script has not")
    for name, seconds in (case.seconds_between or {}).items():
        if rows.get(name, {}).get("ns", 0) < seconds * 1e9:
            found.append(f"row {name!r}: {rows.get(name)}, truth at least {seconds} s")
    if loop["step_ns"] < case.step_ms_at_least * 1e6:
        found.append(f"loop.step_ns: {loop['step_ns'] / 1e6:.2f} ms, truth at least {case.step_ms_at_least}")
    if case.per_step is not None and throughput.get("per_s"):
        per_s = throughput["per_step"] / (loop["step_ns"] / 1e9)
        if abs(throughput["per_s"] / per_s - 1) > 0.01:
            found.append(f"per_s {throughput['per_s']:.1f} is not per_step ÷ step_ns, {per_s:.1f}")
    return found
