"""Whether two installations of Stepscope give the same figures for the same inputs: the check of a refactoring.

    python benchmarks/same_figures.py --old "OLD/bin/stepscope" --new "NEW/bin/stepscope" \\
        --traces DIR... --recordings DIR... --results DIR... --keep FOLDER

It runs these verbs with each of the two commands and compares the JSON they give:

    analyze and its views, diagnose, report   every trace, folder of ranks (and its first rank) and recording
    card                                      every recording
    compare                                   neighboring traces and recordings, sweeps that share a point
    report                                    every sweep; every study, made again in a copy
    plan                                      a few small points

Every number, true, false and null is a figure. Whole numbers must be equal, others within 1e-9 of their size. Text is
not compared. Figures are found by path, and by id in lists whose entries have one. In a report, tables and charts are
found by id, wherever they stand, and each column or series is compared as a bag of values, so that rows may move.
Keys and ids that only one side has are listed; a figure that only the new side has is not counted. An input that the
old side refuses counts only if the new side stops in another way. The exit code is 1 if there is a difference.

Without --new only the old side runs. Its answers stay in KEEP/old and are used again: delete that folder when the
inputs or the old side change. The new side's go to KEEP/new each time. Where the new side calls a verb otherwise, or
spells a part of keys and ids otherwise, say so: --rename card=show --rename-key colour=color. Both may be repeated.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

# Not figures: the version of the JSON, rows that Markdown shows, how a chart is drawn. Times of day, durations of the
# reading itself, versions and paths need no entry: where verbs give them they are text, or are read from the input.
SKIPPED = {"schema_version", "num_shown", "log_x", "log_y", "is_chart"}
VIEWS = ("", "--memory", "--attention", "--copies", "--compiler")
PLAN = ("--device", "NVIDIA H200", "--json")
ALLOW = "device,dtype,tokens,parameters,topology,flops"
POINTS = (  # workload, preset, options
    "cs336 tiny; cs336 tiny --dtype autocast_bf16 --max-batch; cs336 tiny --fsdp 2; cs336 small; hydra debug; "
    "nano decoder_tiny; tsmoe 23m; megalodon profile"
)
CHART_KEYS = {"kind", "series", "points", "nodes", "values"}
TEXT = "text"  # in place of any text
Figures = dict[str, Any]  # by path; a list of figures for a column of a table or a series of a chart


class Case(NamedTuple):
    name: str
    argv: list[str]  # {out} is a file or, of a study, a copy of its folder
    study: Path | None = None


def label(path: Path) -> str:
    return "/".join(path.parts[-2:])


def cases_of(traces: list[Path], recordings: list[Path], results: list[Path]) -> Iterator[Case]:
    by_folder: dict[Path, list[Path]] = defaultdict(list)
    for path in (path for folder in traces for path in sorted(folder.rglob("*.json*")) if is_trace(path)):
        by_folder[path.parent].append(path)
    inputs: list[Path] = []
    for folder, files in by_folder.items():  # the files of ranks differ in numbers alone
        is_ranks = len(files) > 1 and len({re.sub(r"\d+", "", path.name) for path in files}) == 1
        inputs += [folder, files[0]] if is_ranks else files
    runs = folders_with("recording.json", recordings)
    for path in inputs + runs:
        for view in VIEWS:
            yield Case(f"analyze {view} {label(path)}", ["analyze", *view.split(), "--json", "--no-cache", str(path)])
        yield Case(f"diagnose {label(path)}", ["diagnose", "--json", "--no-cache", str(path)])
        yield Case(f"report {label(path)}", ["report", "--no-cache", str(path), "-o", "{out}"])
        if path in runs:
            yield Case(f"card {label(path)}", ["card", "--json", str(path)])
    pairs = [*pairwise(runs), *(pair for files in by_folder.values() for pair in zip(files[::2], files[1::2]))]
    points: dict[Path, set[str]] = {}
    for sweep in folders_with("results.jsonl", results):
        yield Case(f"report {label(sweep)}", ["report", str(sweep), "-o", "{out}"])
        lines = (sweep / "results.jsonl").read_text(encoding="utf-8").splitlines()
        points[sweep] = {str(json.loads(line).get("hash")) for line in lines if line.strip()}
        pairs += [(other, sweep) for other in points if points[other] & points[sweep]]  # itself, too
    for one, other in pairs:
        argv = ["compare", "--json", "--no-cache", "--allow", ALLOW, str(one), str(other)]
        yield Case(f"compare {label(one)} {label(other)}", argv)
    for study in folders_with("study.json", results):
        yield Case(f"report {label(study)}", ["report", "{out}"], study)
    for point in POINTS.split("; "):
        yield Case(f"plan {point}", ["plan", *point.replace(" ", " --preset ", 1).split(), *PLAN])


def is_trace(path: Path) -> bool:
    """Return whether a file is a trace and not other JSON."""
    if not path.is_file():
        return False
    return b'"traceEvents"' in (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())


def folders_with(name: str, roots: list[Path]) -> list[Path]:
    return sorted({path.parent for root in roots for path in root.rglob(name)})


def answer(case: Case, command: str, renames: dict[str, str], store: Path, reuse: bool) -> dict[str, Any]:
    """The exit code, the JSON and the last line of errors of a case, from `store` or by running it."""
    key = hashlib.blake2b(f"{case.argv} {case.study}".encode(), digest_size=4).hexdigest()
    kept = store / f"{re.sub('[^A-Za-z0-9]+', '-', case.name)[:90]}-{key}.json.gz"
    if reuse and kept.is_file():
        return json.loads(gzip.decompress(kept.read_bytes()))
    with tempfile.TemporaryDirectory() as scratch:  # neither side sees a cache, ceilings or settings
        out = Path(scratch) / ("study" if case.study else "report.json")
        if case.study:
            shutil.copytree(case.study, out, ignore=shutil.ignore_patterns("*.png", "*.html", "report"))
        argv = shlex.split(command) + [renames.get(word, word).replace("{out}", str(out)) for word in case.argv]
        environment = os.environ | {"XDG_CACHE_HOME": scratch, "STEPSCOPE_CACHE": scratch}
        done = subprocess.run(argv, cwd=scratch, env=environment, capture_output=True)
        written = out / "report" / "report.json" if case.study else out
        try:
            result = json.loads(written.read_bytes() if "{out}" in case.argv else done.stdout)
        except (OSError, ValueError):
            result = None
    given = {"rc": done.returncode, "result": result, "error": done.stderr.decode().strip().rpartition("\n")[2]}
    store.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(gzip.compress(json.dumps(given).encode()))
    return given


def figures_of(result: Any, case: Case, renames: dict[str, str]) -> Figures:
    found: Figures = {}
    bags: dict[str, list[Any]] = defaultdict(list)
    for name, part in parts_of(result) if case.argv[0] == "report" else [("", result)]:
        for path, figure in walk(part, name, {}).items():
            if not name.startswith(("table", "chart")):
                found[path] = figure
            elif figure is not TEXT:
                bags[re.sub(r"\[[^]]*\]", "[]", path)].append(figure)
    found |= {path: bag for path, bag in bags.items() if any(one is not None for one in bag)}
    return {reduce(lambda text, pair: text.replace(*pair), renames.items(), path): found[path] for path in found}


def parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The tables, charts and findings of a report, in whatever it wraps them."""
    if isinstance(value, dict) and "id" in value and isinstance(value.get("columns"), dict):
        yield f"table {value['id']}", value["columns"]
    elif isinstance(value, dict) and "id" in value and CHART_KEYS & value.keys():
        yield f"chart {value['id']}", value
    elif isinstance(value, dict) and "findings" in value and "clean" in value:
        yield "findings", value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from parts_of(inner)


