"""Databases of rocprofv3 as the tables of a trace: written by hand, and real ones against plain SQL.

For the real ones set STEPSCOPE_ROCPD to a folder of `*_results.db`; public ones are in HGLiu1998/batched_gemm.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from nsight_files import changed
from rocpd_files import RocpdBuilder, training_run
from stepscope.errors import TraceError
from stepscope.trace.find import find_traces, open_ranks
from stepscope.trace.reader import read_trace
from verbs import run_verb

FOLDER = os.environ.get("STEPSCOPE_ROCPD")
SAMPLES = sorted(Path(FOLDER).rglob("*.db")) if FOLDER else []


def test_every_kind_of_row_has_its_place_and_its_profiler_name(tmp_path: Path) -> None:
    run = RocpdBuilder(gpu=1).range("step 3", 0, 90).launch("gemm<float>", 10, runs=(20, 30))
    run.copy("HOST_TO_DEVICE", 60, 10, 4096).region("hsa_queue_create", "HSA_CORE_API", 80, 1)
    run.range("aten::mm, seq = 4, op_id = 5, sizes = [[2, 3], []]", 85, 2).region("sample", "OMPT", 88, 1)
    trace = read_trace(run.write(tmp_path))
    assert trace.host.select("kind", "name", "start_ns", "duration_ns").rows() == [
        ("annotation", "step 3", 0, 90_000), ("runtime", "hipLaunchKernel", 10_000, 5_000),
        ("runtime", "hipMemcpyWithStream", 60_000, 15_000), ("driver", "hsa_queue_create", 80_000, 1_000),
        ("op", "aten::mm", 85_000, 2_000),
    ]  # fmt: skip
    where = ("kind", "name", "device", "stream", "start_ns", "duration_ns", "bytes", "grid", "block")
    assert trace.device.select(where).rows() == [
        ("kernel", "gemm<float>", 1, 3, 20_000, 30_000, None, "[4, 2, 1]", "[256, 1, 1]"),
        ("memcpy", "Memcpy HtoD (Host -> Device)", 1, 9, 60_000, 10_000, 4096, None, None),
    ]  # fmt: skip
    calls = trace.host.filter(trace.host["kind"] == "runtime")["correlation"].to_list()
    assert trace.device["correlation"].to_list() == calls and None not in calls
    assert trace.device["shared_memory_bytes"].to_list() == [4096, None]
    assert trace.host.row(4, named=True)["shapes"] == "[[2, 3], []]"
    assert trace.threads.row(0)[1:4] == ("100", "100", "python")
    assert trace.facts.devices == ("AMD Instinct MI300X",) * 2
    assert trace.facts.versions == {"rocpd_schema_version": "3"}


def test_verbs_find_steps_and_phases_and_say_what_is_missing(tmp_path: Path) -> None:
    path = training_run().write(tmp_path)
    done = run_verb("analyze", tmp_path, "--json")  # the folder, as rocprofv3 writes it
    (rank,) = json.loads(done.stdout)["ranks"]
    assert rank["step_source"] == "range" and rank["gpu_time"]["compute_ns"] == 8 * 100_000
    phases = {row["phase"]: row["device_ns"] for row in rank["phases"] if row["device_ns"]}
    assert (phases["forward"], phases["backward"]) == (400_000, 400_000)
    for words in (("show",), ("diagnose",), ("report", "-o", "report.md")):
        done = run_verb(words[0], path, *words[1:], cwd=tmp_path)
        text = (tmp_path / "report.md").read_text() if "report.md" in words else done.stdout
        assert done.returncode == 0 and "does not record dtypes" in " ".join(text.split()), done.stderr


def test_processes_of_one_file_are_ranks_by_gpu(tmp_path: Path) -> None:
    RocpdBuilder(300, gpu=1).launch("second", 10, runs=(20, 7)).write(tmp_path, suffix="_1")
    path = RocpdBuilder(200, gpu=0).launch("first", 15, runs=(30, 5)).write(tmp_path, suffix="_2")
    files = find_traces([path])
    assert [file.rank for file in files] == [0, 1]
    assert [opened.trace.device["name"].to_list() for opened in open_ranks(files)] == [["first"], ["second"]]


def test_what_cannot_be_read_says_so(tmp_path: Path) -> None:
    newer = changed(tmp_path / "new.db", "CREATE TABLE rocpd_region_1 (id INT, start_id INT, end_id INT)")
    with pytest.raises(TraceError, match="schema that Stepscope cannot read"):
        find_traces([newer])
    older = changed(tmp_path / "run.rpd", "CREATE TABLE rocpd_op (id INT)")
    with pytest.raises(TraceError, match="rocmProfileData"):
        find_traces([older])
    with pytest.raises(TraceError, match="no events"):
        read_trace(RocpdBuilder().write(tmp_path, "empty.db"))
    only_view = tmp_path / "view.db"
    changed(only_view, "CREATE VIEW rocpd_region_1 AS SELECT 1 AS start, 2 AS end")
    with pytest.raises(TraceError):
        read_trace(only_view)


def test_other_databases_in_a_folder_are_passed_over(tmp_path: Path) -> None:
    changed(tmp_path / "mlflow.db", "CREATE TABLE runs (id INT)")
    (tmp_path / "profile.db").write_bytes(b"HPCTOOLKIT")
    path = training_run(1).write(tmp_path)
    assert [file.path for file in find_traces([tmp_path])] == [path]


def test_hostile_values_are_null_or_text(tmp_path: Path) -> None:
    path = training_run(1).write(tmp_path)
    changed(
        path,
        "UPDATE rocpd_event_0000aa_bb SET extdata = '[' || extdata WHERE id = 1",
        "UPDATE rocpd_event_0000aa_bb SET extdata = x'00ff' WHERE id = 2",
        "UPDATE rocpd_kernel_dispatch_0000aa_bb SET agent_id = 'x', workgroup_size_x = 0, stream_id = 1.5",
        "UPDATE rocpd_region_0000aa_bb SET tid = -1, pid = 9223372036854775807 WHERE id = 3",
        "UPDATE rocpd_info_agent_0000aa_bb SET type_index = 9223372036854775807",
    )
    trace = read_trace(path)
    assert trace.device.filter(trace.device["kind"] == "kernel").select("device", "stream").unique().rows() == [
        (None, 9)
    ]
    assert trace.host["name"].to_list().count("roctxThreadRangeA") == 2


def test_a_text_that_is_too_long_is_cut(tmp_path: Path) -> None:
    path = RocpdBuilder().range("step " + "x" * 5000, 0, 10).write(tmp_path)
    (name,) = read_trace(path).host["name"].to_list()
    assert name.startswith("step xxx") and 4000 < len(name) < 4100


@pytest.mark.skipif(not SAMPLES, reason="no databases here: set STEPSCOPE_ROCPD to their folder")
@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_sums_equal_plain_sql_exactly(path: Path) -> None:
    database = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)
    kernels = "SELECT display_name, count(*), sum(k.end - k.start) FROM rocpd_kernel_dispatch k "
    kernels += "JOIN rocpd_info_kernel_symbol s ON s.id = kernel_id GROUP BY 1"
    copies = "SELECT dst_agent_id, count(*), sum(size) FROM rocpd_memory_copy GROUP BY 1"
    calls = "SELECT string, count(*), sum(r.end - r.start) FROM rocpd_region r JOIN rocpd_string s ON s.id = name_id "
    theirs = [sorted(database.execute(query)) for query in (kernels, copies, f"{calls} GROUP BY 1")]
    database.close()
    (opened,) = open_ranks(find_traces([path]), use_cache=False)
    trace, ours = opened.trace, []
    is_kernel = trace.device["kind"] == "kernel"
    for frame, key, amount in (
        (trace.device.filter(is_kernel), "name", "duration_ns"),
        (trace.device.filter(~is_kernel), "device", "bytes"),
        (trace.host, "name", "duration_ns"),
    ):
        counts: Counter[str] = Counter()
        sums: Counter[str] = Counter()
        for name, value in frame.select(key, amount).iter_rows():
            counts[name] += 1
            sums[name] += value
        ours.append(sorted((name, counts[name], sums[name]) for name in counts))
    assert ours == theirs
    launches = set(trace.host["correlation"]) & set(trace.device["correlation"])
    assert launches == set(trace.device["correlation"])
