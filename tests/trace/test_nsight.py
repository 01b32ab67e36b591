"""The SQLite export of Nsight Systems as the tables of a trace."""

from __future__ import annotations

import contextlib
import gzip
import random
import sqlite3
from pathlib import Path

import pytest

from nsight_files import (
    COPY,
    EVENT,
    FILL,
    GRAPH,
    KERNEL,
    OLD_SCHEMA,
    RUNTIME,
    SCHEMA,
    SYNC,
    NsightBuilder,
    changed,
    training_run,
)
from parametrized import parametrized
from stepscope.errors import TraceError, UsageError
from stepscope.trace.find import find_traces, open_ranks
from stepscope.trace.reader import read_trace
from trace_builder import TraceBuilder


def test_a_run_gives_the_same_tables_as_a_trace_of_the_profiler(tmp_path: Path) -> None:
    export, trace = NsightBuilder(), TraceBuilder()
    for step in range(2):
        at = 1000 * step
        export.range(f"ProfilerStep#{step}", at, 900)
        trace.step(step, at, 900)
        export.range(f"aten::mm, seq = {step}, op_id = {step + 1}, sizes = [[8, 4], [4, 2]]", at + 10, 40)
        trace.op("aten::mm", at + 10, 40, sequence=step, forward_thread=0, **{"Input Dims": [[8, 4], [4, 2]]})
        export.launch("gemm<float>", at + 20, runs=(at + 100, 50), dur=1)
        trace.launch("gemm<float>", at + 20, runs=(at + 100, 50))
    ours, theirs = read_trace(export.write(tmp_path)), trace.read()
    for table, columns in {
        "host": [
            "kind",
            "name",
            "start_ns",
            "duration_ns",
            "sequence",
            "forward_thread",
            "shapes",
            "parent",
            "self_ns",
        ],
        "device": ["kind", "name", "device", "stream", "start_ns", "duration_ns"],
    }.items():
        one, other = getattr(ours, table), getattr(theirs, table)
        assert one.schema == other.schema
        assert one.select(columns).rows() == other.select(columns).rows()
    assert ours.host.filter(ours.host["kind"] == "runtime")["correlation"].to_list() == [1, 2]


def test_every_kind_of_row_has_its_place_and_its_profiler_name(tmp_path: Path) -> None:
    export = NsightBuilder().launch("fill<int>", 10, runs=(20, 30), graphId=3, graphNodeId=12)
    export.call("cudaMemcpyAsync_v3020", 60, 5, correlation=2).call("cuMemsetD8Async", 70, 5, correlation=3)
    export.gpu_row(COPY, 65, 10, 2, bytes=4096, copyKind=1, srcKind=0, dstKind=2)
    export.gpu_row(FILL, 80, 2, 3, bytes=64, memKind=2)
    export.call("cudaStreamWaitEvent_v3020", 90, 1, correlation=4).gpu_row(
        SYNC, 90, 1, 4, syncType=2, eventId=5, eventSyncId=9
    )
    export.gpu_row(EVENT, 50, 0, 8, eventId=5, eventSyncId=9, streamId=13)
    export.call("cudaEventSynchronize_v3020", 95, 1, correlation=5).gpu_row(
        SYNC, 95, 1, 5, syncType=1, streamId=2**32 - 1
    )
    export.row("PROFILER_OVERHEAD", start=1, end=5, globalTid=(1 << 48 | 100 << 24 | 1), nameId=export.text("flush"))
    export.row("TARGET_INFO_GPU", id=0, name="NVIDIA H100").row("TARGET_INFO_SESSION_START_TIME", utcEpochNs=10**18)
    export.row("PROCESSES", globalPid=1 << 48 | 100 << 24, pid=100, name="python3")
    export.row("ThreadNames", nameId=export.text("pt_main"), globalTid=(1 << 48 | 100 << 24 | 1))
    trace = read_trace(export.write(tmp_path))
    names = ["kind", "name", "bytes", "correlation"]
    assert trace.device.select(names).rows() == [
        ("kernel", "fill<int>", None, 1),
        ("memcpy", "Memcpy HtoD (Pageable -> Device)", 4096, 2),
        ("memset", "Memset (Device)", 64, 3),
    ]
    kernel = trace.device.row(0, named=True)
    sizes = ("grid", "block", "registers_per_thread", "shared_memory_bytes", "graph", "graph_node")
    assert [kernel[name] for name in sizes] == ["[4, 2, 1]", "[128, 1, 1]", 32, 1040, 3, 12]
    assert trace.syncs.select("name", "stream", "wait_on_stream", "wait_on_correlation").rows() == [
        ("Stream Wait Event", 7, 13, 8), ("Event Sync", None, None, None),
    ]  # fmt: skip
    assert trace.host.select("kind", "name").rows() == [
        ("overhead", "flush"), ("runtime", "cudaLaunchKernel"), ("runtime", "cudaMemcpyAsync"),
        ("driver", "cuMemsetD8Async"), ("runtime", "cudaStreamWaitEvent"), ("runtime", "cudaEventSynchronize"),
    ]  # fmt: skip
    assert trace.threads.row(0) == (0, "100", "1", "python3", None, "pt_main")
    assert trace.facts.devices == ("NVIDIA H100",) and trace.facts.base_time_ns == 10**18
    assert trace.facts.versions == {"nsight_systems_product_version": "2026.2.1"}


