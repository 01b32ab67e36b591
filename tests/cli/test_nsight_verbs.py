"""Every verb that takes a trace, on an export of Nsight Systems."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import stepscope
from nsight_files import NsightBuilder, training_run
from parametrized import parametrized
from stepscope.trace.reader import read_trace
from verbs import run_verb

CANNOT_TELL = "does not record dtypes"


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = training_run().row("TARGET_INFO_GPU", id=0, name="NVIDIA H100 80GB HBM3")
    return run.write(tmp_path_factory.mktemp("nsight"))


@parametrized("words", [("show",), ("analyze",), ("diagnose",), ("report", "-o", "report.md")], quick=2)
def test_a_verb_says_what_it_found_and_what_the_export_cannot_tell(
    export: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    done = run_verb(words[0], export, *words[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "report.md").read_text() if "report.md" in words else " ".join(done.stdout.split())
    assert CANNOT_TELL in " ".join(text.split())


def test_analyze_counts_exactly(export: Path) -> None:
    analysis = json.loads(run_verb("analyze", export, "--json").stdout)
    (rank,) = analysis["ranks"]
    assert (rank["step_source"], analysis["trace"]["steps"]) == ("range", 4)
    assert rank["gpu_time"]["compute_ns"] == 16 * 100_000
    assert analysis["trace"]["device"] == "NVIDIA H100 80GB HBM3"
    phases = {row["phase"]: row["device_ns"] for row in rank["phases"] if row["device_ns"]}
    assert [phases[name] for name in ("forward", "backward", "optimizer")] == [800_000, 400_000, 400_000]


def test_functions_take_an_export_too(export: Path) -> None:
    assert stepscope.analyze(export).ranks[0].gpu_time.compute_ns == 16 * 100_000
    assert stepscope.open(export).case.num_steps >= 1


def test_rules_that_need_dtypes_are_not_checked(export: Path, tmp_path: Path) -> None:
    diagnosis = json.loads(run_verb("diagnose", export, "--json").stdout)
    needing = {
        "float64_work",
        "loss_scaling",
        "fp32_matmul",
        "unfused_elementwise",
        "attention_backend",
        "memory_layout",
    }
    why = {each["id"]: each["reason"] for each in diagnosis["unchecked"]}
    assert all("no dtypes" in why[name] for name in needing)
    assert {"small_gemms", "synchronization", "waiting_for_data"} <= set(diagnosis["clean"])
    # Without shapes, even less can be checked.
    bare = json.loads(run_verb("diagnose", training_run(shapes=False).write(tmp_path), "--json").stdout)
    assert "small_gemms" not in bare["clean"]


def test_sql_memory_and_compare_answer(export: Path, tmp_path: Path) -> None:
    answer = run_verb("analyze", "--sql", export, "select sum(duration_ns) as total from device")
    assert "1600000" in answer.stdout
    memory = run_verb("analyze", "--memory", export)
    assert memory.returncode != 0 and "memory" in memory.stderr
    slower = training_run()
    for row in slower.rows["CUPTI_ACTIVITY_KIND_KERNEL"]:
        row["end"] += 50_000
    compared = json.loads(run_verb("compare", export, slower.write(tmp_path), "--json").stdout)
    changes = {change["metric"]: (change["base"], change["new"]) for change in compared["pairs"][0]["changes"]}
    assert changes["gpu_busy_time"] == (400_000, 550_000)  # two of them overlap now


@parametrized("format_", ["perfetto", "speedscope", "csv", "parquet"], quick=2)
def test_export_writes_it_for_other_tools(export: Path, tmp_path: Path, format_: str) -> None:
    name = f"out.{format_}.json" if format_ in ("perfetto", "speedscope") else "out"
    done = run_verb("export", export, format_, "-o", tmp_path / name)
    assert done.returncode == 0 and (tmp_path / name).exists(), done.stderr
    if format_ == "perfetto":
        again, first = read_trace(tmp_path / name).device, read_trace(export).device
        columns = ["kind", "name", "device", "stream", "start_ns", "duration_ns", "correlation", "grid", "block"]
        assert again.select(columns).sort("start_ns").equals(first.select(columns).sort("start_ns"))


def test_each_process_is_a_rank(tmp_path: Path) -> None:
    run = NsightBuilder(pid=1).launch("a", 10, runs=(20, 7)).process(2, gpu=1).launch("b", 10, runs=(20, 5))
    path = run.write(tmp_path)
    analysis = json.loads(run_verb("analyze", path, "--json").stdout)
    assert [rank["gpu_time"]["compute_ns"] for rank in analysis["ranks"]] == [7000, 5000]
    one = json.loads(run_verb("analyze", path, "--rank", "1", "--json").stdout)
    assert [rank["rank"] for rank in one["ranks"]] == [1]
    assert sum(CANNOT_TELL in text for text in analysis["trace"]["warnings"]) == 1
