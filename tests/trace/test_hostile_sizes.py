"""Small inputs that ask for much: values at the ends of their ranges, deep nesting, thousands of names."""

from __future__ import annotations

import gzip
import json
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import polars as pl
import pytest

from handmade import MS, cpu_facts, sample, write_recording
from memories import a_step, tensor, write_memory
from parametrized import parametrized
from stepscope.analysis.comparison.sweeps import sweep_of
from stepscope.analysis.kernels.ops import ops
from stepscope.analysis.memory.account import account
from stepscope.analysis.memory.allocator_events import memory_summary
from stepscope.analysis.structure.links import link
from stepscope.border import read_file, read_json
from stepscope.document.sections import sweep_charts
from stepscope.errors import TraceError
from stepscope.render import terminal
from stepscope.rows import BadRow, read_rows
from stepscope.trace.memory_file import read_memory
from stepscope.trace.recording import read_recording
from stepscope.trace.snapshot import plain_values, read_snapshot
from trace_builder import TraceBuilder
from verbs import answers, run_verb

# -- steps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "odd", [{"host_ns": {}}, {"wall_ns": 0}, {"host_ns": {"forward": 0}, "wall_ns": 0}, {"device_ns": {"forward": 0}}]
)
@pytest.mark.parametrize("verb", ["show {}", "diagnose {} --json", "report {} -o {}.html", "compare {} {}"])
def test_steps_that_take_no_time(odd, verb, tmp_path):
    folder = write_recording(tmp_path / "run", cpu_facts(), [{**sample(step), **odd} for step in range(9)])

    answers(verb, folder)


def test_the_phases_of_a_step_add_up_to_it(tmp_path):
    lines = [
        {**sample(0), "host_ns": {}},
        {**sample(1), "host_ns": {"forward": 4 * MS, "unattributed": MS}},
        {**sample(2), "host_ns": {"forward": 11 * MS}},
        {**sample(3), "wall_ns": 0, "host_ns": {}},
        {**sample(4), "device_ns": {}},
    ]
    recording = read_recording(write_recording(tmp_path / "run", {}, lines))

    assert [dict(each.host_ns) for each in recording.samples] == [
        {"unattributed": 10 * MS},
        {"forward": 4 * MS, "unattributed": 6 * MS},
    ]
    assert "3 step(s) have a missing or invalid field" in recording.warnings[0]


def _joined(num: int) -> list[dict[str, Any]]:
    """A step of many phases that turns out to be one with each that follows, and many that turn out to be one."""
    lines = [sample(0, host_ns={f"phase {phase}": 1000 for phase in range(num)})]
    for step in range(1, num):
        lines += [sample(step, host_ns={f"step {step}": 1000}), {"joined": 2}]
    return [*lines, *(sample(num + step, host_ns={f"own {step}": 1000}) for step in range(num)), {"joined": num}]


def test_joining_steps_is_linear_in_their_phases(tmp_path):
    recordings, seconds = {}, {}
    for num in (500, 2000):
        folder = write_recording(tmp_path / str(num), {}, _joined(num))
        begin = time.process_time()
        recordings[num] = read_recording(folder)
        seconds[num] = time.process_time() - begin

    first, second = recordings[500].samples
    assert (len(first.host_ns), first.wall_ns) == (999, 999_000)
    assert (len(second.host_ns), second.wall_ns, second.num_tokens) == (500, 500_000, 512)
    assert seconds[2000] < 10 * seconds[500] + 0.1  # 4 times if linear, 16 if quadratic


def test_the_reasons_of_throttling_are_as_many_as_nvml_has(tmp_path):
    counters = [{"t_ns": 10 * MS + number, "throttle": [f"reason {number}"]} for number in range(1000)]
    counters += [{"t_ns": 20 * MS, "throttle": ["reason 1", "reason 1"]}, {"t_ns": 1, "throttle": [["deep"]]}]
    recording = read_recording(write_recording(tmp_path / "run", {}, [sample(1), sample(2)], counters))

    assert len(recording.counters) == 65 and recording.counters[-1].throttle == ("reason 1",)
    assert recording.warnings == ("counters.jsonl: 937 line(s) could not be read and were skipped",)


