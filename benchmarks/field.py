"""What `stepscope run` says about other people's scripts, beside a truth that needs no instrument.

    python benchmarks/field.py SCRIPTS        # public scripts, laid out as ../shared/field/README.md says
    python benchmarks/field.py --own          # the repository's own corpus, tests/field
    python benchmarks/field.py SCRIPTS --only nanogpt --repeats 5 --keep runs/field

Each case runs bare with N steps, bare with 2N, and under Stepscope with N, in turns. The true time of a step is
(T(2N) − T(N)) / N: start and shutdown cancel, and whatever happens between steps is in it. The spread is that of the
turns; CPU ms is the same of processor time, which other load on the machine hardly changes. Public scripts have few
steps: where imports take seconds, `--times 8` gives them 8 times as many. A case of the own corpus gets as many steps
as take `--seconds`.

Exit code 1 if a bar is missed: steps or work per step unequal to the truth; throughput off by more than 5 % and
outside the truth's spread; time rows that do not sum to the wall clock within 1 %; another exit code or standard
output than bare. In standard output, words in which two bare runs differ are the script's own clock and not compared.

Packages: those that cases.json names, and the extra `field`. A case whose package is missing is listed and left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "field"), str(ROOT / "tests")]

from case import Case  # noqa: E402
from cases import CASES  # noqa: E402
from checks import ROWS_MAY_MISS_SHARE, SOURCE_FOLDER, bare_command, mistakes  # noqa: E402

from stepscope import read  # noqa: E402

THROUGHPUT_MAY_MISS_SHARE = 0.05
WORK_MAY_MISS_SHARE = 0.01  # the last batch of an epoch may be a little smaller
SPREAD_OF_A_BUSY_MACHINE = 0.15
TIMEOUT_S = 900
# Packages by the name they are imported by, where it is another.
IMPORTED_AS = {"pillow": "PIL"}


@dataclass(frozen=True)
class Job:
    """One case, public or our own, in the words that both ways of running it need."""

    name: str
    bare: list[str]
    bare_double: list[str]
    words: list[str]
    words_double: list[str]
    steps: int
    steps_double: int
    unit: str
    per_step: float | None
    environment: dict[str, str]
    fresh_folder: Callable[[], Path]
    exit_code: int = 0
    mistakes: Callable[[dict[str, Any]], list[str]] = lambda _card: []


@dataclass
class Run:
    """One finished process."""

    wall_s: float
    processor_s: float
    exit_code: int
    stdout: str
    stderr: str


@dataclass
class Result:
    """The truth about a case, and what Stepscope said; `misses` are the bars it did not reach."""

    name: str
    steps: int
    unit: str
    per_step: float | None
    steps_found: int | None = None
    per_step_found: float | None = None
    step_ms: float | None = None
    step_ms_of_turns: list[float] = field(default_factory=list)
    processor_ms: float | None = None
    step_ms_found: list[float] = field(default_factory=list)
    per_s_found: float | None = None
    rows_share: float | None = None
    rows: dict[str, float] = field(default_factory=dict)
    wall_ratio: float | None = None
    steady_ratio: float | None = None
    misses: list[str] = field(default_factory=list)

    @property
    def spread(self) -> float | None:
        """How far the turns lie apart, as a share of the true time of a step."""
        if not self.step_ms:
            return None
        return (max(self.step_ms_of_turns) - min(self.step_ms_of_turns)) / abs(self.step_ms)


def main() -> int:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", type=Path, nargs="?", metavar="SCRIPTS", help="the public scripts, a folder each")
    parser.add_argument(
        "--shared", type=Path, default=ROOT.parent / "shared" / "field", help="cases.json, prepare.py"
    )
    parser.add_argument("--own", action="store_true", help="run the repository's own corpus")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="only this case; may be repeated")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the recordings and results.jsonl here")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="turns of each case (default 3)")
    parser.add_argument("--times", type=int, default=1, metavar="N", help="N times the steps of a public case")
    parser.add_argument("--seconds", type=float, default=3.0, help="training time of an own case (default 3)")
    parser.add_argument(
        "--steady", action="store_true", help="also 2N steps under Stepscope: what a later step costs"
    )
    options = parser.parse_args()
    if options.scripts is None and not options.own:
        parser.error("name the folder of the public scripts, or --own")
    with tempfile.TemporaryDirectory(prefix="field-") as scratch:
        keep = (options.keep or Path(scratch) / "kept").resolve()
        keep.mkdir(parents=True, exist_ok=True)
        results = []
        for job in _jobs(options, Path(scratch)):
            results.append(_measure(job, keep / job.name, options.repeats, options.steady))
            with (keep / "results.jsonl").open("a") as file:
                file.write(json.dumps(vars(results[-1])) + "\n")
            print(_line(results[-1]), flush=True)
        if options.scripts is not None:
            results += [_survives(job, keep / job.name) for job in _endless(options, Path(scratch))]
    print("\n" + _table(results))
    missed = [result for result in results if result.misses]
    for result in missed:
        print(f"\n{result.name}:\n" + "\n".join(f"  {miss}" for miss in result.misses))
    busy = [result.name for result in results if (result.spread or 0.0) > SPREAD_OF_A_BUSY_MACHINE]
    if busy:
        print(f"\nThe truth scatters too much to judge throughput (is the machine busy?): {', '.join(busy)}")
    print(f"\n{len(results) - len(missed)} of {len(results)} cases reach every bar")
    return 1 if missed else 0


# --- the cases ----------------------------------------------------------------------------------


def _jobs(options: argparse.Namespace, scratch: Path) -> Iterator[Job]:
    if options.scripts is not None:
        for case in json.loads((options.shared / "cases.json").read_text())["cases"]:
            if _wanted(options, case["name"]) and _installed(case["name"], case["pip"]):
                yield _public_job(_longer(case, options.times), options, scratch)
    if options.own:
        for own in CASES:
            if _wanted(options, own.id) and _installed(own.id, own.needs):
                yield _own_job(own, scratch, options.seconds)


def _endless(options: argparse.Namespace, scratch: Path) -> Iterator[Job]:
    for case in json.loads((options.shared / "cases.json").read_text())["endless"]:
        if _wanted(options, case["name"]) and _installed(case["name"], case["pip"]):
            yield _public_job(case, options, scratch)


def _wanted(options: argparse.Namespace, name: str) -> bool:
    return not options.only or name in options.only


def _installed(name: str, packages: list[str] | tuple[str, ...]) -> bool:
    missing = [package for package in packages if not importlib.util.find_spec(IMPORTED_AS.get(package, package))]
    if missing:
        print(f"{name}: left out, {', '.join(missing)} not installed", flush=True)
    return not missing


def _longer(case: dict[str, Any], times: int) -> dict[str, Any]:
    """Return a case with so many times the steps: where N and 2N steps differ in a number, it goes on that way."""

    def words(units: int) -> list[str]:
        return [_extrapolated(*pair, units) for pair in zip(case["argv"], case["argv_double"])]

    added = case["steps_double"] - case["steps"]
    steps = case["steps"] + added * (times - 1)
    return {
        **case,
        **{"argv": words(times), "argv_double": words(2 * times)},
        **{"steps": steps, "steps_double": steps + added * times},
    }


def _extrapolated(once: str, twice: str, units: int) -> str:
    """Return the word of a command with `units` times the steps.

    >>> _extrapolated("--max_iters=99", "--max_iters=199", 4)
    '--max_iters=399'
    """
    numbers = [[int(number) for number in re.findall(r"\d+", word)] for word in (once, twice)]
    values = iter([a + (b - a) * (units - 1) for a, b in zip(*numbers)])
    return re.sub(r"\d+", lambda _: str(next(values)), once) if once != twice else once


def _public_job(case: dict[str, Any], options: argparse.Namespace, scratch: Path) -> Job:
    data, untouched = scratch / "data", scratch / "untouched"
    if not untouched.exists():
        prepare = [sys.executable, str(options.shared / "prepare.py"), str(untouched), str(options.scripts)]
        subprocess.run(prepare, check=True)

    def fresh_folder() -> Path:
        # What one run leaves (checkpoints, caches) must not be found by the next, and paths are in the output.
        shutil.rmtree(data, ignore_errors=True)
        shutil.copytree(untouched, data)
        return data / str(case["cwd"])

    def words(argv: list[str]) -> list[str]:
        return [word.replace("{data}", str(data)) for word in argv]

    argv, double = words(case["argv"]), words(case.get("argv_double", []))
    return Job(
        name=case["name"],
        bare=[sys.executable, *argv],
        bare_double=[sys.executable, *double],
        words=argv,
        words_double=double,
        steps=case.get("steps", 0),
        steps_double=case.get("steps_double", 0),
        unit=case["unit"],
        per_step=case.get("per_step"),
        environment={key: value.replace("{data}", str(data)) for key, value in case["env"].items()},
        fresh_folder=fresh_folder,
        mistakes=lambda card: _mistakes_of_public(case, card),
    )


def _mistakes_of_public(case: dict[str, Any], card: dict[str, Any]) -> list[str]:
    found = []
    throughput, loop = card.get("throughput") or {}, card.get("loop")
    if card.get("num_steps") != case["steps"]:
        found.append(f"num_steps: {card.get('num_steps')}, truth {case['steps']}")
    if throughput.get("unit") != case["unit"]:
        found.append(f"unit: {throughput.get('unit')}, truth {case['unit']}")
    value = throughput.get("per_step") or 0.0
    if abs(value - case["per_step"]) > WORK_MAY_MISS_SHARE * case["per_step"]:
        found.append(f"per_step: {value}, truth {case['per_step']}")
    if loop is None:
        return [*found, "loop: not on the card"]
    total = sum(row["ns"] for row in loop["rows"])
    if abs(total - loop["wall_ns"]) > ROWS_MAY_MISS_SHARE * loop["wall_ns"]:
        found.append(f"rows sum to {total} ns, the wall clock to {loop['wall_ns']}")
    return found


def _own_job(case: Case, scratch: Path, seconds: float) -> Job:
    def fresh_folder() -> Path:
        folder = scratch / "own"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    environment = dict(case.environment)
    few, many = case.steps, 5 * case.steps
    short, long = (_run(bare_command(case, num), environment, fresh_folder()) for num in (few, many))
    added_s = max(long.wall_s - short.wall_s, long.processor_s - short.processor_s)  # a busy machine can hide one
    step_s = max(added_s / (many - few), 1e-4)
    steps = max(case.steps, math.ceil(seconds / step_s / case.period) * case.period)
    return Job(
        name=case.id,
        bare=bare_command(case, steps),
        bare_double=bare_command(case, 2 * steps),
        words=case.words(steps),
        words_double=case.words(2 * steps),
        steps=steps,
        steps_double=2 * steps,
        unit=case.unit,
        per_step=case.per_step,
        environment=environment,
        fresh_folder=fresh_folder,
        exit_code=case.exit_code,
        mistakes=lambda card: mistakes(case, card, steps),
    )


# --- measuring ----------------------------------------------------------------------------------


def _run(command: list[str], environment: dict[str, str], folder: Path) -> Run:
    """Run to the end, on one thread and without a GPU or a network."""
    import resource

    paths = [str(SOURCE_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | settings | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    wall_s = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(wall_s, processor_s, done.returncode, done.stdout, done.stderr)


def _under_stepscope(job: Job, recording: Path, words: list[str], *options: str) -> Run:
    # Quiet, because then standard output is the script's alone. The card is read from the recording.
    start = [sys.executable, "-m", "stepscope", "run", "--quiet", "--force", "-o", str(recording), *options]
    return _run([*start, *words], job.environment, job.fresh_folder())


def _measure(job: Job, folder: Path, repeats: int, steady: bool) -> Result:
    once, twice, recorded, recorded_twice, cards = [], [], [], [], []
    result = Result(job.name, job.steps, job.unit, job.per_step)
    for turn in range(repeats):
        once.append(_run(job.bare, job.environment, job.fresh_folder()))
        recorded.append(_under_stepscope(job, folder / str(turn), job.words))
        twice.append(_run(job.bare_double, job.environment, job.fresh_folder()))
        if steady:
            recorded_twice.append(_under_stepscope(job, folder / f"{turn}-double", job.words_double))
        try:
            cards.append(read(folder / str(turn)).to_json())
        except Exception as error:
            result.misses.append(f"no card: {error}")
    for run in (*once, *twice):
        if run.exit_code != job.exit_code:
            result.misses.append(f"bare: exit code {run.exit_code}, {run.stderr[-500:]}")
    result.misses += _differences(job, once, recorded)
    added = job.steps_double - job.steps
    result.step_ms = _median_s(twice, once) / added * 1e3
    result.step_ms_of_turns = [(b.wall_s - a.wall_s) / added * 1e3 for a, b in zip(once, twice)]
    result.processor_ms = (_median(twice, "processor_s") - _median(once, "processor_s")) / added * 1e3
    result.wall_ratio = _median(recorded, "wall_s") / _median(once, "wall_s")
    if recorded_twice:
        result.steady_ratio = _median_s(recorded_twice, recorded) / _median_s(twice, once)
    for card in cards:
        result.misses += [miss for miss in job.mistakes(card) if miss not in result.misses]
    if cards:
        _compare(job, result, cards)
    return result


def _compare(job: Job, result: Result, cards: list[dict[str, Any]]) -> None:
    """Fill in what the cards say; a miss if the throughput is neither near the truth nor inside its spread."""
    told = [(card.get("throughput") or {}).get("per_s") for card in cards]
    loop = cards[-1].get("loop")
    result.steps_found = cards[-1].get("num_steps")
    result.per_step_found = (cards[-1].get("throughput") or {}).get("per_step")
    if loop is not None:
        result.rows = {row["name"]: row["ns"] / loop["wall_ns"] for row in loop["rows"] if loop["wall_ns"]}
        result.rows_share = sum(result.rows.values())
        result.step_ms_found = [card["loop"]["step_ns"] / 1e6 for card in cards if card.get("loop")]
    if job.per_step is None or not result.step_ms:
        return
    if None in told:
        result.misses.append("no throughput on the card")
        return
    result.per_s_found = statistics.median(told)
    true_per_s = job.per_step / result.step_ms * 1e3
    ratio = result.per_s_found / true_per_s
    fastest = job.per_step / min(result.step_ms_of_turns) * 1e3 if min(result.step_ms_of_turns) > 0 else math.inf
    slowest = job.per_step / max(result.step_ms_of_turns) * 1e3
    is_inside = slowest <= result.per_s_found <= fastest
    if abs(ratio - 1) > THROUGHPUT_MAY_MISS_SHARE and not is_inside:
        result.misses.append(
            f"throughput: {result.per_s_found:.1f} {job.unit}/s, truth {true_per_s:.1f}"
            f" ({slowest:.1f} to {fastest:.1f})"
        )


def _survives(job: Job, folder: Path) -> Result:
    """A script without an end: whether it runs and `--exit-after` ends it after training was measured."""
    result = Result(job.name, 0, job.unit, None)
    run = _under_stepscope(job, folder / "0", job.words, "--exit-after")
    if run.exit_code != 0:
        result.misses.append(f"exit code {run.exit_code}: {run.stderr[-500:]}")
    try:
        card = read(folder / "0").to_json()
    except Exception as error:
        result.misses.append(f"no card: {error}")
        return result
    result.steps_found = card.get("num_steps")
    result.per_step_found = (card.get("throughput") or {}).get("per_step")
    if not result.steps_found:
        result.misses.append("no step was found")
    return result


def _median(runs: list[Run], name: str) -> float:
    return statistics.median(getattr(run, name) for run in runs)


def _median_s(longer: list[Run], shorter: list[Run]) -> float:
    return _median(longer, "wall_s") - _median(shorter, "wall_s")


# --- standard output ----------------------------------------------------------------------------


def _differences(job: Job, bare: list[Run], recorded: list[Run]) -> list[str]:
    """What Stepscope changed in exit code or standard output."""
    found = []
    for run in recorded:
        if run.exit_code != job.exit_code:
            found.append(f"exit code {run.exit_code}, bare {job.exit_code}: {run.stderr[-500:]}")
    clocks = _clock_words(bare)
    for run in recorded:
        ours, theirs = _without(run.stdout, clocks), _without(bare[0].stdout, clocks)
        if ours != theirs:
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
            found.append(f"standard output, line {at + 1}: {ours[at : at + 1]}, bare {theirs[at : at + 1]}")
            break
    return found


def _template(line: str) -> tuple[str, ...]:
    return tuple(re.sub(r"[\d.]+(e[-+]?\d+)?", "#", word) for word in line.split())


def _clock_words(runs: list[Run]) -> set[tuple[tuple[str, ...], int]]:
    """Words, by the line's shape and their position in it, in which bare runs differ."""
    clocks = set()
    first = runs[0].stdout.splitlines()
    for run in runs[1:]:
        for line, other in zip(first, run.stdout.splitlines()):
            shape = _template(line)
            if shape == _template(other):
                clocks |= {(shape, i) for i, (a, b) in enumerate(zip(line.split(), other.split())) if a != b}
    return clocks


