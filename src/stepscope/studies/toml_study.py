"""A study declared in TOML: points, and questions of one kind: how a figure goes with a knob, and which way is best.

title = "How does my model grow?"

[[sweep]]
id = "lengths"
workload = "model.py:build"
quick = { seq_len = [64, 128] }
full = { seq_len = [1024, 2048, 4096], attention = ["plain", "fast"] }

[[question]]
title = "How does a step grow with the length?"
of = "lengths"
x = "seq_len"
y = "time_median_ns"
by = "attention"
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stepscope.document.model import Text
from stepscope.errors import Unavailable, UsageError
from stepscope.formatting import title_of
from stepscope.studies.figures import growth, in_words, lines, said, table
from stepscope.studies.stored import Stored
from stepscope.studies.study import Measure, Question, Recordings, Study, Sweep
from stepscope.sweep.toml_file import read_toml
from stepscope.workloads.knobs import nearest

_OF_A_MEASURE = {"id", "workload", "about", "quick", "full"}
_OF_A_QUESTION = {"title", "of", "x", "y", "by"}
_TABLES = {"sweep", "recordings", "question"}
_KINDS: dict[str, tuple[type, ...]] = {
    "quick": (dict, list), "full": (dict, list), "trace": (bool,), "layers": (bool,), "options": (list,),
    "loop": (list,),
}  # fmt: skip
"""Of every other key: text."""
_WORDS = {dict: "{ a table }", list: "[a list]", bool: "true or false", str: '"text"'}


def study_from_toml(path: Path, name: str | None = None) -> Study:
    """The study that the file declares, called like the file; UsageError names the table and key that is wrong."""
    declared = read_toml(path)
    _check(path, "the file", declared, {"title", "about"} | _TABLES, {"title", "question"})
    measures: list[Measure] = []
    for kind, made in (("sweep", Sweep), ("recordings", Recordings)):
        for entry in _tables(path, declared, kind):
            extra = {"trace", "layers"} if made is Sweep else {"options", "loop"}
            _check(path, f"[[{kind}]]", entry, _OF_A_MEASURE | extra, {"id", "workload", "quick"})
            fields: dict[str, Any] = {"about": "", "full": entry["quick"], **entry}
            fields |= {name: tuple(map(str, entry[name])) for name in ("options", "loop") if name in entry}
            measures.append(made(**fields))
    if not measures:
        raise UsageError(f"{path} measures nothing: give it a [[sweep]] or [[recordings]]")
    questions = []
    for entry in _tables(path, declared, "question"):
        _check(path, "[[question]]", entry, _OF_A_QUESTION, _OF_A_QUESTION - {"by"})
        sweeps = [measure.id for measure in measures if isinstance(measure, Sweep)]
        if entry["of"] not in sweeps:
            raise UsageError(
                f"{path}, [[question]]: of = {entry['of']!r} is no id of a [[sweep]]: {nearest(entry['of'], sweeps)}"
            )
        questions.append(Question(title=str(entry["title"]), answer=_answer(entry)))
    return Study(
        name=name or path.stem,
        title=str(declared["title"]),
        about=str(declared.get("about", "")),
        measures=tuple(measures),
        questions=tuple(questions),
    )


def _check(path: Path, where: str, entry: Mapping[str, Any], known: set[str], needed: set[str]) -> None:
    for name, value in entry.items():
        if name not in known:
            raise UsageError(f"{path}, {where}: there is no key {name!r}; there are {', '.join(sorted(known))}")
        kinds = _KINDS.get(name, (str,))
        if not isinstance(value, kinds) and name not in _TABLES:
            said = " or ".join(_WORDS[kind] for kind in kinds)
            raise UsageError(f"{path}, {where}: {name} = {value!r} must be {said}")
    for name in sorted(needed - entry.keys()):
        raise UsageError(f"{path}, {where}: {name} is missing")


def _tables(path: Path, declared: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found = declared.get(name, [])
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise UsageError(f"{path}: write [[{name}]], with two brackets, once for each")
    return found


def _answer(entry: Mapping[str, Any]) -> Any:
    x, y, by = str(entry["x"]), str(entry["y"]), str(entry.get("by", ""))

    def answer(stored: Stored) -> Iterator[Any]:
        rows = stored.rows(entry["of"]).needed()
        fields = {name: None for record in rows for name in record}
        for key, name in (("x", x), ("y", y), ("by", by)):
            if name and name not in fields:
                raise Unavailable(f"{key} = {name!r} is in no row: {nearest(name, fields)} Mend it and --resume")
        yield Text(" ".join(_sentences(list(rows.ok), x, y, by)))
        names = [name for name in (x, by, y) if name]
        yield table(f"{entry['of']}-{y}", f"{title_of(y)} by {x}", rows, *names)
        yield lines(f"{y}-over-{x}", f"{title_of(y)} over {x}", rows, x, y, by or ())

    return answer


def _sentences(rows: list[dict[str, Any]], x: str, y: str, by: str) -> Iterator[str]:
    """How y grows with x in each group, and which group has the least where all have a figure."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        if row.get(y) is not None:
            groups.setdefault(row.get(by) if by else None, []).append(row)
    if not groups:
        raise Unavailable(f"no row has a {y}")
    for name, group in groups.items():
        ordered = sorted(group, key=lambda row: row[x])
        ends = f"{said(y, ordered[0][y])} at {x} {ordered[0][x]} and {said(y, ordered[-1][y])} at {ordered[-1][x]}"
        who = f"{by} {name}" if by else title_of(y)
        yield f"{who}: {ends}, growing {in_words(growth(ordered, x, y))}." if len(ordered) > 1 else f"{who}: {ends}."
    shared = set.intersection(*({row[x] for row in group} for group in groups.values()))
    if len(groups) > 1 and shared:
        last = max(shared)
        there = sorted(
            ((next(r[y] for r in g if r[x] == last), name) for name, g in groups.items()), key=lambda p: p[0]
        )
        times = there[1][0] / there[0][0]
        yield f"At {x} {last}, {there[0][1]} has the least; {there[1][1]} has {times:.2f} times that."
