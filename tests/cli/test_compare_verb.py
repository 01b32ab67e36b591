"""`stepscope compare` as a process of its own, on real recordings, real sweeps and real traces."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from analyze_verb import training

from stepscope import read
from stepscope.cli.main import main
from trace_builder import TRACES, needs_traces

TRAIN = """
import sys, torch
from torch import nn
torch.manual_seed(0)
width = int(sys.argv[1])
model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, width), nn.GELU(), nn.Linear(width, 64))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(16):
    tokens = torch.randint(64, (4, 64))
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
WINDOWS = ("--warmup", "2", "--clean", "8", "--trace", "2")
SWEEP = ("attention", "--set", "batch=1,2", "--set", "seq_len=16", "--device", "cpu", "--mode", "forward")


def stepscope(*words, cwd):
    done = subprocess.run(
        [sys.executable, "-m", "stepscope", *map(str, words)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=200,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
    )
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture
def compare(capsys, monkeypatch):
    """The verb in this process: what it printed, or its complaint, after its exit code was the one expected."""
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)

    def run(*words, code=0):
        try:
            exit_code = main(["compare", *map(str, words)])
        except SystemExit as stop:  # argparse's own way
            exit_code = stop.code
        said = capsys.readouterr()
        assert exit_code == code, (exit_code, said.out, said.err)
        return said.out or said.err

    return run


