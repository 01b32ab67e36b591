"""A script run with and without fixes, in turns, and what they brought: the command's and the function's work."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from stepscope.analysis.comparison.subjects import environment_context
from stepscope.analysis.comparison.verification import medians_ns, refusal, step_ns, verify
from stepscope.analysis.comparison.verified import Attempt, Expected, Plan, Verification
from stepscope.errors import MissingDependencyError, RecordingError, StepscopeError, UsageError
from stepscope.findings.fixes import Chosen, parse_fix
from stepscope.session import Session, open_session
from stepscope.sweep.rerun import Command, Options, recorded_command, run_again, script_command
from stepscope.trace.recording import Recording, read_recording

RESULT_FILE = "verify.json"
RESTLESS_SHARE = 0.1
"""How far the medians of runs without any fix may be apart before it is said."""
FEWEST_WARMUP = 5
Say = Callable[[str], None]


def verify_fixes(
    words: Sequence[str],
    fixes: Sequence[str],
    *,
    is_module: bool = False,
    rounds: int = 4,
    options: Options | None = None,
    tolerance: float | None = None,
    output: Path | None = None,
    doing: Say | None = None,
    warn: Say | None = None,
) -> Verification:
    """Run everything, and write the answer beside the recordings.

    `words` is a recording, or a script (a module) and its arguments. `doing` is told what is being done, `warn` what
    is not as it was when the recording was made.
    """
    options = options or Options()
    if rounds < 1 or options.clean < 1:
        raise UsageError(f"{rounds} rounds of {options.clean} clean steps: both are 1 at the least")
    if not fixes:
        raise UsageError("name a fix: --fix ID (stepscope list fixes says which there are)")
    if options.warmup < FEWEST_WARMUP:
        raise UsageError(
            f"--warmup is {options.warmup}: a fix is made in the third step, so {FEWEST_WARMUP} are the least"
        )
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("a script is run again: pip install torch")
    chosen = [parse_fix(text) for text in dict.fromkeys(fixes)]
    path = Path(words[0])
    session: Session | None = None
    warnings: list[str] = []
    if not is_module and path.is_dir():
        session = open_session(path)
        command, warnings = recorded_command(path, session.recording.facts)
    else:
        command = script_command(list(words), is_module)
    if warn is not None:
        for warning in warnings:
            warn(warning)
    folder = _folder(output, command)
    plans = [
        Plan(
            each.text, each.arithmetic, [fix.lowers_to for fix in each.fixes if fix.lowers_to is not None], tolerance
        )
        for each in chosen
    ]
    before, after = _run_all(command, plans, folder, options, rounds, doing or (lambda what: None))
    first = before[0].recording
    assert first is not None
    environment = first.facts.get("environment") or {}
    warnings += _environment_changes(None if session is None else session.recording, first)
    expected = _expected_gains(session, environment.get("device_name"), chosen)
    medians = medians_ns(before)
    apart_share = max(medians) / min(medians) - 1
    if apart_share > RESTLESS_SHARE:
        warnings.append(
            f"runs of the same script are {apart_share:.0%} apart: the machine is not at rest; --rounds "
            f"{2 * rounds} shows smaller gains, a quiet machine more of them"
        )
    verification = Verification(
        command=command.text,
        folder=str(folder),
        device_name=environment.get("device_name"),
        torch=environment.get("torch"),
        num_rounds=rounds,
        step_ns=step_ns(before),
        apart_share=apart_share,
        fixes=tuple(verify(plan, before, after[plan.fix], expected.get(plan.fix)) for plan in plans),
        warnings=tuple(warnings),
    )
    (folder / RESULT_FILE).write_text(json.dumps(verification.to_json(), indent=1) + "\n", encoding="utf-8")
    return verification


def _folder(given: Path | None, command: Command) -> Path:
    """Where the runs go: absolute, as the script runs in a folder of its own."""
    if given is not None:
        if given.exists() and (not given.is_dir() or any(given.iterdir())):
            raise UsageError(f"{given} is not empty: name another folder with -o")
        return given.absolute()
    word = next((word for word in command.words if word != "-m"), "script")
    name = f"verify-{Path(word).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    found = Path("runs") / name
    number = 1
    while found.exists():
        number += 1
        found = Path("runs") / f"{name}-{number}"
    return found.absolute()


def _run_all(
    command: Command, plans: list[Plan], folder: Path, options: Options, num_rounds: int, doing: Say
) -> tuple[list[Attempt], dict[str, list[Attempt]]]:
    """A rehearsal and the rounds: without any fix, then with each. What the rehearsal refuses is not run again."""
    before: list[Attempt] = []
    after: dict[str, list[Attempt]] = {plan.fix: [] for plan in plans}
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


def _environment_changes(recorded: Recording | None, now: Recording) -> list[str]:
    """What a script runs on otherwise than when it was recorded: versions, device, settings."""
    if recorded is None:
        return []
    was, is_ = (environment_context(each.facts.get("environment") or {}) for each in (recorded, now))
    names = [name for name in dict.fromkeys([*was, *is_]) if was.get(name) != is_.get(name)]
    told = ", ".join(f"{name} {was.get(name)}, now {is_.get(name)}" for name in names)
    return [f"not as when it was recorded: {told}"] if told else []


def _expected_gains(session: Session | None, device_name: str | None, chosen: list[Chosen]) -> dict[str, Expected]:
    """What diagnose expects of each fix, by its text; nothing where no recording was given."""
    if session is None:
        return {}
    was = (session.recording.facts.get("environment") or {}).get("device_name")
    if was != device_name:
        reason = f"it was recorded on {was}: what is expected there says nothing here"
        return {each.text: Expected(None, None, False, None, reason) for each in chosen}
    try:
        case = session.case
        from stepscope.findings.diagnose import diagnose
        from stepscope.findings.expected import expected_of

        diagnosis = diagnose(case)
    except StepscopeError as error:
        reason = f"diagnose: {error}"
    else:
        return {each.text: expected_of(diagnosis, each) for each in chosen}
    return {each.text: Expected(None, None, False, None, reason) for each in chosen}