def _without(text: str, clocks: set[tuple[tuple[str, ...], int]]) -> list[list[str]]:
    return [
        ["⏱" if (_template(line), i) in clocks else word for i, word in enumerate(line.split())]
        for line in text.splitlines()
    ]


# --- the table ----------------------------------------------------------------------------------

HEAD = (
    *("case", "steps", "found", "work", "found", "unit", "ms/step", "spread", "CPU ms", "told", "ratio", "rows"),
    *("wall ×", "steady ×", "misses"),
)


def _cells(result: Result) -> list[str]:
    def shown(value: float | None, digits: int = 1) -> str:
        return "—" if value is None else f"{value:.{digits}f}"

    told_ms = result.per_step_found and result.per_s_found and result.per_step_found / result.per_s_found * 1e3
    spread, ratio = result.spread, None
    if result.step_ms and result.per_s_found and result.per_step:
        ratio = result.per_s_found * result.step_ms / 1e3 / result.per_step
    return [
        result.name,
        str(result.steps or "—"),
        "—" if result.steps_found is None else str(result.steps_found),
        "—" if result.per_step is None else f"{result.per_step:g}",
        "—" if result.per_step_found is None else f"{result.per_step_found:g}",
        result.unit,
        shown(result.step_ms, 2),
        "—" if spread is None else f"{spread:.0%}",
        shown(result.processor_ms, 2),
        shown(told_ms or None, 2),
        shown(ratio, 3),
        "—" if result.rows_share is None else f"{result.rows_share:.1%}",
        shown(result.wall_ratio, 2),
        shown(result.steady_ratio, 2),
        str(len(result.misses)) if result.misses else "",
    ]


def _line(result: Result) -> str:
    return "  ".join(f"{head} {cell}" if head != "case" else cell for head, cell in zip(HEAD, _cells(result)) if cell)


def _table(results: list[Result]) -> str:
    rows = [list(HEAD), *map(_cells, results)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    )


if __name__ == "__main__":
    sys.exit(main())