def test_texts_of_ops_become_names_numbers_and_shapes(tmp_path: Path) -> None:
    texts = {
        "aten::add, op_id = 3": ("op", "aten::add", None, None, None),
        "aten::mm, seq = 4, op_id = 5, sizes = [[2, 3], []], input_op_ids = [(3,0)]": (
            "op", "aten::mm", 4, 0, "[[2, 3], []]",
        ),
        "autograd::engine::evaluate_function: MmBackward0, seq = 4, op_id = 8": (
            "op", "autograd::engine::evaluate_function: MmBackward0", 4, 1, None,
        ),
        "MyFunction, seq = 6, op_id = 9": ("op", "MyFunction", 6, 0, None),
        "Optimizer.step#SGD.step, op_id = 11": ("annotation", "Optimizer.step#SGD.step", None, None, None),
        "FSDP::all_gather (layers.0), op_id = 12": ("annotation", "FSDP::all_gather (layers.0)", None, None, None),
        "step 3": ("annotation", "step 3", None, None, None),
        "aten::mm": ("annotation", "aten::mm", None, None, None),  # nobody but the user pushed this one
        "two\nlines, op_id = 1": ("annotation", "two\nlines, op_id = 1", None, None, None),
    }  # fmt: skip
    export = NsightBuilder()
    for number, text in enumerate(texts):
        export.range(text, 10 * number, 5)
    export.range("mark", 200, 0, end=None, eventType=34).range("open", 210, 0, end=None)
    export.row("NVTX_EVENTS", start=300_000, end=301_000, eventType=60, textId=export.text("registered"))
    host = read_trace(export.write(tmp_path)).host.sort("start_ns")
    found = host.select("kind", "name", "sequence", "forward_thread", "shapes").rows()
    registered = found.pop(0 if found[0][1] == "registered" else -1)
    assert dict(zip(texts, found)) == texts and registered[:2] == ("annotation", "registered")


def test_processes_are_ranks_whose_correlations_do_not_mix(tmp_path: Path) -> None:
    export = NsightBuilder(pid=300, gpu=1).launch("second", 10, runs=(20, 7))
    export.process(200, gpu=0).launch("first", 15, runs=(30, 5)).process(999).range("no GPU", 0, 1)
    files = find_traces([export.write(tmp_path)])
    assert [(file.rank, file.process and file.process & 0xFFFFFF) for file in files] == [(0, 200), (1, 300)]
    for opened, name in zip(open_ranks(files), ("first", "second"), strict=True):
        assert opened.trace.device["name"].to_list() == [name] and opened.is_known
        assert opened.trace.host["name"].to_list() == ["cudaLaunchKernel"]
        assert opened.trace.device["correlation"].to_list() == [1]
    only = list(open_ranks(files, rank=1))
    assert [each.trace.device["duration_ns"].sum() for each in only] == [7000]


