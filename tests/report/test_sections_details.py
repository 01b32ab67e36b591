"""Steps, compiler, precision, counters and ranks: every figure equal to a result's, and words for what is missing."""

from __future__ import annotations

import json

import pytest
from section_parts import EVIL, facts_in, of
from test_card import COMPILER

from handmade import MS, cpu_facts, cpu_recording, gpu_facts, gpu_recording, sample, write_recording
from memories import a_step, write_memory
from parametrized import parametrized
from stepscope.analysis.time import statistics
from stepscope.analysis.time.phases import PHASES, UNATTRIBUTED
from stepscope.analysis.time.summary import clean_step_ns
from stepscope.document.build import section_of
from stepscope.document.model import Bars, Chart, Lines, Missing, Table, Text
from stepscope.document.sections import compiler, counters, precision, ranks, steps
from stepscope.errors import Unavailable
from stepscope.session import open_session
from trace_builder import PUBLIC, TraceBuilder, needs_traces


@pytest.fixture(autouse=True)
def quick_and_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(statistics, "NUM_RESAMPLES", 5)


# -- steps ----------------------------------------------------------------------------------------------------


def test_every_sample_is_in_the_table_and_its_phases_sum_to_it(tmp_path):
    source = open_session(gpu_recording(tmp_path / "run"))
    table = of(steps.parts(source), Table, "steps")
    names = [f"{phase}_ns" for phase in (*PHASES, UNATTRIBUTED) if f"{phase}_ns" in table.columns]

    assert table.columns["step"] == [sample.step for sample in source.recording.samples]
    for row in range(table.num_rows):
        assert sum(table.columns[name][row] or 0 for name in names) == table.columns["duration_ns"][row]
    clean = [ns for ns, window in zip(table.columns["duration_ns"], table.columns["window"]) if window == "clean"]
    assert tuple(clean) == clean_step_ns(source.recording)


def test_windows_are_apart_and_a_long_warm_up_makes_the_axis_logarithmic(tmp_path):
    chart = of(steps.parts(open_session(cpu_recording(tmp_path / "run"))), Lines, "step_times")
    assert [series.name for series in chart.series] == [
        "warm-up", "clean", "profiler warm-up", "traced", "memory and FLOPs", "free",
    ]  # fmt: skip
    assert chart.log_y and "step 9 with 100 ms, 10.0 times the median" in chart.caption

    few = write_recording(tmp_path / "few", cpu_facts(), [sample(0, "warmup"), sample(1), sample(2, num_compiles=1)])
    chart = of(steps.parts(open_session(few)), Lines, "step_times")
    assert not chart.log_y and [series.name for series in chart.series] == ["warm-up", "clean", "compiling"]


def test_the_areas_of_the_clean_steps_sum_to_them(tmp_path):
    source = open_session(cpu_recording(tmp_path / "run"))
    chart = of(steps.parts(source), Lines, "clean_step_phases")

    sums = [sum(series.y[i] for series in chart.series) for i in range(len(chart.series[0].y))]
    assert tuple(sums) == clean_step_ns(source.recording) and chart.style == "areas"
    assert list(chart.series[0].x) == [2, 3, 4, 5]


def test_the_bins_hold_every_clean_step(tmp_path):
    source = open_session(cpu_recording(tmp_path / "run"))
    chart = of(steps.parts(source), Bars, "step_distribution")

    assert sum(chart.series[0].y) == source.summary.num_clean and len(chart.labels) == len(chart.series[0].y)


def test_an_outlier_says_which_how_much_where_and_what_was_special(tmp_path):
    host_ns = {"data": MS, "forward": 3 * MS, "backward": 5 * MS, "optimizer": MS}
    lines = [sample(i, host_ns=host_ns | {"forward": 3 * MS + i * 1000}) for i in range(12)]
    lines.append(sample(12, host_ns=host_ns | {"backward": 65 * MS}, num_compiles=2, num_skipped=1))
    parts = steps.parts(open_session(write_recording(tmp_path / "run", cpu_facts(), lines)))
    table = of(parts, Table, "outliers")

    assert (table.columns["step"], table.columns["phase_that_grew"]) == ([12], ["backward"])
    assert table.columns["excess_ns"] == [60 * MS - 5500] and table.columns["phase_excess_ns"] == [60 * MS]
    assert table.columns["what_was_special"] == ["2 compiles; 1 optimizer step skipped"]
    assert table.columns["duration_ns"] == [70 * MS]


