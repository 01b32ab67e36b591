"""The runs of `stepscope verify`, in turns, and what was expected of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.analysis.subjects import environment_context
from stepscope.analysis.verification import refusal
from stepscope.analysis.verified import Attempt, Expected, Plan
from stepscope.cli.progress import Doing
from stepscope.errors import RecordingError, StepscopeError
from stepscope.sweep.rerun import Command, Options, run_again
from stepscope.trace.recording import Recording, read_recording

if TYPE_CHECKING:
    from stepscope.findings.fixes import Chosen


def run_all(
    command: Command, plans: list[Plan], folder: Path, options: Options, num_rounds: int
) -> tuple[list[Attempt], dict[str, list[Attempt]]]:
    """A rehearsal and the rounds: without any fix, then with each. What the rehearsal refuses is not run again."""
    before: list[Attempt] = []
    after: dict[str, list[Attempt]] = {plan.fix: [] for plan in plans}
    with Doing() as doing:
        for number in range(num_rounds + 1):
            where = f"round {number} of {num_rounds}" if number else "rehearsal"
            doing(f"{where}: without")
            attempt = _attempt(command, folder / f"without-{number}", number, None, options)
            if attempt.failure is not None or attempt.recording is None:
                raise StepscopeError(f"the script fails without any fix: {attempt.failure}")
            if not attempt.recording.window("clean"):
                raise StepscopeError(
                    f"the script ended after {len(attempt.recording.samples)} steps, before one was timed: let it "
                    f"run longer than --warmup {options.warmup} steps; call stepscope.step() where none are found"
                )
            before.append(attempt)
            for plan in plans:
                if number and refusal(plan, before[0], after[plan.fix]) is not None:
                    continue
                doing(f"{where}: with {plan.fix}")
                after[plan.fix].append(_attempt(command, folder / f"{plan.fix}-{number}", number, plan.fix, options))
    return before, after


def _attempt(command: Command, output: Path, number: int, fix: str | None, options: Options) -> Attempt:
    failure = run_again(command, output, options, fix, rehearses=number == 0)
    try:
        recording = read_recording(output)
    except RecordingError as error:
        return Attempt(number, None, failure or str(error))
    said = recording.facts.get("exception")
    if failure is not None and said:
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        failure = " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])
    return Attempt(number, recording, failure)


def environment_changes(recorded: Recording | None, now: Recording) -> list[str]:
    """What a script runs on otherwise than when it was recorded: versions, device, settings."""
    if recorded is None:
        return []
    was, is_ = (environment_context(each.facts.get("environment") or {}) for each in (recorded, now))
    names = [name for name in dict.fromkeys([*was, *is_]) if was.get(name) != is_.get(name)]
    told = ", ".join(f"{name} {was.get(name)}, now {is_.get(name)}" for name in names)
    return [f"not as when it was recorded: {told}"] if told else []


def expected_gains(
    path: Path, recording: Recording | None, device_name: str | None, chosen: list[Chosen]
) -> dict[str, Expected]:
    """What diagnose expects of each fix, by its text; nothing where no recording was given."""
    if recording is None:
        return {}
    was = (recording.facts.get("environment") or {}).get("device_name")
    if was != device_name:
        reason = f"it was recorded on {was}: what is expected there says nothing here"
        return {each.text: Expected(None, None, False, None, reason) for each in chosen}
    try:
        from stepscope.api import diagnose

        diagnosis = diagnose(path)
    except StepscopeError as error:
        return {each.text: Expected(None, None, False, None, f"diagnose: {error}") for each in chosen}
    from stepscope.findings.expected import expected_of

    return {each.text: expected_of(diagnosis, each) for each in chosen}
