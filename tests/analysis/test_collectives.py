"""Communication kernel by kernel: names from wherever a trace has them, sizes, bandwidths, exposed time to the ns."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parametrized import parametrized
from stepscope.analysis.ranks.collectives import (
    SCHEMA,
    _exposed,
    bus_factor,
    collective_kind,
    collectives,
    collectives_by_size,
    dtype_name,
    tensor_sizes,
)
from stepscope.analysis.structure.intervals import union
from stepscope.analysis.structure.links import Linked, link
from stepscope.analysis.time.gpu_time import gpu_time
from stepscope.trace.reader import read_trace

TRACES = Path(os.environ.get("STEPSCOPE_TRACES", Path(__file__).parents[2].parent / "shared" / "traces")) / "public"
US = 1000
RING = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)"
GENERIC = "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)"
SEND_RECV = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)"
Event = dict[str, Any]


def event(category: str, name: str, start: int, duration: int, tid: int = 1, **args: Any) -> Event:
    """A complete event; times in nanoseconds."""
    pid = 0 if category in ("kernel", "gpu_memcpy") else 7
    times = {"ts": start / US, "dur": duration / US}
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, **times, "args": args}


def kernel(name: str, start: int, duration: int, stream: int = 20, **args: Any) -> Event:
    return event("kernel", name, start, duration, stream, **{"device": 0, "stream": stream, **args})


def launch(start: int, correlation: int) -> Event:
    return event("cuda_runtime", "cudaLaunchKernel", start, 100, correlation=correlation)


def arguments(name: str, elements: tuple[int, int], dtype: str = "Float", size: int = 4, **more: Any) -> Event:
    """What a profiler of today writes on the op and on the kernel of a collective."""
    return {
        "Collective name": name,
        "In msg nelems": elements[0],
        "Out msg nelems": elements[1],
        "Group size": size,
        "dtype": dtype,
        "Process Group Name": "7",
        "Process Group Ranks": "[0, 1, 2, 3]",
        **more,
    }


def table_of(tmp_path: Path, events: list[Event], world_size: int | None = 4) -> tuple[pl.DataFrame, Linked]:
    path = tmp_path / "trace.json"
    info = {"distributedInfo": {"rank": 0, "world_size": world_size}} if world_size else {}
    path.write_text(json.dumps({"traceEvents": [*events, event("cpu_op", "aten::add", 0, 100)], **info}))
    linked = link(read_trace(path))
    return collectives(linked), linked


def row_of(tmp_path: Path, events: list[Event], world_size: int | None = 4) -> dict[str, Any]:
    return table_of(tmp_path, events, world_size)[0].row(0, named=True)


def test_everything_from_the_arguments_of_the_kernel(tmp_path):
    step = event("user_annotation", "ProfilerStep#3", 0, 20_000)
    said = arguments("_allgather_base", (1000, 4000), "BFloat16")
    events = [step, launch(1_000, 5), kernel(GENERIC, 10_000, 4_000, correlation=5, **said)]

    assert row_of(tmp_path, events) == {
        "event": 2, "device": 0, "stream": 20, "start_ns": 10_000, "end_ns": 14_000, "duration_ns": 4_000, "step": 3,
        "phase": "other", "collective": "all_gather", "source": "arguments", "dtype": "bfloat16",
        "num_elements": 4000, "bytes": 8000, "group": "7", "group_ranks": "[0, 1, 2, 3]", "group_size": 4,
        "algorithm_bandwidth_bytes_per_s": 2_000_000_000, "bus_bandwidth_bytes_per_s": 1_500_000_000,
        "exposed_ns": 4_000,
    }  # fmt: skip


def test_the_arguments_of_the_op_around_the_launch_serve_a_kernel_that_has_none(tmp_path):
    op = event("cpu_op", "record_param_comms", 500, 2_000, **arguments("allreduce", (1000, 1000)))
    waits = event("cpu_op", "record_param_comms", 2_600, 10, **arguments("wait", (0, 0), "Byte", 1))
    for said in ({}, {"Collective name": "no such thing", "In msg nelems": 3}):
        row = row_of(tmp_path, [op, launch(1_000, 5), waits, kernel(GENERIC, 10_000, 4_000, correlation=5, **said)])

        assert (row["collective"], row["source"], row["bytes"], row["group"]) == (
            "all_reduce",
            "arguments",
            4000,
            "7",
        )


def test_an_old_trace_has_a_label_with_the_shape_of_what_a_rank_gives(tmp_path):
    label = {"Input Dims": [[8, 128]], "Input type": ["float"]}
    events = [event("user_annotation", "nccl:all_to_all", 500, 2_000, **label), launch(1_000, 5)]
    row = row_of(tmp_path, [*events, kernel(SEND_RECV, 10_000, 4_096, correlation=5)])

    assert (row["collective"], row["source"], row["dtype"], row["group"]) == (
        "all_to_all", "annotation", "float32", None,
    )  # fmt: skip
    assert (row["num_elements"], row["bytes"], row["group_size"]) == (1024, 4096, 4)
    assert row["algorithm_bandwidth_bytes_per_s"] == 10**9
    assert row["bus_bandwidth_bytes_per_s"] == 750_000_000


def test_the_label_of_an_all_gather_tells_one_rank_of_many(tmp_path):
    label = {"Input Dims": [[100]], "Input type": ["c10::Half"]}
    events = [event("user_annotation", "nccl:_all_gather_base", 500, 2_000, **label), launch(1_000, 5)]
    row = row_of(tmp_path, [*events, kernel(GENERIC, 10_000, 4_000, correlation=5)])

    assert (row["collective"], row["num_elements"], row["bytes"]) == ("all_gather", 400, 800)


def test_the_op_has_the_size_where_the_label_does_not(tmp_path):
    told = {"Input Dims": [[64], [64], []], "Input type": ["long int", "long int", "Scalar"]}
    op = event("cpu_op", "record_param_comms", 400, 2_200, **told)
    events = [op, event("user_annotation", "nccl:all_reduce", 500, 2_000), launch(1_000, 5)]
    row = row_of(tmp_path, [*events, kernel(GENERIC, 10_000, 4_000, correlation=5)])

    assert (row["collective"], row["dtype"], row["bytes"]) == ("all_reduce", "int64", 512)


@pytest.mark.parametrize(("name", "kind"), [(RING, "all_reduce"), (SEND_RECV, "send_recv"), (GENERIC, "unknown")])
def test_a_kernel_launched_before_the_trace_has_its_name_and_no_step(tmp_path, name, kind):
    step = event("user_annotation", "ProfilerStep#3", 0, 20_000)
    row = row_of(tmp_path, [step, launch(1_000, 5), kernel(name, 10_000, 4_000, correlation=4)], world_size=None)

    assert (row["collective"], row["source"], row["step"], row["phase"]) == (kind, "kernel", None, None)
    assert row["bytes"] is row["group_size"] is row["bus_bandwidth_bytes_per_s"] is None


def test_a_trace_without_communication_has_an_empty_table(tmp_path):
    table, _ = table_of(tmp_path, [launch(0, 1), kernel("volta_sgemm", 10, 10, correlation=1)])

    assert table.schema == SCHEMA
    assert table.is_empty()
    assert collectives_by_size(table).is_empty()


def test_exposed_parts_add_up_also_where_collectives_overlap(tmp_path):
    #  computes        1000-3000                  7000-7500
    #  all-reduce 0-------------4000
    #  all-gather       2000------------6000
    #  broadcast           2500-3500       6000-------8000
    events = [
        launch(0, 1),
        kernel("volta_sgemm", 1_000, 2_000, stream=7),
        kernel("volta_sgemm", 7_000, 500, stream=7),
        kernel(RING, 0, 4_000, stream=20),
        kernel(RING.replace("AllReduce", "AllGather"), 2_000, 4_000, stream=21),
        kernel(RING.replace("AllReduce", "Broadcast"), 2_500, 1_000, stream=22),
        kernel(RING.replace("AllReduce", "Broadcast"), 6_000, 2_000, stream=22),
    ]
    table, linked = table_of(tmp_path, events)

    assert table["exposed_ns"].to_list() == [2_000, 2_000, 0, 1_500]
    assert table["exposed_ns"].sum() == gpu_time(linked.device).exposed_communication_ns == 5_500


INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12)


@given(INTERVALS, INTERVALS)
def test_exposed_parts_are_the_moments_that_nothing_hides(communication, compute):
    frame = pl.DataFrame([(s, s + d) for s, d in sorted(communication)], schema=["start_ns", "end_ns"], orient="row")
    other = pl.DataFrame([(s, s + d) for s, d in compute], schema=["start_ns", "end_ns"], orient="row")
    parts = _exposed(frame.cast(pl.Int64), union(other.cast(pl.Int64)))

    hidden = {moment for start, length in compute for moment in range(start, start + length)}
    seen: set[int] = set()
    for (start, length), part in zip(sorted(communication), parts.to_list()):
        moments = set(range(start, start + length))
        assert part == len(moments - hidden - seen)
        seen |= moments


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("all_reduce", 1.75), ("all_gather", 0.875), ("reduce_scatter", 0.875), ("all_to_all", 0.875), ("gather", 0.875),
     ("scatter", 0.875), ("broadcast", 1.0), ("reduce", 1.0), ("send_recv", 1.0), ("barrier", None),
     ("unknown", None)],
)  # fmt: skip
def test_bus_factors_of_eight_ranks_are_those_of_nccl_tests(kind, factor):
    frame = pl.DataFrame({"collective": [kind], "group_size": [8]})

    assert frame.select(bus_factor()).item() == factor


@pytest.mark.parametrize("size", [0, None])
def test_a_group_of_unknown_size_has_no_bus_bandwidth(size):
    frame = pl.DataFrame({"collective": ["all_reduce"], "group_size": pl.Series([size], dtype=pl.Int64)})

    assert frame.select(bus_factor()).item() is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [("allreduce", "all_reduce"), ("allreduce_coalesced", "all_reduce"), ("nccl:all_reduce_barrier", "barrier"),
     ("_reduce_scatter_base", "reduce_scatter"), ("reduce_scatter_tensor_coalesced", "reduce_scatter"),
     ("allgather_into_tensor_coalesced", "all_gather"), ("all_to_allv", "all_to_all"),
     ("alltoall_base", "all_to_all"), ("nccl:send 0->1", "send"), ("nccl:recv 0<-1", "recv"),
     ("_broadcast_oop", "broadcast"), ("wait", "unknown"),
     ("ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevComm*)", "reduce"), ("ncclAllReduceRingLLKernel_sum_f32(x)",
     "all_reduce"), ("ncclDevKernel_Generic(allreduceArgs)", "unknown")],
)  # fmt: skip
def test_one_spelling_of_a_collective(name, kind):
    assert collective_kind(name) == kind


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("Float", "float32"), ("long int", "int64"), ("c10::Half", "float16"), ("Float8_e4m3fn", "float8"),
     ("Byte", "uint8"), ("c10::complex<float>", "complex64"), ("Scalar", None), ("", None)],
)  # fmt: skip
def test_one_spelling_of_a_type(name, dtype):
    assert dtype_name(name) == dtype


@pytest.mark.parametrize(
    ("shapes", "dtypes", "sizes"),
    [
        ("[[]]", '["float"]', (1, "float32")),
        ("[[], []]", '["TensorList", "Scalar"]', (None, None)),
        ("[[[2, 3], [4]], []]", '["TensorList", ""]', (10, None)),
        ("[[4], [4]]", '["float", "int"]', (None, None)),
        ("[[-1]]", '["float"]', (None, None)),
        ("[[1000000000, 10000000000]]", '["float"]', (None, None)),
        (None, None, (None, None)),
        ("7", '["float"]', (None, None)),
        ("[[4]", '["float"]', (None, None)),
        ("[" * 20_000, "[]", (None, None)),
    ],
)
def test_sizes_are_told_or_not_guessed(shapes, dtypes, sizes):
    assert tensor_sizes(shapes, dtypes) == sizes


def test_by_size_the_calls_add_up(tmp_path):
    said = arguments("allreduce", (1000, 1000))
    events = [launch(0, 1), *(kernel(GENERIC, start, 2_000 + start, **said) for start in (0, 10_000, 30_000))]
    events.append(kernel(GENERIC, 80_000, 5_000, **arguments("broadcast", (9, 9))))
    table, _ = table_of(tmp_path, events)

    sizes = collectives_by_size(table)

    assert sizes["num_calls"].to_list() == [3, 1]
    assert sizes["total_ns"].to_list() == [46_000, 5_000]
    assert sizes.row(0, named=True) == {
        "collective": "all_reduce", "dtype": "float32", "bytes": 4000, "group_size": 4, "num_calls": 3,
        "total_ns": 46_000, "median_ns": 12_000, "exposed_ns": 46_000,
        "best_bus_bandwidth_bytes_per_s": 3_000_000_000, "algorithm_bandwidth_bytes_per_s": 260_869_565,
        "bus_bandwidth_bytes_per_s": 391_304_348,
    }  # fmt: skip


REAL = [
    ("trace_diff/control.json.gz", {"all_reduce": 18, "all_to_all": 42}),
    ("trace_diff/test.json.gz", {"all_reduce": 21, "all_to_all": 42, "send_recv": 1}),
    ("resnet_act_checkpoint_mi300.json.gz", {"all_reduce": 6, "broadcast": 6, "unknown": 5}),
    ("v100_ddp_1rank.json.gz", {}),
]


@parametrized(("name", "kinds"), REAL, quick=2, ids=[name for name, _ in REAL])
def test_real_traces(name, kinds):
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"{path} is not here")
    linked = link(read_trace(path))
    table = collectives(linked)

    assert dict(table["collective"].value_counts().rows()) == kinds
    assert table["exposed_ns"].sum() == gpu_time(linked.device).exposed_communication_ns
    assert table.filter(pl.col("source") != "kernel")["bytes"].null_count() == 0
    assert table.filter(pl.col("exposed_ns") > pl.col("duration_ns")).is_empty()