def test_two_gpus_of_one_process_stay_one_trace(tmp_path: Path) -> None:
    export = NsightBuilder().launch("a", 10, runs=(20, 7)).launch("b", 12, runs=(20, 5), deviceId=1)
    (file,) = find_traces([export.write(tmp_path)])
    assert file.rank is None
    assert read_trace(file.path).device.select("device", "duration_ns").rows() == [(0, 7000), (1, 5000)]


def test_each_process_is_cached_on_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.trace.cache.WORTH_KEEPING", 1)
    monkeypatch.setattr("stepscope.trace.cache._SETTLED_NS", -1)
    export = NsightBuilder(pid=1).launch("a", 10, runs=(20, 7)).process(2, gpu=1).launch("b", 10, runs=(20, 5))
    files = find_traces([export.write(tmp_path)])
    first = [opened.trace.device.rows() for opened in open_ranks(files)]
    monkeypatch.setattr("stepscope.trace.reader.read_trace", None)  # the second time, nothing is read
    assert [opened.trace.device.rows() for opened in open_ranks(files)] == first


def test_a_path_with_odd_characters_and_a_journal_beside_it_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "100% #1?"
    folder.mkdir()
    path = changed(training_run(1).write(folder), "PRAGMA journal_mode = WAL")
    before = sorted(folder.iterdir())
    assert read_trace(path).device.height == 4
    assert sorted(folder.iterdir()) == before  # nothing is written beside it


def test_an_old_export_has_what_it_has(tmp_path: Path) -> None:
    new, old = training_run().write(tmp_path), training_run().write(tmp_path, "old.sqlite", OLD_SCHEMA)
    assert read_trace(new).device.drop("graph").equals(read_trace(old).device.drop("graph"))
    assert read_trace(new).host.equals(read_trace(old).host)
    assert read_trace(old).facts.versions == {"nsight_systems_product_version": "2026.2.1"}


@pytest.mark.parametrize(
    ("without", "says"),
    [
        ((KERNEL,), "no kernels"),
        (("NVTX_EVENTS",), "no PyTorch ops"),
        (("StringIds", "PROCESSES", "TARGET_INFO_GPU"), ""),
        ((RUNTIME,), ""),
    ],
)
def test_a_table_that_is_missing_leaves_the_others(tmp_path: Path, without: tuple[str, ...], says: str) -> None:
    trace = read_trace(training_run().write(tmp_path, without=without))
    assert trace.num_events and says in " ".join(trace.warnings)
    assert trace.device.height == (0 if KERNEL in without else 16)
    assert "does not record dtypes" in trace.warnings[-1]


def test_graphs_recorded_as_a_whole_keep_the_gpu_busy_and_are_told(tmp_path: Path) -> None:
    export = NsightBuilder().call("cudaGraphLaunch_v10000", 10, 5, correlation=1)
    trace = read_trace(export.gpu_row(GRAPH, 20, 300, 1, graphId=4).write(tmp_path))
    assert trace.device.select("kind", "name", "graph", "duration_ns").rows() == [
        ("kernel", "CUDA graph 4", 4, 300_000)
    ]
    assert "--cuda-graph-trace=node" in trace.warnings[0]


def test_rows_with_impossible_times_are_counted(tmp_path: Path) -> None:
    export = NsightBuilder().launch("good", 10, runs=(20, 7)).launch("backwards", 30, runs=(50, -7))
    export.launch("far", 40, runs=(60, 7), end=2**63 - 1)
    trace = read_trace(export.write(tmp_path))
    assert trace.device["name"].to_list() == ["good"]
    assert [text.partition(": ")[2] for text in trace.warnings[:2]] == [
        "1 rows have a negative duration and were skipped",
        "1 rows have a duration of more than 104 days and were skipped",
    ]