@pytest.mark.parametrize(
    ("num", "said"), [(1, "1 clean step is too few"), (7, "7 clean steps are too few"), (8, "No outliers")]
)
def test_without_outliers_a_sentence_says_so(tmp_path, num, said):
    lines = [sample(i, host_ns={"forward": (40 if num == 7 and i == 3 else 10) * MS}) for i in range(num)]
    parts = steps.parts(open_session(write_recording(tmp_path / "run", cpu_facts(), lines)))
    assert of(parts, Text).text.startswith(said)


def test_a_traces_steps_are_the_accounts(tmp_path):
    trace = TraceBuilder().step(3, 0, 100).step(4, 100, 80).op("aten::mm", 10, 20, id=5)
    source = open_session(trace.launch("k", 12, runs=(30, 40), id=5).write(tmp_path / "t.json"))
    parts, table = steps.parts(source), source.analysis.ranks[0].steps
    chart, rows = of(parts, Bars), of(parts, Table)

    assert rows.columns["duration_ns"] == table["duration_ns"].to_list() == [100_000, 80_000]
    assert [sum(values) for values in zip(*(series.y for series in chart.series))] == [100_000, 80_000]
    many = TraceBuilder()
    for number in range(40):
        many.step(number, number * 10, 10).op("aten::mm", number * 10 + 1, 5)
    parts = steps.parts(open_session(many.write(tmp_path / "many.json")))
    assert len(of(parts, Lines).series[0].y) == of(parts, Table).num_rows == 40


def test_a_trace_without_steps_says_what_to_run(tmp_path):
    path = TraceBuilder().op("aten::mm", 10, 20).write(tmp_path / "t.json")

    with pytest.raises(Unavailable, match=r"prof\.step\(\)"):
        steps.parts(open_session(path))


@parametrized("nonsense", [None, "text", [], {}, -1], quick=3)
def test_a_wrong_field_is_a_missing_section_and_never_a_traceback(tmp_path, nonsense):
    whole = gpu_facts()
    names = [(name,) for name in whole] + [("environment", name) for name in whole["environment"]]
    names += [("counters", "other_processes"), ("parameters", "bytes_by_dtype"), ("memory", "num_allocator_retries")]
    for path in names:
        facts = json.loads(json.dumps(whole))
        inner = facts if len(path) == 1 else facts[path[0]]
        inner[path[-1]] = nonsense
        folder = write_recording(
            tmp_path / "run", facts, [sample(i) for i in range(3)], [{"t_ns": 5, "power_watts": 3}]
        )
        for name in ("steps", "compiler", "precision", "counters", "ranks"):
            assert section_of(open_session(folder), name).parts, path


# -- compiler -------------------------------------------------------------------------------------------------


def test_all_that_the_compiler_said_is_in_tables(tmp_path):
    told = COMPILER | {
        "graph_breaks": [
            {"reason": EVIL, "place": "a.py:1 in f", "count": 3},
            {"reason": "b", "place": "c.py:2 in g", "count": 2, "runs_eagerly": True},
        ],
        "failures": [
            {"reason": "the same", "place": "c.py:2", "count": 1},
            {"reason": "another", "place": "c.py:20", "count": 1},
        ],
        "frames": [{"frame": EVIL, "num_compiles": 7}],
    }
    parts = compiler.parts(open_session(gpu_recording(tmp_path / "run", told)))

    assert of(parts, Table, "graph_breaks").columns == {
        "place": ["a.py:1 in f", "c.py:2 in g"], "reason": [EVIL, "b"], "whole_function_runs_eagerly": [None, True],
        "num_times": [3, 2],
    }  # fmt: skip
    assert of(parts, Table, "failures").columns["reason"] == ["another"]  # the other is the break that gave up
    assert of(parts, Table, "recompiles").columns["guards_that_failed"] == ["x.size()[0] == 4"]
    assert of(parts, Table, "compiled_functions").columns == {"function": [EVIL], "num_compiles": [7]}
    shown = facts_in(parts)
    assert (shown["compiles"], shown["graph breaks"], shown["recompiles"]) == ("7", "5", "1")
    assert shown["compile time"] == "12.3 s" and shown["CUDA graphs"] == "5 recorded"
    assert "sizes compiled for any value" in [part.text for part in parts if isinstance(part, Text)][-1]


@pytest.mark.parametrize("nonsense", [None, "text", [], {}, 3, [None], [{"count": "many"}]])
def test_a_damaged_compile_file_is_survived(tmp_path, nonsense):
    for name in COMPILER:
        folder = gpu_recording(tmp_path / "run", COMPILER)
        (folder / "compile.json").write_text(json.dumps(COMPILER | {name: nonsense}))
        assert section_of(open_session(folder), "compiler").parts