@pytest.mark.parametrize("deep", ["1e999", '"\\ud800"', "[" * 300 + "]" * 300])
def test_a_field_that_no_schema_names_must_be_plain(deep, tmp_path):
    folder = write_recording(tmp_path / "run", cpu_facts(), [sample(step) for step in range(9)])
    written = (folder / "recording.json").read_text()
    (folder / "recording.json").write_text(written.replace('"num_total"', f'"unknown": [{deep}], "num_total"'))

    said = run_verb("show", folder, "--json")
    assert "parameters" in json.loads(said.stdout)["warnings"][0] and "parameters.unknown" in said.stdout
    row = {"hash": "a", "workload": "w", "status": "ok", "config": {}, "run": {}, "unknown": 1}
    (tmp_path / "results.jsonl").write_text(json.dumps(row).replace("1}", f'{{"x": {deep}}}}}') + "\n")
    with pytest.raises(BadRow, match=r"line 1 is not a valid row.*unknown"):
        read_rows(tmp_path / "results.jsonl")


def test_a_rank_can_have_any_number(tmp_path):
    environment = {**cpu_facts()["environment"], "rank": 2**62}
    folder = write_recording(tmp_path / "run", cpu_facts(environment=environment), [sample(0), sample(1)])

    assert "missing: 0, 1, 2" in answers("show {}", folder)


# -- JSON ---------------------------------------------------------------------------------------------------------


def test_a_file_that_expands_a_thousandfold_is_not_read_to_its_end(tmp_path, monkeypatch):
    with gzip.open(tmp_path / "bomb.gz", "wb", 9) as file:
        for _ in range(80):
            file.write(bytes(1 << 20))

    with pytest.raises(ValueError, match="STEPSCOPE_MAX_RATIO"):
        read_file(tmp_path / "bomb.gz")
    monkeypatch.setenv("STEPSCOPE_MAX_RATIO", "2000")
    assert len(read_file(tmp_path / "bomb.gz")) == 80 << 20


@parametrized("piece", [b"[],", b"{},", b'{"a":1},', b"7,", b'"",'], quick=2)
def test_a_small_file_of_very_many_values_is_not_parsed(piece, tmp_path):
    bomb = tmp_path / "bomb.json.gz"
    with gzip.open(bomb, "wb", 1) as file:
        file.write(b"[")
        for _ in range(11):
            file.write(piece * 1_000_000)
    assert bomb.stat().st_size < 1_000_000
    parsed = mock.patch("json.loads", side_effect=AssertionError("parsed"))
    with parsed, pytest.raises(ValueError, match="MAX_VALUES"):
        read_json(bomb)


