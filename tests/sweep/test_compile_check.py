"""`stepscope bench --check compile`: same, differing and failing workloads at two shapes, each in its own process."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from sweep_runs import exit_code

from stepscope.cli.checks.bench_compile import EXIT_NOT_SAME
from stepscope.cli.main import main
from stepscope.document.sections.compiler import check_json, checks_document
from stepscope.render.terminal import terminal_text
from stepscope.sweep import prepare
from stepscope.sweep.checks import compile_check
from stepscope.sweep.checks.compile_runs import shapes_of
from stepscope.sweep.grid import Grid
from stepscope.sweep.process import run_point
from stepscope.sweep.protocol import Request
from stepscope.workloads.registry import find

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
FILE = Path(__file__).with_name("compiled_workloads.py")
WORKLOAD = f"{FILE}:build"


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """A check's row, in this process and with a back end that compiles nothing."""
    monkeypatch.setattr(prepare, "compiled", lambda module, run: torch.compile(module, backend="eager"))
    monkeypatch.setattr(compile_check.memory, "limit_to_machine", lambda: None)
    monkeypatch.setattr(compile_check, "FEWEST_SECONDS", 0.0)

    def check(kind="same", shapes=({"batch": 8}, {"batch": 4}), workload=WORKLOAD, **run):
        torch._dynamo.reset()
        defaults = {"device": "cpu", "mode": "forward+backward", "compile": "default", "warmup": 1, "steps": 1}
        grid = Grid(find(workload), defaults)
        (point,) = grid.points([{**({"kind": [kind]} if kind else {}), **{name: [v] for name, v in run.items()}}])
        request = Request(
            workload=workload,
            preset=point.preset,
            config=dict(point.config),
            run=dict(point.run),
            result_path=str(tmp_path / "result.json"),
            log_path=str(tmp_path / "log"),
            shapes=list(shapes),
        )
        run_point(request)
        fields = json.loads((tmp_path / "result.json").read_text())
        return {"workload": "w", "preset": None, "config": dict(point.config), "run": dict(point.run), **fields}

    yield check
    torch._dynamo.reset()
    torch._inductor.config.fallback_random = False


def test_compiled_code_that_computes_the_same(checked):
    row = checked()
    check = check_json(row)

    assert row["status"] == "ok" and check["verdict"] == "same"
    assert [shape["shape"] for shape in row["shapes"]] == [{"batch": 8}, {"batch": 4}]
    assert all(shape["deviations"] == {"outputs": 0.0, "gradients": 0.0} for shape in row["shapes"])
    assert check["compiler"]["num_recompiles"] == 1
    (again,) = check["compiler"]["recompiles"]
    assert again["values"] == ("8", "4") and again["is_size"]
    assert check["compiler"]["break_even"] is None or check["compiler"]["break_even"] > 0
    text = terminal_text(checks_document([row]), 80)
    assert "seen: 8, 4" in text and max(map(len, text.splitlines())) <= 80


def test_compiled_code_that_computes_something_else(checked):
    row = checked("differs")

    assert row["status"] == "wrong" and row["reason"].startswith("output 0: ")
    assert "differs" in terminal_text(checks_document([row]), 80)


def test_what_does_not_compile_is_a_row_with_one_line_and_its_place(checked, capsys):
    row = checked("fails")
    line = next(n for n, text in enumerate(FILE.read_text().splitlines(), 1) if "planted: cannot be" in text)

    assert row["status"] == "crashed" and check_json(row)["verdict"] == "does not compile"
    assert re.search(r"8.{1,8}8.*3.{1,8}3", row["reason"]) and f"{FILE.name}:{line} in forward" in row["reason"]
    assert "\n" not in row["reason"] and len(row["reason"]) < 700
    assert "Traceback" in capsys.readouterr().err  # the log has it all


def test_what_cannot_be_checked_is_said(checked):
    assert checked(compile="off")["reason"] == "compile=off leaves nothing to check"
    whole = checked(None, workload=f"{FILE}:step", mode="step")
    assert whole["status"] == "skipped" and "complete training step" in whole["reason"]


def test_shapes_are_a_length_or_a_batch_and_half_of_it():
    (point,) = Grid(find(WORKLOAD), {"device": "cpu"}).points([{"batch": ["10"]}])

    assert shapes_of(point, None) == [{"batch": 10}, {"batch": 5}]
    assert shapes_of(point, ("batch", [4, 6])) == [{"batch": 4}, {"batch": 6}]
    (small,) = Grid(find(WORKLOAD), {"device": "cpu"}).points([{"batch": ["3"]}])
    assert shapes_of(small, None) == [{}]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shapes", "batch"], "key=v1,v2"),
        (["--shapes", "batch=4"], "two or more values"),
        (["--shapes", "bach=4,6"], "batch"),
        (["--shapes", "kind=same,fails"], "integer values"),
        (["--timeout", "0"], "--timeout"),
        (["--compile", "fast"], "compile"),
    ],
)
def test_mistakes_are_one_line(capsys, words, said):
    assert exit_code(["bench", "--check", "compile", WORKLOAD, "--device", "cpu", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.strip().splitlines()) == 1


@pytest.mark.long
def test_the_verb_in_a_fresh_process(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    words = [
        "bench",
        "--check",
        "compile",
        WORKLOAD,
        "--device",
        "cpu",
        "--set",
        "kind=same,fails",
        "--mode",
        "forward",
        "--json",
    ]

    assert main(words) == EXIT_NOT_SAME
    same, fails = json.loads(capsys.readouterr().out)["checks"]
    assert (same["verdict"], fails["verdict"]) == ("same", "does not compile")
    assert same["compiler"]["num_graphs"] == 2 and same["compiler"]["seconds"] > 0
    assert any("Traceback" in line for line in fails["log"]) and "log" not in same


def test_a_check_that_fails_has_what_was_known():
    error = RuntimeError("backend='inductor' raised:\nno luck\nmore")
    fields = compile_check._failure(error, "compiled call at batch=4")

    assert fields["reason"] == "RuntimeError: no luck" and fields["compiles"] is False