# -- files that mean harm -------------------------------------------------------------------------------------------


ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x AS start, x AS end FROM n"


def test_a_view_in_place_of_a_table_is_refused_and_never_runs(tmp_path: Path) -> None:
    path = training_run().write(tmp_path, without=(RUNTIME,))
    changed(path, f"CREATE VIEW {RUNTIME} AS {ENDLESS}")
    with pytest.raises(TraceError, match="RUNTIME is a view or a virtual table"):
        read_trace(path)


def test_a_virtual_table_is_refused(tmp_path: Path) -> None:
    path = training_run().write(tmp_path, without=("NVTX_EVENTS",))
    changed(path, "CREATE VIRTUAL TABLE NVTX_EVENTS USING fts5(text)")
    with pytest.raises(TraceError, match="NVTX_EVENTS is a view or a virtual table"):
        read_trace(path)


def test_columns_that_are_sql_are_null_and_triggers_and_indexes_do_nothing(tmp_path: Path) -> None:
    columns = "start INT, end INT, correlationId INT, globalTid INT, nameId INT AS (length(zeroblob(1)))"
    path = training_run().write(tmp_path, schema={**SCHEMA, RUNTIME: columns})
    changed(path, f"INSERT INTO {RUNTIME} (start, end, correlationId) VALUES (1, 2, 3)",
            f"CREATE TRIGGER t AFTER INSERT ON {RUNTIME} BEGIN SELECT randomblob(1); END",
            f"CREATE INDEX i ON {RUNTIME} (start, end, correlationId, globalTid) WHERE start > 0")  # fmt: skip
    host = read_trace(path).host
    calls = host.filter(host["kind"] == "runtime")
    assert calls["name"].null_count() == calls.height == 17


def test_values_of_another_type_are_null(tmp_path: Path) -> None:
    path = training_run(num_steps=1).write(tmp_path)
    changed(path, f"UPDATE {KERNEL} SET deviceId = 'many', streamId = 1.5, correlationId = zeroblob(1000000)",
            "UPDATE NVTX_EVENTS SET globalTid = 'x', text = x'41' WHERE rowid = 1",
            "UPDATE StringIds SET value = CAST(x'ff41' AS TEXT) WHERE id = 1")  # fmt: skip
    trace = read_trace(path)
    assert trace.device.select("device", "stream", "correlation").unique().rows() == [(None, None, None)]
    assert "�A" in trace.host["name"].to_list() and trace.host["name"].null_count() == 1


def test_a_start_that_is_text_drops_only_its_row(tmp_path: Path) -> None:
    path = changed(training_run(1).write(tmp_path), f"UPDATE {KERNEL} SET start = 'soon' WHERE rowid = 1")
    trace = read_trace(path)
    assert trace.device.height == 3 and "1 rows have no usable start time" in trace.warnings[0]


def test_names_that_are_too_long_are_cut_and_huge_ones_refused(tmp_path: Path) -> None:
    path = changed(training_run(1).write(tmp_path), f"UPDATE StringIds SET value = '{'x' * 5000}' WHERE id = 1")
    assert max(map(len, read_trace(path).host["name"].cast(str).drop_nulls())) == 4097
    changed(path, "UPDATE StringIds SET value = CAST(zeroblob(20000000) AS TEXT) WHERE id = 1")
    if hasattr(sqlite3.Connection, "setlimit"):  # from Python 3.11 on; before, the name is only cut
        with pytest.raises(TraceError, match="too big"):
            read_trace(path)