def test_values_have_a_limit_that_can_be_raised(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPSCOPE_MAX_VALUES", "200")
    monkeypatch.setenv("STEPSCOPE_MAX_ROWS_VALUES", "30")
    row = {"hash": "a", "workload": "w", "status": "ok", "config": {}, "run": {}}
    (tmp_path / "results.jsonl").write_text(3 * (json.dumps(row) + "\n"))
    with pytest.raises(BadRow, match=r"line 3 is not a valid row .*30 values: set STEPSCOPE_MAX_ROWS_VALUES"):
        read_rows(tmp_path / "results.jsonl")
    counters = [{"t_ns": number, "throttle": ["x"]} for number in range(60)]
    folder = write_recording(tmp_path / "run", {}, [sample(step) for step in range(20)], counters)
    recording = read_recording(folder)
    assert 4 < len(recording.samples) < 12 and 30 < len(recording.counters) < 60
    monkeypatch.setenv("STEPSCOPE_MAX_VALUES", "2000")
    assert len(read_recording(folder).samples) == 20


def test_the_warnings_of_a_damaged_file_are_counted(tmp_path):
    facts = {f"field {number}": float("inf") for number in range(5000)}
    recording = read_recording(write_recording(tmp_path / "run", facts, [sample(0)]))

    assert len(recording.warnings) == 21 and "'field 19' was left out" in recording.warnings[19]
    assert recording.warnings[20] == "recording.json: 4,980 more fields were left out"


# -- snapshots ----------------------------------------------------------------------------------------------------


def _dict_of(names: list[Any]) -> bytes:
    return pickle.dumps({"segments": [dict.fromkeys(names[start : start + 500], 0) for start in range(0, 3000, 500)]})


@pytest.mark.parametrize(
    "names",
    [[number * (2**61 - 1) for number in range(1, 3001)], [(number, 2**40 + number) for number in range(3000)]],
)
def test_names_of_a_dict_that_may_share_one_hash_are_refused(names, tmp_path):
    (tmp_path / "snapshot.pickle").write_bytes(_dict_of(names))
    loaded = mock.patch("stepscope.trace.snapshot._PlainUnpickler", side_effect=AssertionError("loaded"))
    with loaded, pytest.raises(TraceError, match=r"no snapshot has|not needed for plain values"):
        read_snapshot(tmp_path / "snapshot.pickle")


def test_addresses_pool_ids_and_a_few_large_numbers_are_plain():
    honest = [{"address": 0x7F0000000000 + number, "segment_pool_id": (0, number)} for number in range(3000)]
    values = {"segments": honest, "stream": 2**64 - 1}

    assert plain_values(pickle.dumps(values)) == values


# -- many devices, many names -------------------------------------------------------------------------------------


def test_thousands_of_devices_of_a_memory_file_are_not_listed_one_by_one(tmp_path):
    memory = a_step()
    memory["allocations"] += [tensor(512, born=0, died=7, device=f"cuda:{1 + number}") for number in range(1000)]
    found = account(memory).other_devices

    assert len(found) == 65 and found["937 more devices"] == 937 * 512
    assert answers("show {}", write_memory(tmp_path / "memory.json.gz", memory)).count("other device") == 65


def test_thousands_of_devices_with_memory_events_are_not_listed_one_by_one():
    trace = TraceBuilder().kernel("gemm", 0, 5)
    for number in range(100):
        trace.memory(number, 512).memory(number, 512)
        trace.events[-1]["args"]["Device Id"] = number
    found = trace.account()

    assert len(memory_summary(trace.linked())) == 64
    assert any("of 100 devices with [memory] events, only 64" in warning for warning in found.warnings)


@pytest.mark.long
def test_the_device_of_an_old_memory_file_is_found_in_linear_time(tmp_path):
    seconds = {}
    for num in (4000, 16_000):
        made = [{**tensor(512, "parameter", device=f"cuda:{n}"), "born_ns": 1, "died_ns": 9} for n in range(num)]
        write_memory(tmp_path / "memory.json.gz", {"schema_version": 1, "allocations": made})
        begin = time.process_time()
        assert read_memory(tmp_path / "memory.json.gz")["device"] == "cuda:0"
        seconds[num] = time.process_time() - begin

    assert seconds[16_000] < 10 * seconds[4000] + 0.1  # 4 times if linear, 16 if quadratic


def _sweep(num_rows: int, num_names: int) -> list[dict[str, Any]]:
    """Rows in which no name determines another."""
    return [
        {"hash": f"h{row}", "workload": "w", "status": "ok", "run": {"mode": "step", "dtype": "fp32"},
         "config": {f"n{name}": (row * 7 + name) % (row % 9 + 2) for name in range(num_names)},
         "samples_device_ns": [1000 + row, 1100 + row]}
        for row in range(num_rows)
    ]  # fmt: skip


def test_the_names_of_a_sweep_are_not_compared_all_with_all():
    rows = _sweep(40, 150)
    with mock.patch.object(sweep_charts, "_follows", wraps=sweep_charts._follows) as follows:
        sweep_charts.layout_of(sweep_of(rows, {}), rows)

    assert 150 <= follows.call_count <= 150 * 20


def test_only_the_columns_that_fit_are_written_for_a_terminal(tmp_path):
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _sweep(10, 300)))
    with mock.patch.object(terminal, "cell", wraps=terminal.cell) as cell:
        said = answers("show {}", tmp_path)

    assert "Too narrow for" in said and cell.call_count < 2 * 10 * 60