def walk(value: Any, path: str, found: Figures) -> Figures:
    """`found` with the figures in `value` added."""
    if isinstance(value, dict):
        for key in (key for key in value if key not in SKIPPED):
            walk(value[key], f"{path}.{key}", found)
    elif isinstance(value, list):
        seen: Counter[str] = Counter()
        for index, inner in enumerate(value):
            name = inner.get("id") if isinstance(inner, dict) else inner
            key = name if isinstance(name, str) and name.isidentifier() else str(index)
            seen[key] += 1
            walk(inner, f"{path}[{key}]" if seen[key] == 1 else f"{path}[{key}#{seen[key]}]", found)
    else:
        found[path] = TEXT if isinstance(value, str) else value
    return found


def compare(old: Figures, new: Figures) -> tuple[int, list[str]]:
    """How many figures of the old side were compared, and the differences."""
    count, differences = 0, []
    for path, one in old.items():
        if one is TEXT or (one is None and path not in new):
            continue
        count += len(one) if isinstance(one, list) else 1
        if path not in new:
            differences.append(f"{path}: {str(one)[:60]} is missing")
        elif not same(one, new[path]):
            pair = [one, new[path]]
            if isinstance(one, list):  # the first three of each that the other has not
                pair = [[*(Counter(bag) - Counter(other)).elements()][:3] for bag, other in (pair, pair[::-1])]
            differences.append(f"{path}: {pair[0]} → {pair[1]}")
    return count, differences


