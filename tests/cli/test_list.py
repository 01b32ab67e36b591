"""`stepscope list`: what there is to run."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest

from stepscope.cli import list as list_verb
from stepscope.cli.main import main
from stepscope.workloads import registry


def run(capsys, *words):
    code = main(["list", *words])
    return code, *capsys.readouterr()


def test_a_workload_has_presets_with_parameters_and_knobs_with_values(capsys):
    code, out, _ = run(capsys, "workloads", "tsmoe")

    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("tsmoe  time-series")
    assert "  presets 538m  538,130,793 (198,392,169 active)  all knobs at their defaults" in lines
    assert any("23,108,841 (12,492,009 active)" in line for line in lines)
    (dispatch,) = [line for line in lines if line.split()[0] == "dispatch"]
    assert "loop  loop|capacity|one_hot|tile|grouped" in dispatch
    assert max(map(len, lines)) <= 110


def test_json_says_the_same(capsys):
    code, out, _ = run(capsys, "workloads", "tsmoe", "moe", "--json")

    tsmoe, moe = json.loads(out)["workloads"]
    assert code == 0 and (tsmoe["kind"], moe["kind"]) == ("model", "op")
    assert tsmoe["presets"][0] == {
        "name": "538m",
        "sets": {},
        "num_parameters": 538_130_793,
        "num_active_parameters": 198_392_169,
    }
    knobs = {knob["name"]: knob for knob in tsmoe["knobs"]}
    assert knobs["batch"] == {
        "name": "batch",
        "kind": "int",
        "default": 16,
        "values": None,
        "about": knobs["batch"]["about"],
    }
    assert knobs["dispatch"]["values"][0] == "loop" and tsmoe["reference"]["dispatch"] == "loop"
    assert "num_parameters" not in moe["presets"][0]


def test_every_workload_is_there_and_fits(capsys):
    code, out, _ = run(capsys, "workloads")

    assert code == 0
    heads = [line.split()[0] for line in out.splitlines() if line and not line.startswith(" ")]
    assert heads == list(registry.names())
    assert max(map(len, out.splitlines())) <= 110 and not out.endswith("\n\n")


def test_a_workload_of_ones_own(capsys, tmp_path):
    (tmp_path / "mine.py").write_text("def build(size: int = 3, fast: bool = True):\n    return lambda: size\n")

    code, out, _ = run(capsys, "workloads", f"{tmp_path}/mine.py:build")

    assert code == 0 and "a user-defined workload" in " ".join(out.split())  # the path may be long
    assert any(line.split()[:3] == ["fast", "true", "true|false"] for line in out.splitlines())


def test_long_words_do_not_break_the_columns():
    entry = {
        "name": "wide",
        "about": "word " * 60,
        "presets": [{"name": "p", "sets": {f"knob_{i}": i for i in range(40)}}],
        "knobs": [],
    }

    lines = list(list_verb.workload_lines(entry, 0))

    assert max(map(len, lines)) <= 110 and len(lines) > 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["workloads", "tsmo"], "did you mean tsmoe?"),
        (["wrkloads"], "workloads"),
        ([], "WHAT"),
    ],
)
def test_mistakes_are_one_line(words, message):
    done = subprocess.run([sys.executable, "-m", "stepscope", "list", *words], capture_output=True, text=True)

    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.long
def test_a_reader_who_has_seen_enough_is_no_error_and_a_closed_stream_is_one():
    command = f"{shlex.quote(sys.executable)} -m stepscope list workloads norm"
    done = subprocess.run(f"{command} | true; {command} >&-; echo $?", shell=True, capture_output=True, text=True)

    assert done.stdout == "2\n"
    assert done.stderr == "stepscope list: the answer could not be written: standard output is closed\n"


def test_help_costs_no_torch():
    code = (
        "import sys; from stepscope.cli.main import main\n"
        "try: main(['list', '--help'])\nexcept SystemExit: sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
