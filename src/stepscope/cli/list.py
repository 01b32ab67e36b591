"""List workloads with presets, knobs and parameter counts; rules of diagnose; fixes of verify; studies.

examples:
  stepscope list rules
  stepscope list fixes
  stepscope list studies
  stepscope list workloads
  stepscope list workloads tsmoe moe
  stepscope list workloads --json
"""

import argparse
import json
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from stepscope.cli.support.output import write
from stepscope.errors import UsageError, need_torch
from stepscope.session import need_read_side

WIDTH = 110
Entry = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=list(LISTS), metavar="WHAT", help=", ".join(LISTS))
    about = "only these; also your own workload or hf:config.json"
    parser.add_argument("names", nargs="*", metavar="NAME", help=about)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def main(arguments: argparse.Namespace) -> int:
    entries, lines = LISTS[arguments.what]
    found = entries(arguments.names)
    text = json.dumps({arguments.what: found}, indent=2) if arguments.json else text_of(found, lines)
    write([text, "\n"])
    return 0


def text_of(entries: Sequence[Entry], lines: Callable[[Entry, int], Iterable[str]]) -> str:
    """Return entries as lines; their names are padded to the longest."""
    width = max(len(str(entry.get("id", ""))) for entry in entries)
    return "\n".join(line for entry in entries for line in lines(entry, width)).rstrip()


def _wanted(names: Sequence[str], known: Mapping[str, Any], kind: str) -> list[Any]:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"no {kind} is called {unknown[0]!r}; there are {', '.join(known)}")
    return [known[name] for name in names or known]


def _rules(names: Sequence[str]) -> list[Entry]:
    need_read_side()
    from stepscope.findings.diagnose import all_rules

    rules = {rule.id: {"id": rule.id, "question": rule.question} for rule in all_rules()}
    return _wanted(names, rules, "rule")


def _rule_lines(entry: Entry, width: int) -> list[str]:
    return _wrap(entry["question"], f"{entry['id']:<{width}}  ", " " * (width + 2))


def fixes(names: Sequence[str] = ()) -> list[Entry]:
    from stepscope.findings.fixes import FIXES

    return [
        {"id": fix.id, "about": fix.about, "values": list(filter(None, fix.values)), "losses": fix.arithmetic}
        for fix in _wanted(names, FIXES, "fix")
    ]


def fix_lines(entry: Entry, width: int) -> list[str]:
    values = f"; {entry['id']}={'|'.join(entry['values'])}" if entry["values"] else ""
    return _wrap(entry["about"] + values, f"{entry['id']:<{width}}  ", " " * (width + 2))


def _studies(names: Sequence[str]) -> list[Entry]:
    need_read_side()
    from stepscope.studies.registry import STUDIES, find_study

    return [
        {"name": each.name, "title": each.title, "about": each.about, "questions": [q.title for q in each.questions]}
        for each in map(find_study, names or STUDIES)
    ]


def _study_lines(entry: Entry, _: int) -> Iterator[str]:
    yield from _wrap(f"{entry['title']}. {entry['about']}", f"{entry['name']}  ", "    ")
    for question in entry["questions"]:
        yield from _wrap(question, "    - ", "      ")


def _workloads(names: Sequence[str]) -> list[Entry]:
    need_torch()
    from stepscope.sweep.grid import find_workload
    from stepscope.workloads.registry import MODELS, OPS
    from stepscope.workloads.workload import facts_of

    kinds = {**dict.fromkeys(MODELS, "model"), **dict.fromkeys(OPS, "op")}
    return [
        {"kind": kinds.get(name, "yours"), **facts_of(find_workload(name), has_parameters=name in MODELS)}
        for name in names or kinds
    ]


def workload_lines(entry: Entry, _: int) -> Iterator[str]:
    """Return a workload for the terminal, no line wider than 110 columns."""
    yield from _wrap(entry["about"], f"{entry['name']}  ", "    ")
    presets, knobs = [], []
    for preset in entry["presets"]:
        active = preset.get("num_active_parameters")
        count = f"{preset['num_parameters']:,}" if "num_parameters" in preset else ""
        sets = " ".join(f"{name}={_text(value)}" for name, value in preset["sets"].items())
        count += "" if active is None else f" ({active:,} active)"
        presets.append((preset["name"], count, sets or "all knobs at their defaults"))
    for knob in entry["knobs"]:
        values = "" if knob["values"] is None else "|".join(map(_text, knob["values"])) + "  "
        knobs.append((knob["name"], _text(knob["default"]), values + knob["about"]))
    yield from _table("presets", presets)
    yield from _table("knobs", knobs)
    yield ""


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _table(title: str, rows: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    first, second = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    for index, (name, middle, rest) in enumerate(rows):
        head = f"  {title if index == 0 else '':<8}{name:<{first}}  " + (f"{middle:>{second}}  " if second else "")
        yield from _wrap(rest, head, " " * len(head))


def _wrap(text: str, head: str, indent: str) -> list[str]:
    width = max(60, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))
    return textwrap.wrap(text, width, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False)


LISTS: dict[str, tuple[Callable[[Sequence[str]], list[Entry]], Callable[[Entry, int], Iterable[str]]]] = {
    "workloads": (_workloads, workload_lines),
    "rules": (_rules, _rule_lines),
    "fixes": (fixes, fix_lines),
    "studies": (_studies, _study_lines),
}  # what can be listed: its entries, and the lines of one entry