def same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        bags = (sorted(bag, key=lambda it: (it is None, isinstance(it, bool), it or 0)) for bag in (one, other))
        return len(one) == len(other) and all(same(*pair) for pair in zip(*bags))
    if {type(one), type(other)} in ({float}, {int, float}):
        return abs(one - other) <= 1e-9 * max(abs(one), abs(other))
    return type(one) is type(other) and one == other


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", required=True, metavar="COMMAND")
    parser.add_argument("--new", metavar="COMMAND")
    for name in ("--traces", "--recordings", "--results"):
        parser.add_argument(name, type=lambda text: Path(text).resolve(), nargs="+", default=[], metavar="DIR")
    parser.add_argument("--keep", type=Path, default=Path("same_figures"), metavar="FOLDER")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="cases at a time")
    parser.add_argument("--show", type=int, default=5, metavar="N", help="differences shown of a case")
    parser.add_argument("--rename", action="append", default=[], metavar="VERB=NEW", help="card=show")
    parser.add_argument("--rename-key", action="append", default=[], metavar="PART=NEW", help="colour=color")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="cases with it in their name")
    options = parser.parse_args()
    renames, keys = (dict(word.split("=", 1) for word in words) for words in (options.rename, options.rename_key))
    cases = list(cases_of(options.traces, options.recordings, options.results))
    cases = [case for case in cases if any(text in case.name for text in options.only or [""])]

    def both(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
        old = answer(case, options.old, {}, options.keep / "old", reuse=True)
        return old, answer(case, options.new, renames, options.keep / "new", reuse=False) if options.new else old

    totals, names = Counter(), {"old": Counter(), "new": Counter()}
    print(f"{'figures':>9} {'differ':>7}  case", flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        for case, (old, new) in zip(cases, pool.map(both, cases)):
            is_refused = old["result"] is None
            before, after = ({} if is_refused else figures_of(it["result"], case, keys) for it in (old, new))
            num_figures, differences = compare(before, after)
            if new["rc"] != old["rc"] and not (is_refused and new["rc"] == 0):
                differences.insert(0, f"exit code {old['rc']} → {new['rc']}: {new['error']}")
            row = f"{'refused' if is_refused else num_figures:>9} {len(differences):>7}  {case.name}"
            print(row, *differences[: options.show], sep=f"\n{'':19}", flush=True)
            totals.update(figures=num_figures, differences=len(differences), refused=is_refused)
            words = [set(re.findall(r"[A-Za-z_]\w*", " ".join(paths))) for paths in (before, after)]
            names["old"].update(words[0] - words[1])
            names["new"].update(words[1] - words[0])
    for side, some in names.items():
        listed = ", ".join(f"{name} ({count})" for name, count in some.most_common(60))
        print(f"keys and ids of the {side} side alone: {listed or 'none'}")
    print(f"{len(cases)} cases", *(f"{count:,} {name}" for name, count in totals.items()), sep=", ")
    return 1 if totals["differences"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
