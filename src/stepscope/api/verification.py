"""`stepscope.verify`: a script run with and without fixes, in turns, and what each fix saves."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.errors import RecordingError, StepscopeError, UsageError, need_torch
from stepscope.formatting import elapsed, plural, safe, whole_percent

if TYPE_CHECKING:
    from stepscope.analysis.comparison.verification import Attempt, Expected, Plan, Verification
    from stepscope.findings.fixes import Chosen
    from stepscope.session import Session
    from stepscope.sweep.engines.engine import Engine
    from stepscope.sweep.engines.start import Where
    from stepscope.sweep.record_runs import Command, Options
    from stepscope.trace.recording import Recording

RESULT_FILE = "verify.json"
RESTLESS_SHARE = 0.1  # a warning is given if the medians of runs without a fix differ by more than this share
LEAST_OTHERS_SHARE = 0.01  # of the time of a run
FEWEST_WARMUP = 5
NUM_WARMUP = 8
NUM_CLEAN, MOST_CLEAN = 20, 500  # steps that are timed in a run
MOST_NS = 20e9  # that they may take to include what happens between them
TIMED_NS = 3e9  # of short steps, as many more: what else runs on a machine comes and goes within seconds
WITHOUT = "without"  # the runs of the unchanged script
Say = Callable[[str], None]


def verify(
    target: str | os.PathLike[str],
    *arguments: str,
    fix: str | Sequence[str],
    is_module: bool = False,
    rounds: int = 4,
    warmup: int | None = None,
    clean: int | None = None,
    tolerance: float | None = None,
    timeout_s: float = 1800,
    on: str = "local",
    engine: Mapping[str, Any] | None = None,
    output: str | os.PathLike[str] | None = None,
    yes: bool | Callable[[str], bool] = False,
    on_line: Say | None = None,
    warn: Say | None = None,
) -> Verification:
    """Return what fixes save, like `stepscope verify`: `.fixes[0].status`, `.change` and `.losses`.

    `target` is a recording, whose command is run again, or a script with its `arguments` (a module with `is_module`).
    A recording can come from anybody: a command that this user has not run under Stepscope before runs only with
    `yes=True`, or if the function `yes` returns True for it. `fix` is one or more ids of `stepscope list fixes`, or
    `NAME=SCRIPT`: a copy of the script, changed by hand. Every run is a process of its own: `rounds` pairs of runs
    with `warmup` steps (default 8, or as many as the recording has) and `clean` timed ones each (default 20, or as
    many as take 3 s). Losses may differ by the share `tolerance`. `on_line` receives what runs, `warn` what has
    changed since the recording. `on="ray"` or `"slurm"` runs the script on a node of a cluster, with the settings in
    `engine` (docs/engines.md).

    >>> verify("runs/baseline", fix="unfused_optimizer", yes=True).fixes[0].status  # doctest: +SKIP
    """
    need_torch()
    from statistics import geometric_mean

    from stepscope.analysis.comparison.verification import MIN_ROUNDS, Plan, Verification, steps_ns
    from stepscope.analysis.comparison.verification import verify as verify_runs
    from stepscope.findings.fixes import parse_change
    from stepscope.recorder.files import write_json
    from stepscope.session import open_session
    from stepscope.sweep.engines.start import where_of
    from stepscope.sweep.record_runs import Options, changes_since, recorded_command, script_command
    from stepscope.user_cache import has_run

    where = where_of(on, engine)
    if rounds < 1 or (clean is not None and clean < 1):
        raise UsageError(f"{rounds} rounds of {clean} timed steps: both must be at least 1")
    if not fix:
        raise UsageError("name a fix with --fix ID: `stepscope list fixes` lists them")
    chosen = [parse_change(text) for text in dict.fromkeys([fix] if isinstance(fix, str) else fix)]
    fewest = 2 if all(each.script for each in chosen) else FEWEST_WARMUP
    if warmup is not None and warmup < fewest:
        raise UsageError(f"--warmup {warmup}: {fewest} is the least")
    if len({each.text for each in chosen}) < len(chosen):
        raise UsageError("two changes have the same name and script: give each its own, --fix NAME=SCRIPT")
    session: Session | None = None
    warnings: list[str] = []
    if rounds < MIN_ROUNDS and warn is not None:
        warn(f"{plural(rounds, 'round')} cannot rule out chance: a verdict needs --rounds {MIN_ROUNDS} or more")
    if not is_module and Path(target).is_dir():
        session = open_session(target)
        command = recorded_command(Path(target), session.recording.facts)
    else:
        command = script_command([os.fspath(target), *arguments], is_module)
    commands = {each.text: command.changed(each.finding, each.script) for each in chosen if each.script is not None}
    if session is not None:
        if not has_run(session.recording.facts.get("command") or {}):
            _need_consent(Path(target), command, yes)
        warnings = changes_since(command, session.recording.facts)
    num_clean = clean
    if session is not None:
        num_clean, untimed = _steps_to_time(session.recording, clean)
        warnings += untimed
    if warn is not None:
        for warning in warnings:
            warn(warning)
    folder = _folder(None if output is None else Path(output), command)
    plans = [
        Plan(each.text, each.arithmetic, each.lowers_to, tolerance, script=each.script, growth=each.growth)
        for each in chosen
    ]
    recorded = None if session is None else (session.recording.facts.get("windows") or {}).get("warmup")
    options = Options(
        warmup=warmup or max(NUM_WARMUP, recorded or 0), clean=num_clean or NUM_CLEAN, timeout_s=timeout_s, free=0
    )
    before, after = _run_all(command, commands, plans, folder, options, rounds, on_line, where, clean is None)
    num_done = before[-1].round
    if num_done < rounds:
        warnings.append(f"interrupted after {num_done} of {rounds} rounds")
    first = before[0].recording
    assert first is not None
    environment = first.facts.get("environment") or {}
    warnings += _environment_changes(None if session is None else session.recording, first)
    expected = _expected_gains(session, environment.get("device_name"), chosen)
    timed = [each for side in (before, *after.values()) for each in side if each.round and each.failure is None]
    shares = [each.others_share for each in timed if each.recording is not None]
    if max(shares, default=0.0) > LEAST_OTHERS_SHARE:
        warnings.append(
            f"training waited {whole_percent(min(shares))} to {whole_percent(max(shares))} of the time for a CPU "
            "core that other processes used: these times are without that"
        )
    times = steps_ns(before)
    apart_share = max(times) / min(times) - 1
    if apart_share > RESTLESS_SHARE:
        warnings.append(
            f"runs of the same script differ by {whole_percent(apart_share)}: the machine is busy. "
            f"--rounds {2 * rounds} or a quiet machine shows smaller gains"
        )
    verification = Verification(
        command=command.text,
        folder=str(folder),
        device_name=environment.get("device_name"),
        torch=environment.get("torch"),
        num_rounds=num_done,
        step_ns=geometric_mean(times),
        apart_share=apart_share,
        fixes=tuple(verify_runs(plan, before, after[plan.fix], expected.get(plan.fix)) for plan in plans),
        warnings=tuple(warnings),
    )
    write_json(folder / RESULT_FILE, verification.to_json())
    return verification


def _steps_to_time(recording: Recording, given: int | None = None) -> tuple[int, list[str]]:
    """Return how many steps to time, so that they include everything twice that the recording does between steps, and
    what takes too long for that, or is not in those that are `given`."""
    from stepscope.analysis.time.loop_time import periods
    from stepscope.analysis.time.summary import loop_of

    loop, most, warnings = loop_of(recording), given or NUM_CLEAN, []
    for row, period in periods(recording).items():
        num = math.ceil(2 * period)
        if num <= most:
            continue
        if given is None and num <= MOST_CLEAN and loop is not None and num * loop.step_ns <= MOST_NS:
            most = num
        else:
            warnings.append(
                f"{row} comes every {period:,.0f} steps, and its cost is not part of these times: --clean {num} "
                "includes it"
            )
    return most, warnings


def _need_consent(recording: Path, command: Command, yes: bool | Callable[[str], bool]) -> None:
    """Raise UsageError unless the user agrees to the command that a recording names."""
    shown = safe(command.whole_text, len(command.whole_text))
    if callable(yes):
        if not yes(shown):
            raise UsageError("nothing was run")
    elif not yes:
        raise UsageError(
            f"{recording} names this command, which would be run: {shown}. If you trust it, add --yes "
            "(in Python: yes=True)"
        )


def _folder(given: Path | None, command: Command) -> Path:
    """Return the folder of the runs; absolute, because the script runs in a folder of its own."""
    if given is not None:
        if given.exists() and (not given.is_dir() or any(given.iterdir())):
            raise UsageError(f"{given} is not empty: name another folder")
        return given.absolute()
    now = time.strftime("%Y%m%d-%H%M%S")
    return next(path for path in folders_for("verify", command, now) if not path.exists())


def folders_for(verb: str, command: Command, suffix: str) -> Iterator[Path]:
    """Yield the folders in runs/ that the runs of a command may go to, without end."""
    word = next((word for word in command.words if word != "-m"), "script")
    name = f"{verb}-{Path(word).stem}-{suffix}"
    yield from map(Path("runs").absolute().joinpath, chain([name], (f"{name}-{number}" for number in count(2))))


def _run_all(
    command: Command,
    changed: Mapping[str, Command],
    plans: list[Plan],
    folder: Path,
    options: Options,
    num_rounds: int,
    on_line: Say | None,
    where: Where,
    times_more: bool,
) -> tuple[list[Attempt], dict[str, list[Attempt]]]:
    """Return the runs of a rehearsal and of all rounds, without a fix and with each.

    `changed` has the commands of changes by hand, by name. A fix that the rehearsal refuses is not run again. With
    `times_more`, as many steps are timed as take `TIMED_NS`, if they are more than the options say. Ctrl-C ends it
    with the rounds that are complete, if there are any.
    """
    from statistics import fmean

    from stepscope.analysis.comparison.verification import refusal, steps_ns
    from stepscope.sweep.engines.engine import Engine
    from stepscope.sweep.grid import default_device

    before: list[Attempt] = []
    after: dict[str, list[Attempt]] = {plan.fix: [] for plan in plans}
    with where.open(folder, default_device(), on_line or (lambda line: None), keeps_node=True) as server:
        engine = server if isinstance(server, Engine) else None
        took_s: dict[bool, list[float]] = {False: [], True: []}  # runs of the rehearsal, and of rounds

        def run(name: str, number: int, names: Sequence[str]) -> Attempt:
            began_s = time.monotonic()
            if on_line is not None:
                turn = f"round {number} of {num_rounds}" if number else "rehearsal"
                num_left = (num_rounds - number + 1) * len(names) - names.index(name)
                known_s = took_s[True] or took_s[False]
                left = f", about {elapsed(num_left * fmean(known_s))} left" if known_s else ""
                on_line(f"{turn}: {'' if name == WITHOUT else 'with '}{name}{left}")
            fix = None if name == WITHOUT or name in changed else name
            output = folder / f"{name}-{number}"
            done = attempt(changed.get(name, command), output, number, fix, options, not number, engine=engine)
            _need_like_devices([*before, done])
            took_s[number > 0].append(time.monotonic() - began_s)
            return done

        for number in range(num_rounds + 1):
            if number == 1 and times_more:
                num_timed = round(TIMED_NS / steps_ns(before, 0)[0])
                options = replace(options, clean=max(options.clean, min(num_timed, MOST_CLEAN)))
            tried = [plan.fix for plan in plans if not number or refusal(plan, before[0], after[plan.fix]) is None]
            # Every other round is the other way around: what drifts is not always later.
            names = (WITHOUT, *tried) if number % 2 or not number else (*reversed(tried), WITHOUT)
            done: dict[str, Attempt] = {}
            try:
                for name in names:
                    done[name] = run(name, number, names)
                    if name == WITHOUT:
                        need_timed(done[name], options)
            except KeyboardInterrupt:
                if number < 2:
                    raise
                return before, after
            before.append(done.pop(WITHOUT))
            for name, attempt_of in done.items():
                after[name].append(attempt_of)
    return before, after


def _need_like_devices(attempts: Sequence[Attempt]) -> None:
    """Raise StepscopeError if runs that are compared ran on unlike devices."""
    environments = [(each.recording.facts.get("environment") or {}) for each in attempts if each.recording]
    names = list(dict.fromkeys(str(each.get("device_name")) for each in environments))
    if len(names) > 1:
        raise StepscopeError(
            f"Runs on {' and '.join(names)} cannot be compared. Name nodes with one kind of device in "
            "[tool.stepscope.engine], such as a partition."
        )


def need_timed(unchanged: Attempt, options: Options) -> None:
    """Raise StepscopeError unless a run of the unchanged script has timed steps."""
    if unchanged.failure is not None or unchanged.recording is None:
        is_option = "unrecognized argument" in str(unchanged.failure)
        hint = " (options of verify go before the script)" if is_option else ""
        raise StepscopeError(f"the script fails without a fix: {unchanged.failure}{hint}")
    if not unchanged.recording.window("clean"):
        raise StepscopeError(
            f"the script ended after {len(unchanged.recording.samples)} steps, before any was timed. Let it run "
            f"longer than --warmup {options.warmup} steps, or call stepscope.step() if steps are not found"
        )


def attempt(
    command: Command,
    output: Path,
    number: int,
    fix: str | None,
    options: Options,
    rehearses: bool,
    num_traced: int = 0,
    engine: Engine | None = None,
) -> Attempt:
    """Return the recording of a script with fixes applied from outside, run in a fresh process, or why it failed."""
    from stepscope.sweep.record_runs import run_again

    failure = run_again(command, output, options, fix, rehearses, num_traced, engine)
    return read_attempt(output, number, *((failure.reason, failure.is_timeout) if failure is not None else ()))


def read_attempt(output: Path, number: int, failure: str | None = None, is_timeout: bool = False) -> Attempt:
    from stepscope.analysis.comparison.verification import Attempt
    from stepscope.trace.recording import read_recording

    try:
        recording = read_recording(output)
    except RecordingError as error:
        return Attempt(number, None, failure or str(error), is_timeout)
    said = recording.facts.get("exception")
    if failure is not None and said:
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        failure = " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])
    return Attempt(number, recording, failure, is_timeout, _share_of_others(recording))


def _share_of_others(recording: Recording) -> float:
    """Return the share of the measured steps' time in which training waited for CPU cores that others used."""
    from stepscope.analysis.time.loop_time import measured_steps
    from stepscope.session.run import read_history, run_of

    if (recording.facts.get("environment") or {}).get("device") != "cpu" or not recording.samples:
        return 0.0
    run = run_of(recording, read_history(recording.folder))
    return run.share_of_others([sample.step for sample in measured_steps(recording, on_device=False)]) or 0.0


