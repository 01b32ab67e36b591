"""What there is: workloads with presets, knobs and parameter counts; rules of diagnose; fixes of verify; studies.

examples:
  stepscope list rules
  stepscope list fixes
  stepscope list studies
  stepscope list workloads
  stepscope list workloads tsmoe moe
  stepscope list workloads --json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stepscope.cli.support.output import write
from stepscope.cli.support.users_code import users_code
from stepscope.errors import MissingDependencyError, UsageError

if TYPE_CHECKING:
    from stepscope.workloads.workload import Knob, Workload

WIDTH = 110


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=["workloads", "rules", "fixes", "studies"],
        metavar="WHAT",
        help="workloads, rules, fixes or studies",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="only these, your own and hf: ones too (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def main(arguments: argparse.Namespace) -> int:
    if arguments.what == "rules":
        return _rules(arguments)
    if arguments.what == "fixes":
        write([fixes_text(arguments.names, arguments.json), "\n"])
        return 0
    if arguments.what == "studies":
        write([_studies_text(arguments.names, arguments.json), "\n"])
        return 0
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("workloads need torch: pip install torch")
    from stepscope.workloads.registry import MODELS, OPS, find

    entries = []
    for name in arguments.names or (*MODELS, *OPS):
        kind = "model" if name in MODELS else "op" if name in OPS else "yours"
        with users_code():
            workload = find(name)
        entries.append({"kind": kind, **facts_of(workload, has_parameters=kind == "model")})
    if arguments.json:
        text = json.dumps({"workloads": entries}, indent=2)
    else:
        text = "\n".join(line for entry in entries for line in lines_of(entry)).rstrip()
    write([text, "\n"])
    return 0


def _rules(arguments: argparse.Namespace) -> int:
    for name in ("polars", "msgspec"):
        if importlib.util.find_spec(name) is None:
            raise MissingDependencyError(f"rules need {name}: pip install polars msgspec")
    from stepscope.findings.diagnose import all_rules

    rules = {rule.id: rule.question for rule in all_rules()}
    unknown = [name for name in arguments.names if name not in rules]
    if unknown:
        raise UsageError(f"no rule is called {unknown[0]!r}; there are {', '.join(rules)}")
    wanted = {name: rules[name] for name in arguments.names or rules}
    if arguments.json:
        text = json.dumps({"rules": [{"id": name, "question": about} for name, about in wanted.items()]}, indent=2)
    else:
        width = max(map(len, wanted))
        lines = [_wrap(about, f"{name:<{width}}  ", " " * (width + 2)) for name, about in wanted.items()]
        text = "\n".join(line for wrapped in lines for line in wrapped)
    write([text, "\n"])
    return 0


def fixes_text(names: Sequence[str] = (), as_json: bool = False) -> str:
    """The fixes of `stepscope verify`, for the terminal or as JSON."""
    from stepscope.findings.fixes import FIXES

    unknown = [name for name in names if name not in FIXES]
    if unknown:
        raise UsageError(f"no fix is called {unknown[0]!r}; there are {', '.join(FIXES)}")
    wanted = [FIXES[name] for name in names or FIXES]
    if as_json:
        entries = [
            {"id": fix.id, "about": fix.about, "values": list(filter(None, fix.values)), "losses": fix.arithmetic}
            for fix in wanted
        ]
        return json.dumps({"fixes": entries}, indent=2)
    width = max(len(fix.id) for fix in wanted)
    lines: list[str] = []
    for fix in wanted:
        values = f"; {fix.id}={'|'.join(filter(None, fix.values))}" if fix.values else ""
        lines += _wrap(fix.about + values, f"{fix.id:<{width}}  ", " " * (width + 2))
    return "\n".join(lines)


def _studies_text(names: Sequence[str], as_json: bool) -> str:
    """The studies with what each asks, for the terminal or as JSON."""
    from stepscope.session import need_read_side
    from stepscope.studies.registry import STUDIES, find_study

    need_read_side()
    studies = [find_study(name) for name in names or STUDIES]
    if as_json:
        entries = [
            {"name": study.name, "title": study.title, "questions": [question.title for question in study.questions]}
            for study in studies
        ]
        return json.dumps({"studies": entries}, indent=2)
    lines: list[str] = []
    for study in studies:
        lines += _wrap(f"{study.title}. {study.about}", f"{study.name}  ", "    ")
        for question in study.questions:
            lines += _wrap(question.title, "    - ", "      ")
    return "\n".join(lines)


def facts_of(workload: Workload[Any], *, has_parameters: bool) -> dict[str, Any]:
    """A workload as JSON: presets with their parameter counts, counted on tensors without data, and knobs."""
    return {
        "name": workload.name,
        "about": workload.about,
        "presets": [
            {"name": preset, "sets": dict(values), **(_parameters(workload, preset) if has_parameters else {})}
            for preset, values in workload.presets.items()
        ],
        "knobs": [_knob(knob) for knob in workload.knobs()],
        "reference": dict(workload.reference),
    }


def _parameters(workload: Workload[Any], preset: str) -> dict[str, int | None]:
    import torch

    from stepscope.workloads.workload import Built

    with torch.device("meta"):
        built = workload.build(workload.configure(preset))
    assert isinstance(built, Built)
    total = sum(parameter.numel() for parameter in built.module.parameters())
    return {"num_parameters": total, "num_active_parameters": built.num_active_parameters}


def _knob(knob: Knob) -> dict[str, Any]:
    return {
        "name": knob.name,
        "kind": knob.kind.__name__,
        "default": knob.default,
        "values": None if knob.values is None else list(knob.values),
        "about": knob.about,
    }


def lines_of(entry: Mapping[str, Any]) -> Iterator[str]:
    """A workload for the terminal, no line wider than 110 columns."""
    yield from _wrap(entry["about"], f"{entry['name']}  ", "    ")
    presets = [(preset["name"], _count(preset), _settings(preset["sets"])) for preset in entry["presets"]]
    yield from _table("presets", presets)
    knobs = [(knob["name"], _text(knob["default"]), _values(knob) + knob["about"]) for knob in entry["knobs"]]
    yield from _table("knobs", knobs)
    yield ""


def _count(preset: Mapping[str, Any]) -> str:
    if "num_parameters" not in preset:
        return ""
    active = preset["num_active_parameters"]
    return f"{preset['num_parameters']:,}" + ("" if active is None else f" ({active:,} active)")


def _settings(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={_text(value)}" for name, value in values.items()) or "all knobs at their defaults"


def _values(knob: Mapping[str, Any]) -> str:
    return "" if knob["values"] is None else "|".join(map(_text, knob["values"])) + "  "


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _table(title: str, rows: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    first, second = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    for index, (name, middle, rest) in enumerate(rows):
        head = f"  {title if index == 0 else '':<8}{name:<{first}}  " + (f"{middle:>{second}}  " if second else "")
        yield from _wrap(rest, head, " " * len(head))


def _wrap(text: str, head: str, indent: str) -> list[str]:
    width = max(60, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))
    return textwrap.wrap(
        text, width, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False, drop_whitespace=True
    )
