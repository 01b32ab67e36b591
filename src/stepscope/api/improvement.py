"""`stepscope.improve`: tries what is known to make training faster on a script, and keeps what pays."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import MissingDependencyError, UsageError, need_torch
from stepscope.formatting import percent

if TYPE_CHECKING:
    from stepscope.analysis.comparison.improvement import Improvement
    from stepscope.api.improve_search import Search
    from stepscope.sweep.record_runs import Command

NOISY_SHARE = 0.25  # by which runs of the same program differ
Say = Callable[[str], None]


def improve(
    script: str | os.PathLike[str],
    *arguments: str,
    is_module: bool = False,
    minutes: float = 20.0,
    warmup: int = 8,
    clean: int = 20,
    fix: str | Sequence[str] | None = None,
    tolerance: float | None = None,
    timeout_s: float = 1800,
    output: str | os.PathLike[str] | None = None,
    resume: bool = False,
    on_line: Say | None = None,
    progress: Callable[[float], None] | None = None,
) -> Improvement:
    """Return which changes make a script faster, like `stepscope improve`: `.kept`, `.gain.factor` and `.code`.

    The script with its `arguments` (a module with `is_module`) is run again and again, each time for `warmup` and
    `clean` timed steps, until every change was tried or `minutes` are over; `fix` names the changes to try (default:
    all). A change is kept if it makes steps shorter and losses stay within what its arithmetic explains, or within
    the share `tolerance`. All runs are kept in `output` (default: a folder in runs/). A call that was killed goes on
    where it stopped; `resume` also goes on after the time was up. `on_line` receives one line per trial, `progress`
    the share of the time that is over.

    >>> improve("train.py", "--lr", "3e-4", minutes=10).gain.factor  # doctest: +SKIP
    """
    need_torch()
    from stepscope.api.improve_order import NUM_TRACED, TRIES
    from stepscope.api.improve_search import Search
    from stepscope.api.verification import FEWEST_WARMUP
    from stepscope.sweep.record_runs import Options, script_command
    from stepscope.sweep.run_log import RunLog

    if not 0 < minutes < float("inf") or clean < 1:
        raise UsageError(f"{minutes:g} minutes of runs with {clean} timed steps: both must be positive")
    if warmup < FEWEST_WARMUP:
        raise UsageError(f"--warmup {warmup}: a change is made in the third step, so {FEWEST_WARMUP} is the least")
    wanted = TRIES if fix is None or not fix else _wanted([fix] if isinstance(fix, str) else fix)
    command = script_command([os.fspath(script), *arguments], is_module)
    asked = {**_asked(command), "warmup": warmup, "clean": clean, "tolerance": tolerance}
    folder = _folder(None if output is None else Path(output), command, asked, resume)
    options = Options(warmup=warmup, clean=clean, timeout_s=timeout_s)
    with RunLog(folder, asked) as log:

        def say(line: str) -> None:
            if progress is not None:
                progress(min(1.0, search.spent_s / search.limit_s))
            if on_line is not None:
                left_s = max(0, round(search.limit_s - search.spent_s))
                on_line(f"{left_s // 60:>2}:{left_s % 60:02d} left  {line}")

        search = Search(command, log, options, 60 * minutes, tolerance, say)
        if log.rows:
            say(f"continuing in {folder} with {len(log.rows)} runs from before")
        say("running the unchanged script, to see what each change would do")
        problem = _unreadable()
        search.run(search.survey(0 if problem else NUM_TRACED), wanted, problem)
        result = _improvement(search, command, folder)
        if not result.is_interrupted:  # the same command goes on
            log.write(result.to_json())
    return result


def _wanted(texts: Sequence[str]) -> tuple[str, ...]:
    """Return changes as typed; UsageError for one that is unknown or whose losses cannot be compared."""
    from stepscope.analysis.comparison.losses import NOT_COMPARABLE
    from stepscope.findings.fixes import parse_fix

    for text in texts:
        chosen = parse_fix(text)
        if len(chosen.fixes) > 1:
            raise UsageError(f"--fix {text}: name one change at a time; improve combines those that pay")
        if chosen.arithmetic == NOT_COMPARABLE:
            raise UsageError(f"--fix {text}: its losses cannot be compared, so improve does not try it")
    return tuple(dict.fromkeys(texts))


def _asked(command: Command) -> dict[str, object]:
    """Return what identifies a command: the same words for the same file in the same folder."""
    from stepscope.recorder.run_facts import file_hash

    file = None if command.words[0] == "-m" else file_hash(command.folder / command.words[0])
    return {"command": list(command.words), "working_folder": str(command.folder), "sha256": file}


def _folder(given: Path | None, command: Command, asked: dict[str, object], resume: bool) -> Path:
    """Return the folder of the runs: the one of the same command if it has no result yet, or with `resume` any."""
    from stepscope.api.verification import folders_for
    from stepscope.sweep.run_log import asked_of, is_unfinished

    if given is not None:
        if asked_of(given) == asked and not resume and not is_unfinished(given):
            raise UsageError(
                f"{given} holds the result of this command. Add --resume to go on, or name another folder"
            )
        return given.absolute()
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:8]
    last = None
    for path in folders_for("improve", command, digest):
        if not path.exists():
            return last if resume and last is not None else path
        if asked_of(path) == asked and is_unfinished(path):
            return path
        last = path if asked_of(path) == asked else last
    raise AssertionError


def _unreadable() -> str | None:
    """Return why the ledger cannot be computed here; None if it can."""
    from stepscope.session import need_read_side

    try:
        need_read_side()
    except MissingDependencyError as error:
        return str(error)
    return None


def _improvement(search: Search, command: Command, folder: Path) -> Improvement:
    from statistics import geometric_mean

    from stepscope.analysis.comparison.improvement import Improvement
    from stepscope.analysis.comparison.losses import DIFFER, REDUCED, TOLERANCE
    from stepscope.analysis.comparison.verification import loss_noise
    from stepscope.api.improve_search import BASELINE
    from stepscope.document.verification import losses_sentence
    from stepscope.findings.fixes import code_of

    unchanged = search.attempts[BASELINE]
    recordings = [each.recording for each in unchanged if each.recording is not None]
    environment = recordings[0].facts.get("environment") or {}
    warnings, kept, losses = [], tuple(search.kept), search.losses()
    if kept and (search.gain is None or not search.gain.is_significant):
        warnings.append(f"{', '.join(kept)} paid when tried, but together they are not measurably faster at the end")
        kept = ()
    if kept and losses is not None and losses.verdict == DIFFER:
        warnings.append(f"{', '.join(kept)} were kept, but the losses differ at the end: {losses_sentence(losses)}")
        kept = ()
    if (apart := search.noise_share()) > NOISY_SHARE:
        warnings.append(
            f"runs of the same program differ by up to {percent(apart)}, so only large gains can be shown. Stop "
            "other programs, and try OMP_NUM_THREADS=1 on a CPU"
        )
    noise = loss_noise(unchanged)
    if noise is not None and noise > TOLERANCE[REDUCED]:
        warnings.append(
            f"losses of the unchanged script differ by up to {percent(noise)} from run to run; changes were allowed "
            "twice that. Seed the script for a stricter check"
        )
    before_ns, after_ns = search.times_ns
    best = "+".join(search.kept)
    code: list[str] = []
    peaks = None
    if kept and (last := next(each.recording for each in reversed(search.attempts[best]) if each.recording)):
        values = {fix["id"]: fix.get("value") for fix in last.facts.get("fixes") or []}
        code = code_of(best, values, environment.get("device") or "cpu")
        if any("fallback_random" in what for fix in last.facts.get("fixes") or [] for what in fix["changed"]):
            code.append("torch._inductor.config.fallback_random = True  # the dropout masks of eager mode")
        found = [(each.facts.get("memory") or {}).get("peak_allocated_bytes") for each in (recordings[-1], last)]
        peaks = (found[0], found[1]) if found[0] and found[1] else None
    baseline_ns = geometric_mean(before_ns)
    return Improvement(
        command=command.text,
        folder=str(folder),
        device_name=environment.get("device_name"),
        torch=environment.get("torch"),
        baseline_ns=baseline_ns,
        best_ns=geometric_mean(after_ns) if kept else baseline_ns,
        kept=kept,
        gain=search.gain if kept else None,
        losses=losses if kept else None,
        trials=tuple(search.trials.values()),
        code=tuple(code),
        order=search.order,
        peak_bytes=peaks,
        num_runs=sum(map(len, search.attempts.values())),
        seconds=round(search.spent_s, 1),
        limit_s=search.limit_s,
        is_finished=search.is_finished,
        warnings=tuple(warnings),
        by_hand=search.promises.by_hand,
    )
