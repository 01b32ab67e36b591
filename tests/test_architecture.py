"""The import arrows of the design, and the record side with nothing but torch and the standard library."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import stepscope

ROOT = Path(stepscope.__file__).parent

# What each part may import of Stepscope besides itself. A part that is not here is not in the design.
READ_SIDE = {"findings", "session", "analysis", "trace", "devices", "display", "errors", "formatting", "version"}
READ_SIDE |= {"border", "rows", "user_cache"}
RUN_SIDE = {"planner", "sweep", "recorder", "workloads"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "formatting": set(),
    "display": set(),
    "user_cache": set(),
    "border": set(),
    "rows": {"border"},
    "devices": {"errors", "user_cache"},
    "recorder": set(),
    "workloads": {"errors"},
    "sweep": {"recorder", "workloads", "errors", "formatting", "border", "rows", "version"},
    "trace": {"border", "errors", "rows", "user_cache"},
    "analysis": {"trace", "border", "devices", "display", "errors", "formatting"},
    "session": {"analysis", "trace", "devices", "display", "errors", "formatting"},
    "findings": {"session", "analysis", "trace", "devices", "display", "errors", "formatting"},
    "document": READ_SIDE,
    "render": {"document", "errors", "formatting", "version"},
    "exporters": {"document", "render"} | READ_SIDE,
    "trackers": {"document", "render"} | READ_SIDE,
    "planner": {"sweep", "recorder", "workloads", "devices", "display", "errors", "formatting"},
    "studies": {"render", "document"} | READ_SIDE | RUN_SIDE,
    "api": {"studies", "render", "document", "exporters", "trackers"} | READ_SIDE | RUN_SIDE,
    "integrations": {"api", "render", "document"} | READ_SIDE | {"recorder"},
    "cli": {"integrations", "api", "studies", "render", "document", "exporters", "trackers"} | READ_SIDE | RUN_SIDE,
    "__main__": {"cli"},
    "__init__": {"api", "document"} | READ_SIDE | RUN_SIDE,
}
WITHOUT_TORCH = (
    "trace",
    "analysis",
    "session",
    "findings",
    "document",
    "render",
    "exporters",
    "trackers",
    "devices",
    "errors",
    "formatting",
    "version",
    "user_cache",
    "border",
    "rows",
)
MOST_FILES_IN_A_FOLDER = 25


FILES = sorted(path for path in ROOT.rglob("*.py"))


def part_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported_names(source: str, package: str) -> set[str]:
    """Every module that a source names in an import, at any depth, or as a constant to import_module."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], base]).rstrip(".")
            names.update(f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func
            called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                names.add(node.args[0].value)
    return names


def stepscope_parts(names: set[str]) -> set[str]:
    parts = set()
    for name in names:
        words = name.split(".")
        if words[0] == "stepscope":
            # `from stepscope import devices` imports devices; `from stepscope import step` the face.
            part = words[1] if len(words) > 1 else "__init__"
            is_module = (ROOT / part).is_dir() or (ROOT / f"{part}.py").is_file()
            parts.add(part if is_module else "__init__")
    return parts


@cache
def imports_of(path: Path) -> set[str]:
    package = ".".join(("stepscope", *path.relative_to(ROOT).parts[:-1]))
    return imported_names(path.read_text(encoding="utf-8"), package)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import a.b, c", {"a.b", "c"}),
        ("from a import b", {"a.b"}),
        ("def f():\n  class C:\n    import deep", {"deep"}),
        ("if TYPE_CHECKING:\n  from a.b import C", {"a.b.C"}),
        ("from . import x", {"stepscope.trace.x"}),
        ("from .x import y", {"stepscope.trace.x.y"}),
        ("from ..recorder import y", {"stepscope.recorder.y"}),
        ("import importlib\nimportlib.import_module('a.b')", {"importlib", "a.b"}),
    ],
)
def test_the_parser_sees_every_kind_of_import(source, names):
    assert imported_names(source, "stepscope.trace") == names


def test_parts_are_told_from_names_of_the_face():
    assert stepscope_parts({"stepscope.devices", "stepscope.trace.recording.X", "stepscope.step", "json"}) == {
        "devices",
        "trace",
        "__init__",
    }


def test_every_part_has_its_arrows():
    unknown = {part_of(path) for path in FILES} - MAY_IMPORT.keys()
    assert not unknown, f"say in MAY_IMPORT what {sorted(unknown)} may import, and in the design why"


def test_imports_point_down():
    parts = {path: part_of(path) for path in FILES}
    wrong = {path: stepscope_parts(imports_of(path)) - {part} - MAY_IMPORT[part] for path, part in parts.items()}

    assert {str(path.relative_to(ROOT)): names for path, names in wrong.items() if names} == {}


def test_the_read_side_never_imports_torch_and_the_record_side_nothing_but_torch():
    ours = {*sys.stdlib_module_names, "stepscope"}
    tops = {path: {name.split(".")[0] for name in imports_of(path)} - ours for path in FILES}

    assert [path for path, names in tops.items() if part_of(path) in WITHOUT_TORCH and "torch" in names] == []
    assert [path for path, names in tops.items() if part_of(path) == "recorder" and names - {"torch"}] == []