def test_compiled_regions_of_a_trace(tmp_path):
    trace = TraceBuilder().step(1, 0, 100)
    trace.annotation("Torch-Compiled Region: 0/0", 10, 60).annotation("Torch-Compiled Region: 1/0", 30, 20)
    parts = compiler.parts(open_session(trace.op("aten::mm", 12, 4).write(tmp_path / "t.json")))
    table = of(parts, Table, "compiled_regions")

    assert table.columns["region"] == ["compiled region 0/0", "compiled region 1/0"]
    assert table.columns["is_called_by_another"] == [False, True] and table.columns["host_ns"] == [60_000, 20_000]
    assert "stepscope run" in of(parts, Missing).text


def test_nothing_compiled_says_what_to_run(tmp_path):
    with pytest.raises(Unavailable, match="--fix compile"):
        compiler.parts(open_session(cpu_recording(tmp_path / "run")))
    with pytest.raises(Unavailable, match=r"torch\.compile\(model\)"):
        compiler.parts(open_session(TraceBuilder().step(1, 0, 9).op("aten::mm", 1, 2).write(tmp_path / "t.json")))


# -- precision ------------------------------------------------------------------------------------------------


def test_precision_of_a_recording(tmp_path):
    facts = gpu_facts() | {"environment": {"device": "cuda", "device_name": "NVIDIA H200", "float32_matmul": "tf32"}}
    folder = write_recording(tmp_path / "run", facts, [sample(0), sample(1), sample(2, "memory")])
    write_memory(folder / "memory.json.gz", a_step())
    source = open_session(folder)
    parts, flops = precision.parts(source), source.summary.flops

    table = of(parts, Table, "flops_by_dtype")
    assert table.columns["executed_flops"] == [flops.hardware_flops] and table.columns["share"] == [1.0]
    assert facts_in(parts)["float32 products"] == "may run in TF32, on tensor cores"  # as older recordings have it
    live, memory = of(parts, Table, "memory_by_dtype"), source.memory.account
    assert sum(live.columns["live_bytes"]) == memory.peak_bytes
    assert [part.text.partition(":")[0] for part in parts if isinstance(part, Missing)] == [
        "dtypes of matrix products", "casts, and whether autocast was on",
    ]  # fmt: skip


def test_products_and_casts_of_a_trace(tmp_path):
    def shaped(op, at, shapes, dtypes, id):
        return trace.op(op, at, 4, id=id, **{"Input Dims": shapes, "Input type": dtypes})

    trace = TraceBuilder(deviceProperties=[{"name": "NVIDIA H200"}]).step(1, 0, 200)
    shaped("aten::linear", 10, [[64, 64], [32, 64]], ["float", "float"], 1)
    trace.events[-1]["dur"] = 30
    shaped("aten::copy_", 12, [[32, 64], [32, 64]], ["c10::BFloat16", "float"], 2)
    trace.launch("bfloat16_copy_kernel", 13, runs=(20, 5), id=2)
    shaped("aten::mm", 30, [[64, 64], [64, 32]], ["c10::BFloat16", "c10::BFloat16"], 3)
    trace.launch("sm90_gemm_bf16", 31, runs=(40, 10), id=3)
    source = open_session(trace.write(tmp_path / "t.json"))
    parts = precision.parts(source)

    products = of(parts, Table, "products_by_dtype")
    assert products.columns["dtype"] == ["bfloat16"] and products.columns["flops"] == [2 * 64 * 64 * 32]
    casts = of(parts, Table, "casts")
    assert casts.columns["num_casts"] == [1.0] and casts.columns["duration_ns"] == [5000.0]
    assert facts_in(parts)["autocast"] == "on"


# -- counters -------------------------------------------------------------------------------------------------


def test_counters_over_time_with_the_clean_window_marked(tmp_path):
    told = {"power_limit_watts": 700.0, "max_sm_clock_mhz": 1980, "other_processes": [{"pid": 7, "name": EVIL}]}
    folder = gpu_recording(tmp_path / "run")
    facts = json.loads((folder / "recording.json").read_text()) | {"counters": told}
    (folder / "recording.json").write_text(json.dumps(facts))
    for name, field in (("samples.jsonl", "start_ns"), ("counters.jsonl", "t_ns")):  # clocks begin anywhere
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        moved = [line | {field: line[field] + 12345 * MS} if field in line else line for line in lines]
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in moved))
    source = open_session(folder)
    parts, found = counters.parts(source), source.summary.counters

    power = of(parts, Lines, "power")
    assert [series.name for series in power.series] == ["power", "limit"] and power.series[0].y == [500.0, 500.0]
    assert [mark.x for mark in power.marks] == [20 * MS, 60 * MS] and power.series[0].x == [20 * MS, 30 * MS]
    summary = of(parts, Table, "counters_summary")
    assert summary.columns["power_watts"] == [found.power_watts.mean, found.power_watts.p95, 700.0]
    assert of(parts, Table, "throttling").columns == {"reason": ["sw_power_cap"], "share": [0.5]}
    clock = of(parts, Lines, "clock")
    assert {series.name: len(series.y) for series in clock.series} == {"not throttled": 1, "sw_power_cap": 1}
    assert of(parts, Table, "other_processes").columns["process"] == [EVIL]
    assert of(parts, Table, "counters").num_rows == len(source.recording.counters)