def test_more_rows_than_the_limit_are_refused_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = training_run().write(tmp_path)
    monkeypatch.setenv("STEPSCOPE_MAX_SQLITE_ROWS", "3")
    with pytest.raises(TraceError, match="STEPSCOPE_MAX_SQLITE_ROWS"):
        read_trace(path)


def test_pages_that_repeat_end_with_an_error(tmp_path: Path) -> None:
    """A page of a table that names the same child many times holds more rows than the file has bytes."""
    path = _with_repeated_pages(training_run(1).write(tmp_path))
    with pytest.raises(TraceError, match="more rows than bytes"):
        read_trace(path)


def _with_repeated_pages(path: Path) -> Path:
    """Make the string table a tree of five levels, whose pages all point 400 times to the level below."""
    database = sqlite3.connect(path)
    (root,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'StringIds'").fetchone()
    (size,) = database.execute("PRAGMA page_size").fetchone()
    database.close()
    data = bytearray(path.read_bytes())
    leaf = data[(root - 1) * size : root * size]
    pages = len(data) // size
    levels = [leaf]
    for level in range(1, 5):
        child = pages + level
        cell = child.to_bytes(4, "big") + b"\x7f"
        num = 400
        first = size - num * len(cell)
        pointers = b"".join((first + each * len(cell)).to_bytes(2, "big") for each in range(num))
        header = b"\x05\0\0" + num.to_bytes(2, "big") + first.to_bytes(2, "big") + b"\0" + child.to_bytes(4, "big")
        levels.append(bytearray((header + pointers).ljust(first, b"\0") + cell * num))
    data[(root - 1) * size : root * size] = levels.pop()
    for level in levels:
        data += level
    data[28:32] = (len(data) // size).to_bytes(4, "big")
    path.write_bytes(data)
    return path


def test_what_is_no_export_says_what_it_is(tmp_path: Path) -> None:
    other = changed(tmp_path / "mlflow.sqlite", "CREATE TABLE runs (id INT)")
    with pytest.raises(TraceError, match="an SQLite database without the tables of Nsight Systems"):
        find_traces([other])
    with pytest.raises(UsageError, match=r"\*\.sqlite of Nsight Systems"):
        find_traces([tmp_path])
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(b"NVIDIA Tegra Profiler Report 1.\n\x0bLocal")
    with pytest.raises(TraceError, match="nsys export --type sqlite"):
        read_trace(report)
    packed = tmp_path / "run.sqlite.gz"
    packed.write_bytes(gzip.compress(training_run(1).write(tmp_path).read_bytes()))
    with pytest.raises(TraceError, match="decompress it with gunzip"):
        read_trace(packed)
    assert [file.path.name for file in find_traces([tmp_path])] == ["run.sqlite"]


@pytest.mark.parametrize("cut", [16, 100, 1000, 5000])
def test_a_file_that_is_cut_off_is_an_error(tmp_path: Path, cut: int) -> None:
    path = training_run().write(tmp_path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(TraceError, match=r"run\.sqlite"):
        read_trace(path)


@parametrized("seed", range(40), quick=10)
def test_damage_anywhere_is_a_sentence_or_leaves_a_trace(tmp_path: Path, seed: int) -> None:
    chance, path = random.Random(seed), training_run(2).write(tmp_path)
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 10, 60))):
        at, source = chance.randrange(16, len(data)), chance.randrange(len(data))
        length = chance.choice((1, 4, 300))
        data[at : at + length] = chance.choice((b"\xff" * length, data[source : source + length]))
    path.write_bytes(data)
    with contextlib.suppress(TraceError):
        for opened in open_ranks(find_traces([path]), use_cache=False):
            assert opened.trace.num_events


def test_a_schema_that_is_not_text_is_an_error(tmp_path: Path) -> None:
    path = training_run(1).write(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE", b"CREATE T\xffBLE"))
    with pytest.raises(TraceError, match="damaged"):
        read_trace(path)


def test_an_export_without_events_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no events"):
        read_trace(NsightBuilder().write(tmp_path))
