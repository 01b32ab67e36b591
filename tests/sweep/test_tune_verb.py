"""`stepscope tune` with real processes: a known best knob, a fast variant that lies, memory that ends."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from sweep_runs import exit_code, quiet_environment, rows_in

TUNED = str(Path(__file__).with_name("tuned_workloads.py"))


@pytest.fixture
def stepscope(server, monkeypatch, capsys, tmp_path):
    """Run a verb in this process, with the points in real processes of one server: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stepscope.sweep.server.Server", lambda start: contextlib.nullcontext(server))

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["stepscope", *map(str, words)])
        code = exit_code()
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def tune(stepscope):
    return lambda *words: stepscope("tune", *words)


@pytest.mark.long
def test_the_fastest_right_way_is_found_and_the_liars_are_not_ranked(tune, tmp_path):
    words = (f"{TUNED}:NAP", "--over", "way", "--device", "cpu", "-o", "tuned")
    code, out, err = tune(*words, "--json")

    assert code == 0, out + err
    found = json.loads(out)
    assert found["best"]["turned"] == {"way": "quick"} and found["stopped"] == "settled"
    # 30 ms of sleep against 8, and what a step takes besides.
    assert found["gain"]["is_significant"] and found["gain"]["is_measured_again"]
    assert 1.5 < found["gain"]["low"] <= found["gain"]["speedup"] <= found["gain"]["high"]
    wrong = {point["turned"]["way"]: point["reason"] for point in found["points"] if point["status"] == "wrong"}
    assert wrong.keys() == {"cheating", "lazy"}
    assert "deviation 0.02, allowed 0.0001" in wrong["cheating"]
    assert wrong["lazy"].startswith("last loss")  # the first one is right: only its gradients are not
    right = {point["hash"] for point in found["points"] if point["status"] == "ok"}
    assert {point["hash"] for point in found["frontier"]} <= right
    assert json.loads((tmp_path / "tuned" / "tune.json").read_text()) == found

    num_rows = len(rows_in(tmp_path / "tuned"))
    code, out, err = tune(*words, "--resume")
    assert code == 0 and len(rows_in(tmp_path / "tuned")) == num_rows
    assert out.strip().startswith("way=quick:") and "× the defaults" in out
    assert found["command"] in " ".join(out.split()) and "way=cheating" in out and "wrong" in out

    code, out, err = tune(*words, "--memory-budget", "1GiB", "--resume")
    assert code == 2 and "other values or another budget" in err


@pytest.mark.long
def test_the_command_is_that_of_the_best_point(stepscope):
    held = ("--device", "cpu", "--dtype", "fp32", "--compile", "off", "--sdpa", "free", "--optimizer", "adamw")
    words = (f"{TUNED}:own", "--set", "fast=off,on", "--set", "batch=8", *held)
    code, out, err = stepscope("tune", *words, "--json", "-o", "tuned")

    assert code == 0, out + err
    found = json.loads(out)
    assert found["best"]["turned"] == {"fast": True} and found["axes"] == {"fast": [False, True]}
    code, out, err = stepscope(*found["command"].split()[1:], "--dry-run", "--json")
    assert code == 0, out + err
    assert [point["hash"] for point in json.loads(out)["points"]] == [found["best"]["hash"]]


@pytest.mark.long
def test_a_batch_that_does_not_fit_ends_the_climb(tune, tmp_path):
    code, out, err = tune(f"{TUNED}:NAP", "--set", "way=quick", "--set", "most=16", "--over", "batch",
                          "--device", "cpu", "--json", "-o", "tuned")  # fmt: skip

    assert code == 0, out + err
    found = json.loads(out)
    assert found["best"]["turned"] == {"batch": 16}
    (failed,) = [point for point in found["points"] if point["status"] != "ok"]
    assert failed["status"] == "oom" and failed["turned"]["batch"] == 32
    # Every batch but the plainest variant's own was held against the plainest variant of that batch.
    assert all(point["plain_loss"] is not None for point in found["points"] if point["status"] == "ok")


@pytest.mark.long
def test_a_plan_keeps_points_from_being_run(tune, tmp_path):
    code, out, err = tune("cs336", "--preset", "tiny", "--set", "seq_len=32", "--over", "batch",
                          "--device", "cpu", "--memory-budget", "4MiB", "-o", "tuned")  # fmt: skip

    assert code == 0, out + err
    rows = rows_in(tmp_path / "tuned")
    pruned = [row for row in rows if row["status"] == "skipped"]
    assert pruned and all(row["tune"]["predicted_bytes"] > 4 << 20 for row in pruned)
    assert all("seconds" in row and "samples_device_ns" not in row for row in pruned)
    for row in rows:
        if row["tune"].get("predicted_bytes") and row["status"] == "ok":
            assert row["tune"]["predicted_bytes"] == pytest.approx(row["peak_allocated_bytes"], rel=1e-3)
    ranked = [row for row in rows if row["status"] == "ok" and row["tune"]["role"] != "reference"]
    assert max(row["peak_allocated_bytes"] for row in ranked) <= 4 << 20
    assert "pruned by their plan" in out and "4.00 MiB are available" in out


@pytest.mark.long
def test_a_whole_step_has_only_knobs_of_its_own(tune):
    code, out, err = tune(f"{TUNED}:whole", "--set", "nap_ms=20,5", "--device", "cpu", "--json")

    assert code == 0, out + err
    found = json.loads(out)
    assert found["best"]["turned"] == {"nap_ms": 5} and found["unit"] == "steps"
    assert {name for entry in found["not_tried"] for name in entry["turned"]} == {
        "optimizer", "sdpa", "dtype", "compile",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--minutes", "0"], "--minutes: '0' must be a positive number"),
        (["--memory-budget", "much"], "'much' is not an amount of memory"),
        (["--set", "steps=3"], "at least 6 samples"),
    ],
)
def test_mistakes_are_one_line(tune, words, said):
    code, out, err = tune("cs336", *words)

    assert code == 2 and out == "" and said in err and err.count("\n") == 1


@pytest.mark.long
def test_as_a_command(tmp_path):
    words = ["tune", f"{TUNED}:own", "--set", "fast=off,on", "--over", "fast", "--device", "cpu"]
    words += ["--minutes", "0.001"]
    done = subprocess.run(
        [sys.executable, "-m", "stepscope", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=quiet_environment(),
    )

    assert done.returncode == 1 and done.stdout == ""
    assert "0.001 minutes" in done.stderr and "--minutes" in done.stderr and done.stderr.count("\n") == 1