@pytest.fixture
def as_json(compare):
    return lambda *words, code=0: json.loads(compare(*words, "--json", code=code))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, forks):
    """Two recordings, the second of a model twelve times as wide; the first again, and without its probes."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "train.py").write_text(TRAIN)
    for name, width in (("base", 64), ("wide", 768)):
        words = ["-m", "stepscope", "run", "--quiet", "-o", name, *WINDOWS, "train.py", str(width)]
        exit_code, _, stderr = forks.run(words, folder, {})
        assert exit_code == 0, stderr
    shutil.copytree(folder / "base", folder / "again")
    shutil.copytree(folder / "base", folder / "short", ignore=shutil.ignore_patterns("trace", "memory.json.gz"))
    return folder


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory):
    """A sweep of two implementations at two batches, as the two sweeps that would have run them one at a time."""
    folder = tmp_path_factory.mktemp("sweeps")
    words = (*SWEEP, "--set", "implementation=naive,builtin", "--trace", "--quiet", "-o", "naive")
    done = stepscope("bench", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    shutil.copytree(folder / "naive", folder / "builtin")
    lines = (folder / "naive" / "results.jsonl").read_text().splitlines(keepends=True)
    for name in ("naive", "builtin"):
        rows = [line for line in lines if json.loads(line)["config"]["implementation"] == name]
        assert len(rows) == 2
        (folder / name / "results.jsonl").write_text("".join(rows))
    return folder


def add_up(pair):
    for table in pair["tables"]:
        assert sum(row["delta"] for row in table["rows"]) == pytest.approx(table["delta"], abs=1), table["by"]
        assert table["rows"][-1]["name"] == "unattributed"
    return {table["by"]: table for table in pair["tables"]}


@pytest.mark.long
def test_two_recordings_of_one_script(runs):
    done = stepscope("compare", "base", "again", "--json", cwd=runs)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)

    (pair,) = found["pairs"]
    assert (found["kind"], found["exit_code"], pair["refused"], pair["unchecked"]) == ("recording", 0, [], [])
    step = next(change for change in pair["changes"] if change["metric"] == "step_time")
    card = read(runs / "base").to_json()
    assert step["base"] == card["step_ns"]["median"] and step["num_samples"] == [8, 8]
    assert step["low"] <= step["share"] == 0 <= step["high"] and step["verdict"] == "no difference shown"
    metrics = {change["metric"]: change for change in pair["changes"]}
    assert metrics["tokens_per_second"]["base"] == pytest.approx(card["throughput"]["per_s"])
    assert metrics["peak_memory"]["delta"] == 0 and metrics["peak_memory"]["verdict"] == "same"
    assert add_up(pair).keys() == {"phase", "module", "op", "memory"} and pair["missing"] == []
    assert pair["differs"] == []


@pytest.mark.long
def test_another_model_is_refused_and_says_how_to_go_on(runs, compare, as_json):
    text = compare(runs / "base", runs / "wide", code=4)

    assert text.strip().startswith("Not comparable: the two differ in parameters (8,320 and 76,608)")
    assert "--allow parameters,flops" in " ".join(text.split())
    assert as_json(runs / "base", runs / "wide", code=4)["pairs"][0]["changes"] == []
    compare(runs / "base", runs / "wide", "--fail-on", "peak_memory:900%", code=4)


@pytest.mark.long
def test_a_wider_model_is_slower_and_the_gates_say_so(runs, compare, as_json):
    words = (runs / "base", runs / "wide", "--allow", "parameters,flops")
    text = compare(*words, "--fail-on", "step_time:3%,peak_memory:1%", code=3)

    assert text.strip().startswith("Slower: a step takes") and "2 failed" in text
    assert re.search(r"command +train.py 64 +train.py 768", text)
    found = as_json(*words)
    tables = add_up(found["pairs"][0])
    assert tables["memory"]["delta"] > 0 and tables["memory"]["rows"][-1]["delta"] == 0
    assert tables["phase"]["delta"] == next(
        c["delta"] for c in found["pairs"][0]["changes"] if c["metric"] == "step_time"
    )
    compare(*words, "--fail-on", "step_time:100000%", "--fail-on", "peak_memory:100000%")
    compare(runs / "wide", runs / "base", "--allow", "parameters,flops", "--fail-on", "step_time:3%")


def test_a_gate_does_not_pass_on_what_is_not_there(runs, compare, as_json):
    assert "undecided" in compare(runs / "base", runs / "again", "--fail-on", "mfu:99%", code=4)
    assert "undecided" in compare(runs / "base", runs / "short", "--fail-on", "peak_memory:99%", code=4)
    missing = {each["what"]: each["reason"] for each in as_json(runs / "base", runs / "short")["pairs"][0]["missing"]}
    assert missing.keys() == {"trace", "memory", "peak_memory"}
    assert all(reason.startswith("new: ") and "stepscope run" in reason for reason in missing.values())
    late = json.loads((runs / "base" / "recording.json").read_text())
    folder = runs / "nothing"
    folder.mkdir()
    (folder / "recording.json").write_text(json.dumps({**late, "status": "interrupted"}))
    assert "No step time to compare" in compare(runs / "base", folder, "--fail-on", "peak_resident_memory:99%")
    compare(runs / "base", folder, "--fail-on", "step_time:99%", code=4)


@pytest.mark.long
def test_several_runs_of_each_side(runs, tmp_path, compare, as_json):
    """Three recordings of one script against three of it that took half as long again, each a little otherwise."""
    sides = []
    for name, factor in (("base", 1.0), ("new", 1.5)):
        sides.append([])
        for number in range(3):
            folder = tmp_path / f"{name}-{number}"
            shutil.copytree(runs / "base", folder)
            lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
            for line in (line for line in lines if "host_ns" in line):
                scale = factor * (1 + number / 100)
                line["host_ns"] = {part: round(ns * scale) for part, ns in line["host_ns"].items()}
                line["wall_ns"] = sum(line["host_ns"].values())
            (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            sides[-1].append(folder)
    words = ("--base", *sides[0], "--new", *sides[1])

    text = compare(*words, "--fail-on", "step_time:3%", code=3)
    (pair,) = as_json(*words)["pairs"]

    assert text.strip().startswith("Slower: a step takes") and "3 and 3 runs" in text
    step = next(change for change in pair["changes"] if change["metric"] == "step_time")
    assert (step["samples_are"], step["num_samples"], step["verdict"]) == ("runs", [3, 3], "slower")
    assert step["share"] == pytest.approx(0.5, rel=1e-3) and step["low"] < 0.47 and step["high"] > 0.53
    tables = add_up(pair)
    assert tables["phase"]["delta"] == pytest.approx(step["delta"])
    assert any("3 runs with" in note and "2.0 % apart" in note for note in pair["notes"])
    assert "Too few samples for a verdict: 2 and 3 runs" in compare(
        "--base", *sides[0][:2], "--new", *sides[1], code=4
    )
    for mistake, said in (
        (("--base", *sides[0]), "--base and --new belong together"),
        ((*sides[0],), "name BASE and NEW, or several runs of each"),
        (("--base", *sides[0], sides[0][0], "--new", *sides[1]), "is named twice"),
    ):
        assert said in compare(*mistake, code=2)
    other = compare("--base", sides[0][0], runs / "wide", "--new", *sides[1], code=4)
    assert "were passed as runs of the same thing but differ in parameters" in other


@pytest.mark.long
def test_sweeps_are_one_on_each_side(sweeps, compare):
    words = ("--base", sweeps / "naive", sweeps / "builtin", "--new", sweeps / "naive")
    assert "of bench results name one on each side" in compare(*words, code=2)


@pytest.mark.long
def test_two_sweeps_about_one_knob(sweeps, compare, as_json):
    found = as_json(sweeps / "naive", sweeps / "builtin" / "results.jsonl")

    assert (found["kind"], len(found["pairs"])) == ("bench", 2)
    assert {pair["name"] for pair in found["pairs"]} == {"batch=1", "batch=2"}
    for pair in found["pairs"]:
        assert [each["what"] for each in pair["differs"]] == ["implementation"]
        assert add_up(pair).keys() >= {"phase", "op"}
        step = next(change for change in pair["changes"] if change["metric"] == "step_time")
        rows = [json.loads(line) for line in (sweeps / "naive" / "results.jsonl").read_text().splitlines()]
        samples = next(sorted(row["samples_device_ns"]) for row in rows if row["hash"] == pair["base"])
        assert step["num_samples"] == [len(samples)] * 2
        assert step["base"] == pytest.approx((samples[4] + samples[5]) / 2)
    text = compare(sweeps / "naive", sweeps / "builtin", "--fail-on", "peak_memory:10000%")
    assert "2 points compared" in text and re.search(r"implementation +naive +builtin", text)


@pytest.mark.long
def test_a_point_that_is_gone_leaves_the_gate_undecided(sweeps, tmp_path, compare, as_json):
    # The samples of a steady machine, so that the gate of the row that is there can be decided.
    rows = [json.loads(line) for line in (sweeps / "naive" / "results.jsonl").read_text().splitlines()]
    steady = [json.dumps(row | {"samples_device_ns": [1000 + n % 7 for n in range(10)]}) + "\n" for row in rows]
    for name in ("whole", "half"):
        shutil.copytree(sweeps / "naive", tmp_path / name)
    whole, half = tmp_path / "whole", tmp_path / "half"
    (whole / "results.jsonl").write_text("".join(steady))
    (half / "results.jsonl").write_text(steady[0] + steady[1][:40])

    found = as_json(whole, half, "--fail-on", "step_time:99%", code=4)
    assert [gate["status"] for gate in found["gates"]] == ["passed", "undecided"] and len(found["only_in_base"]) == 1
    assert "half written" in " ".join(compare(whole, half).split())
    failed = rows[0] | {"status": "oom", "reason": "asked for 3 GiB"}
    (half / "results.jsonl").write_text(json.dumps(failed) + "\n" + steady[1])
    text = compare(whole, half, "--fail-on", "step_time:99%", code=4)
    assert "oom: asked for 3 GiB" in " ".join(text.split())


@pytest.mark.long
def test_two_of_different_kinds_are_refused(runs, sweeps, compare):
    message = compare(runs / "base", sweeps / "naive", code=4)
    assert "is a recording and" in message and "is a bench result: name two of one kind" in message
    trace = runs / "base" / "trace" / "rank0.json.gz"
    assert "is a trace" in compare(trace, runs / "base", code=4)


def test_markdown_and_the_summary_of_a_job(runs, tmp_path, compare, monkeypatch):
    words = (runs / "base", runs / "again", "--fail-on", "peak_memory:1%")
    markdown = compare(*words, "--markdown")
    assert "| peak allocated |" in markdown and "| passed |" in markdown
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    assert "needs GITHUB_STEP_SUMMARY" in compare(*words, "--github-summary", code=2)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    compare(*words, "--github-summary")
    assert summary.read_text() == "before\n" + markdown + "\n"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path))
    assert "cannot be written" in compare(*words, "--github-summary", code=2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--fail-on", "speed:3%"), "unknown metric 'speed'. Choose from step_time"),
        (("--fail-on", "step_time:3"), "step_time:3%"),
        (("--allow", "color"), "device, dtype, tokens"),
        (("--threshold", "two"), "such as 2%"),
        (("--json", "--markdown"), "name one"),
    ],
)
def test_mistakes_are_one_line(tmp_path, words, message, compare):
    training().write(tmp_path / "trace.json")

    said = compare(tmp_path / "trace.json", tmp_path / "trace.json", *words, code=2)

    assert message in said and len(said.splitlines()) == 1


def test_a_path_that_is_not_there(tmp_path, compare):
    assert "does not exist" in compare(tmp_path / "a", tmp_path / "b", code=2)


@pytest.mark.long
def test_a_trace_of_few_steps_is_shown_without_a_verdict(tmp_path, compare, as_json):
    training().write(tmp_path / "base.json")
    longer = training()
    longer.kernel("gemm_kernel_added", 170, 10)
    longer.write(tmp_path / "new.json")

    text = compare(tmp_path / "base.json", tmp_path / "new.json", "--no-cache", code=4)

    assert text.strip().startswith("Too few samples for a verdict: 2 and 2 steps")
    assert "equal: dtype, tokens, parameters, flops" in " ".join(text.split())
    tables = add_up(as_json(tmp_path / "base.json", tmp_path / "new.json", "--no-cache", code=4)["pairs"][0])
    assert {row["name"]: row["delta"] for row in tables["kernel_class"]["rows"]}["gemm"] == 5000
    compare(tmp_path / "base.json", tmp_path / "new.json", "--no-cache", "--fail-on", "step_time:900%", code=4)


@needs_traces
def test_real_traces(tmp_path, compare, as_json):
    diff = TRACES / "public" / "trace_diff"
    words = [shutil.copy(diff / name, tmp_path) for name in ("control.json.gz", "test.json.gz")]
    assert "device (NVIDIA A100-PG509-200 and Tesla V100-SXM2-16GB)" in " ".join(compare(*words, code=4).split())
    found = as_json(*words, "--allow", "device")
    add_up(found["pairs"][0])
    assert next(c for c in found["pairs"][0]["changes"] if c["metric"] == "step_time")["verdict"] == "slower"


@needs_traces
def test_a_stalled_loader_shows_as_idle(as_json):
    h200 = TRACES / "h200"
    found = as_json(h200 / "gpt2_eager.json.gz", h200 / "data_stall.json.gz", "--no-cache", code=4)

    tables = add_up(found["pairs"][0])
    for by in ("phase", "kernel_class"):
        first = tables[by]["rows"][0]
        assert first["name"] == "idle" and first["delta"] == pytest.approx(tables[by]["delta"], rel=0.02)