def _environment_changes(recorded: Recording | None, now: Recording) -> list[str]:
    """Return what differs from when a script was recorded: versions, device, settings."""
    if recorded is None:
        return []
    from stepscope.analysis.comparison.subjects import environment_context

    was, is_ = (environment_context(each.facts.get("environment") or {}) for each in (recorded, now))
    names = [name for name in dict.fromkeys([*was, *is_]) if was.get(name) != is_.get(name)]
    told = ", ".join(f"{name} {was.get(name)}, now {is_.get(name)}" for name in names)
    return [f"changed since it was recorded: {told}"] if told else []


def _expected_gains(session: Session | None, device_name: str | None, chosen: list[Chosen]) -> dict[str, Expected]:
    """Return what diagnose expects of each fix, by its text; nothing without a recording."""
    if session is None:
        return {}
    from stepscope.analysis.comparison.verification import Expected
    from stepscope.session import need_read_side

    try:
        need_read_side()
    except StepscopeError as error:  # where only torch is: the times are known all the same
        return {each.text: Expected(None, None, False, None, f"diagnose: {error}") for each in chosen}
    from stepscope.findings.diagnose import all_rules, diagnose
    from stepscope.findings.fixes import expected_of

    rules = {rule.id for rule in all_rules()}
    chosen = [each for each in chosen if each.script is None or each.finding in rules]

    was = (session.recording.facts.get("environment") or {}).get("device_name")
    reason = f"it was recorded on {was}, so its expected saving does not apply here"
    if was == device_name:
        try:
            diagnosis = diagnose(session.case)
            return {each.text: expected_of(diagnosis, each) for each in chosen}
        except StepscopeError as error:
            reason = f"diagnose: {error}"
    return {each.text: Expected(None, None, False, None, reason) for each in chosen}