def test_no_counters_says_why(tmp_path):
    with pytest.raises(Unavailable, match="on a CPU"):
        counters.parts(open_session(cpu_recording(tmp_path / "cpu")))
    with pytest.raises(Unavailable, match="NVML"):
        counters.parts(open_session(write_recording(tmp_path / "gpu", gpu_facts(), [sample(0)])))
    with pytest.raises(Unavailable, match="a trace has no counters"):
        counters.parts(open_session(TraceBuilder().step(1, 0, 9).write(tmp_path / "t.json")))


# -- ranks ----------------------------------------------------------------------------------------------------


def folder_of_ranks(folder, late=0):
    """Two ranks with one all-reduce: the second comes `late` µs after the first, both leave together."""
    for rank, wait in ((0, 0), (1, late)):
        trace = TraceBuilder(distributedInfo={"rank": rank, "world_size": 2}).step(1, 0, 200)
        trace.op("aten::mm", 5, 10, id=5).launch("gemm", 6, runs=(10, 20), id=5)
        args = {"Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "Float",
                "Group size": 2, "Process Group Name": "0", "Process Group Ranks": "[0, 1]"}  # fmt: skip
        trace.kernel("ncclDevKernel_AllReduce", 50 + wait, 60 - wait, **args)
        trace.write(folder / f"rank{rank}.json")
    return folder


def test_ranks_side_by_side_are_the_analysis(tmp_path):
    source = open_session(folder_of_ranks(tmp_path / "ranks", late=30))
    parts, across = ranks.parts(source), source.analysis.across

    table = of(parts, Table, "ranks")
    assert table.columns["window_ns"] == across.table["window_ns"].to_list()
    chart = of(parts, Bars, "ranks")
    assert [sum(values) for values in zip(*(series.y for series in chart.series))] == table.columns["window_ns"]
    late = of(parts, Table, "stragglers")
    assert late.columns["caused_wait_ns"] == across.stragglers.ranks["caused_wait_ns"].to_list() == [0, 30_000]
    sized = of(parts, Table, "collectives")
    assert sized.columns["bytes"] == [4000] and sized.columns["num_calls"] == [2]
    assert of(parts, Table, "clocks").num_rows == 2
    assert of(parts, Lines, "collectives").series[0].x == [4000.0]


def test_one_rank_says_what_to_run_and_shows_its_collectives(tmp_path):
    with pytest.raises(Unavailable, match="stepscope run torchrun"):
        ranks.parts(open_session(TraceBuilder().step(1, 0, 9).op("aten::mm", 1, 2).write(tmp_path / "t.json")))
    with pytest.raises(Unavailable, match="stepscope run torchrun"):
        ranks.parts(open_session(cpu_recording(tmp_path / "run")))
    parts = ranks.parts(open_session(folder_of_ranks(tmp_path / "ranks"), rank=1))
    assert of(parts, Table, "collectives").num_rows == 1 and "one rank" in of(parts, Missing).text


def test_recordings_of_several_ranks(tmp_path):
    folder = cpu_recording(tmp_path / "run")
    cpu_recording(folder / "rank1")
    write_recording(folder / "rank2", cpu_facts(), [sample(0, host_ns={"forward": 20 * MS})])
    (folder / "rank2" / "recording.json").write_text('{"schema_version": 1, "status": "x", "environment": []}')
    table = of(ranks.parts(open_session(folder)), Table, "rank_steps")

    assert table.columns["rank"] == [0, 1, 2] and table.columns["step_ns"][:2] == [10 * MS, 10 * MS]


@pytest.mark.long
@needs_traces
def test_eight_real_ranks():
    parts = ranks.parts(open_session(PUBLIC / "dlrm_8ranks_v100", use_cache=False))
    table, late = of(parts, Table, "ranks"), of(parts, Table, "stragglers")

    assert table.columns["rank"] == list(range(8)) and late.columns["num_last"][7] == 5
    assert all(chart.caption for chart in parts if isinstance(chart, Chart))
