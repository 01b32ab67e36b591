"""Damaged inputs through every reading verb: no traceback, nothing over a minute or 1.5 GB, times that add up.

    python benchmarks/fuzz.py --keep FOLDER --cases 100000 [--first 0] [--jobs 2] [--traces FILE...]
        [--recordings FOLDER...]

Case N is the same in every run: its number is the seed of what is damaged, and chooses kind and verb in turn. Fresh
processes run them in batches, so that a crash costs one case. Outcomes are appended to KEEP/outcomes.jsonl; a second
call runs what is missing there. `--only N` runs one case again and shows what happened. The exit code is 1 if any
case broke a rule.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]
MOST_BYTES = 1_500_000_000
BATCH = 400
FRESH = 3  # the exit code of a batch that wants a fresh process for its next case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--traces", type=Path, nargs="*", default=[])
    parser.add_argument("--recordings", type=Path, nargs="*", default=[])
    parser.add_argument("--only", type=int)
    parser.add_argument("--batch", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not (arguments.keep / "bases.json").is_file():
        from mutated_inputs import write_bases

        arguments.keep.mkdir(parents=True, exist_ok=True)
        bases = write_bases(arguments.keep / "bases", arguments.traces, arguments.recordings)
        names = {kind: [str(path.resolve()) for path in paths] for kind, paths in bases.items()}
        (arguments.keep / "bases.json").write_text(json.dumps(names))
    outcomes = arguments.keep / "outcomes.jsonl"
    if arguments.only is not None:
        return _batch(arguments, range(arguments.only, arguments.only + 1), None)
    if arguments.batch:
        return _batch(arguments, range(*arguments.batch), outcomes)
    end = arguments.first + arguments.cases
    ranges = [range(first, min(first + BATCH, end)) for first in range(arguments.first, end, BATCH)]
    done = {each["number"] for each in _read(outcomes)}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(lambda some: _run(arguments.keep, some), (r for r in ranges if not done.issuperset(r))))
    return _table([each for each in _read(outcomes) if arguments.first <= each["number"] < end])


def _run(keep: Path, numbers: range) -> None:
    """Run a range of cases, in another process again after one has crashed."""
    outcomes = keep / "outcomes.jsonl"
    while True:
        words = [sys.executable, __file__, "--keep", str(keep), "--batch", str(numbers[0]), str(numbers[-1] + 1)]
        code = subprocess.run(words, env=_environment()).returncode
        done = {each["number"] for each in _read(outcomes)}
        missing = [number for number in numbers if number not in done]
        if not missing:
            return
        if code != FRESH:  # a hard crash, in the first case that was not written
            crash = {"number": missing[0], "kind": "?", "verb": "?", "base": "?", "code": code, "seconds": 0}
            line = json.dumps({**crash, "peak_bytes": 0, "problem": f"the process died with {code}"})
            with outcomes.open("a") as stream:
                stream.write(f"{line}\n")


def _environment() -> dict[str, str]:
    return {**os.environ, "POLARS_MAX_THREADS": "1", "PYTHONHASHSEED": "0"}


def _batch(arguments: argparse.Namespace, numbers: range, outcomes: Path | None) -> int:
    from mutated_inputs import run_case

    names = json.loads((arguments.keep / "bases.json").read_text())
    bases = {kind: [Path(path) for path in paths] for kind, paths in names.items()}
    stream = outcomes.open("a") if outcomes else sys.stdout
    done = {each["number"] for each in _read(outcomes)} if outcomes else set()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        for number in (number for number in numbers if number not in done):
            Path("/proc/self/clear_refs").write_text("5")  # the peak of this case alone
            begin = time.perf_counter()
            found = run_case(number, bases, Path(place) / "case")
            seconds, peak = time.perf_counter() - begin, _peak_bytes()
            problem = found.problem or (f"{peak:,} bytes at the peak" if peak > MOST_BYTES else None)
            line = {**found._asdict(), "seconds": round(seconds, 3), "peak_bytes": peak, "problem": problem}
            stream.write(json.dumps(line) + "\n")
            stream.flush()
            if outcomes is None:
                print(problem)
            if peak > MOST_BYTES // 2:
                return FRESH
    return 0


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def _table(outcomes: list[dict[str, Any]]) -> int:
    by_pair: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for each in outcomes:
        by_pair[each["kind"], each["verb"]].append(each)
    print(f"{'kind':<10} {'verb':<50} {'cases':>6} {'read':>6} {'refused':>7} {'broken':>6} {'most s':>6} {'MB':>5}")
    for (kind, verb), some in sorted(by_pair.items()):
        codes = Counter(each["code"] for each in some)
        broken = sum(each["problem"] is not None for each in some)
        most, peak = max(each["seconds"] for each in some), max(each["peak_bytes"] for each in some) // 1_000_000
        print(
            f"{kind:<10} {verb:<50} {len(some):>6} {codes[0]:>6} {len(some) - codes[0]:>7} {broken:>6} {most:>6.1f} "
            f"{peak:>5}"
        )
    reasons = Counter((each["problem"] or "").strip().splitlines()[-1][:150] for each in outcomes if each["problem"])
    places: dict[str, int] = {}
    for each in outcomes:
        if each["problem"]:
            places.setdefault(each["problem"].strip().splitlines()[-1][:150], each["number"])
    for reason, count in reasons.most_common():
        print(f"{count:>6} × {reason} (first: case {places[reason]})")
    print(f"{len(outcomes):,} cases, {sum(reasons.values()):,} broken")
    return 1 if reasons else 0


if __name__ == "__main__":
    sys.exit(main())