def modules_named(path: Path, modules: dict[str, Path]) -> set[str]:
    """Return the Stepscope modules that a file imports, at any depth; a package stands for its __init__."""
    found = set()
    for name in imports_of(path):
        words = name.split(".")
        for length in range(len(words), 0, -1):
            module = ".".join(words[:length])
            if module in modules:
                found.add(module)
                break
    return found


def test_no_file_imports_itself_through_others():
    modules = {}
    for path in FILES:
        words = ["stepscope", *path.relative_to(ROOT).with_suffix("").parts]
        modules[".".join(words[:-1] if words[-1] == "__init__" else words)] = path
    graph = {name: modules_named(path, modules) - {name} for name, path in modules.items()}
    cycles = cycles_of(graph)
    assert not cycles, "\n".join(" -> ".join(cycle) for cycle in cycles)


def cycles_of(graph: dict[str, set[str]]) -> list[list[str]]:
    """One cycle for each group of modules that import each other."""
    left = dict(graph)
    while free := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in free:
            del left[name]
    cycles, seen = [], set()
    for start in sorted(left):
        trail = [start]
        while (following := sorted(left[trail[-1]] & left.keys())) and following[0] not in trail:
            trail.append(following[0])
        if following and not seen & set(trail):
            cycles.append([*trail[trail.index(following[0]) :], following[0]])
        seen |= set(trail)
    return cycles


def test_a_cycle_is_found_wherever_it_is():
    assert cycles_of({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert cycles_of({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c", "b"]]


def test_polars_is_imported_before_its_parts():
    """Where a thread imports a part while another imports polars, each can wait for the other."""
    for path in sorted(ROOT.rglob("*.py")):
        found = re.findall(r"^(?:import polars\b.*|from polars\b.*)", path.read_text(), re.MULTILINE)
        assert not found or found[0] == "import polars as pl", path


def test_no_folder_is_crowded():
    num_files = Counter(str(path.parent.relative_to(ROOT)) for path in FILES)
    assert {folder: num for folder, num in num_files.items() if num > MOST_FILES_IN_A_FOLDER} == {}


def test_no_file_is_long():
    long = {str(path.relative_to(ROOT)): num for path in FILES if (num := len(path.read_text().splitlines())) > 400}
    assert not long, long


BLOCKED_RUN = """
import importlib, importlib.abc, importlib.util, json, pkgutil, sys, tempfile
from pathlib import Path

TORCH = importlib.machinery.PathFinder.find_spec("torch").submodule_search_locations[0]
STEPSCOPE = importlib.util.find_spec("stepscope").submodule_search_locations[0]
OURS = {"torch", "torchgen", "functorch", "stepscope"}

class OnlyTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        top = name.partition(".")[0]
        if top in OURS or top in sys.stdlib_module_names:
            return None
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.startswith(TORCH):
                return None  # what torch wants is torch's affair
            if frame.f_code.co_filename.startswith(STEPSCOPE):
                break
            frame = frame.f_back
        raise ModuleNotFoundError(f"{name} is not there on the machine that trains", name=name)

sys.meta_path.insert(0, OnlyTorch())
try:
    import hypothesis
except ModuleNotFoundError:
    pass
else:
    sys.exit("the blocker blocks nothing")

num_imported = 0
for package in ("recorder", "devices", "cli"):
    parent = importlib.import_module(f"stepscope.{package}")
    for module in pkgutil.iter_modules(parent.__path__, f"stepscope.{package}."):
        importlib.import_module(module.name)
        num_imported += 1
assert num_imported > 20, num_imported

import torch
import stepscope
from stepscope.cli.support.output import print_card
from stepscope.recorder.windows import Windows

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
windows = Windows(warmup=2, clean=4, trace=2, memory=1)
folder = Path(sys.argv[1])
with stepscope.record(folder, model=model, windows=windows) as rec:
    for _ in range(12):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
assert rec.result.summary.num_clean == 4
assert json.loads((folder / "recording.json").read_text()).get("notes") is None
print_card(rec.result, as_json=False)
"""


@pytest.mark.long
def test_the_record_side_runs_with_torch_and_the_standard_library_alone(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED_RUN, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )

    assert done.returncode == 0, done.stderr
    assert "A step takes" in done.stdout
    assert "optimizer.step()" in done.stdout and "12" in done.stdout


def test_what_both_sides_name_they_name_alike():
    """The arrows forbid one side to import the other's names, so a test compares them."""
    pytest.importorskip("torch")
    from stepscope.analysis.time import phases
    from stepscope.recorder import clock, files
    from stepscope.trace import recording

    assert (phases.PHASES, phases.BEFORE_FORWARD) == (clock.PHASES, clock.BEFORE_FORWARD)
    assert phases.BEFORE_BACKWARD == clock.BEFORE_BACKWARD
    for name in ("SCHEMA_VERSION", "RECORDING_FILE", "SAMPLES_FILE", "COUNTERS_FILE", "COMPILE_FILE"):
        assert getattr(files, name) == getattr(recording, name)