# -- traces -------------------------------------------------------------------------------------------------------


@parametrized("stream", [2**63 - 1, 2**63 - 2, 1, 0], quick=2)
def test_every_track_of_perfetto_has_a_number_of_its_own(stream, tmp_path):
    trace = TraceBuilder().kernel("a", 10, 5000, stream=stream).kernel("b", 20, 6000, stream=stream)
    path = trace.kernel("c", 20, 5000).write(tmp_path / "trace.json")
    answers("export {} perfetto -o {}.p.json", path)

    events = json.loads(Path(f"{path}.p.json").read_text())["traceEvents"]
    tracks = {event["name"]: event["tid"] for event in events if event["ph"] == "X" and event["name"] in "abc"}
    assert len(set(tracks.values())) == 3 and (tracks["a"], tracks["c"]) == (stream, 7)


@contextmanager
def counted(owner: type, name: str) -> Iterator[list[int]]:
    """Count the calls of a method: [number of them]."""
    calls, method = [0], getattr(owner, name)

    def call(*args, **named):
        calls[0] += 1
        return method(*args, **named)

    with mock.patch.object(owner, name, call):
        yield calls


def _nested(num_ops: int) -> TraceBuilder:
    """Ops inside each other, named a, b, c, a, …; the innermost one launches, and memory is allocated between."""
    trace = TraceBuilder()
    for depth in range(num_ops):
        trace.op(f"aten::{'abc'[depth % 3]}", depth, 3 * num_ops - 2 * depth)
    trace.launch("gemm", num_ops, runs=(3 * num_ops, 70))
    for late in (0, 5, num_ops, 3 * num_ops + 1):
        trace.memory(2 * num_ops - 1 + late, 512)
    return trace


def test_ops_inside_ops_are_not_climbed_one_by_one():
    few, many = _nested(300).read(), _nested(3000).read()
    with counted(pl.Series, "gather") as num_few:
        linked = link(few)
        assert ops(linked)["num_calls"].to_list() == [100] * 3
    with counted(pl.Series, "gather") as num_many:
        table = ops(link(many))

    # At (2·300 - 1 + late) µs, the ops up to depth 300 + 1 - late are open.
    assert linked.memory["op"].to_list() == [299, 296, 1, None]
    assert num_many[0] < 2 * num_few[0]
    assert table["device_total_ns"].to_list() == [70_000] * 3
    assert sorted(table["host_total_ns"]) == [(9000 - 2 * depth) * 1000 for depth in (2, 1, 0)]
    assert sorted(table["device_self_ns"]) == [0, 0, 70_000]


def test_bytes_and_intervals_of_a_query_are_written_as_in_its_table(tmp_path):
    path = TraceBuilder().kernel("gemm", 0, 5).write(tmp_path / "trace.json")
    query = "select cast(name as binary) b, interval '1 day' i, array_agg(x'ff') l from device group by name"
    table, lines, cells = (run_verb("analyze", "--sql", path, query, *form) for form in ([], ["--json"], ["--csv"]))

    assert "b'gemm'  1 day, 0:00:00  [b'\\xff']" in table.stdout
    assert json.loads(lines.stdout) == [{"b": "b'gemm'", "i": "1 day, 0:00:00", "l": "[b'\\xff']"}]
    assert cells.stdout.splitlines() == ["b,i,l", "b'gemm',\"1 day, 0:00:00\",[b'\\xff']"]
