"""Finds studies: built-in ones by name, a user's own by path. A TOML file declares points and questions:

title = "How does my model scale?"

[[sweep]]
id = "lengths"
workload = "model.py:build"
quick = { seq_len = [64, 128] }
full = { seq_len = [1024, 2048, 4096], attention = ["plain", "fast"] }

[[question]]
title = "How does the time per step grow with the length?"
of = "lengths"
x = "seq_len"
y = "time_median_ns"
by = "attention"
"""

import importlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from stepscope.errors import Unavailable, UsageError
from stepscope.formatting import title_of
from stepscope.studies.figures import growth, in_words, said
from stepscope.studies.stored import Rows, Stored
from stepscope.studies.study import LinesOf, Measure, Question, Recordings, Study, Sweep, TableOf
from stepscope.sweep.toml_file import read_toml
from stepscope.workloads.users_code import module_from_file, nearest

_OF_A_QUESTION = {"title", "of", "x", "y", "by"}
_TABLES = {"sweep", "recordings", "question"}
_KINDS: dict[str, tuple[type, ...]] = {
    "quick": (dict, list), "full": (dict, list), "trace": (bool,), "layers": (bool,), "options": (list,),
    "loop": (list,),
}  # fmt: skip
"""Every other key is text."""
_WORDS = {dict: "{ a table }", list: "[a list]", bool: "true or false", str: '"text"'}


def study_from_toml(path: Path, name: str | None = None) -> Study:
    """Return the study that the file declares. UsageError names the table and key that is wrong."""
    declared = read_toml(path)
    _check(path, "the file", declared, {"title", "about"} | _TABLES, {"title", "question"})
    measures: list[Measure] = []
    for kind, made in (("sweep", Sweep), ("recordings", Recordings)):
        for entry in _tables(path, declared, kind):
            _check(path, f"[[{kind}]]", entry, {field.name for field in fields(made)}, {"id", "workload", "quick"})
            values: dict[str, Any] = {"about": "", "full": entry["quick"], **entry}
            values |= {name: tuple(map(str, entry[name])) for name in ("options", "loop") if name in entry}
            measures.append(made(**values))
    if not measures:
        raise UsageError(f"{path} measures nothing. Add a [[sweep]] or [[recordings]]")
    questions = []
    for entry in _tables(path, declared, "question"):
        _check(path, "[[question]]", entry, _OF_A_QUESTION, _OF_A_QUESTION - {"by"})
        sweeps = [measure.id for measure in measures if isinstance(measure, Sweep)]
        if entry["of"] not in sweeps:
            raise UsageError(
                f"{path}, [[question]]: of = {entry['of']!r} is not the id of a [[sweep]]: "
                f"{nearest(entry['of'], sweeps)}"
            )
        questions.append(_question(entry))
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
            raise UsageError(f"{path}, {where}: unknown key {name!r}. Known keys: {', '.join(sorted(known))}")
        kinds = _KINDS.get(name, (str,))
        if not isinstance(value, kinds) and name not in _TABLES:
            said = " or ".join(_WORDS[kind] for kind in kinds)
            raise UsageError(f"{path}, {where}: {name} = {value!r} must be {said}")
    for name in sorted(needed - entry.keys()):
        raise UsageError(f"{path}, {where}: {name} is missing")


def _tables(path: Path, declared: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found = declared.get(name, [])
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise UsageError(f"{path}: write [[{name}]] with two brackets, once for each")
    return found


def _question(entry: Mapping[str, Any]) -> Question:
    x, y, by = str(entry["x"]), str(entry["y"]), str(entry.get("by", ""))

    def rows(stored: Stored) -> Rows:
        found = stored.rows(entry["of"]).needed()
        known = {name: None for record in found for name in record}
        for key, name in (("x", x), ("y", y), ("by", by)):
            if name and name not in known:
                raise Unavailable(f"{key} = {name!r} is in no row: {nearest(name, known)} Correct it and --resume")
        return found

    shown = TableOf(f"{entry['of']}-{y}", f"{title_of(y)} by {x}", rows, f"{x} {by} {y}")
    chart = LinesOf(f"{y}-over-{x}", f"{title_of(y)} over {x}", rows, x, y, by)
    return Question(str(entry["title"]), lambda tables: _sentence(tables[shown.id].ok, x, y, by), (chart, shown))


def _sentence(rows: Rows, x: str, y: str, by: str) -> str:
    """Return how y grows with x in each group, and which group has the least at the largest x that all have."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in sorted((row for row in rows if row.get(y) is not None), key=lambda row: row[x]):
        groups.setdefault(row.get(by) if by else None, []).append(row)
    if not groups:
        raise Unavailable(f"no row has a {y}")
    told = []
    for name, group in groups.items():
        first, last = group[0], group[-1]
        text = f"{f'{by} {name}' if by else title_of(y)}: {said(y, first[y])} at {x} {first[x]}"
        if len(group) > 1:
            text += f" and {said(y, last[y])} at {last[x]}, growing {in_words(growth(group, x, y))}"
        told.append(text)
    shared = set.intersection(*({row[x] for row in group} for group in groups.values()))
    if len(groups) > 1 and shared:
        last_x = max(shared)
        at = {name: next(row[y] for row in group if row[x] == last_x) for name, group in groups.items()}
        best, second, *_ = sorted(at, key=lambda name: at[name])
        told.append(f"at {x} {last_x}, {best} has the least and {second} {at[second] / at[best]:.2f} times that")
    return f"{'; '.join(told)}."


STUDIES = ("cs336", "megalodon", "hydra", "nano", "tsmoe")


def find_study(name: str) -> Study:
    """Return the study of that name or file: path/to/study.py with a STUDY in it, or path/to/study.toml."""
    if name in STUDIES:
        study = importlib.import_module(f"stepscope.studies.{name}.study").STUDY
        assert isinstance(study, Study)
        return study
    if name.endswith(".py"):
        study = getattr(module_from_file(Path(name)), "STUDY", None)
        if not isinstance(study, Study):
            raise UsageError(f"{name} has no STUDY: STUDY = Study(name=…, …), see docs/studies.md")
        return study
    if name.endswith(".toml"):
        return study_from_toml(Path(name))
    raise UsageError(f"there is no study {name!r}: {nearest(name, STUDIES)} You can also name a file.py or file.toml")
