"""Every kind of event in the table that is its own, each value where it belongs."""

from __future__ import annotations

import polars as pl
import pytest
from written_traces import SEED, assert_sound, edge, in_file_order, instant, label, read, slice_of, text_of

from stepscope.trace.tables import CATEGORIES


def row(frame: pl.DataFrame, name: str) -> dict:
    """The only row of that name."""
    (found,) = frame.filter(pl.col("name") == name).to_dicts()
    return found


@pytest.fixture
def seed(tmp_path):
    trace = read(tmp_path, SEED)
    assert_sound(trace)
    assert trace.problems == () and trace.warnings == ()
    return trace


def test_an_op_with_all_it_carries(seed):
    assert row(seed.host, "aten::mm") == {
        "event": 8,
        "kind": "op",
        "name": "aten::mm",
        "thread": 1,
        "start_ns": 10_125,
        "duration_ns": 7_250,
        "correlation": None,
        "external_id": 2,
        "record_function": None,
        "sequence": 40,
        "forward_thread": 0,
        "shapes": "[[8, 16], [16, 4]]",
        "dtypes": '["float", "float"]',
        "strides": "[[16, 1], [4, 1]]",
        "inputs": '["", ""]',
        "stack": None,
        "parent": 1,
        "self_ns": 3_750,
    }


def test_every_host_event_has_its_kind_place_and_time(seed):
    columns = ("event", "kind", "name", "start_ns", "duration_ns", "correlation", "external_id")

    assert in_file_order(seed.host).select(columns).rows() == [
        (7, "annotation", "ProfilerStep#1", 1_000, 100_000, None, 1),
        (8, "op", "aten::mm", 10_125, 7_250, None, 2),
        (9, "runtime", "cudaLaunchKernel", 12_000, 3_500, 9, 2),
        (10, "driver", "cuLaunchKernel", 12_500, 1_000, 9, None),
        (11, "python", "train.py(3): step", 2_000, 90_000, None, None),
        (12, "overhead", "CUPTI overhead", 3_000, 1_000, None, None),
        (13, "other", "something new", 4_000, 1_000, None, None),
        (24, "op", "old style", 30_000, 4_000, None, None),
        (25, "op", "inner", 31_000, 1_000, None, None),
    ]


def test_a_kernel_with_all_it_carries(seed):
    assert row(seed.device, "gemm_kernel") == {
        "event": 14,
        "kind": "kernel",
        "name": "gemm_kernel",
        "device": 0,
        "stream": 7,
        "start_ns": 20_001,
        "duration_ns": 30_999,
        "correlation": 9,
        "external_id": 2,
        "bytes": None,
        "grid": "[4, 1, 1]",
        "block": "[128, 1, 1]",
        "registers_per_thread": 32,
        "shared_memory_bytes": 4096,
        "occupancy_percent": 50.0,
        "graph": None,
        "graph_node": None,
    }


def test_copies_and_fills_have_their_bytes(seed):
    rows = seed.device.filter(pl.col("kind") != "kernel").select("kind", "start_ns", "duration_ns", "bytes").rows()

    assert rows == [("memcpy", 60_000, 2_000, 512), ("memset", 63_000, 1_000, 64)]


def test_a_graph_kernel_names_graph_and_node(tmp_path):
    args = {"device": 1, "stream": 3, "graph id": 5, "graph node id": 77}
    trace = read(tmp_path, [slice_of("k", "kernel", args=args)])

    assert trace.device.select("device", "stream", "graph", "graph_node").rows() == [(1, 3, 5, 77)]


def test_a_collective_is_kept_beside_the_event_that_carries_it(seed):
    assert seed.collectives.rows() == [(17, "allreduce", "Float", 1000, 1000, 2, "0", "[0, 1]")]
    assert row(seed.device, "ncclDevKernel")["event"] == 17


def test_ranges_on_the_device(seed):
    assert seed.device_ranges.rows() == [(18, "ProfilerStep#1", 0, 7, 20_001, 69_999, 1)]


def test_synchronizations_say_what_waited_for_what(seed):
    assert seed.syncs.rows() == [(19, "Event Sync", 0, 7, 91_000, 2_000, 13, None, 8, 12)]


def test_memory_with_bytes_device_and_totals(seed):
    assert seed.memory.rows() == [(20, 1, 11_000, 1, 0, 140_000_000_000_000, 128, 128, 2048)]


def test_memory_given_back_is_negative(tmp_path):
    trace = read(tmp_path, [instant("[memory]", 3, Bytes=-64, **{"Device Type": 0, "Device Id": -1})])

    assert trace.memory.select("time_ns", "device_type", "device", "bytes").rows() == [(3_000, 0, -1, -64)]


def test_threads_and_the_streams_that_have_names(seed):
    assert seed.threads.rows() == [
        (0, "0", "7", "python", "GPU 0", "stream 7"),
        (1, "1", "7", "python", "CPU", "thread 7 (python)"),
    ]


def test_every_event_is_counted_kept_or_not(seed):
    assert set(seed.counts.rows()) == {
        ("M", "", "threads", 6),
        ("M", "", None, 1),
        ("X", "user_annotation", "host", 1),
        ("X", "cpu_op", "host", 1),
        ("X", "cuda_runtime", "host", 1),
        ("X", "cuda_driver", "host", 1),
        ("X", "python_function", "host", 1),
        ("X", "overhead", "host", 1),
        ("X", "a_category_of_tomorrow", "host", 1),
        ("X", "kernel", "device", 2),
        ("X", "gpu_memcpy", "device", 1),
        ("X", "gpu_memset", "device", 1),
        ("X", "gpu_user_annotation", "device_ranges", 1),
        ("X", "cuda_sync", "syncs", 1),
        ("i", "cpu_instant_event", "memory", 1),
        ("i", "cpu_instant_event", None, 1),
        ("s", "ac2g", None, 1),
        ("f", "ac2g", None, 1),
        ("B", "cpu_op", "host", 2),
        ("E", "cpu_op", "host", 2),
    }
    assert seed.num_events == len(SEED)


def test_the_facts_around_the_events(seed):
    facts = seed.facts

    assert (facts.rank, facts.world_size, facts.devices) == (3, 8, ("NVIDIA H200",))
    assert (facts.base_time_ns, facts.has_shapes, facts.has_stacks) == (1_700_000_000_000_000_000, True, None)


@pytest.mark.parametrize(
    ("old", "table", "kind"),
    [
        ("Operator", "host", "op"),
        ("Runtime", "host", "runtime"),
        ("Kernel", "device", "kernel"),
        ("Memcpy", "device", "memcpy"),
        ("Memset", "device", "memset"),
        ("CPU_OP", "host", "op"),
        ("hip_runtime", "host", "runtime"),
    ],
)
def test_old_names_mean_the_same(tmp_path, old, table, kind):
    trace = read(tmp_path, [slice_of("it", old, args={"external id": 5, "correlation": 6})])

    assert getattr(trace, table).select("kind", "name", "external_id").rows() == [(kind, "it", 5)]


@pytest.mark.parametrize("category", CATEGORIES)
def test_every_known_category_lands_in_its_table(tmp_path, category):
    trace = read(tmp_path, [slice_of("it", category)])

    table = CATEGORIES[category][0]
    assert getattr(trace, table).height == 1
    assert trace.counts.rows() == [("X", category, table, 1)]


def test_an_old_trace_has_device_and_stream_as_process_and_thread(tmp_path):
    trace = read(
        tmp_path,
        [
            {**slice_of("a", "Kernel"), "pid": 2, "tid": "stream 7"},
            {**slice_of("b", "Kernel"), "pid": 3, "tid": 9},
            {**slice_of("c", "Kernel"), "pid": 3, "tid": 9, "args": {"device": 0, "stream": 20}},
            {**slice_of("d", "Kernel"), "pid": "somewhere", "tid": "else"},
        ],
    )

    assert trace.device.select("device", "stream").rows() == [(2, 7), (3, 9), (0, 20), (None, None)]


def test_the_new_external_id_comes_before_the_old(tmp_path):
    trace = read(
        tmp_path,
        [
            slice_of("a", args={"external id": 1}),
            slice_of("b", args={"External id": 2, "external id": 3}),
            slice_of("c"),
        ],
    )

    assert in_file_order(trace.host)["external_id"].to_list() == [1, 2, None]


def test_numbers_in_quotes_are_numbers(tmp_path):
    trace = read(
        tmp_path,
        [
            slice_of("op", ts="10.001", dur="2", args={"External id": "4", "Sequence number": "5"}),
            slice_of("kernel", "kernel", args={"device": "0", "stream": "7", "correlation": "12"}),
        ],
    )

    assert in_file_order(trace.host).select("start_ns", "duration_ns", "external_id", "sequence").rows() == [
        (10_001, 2_000, 4, 5)
    ]
    assert trace.device.select("device", "stream", "correlation").rows() == [(0, 7, 12)]


def test_times_keep_every_digit_that_is_written(tmp_path):
    written = ["1694128201545123.456", "1694128201545123.5", "1694128201545123", "1.694128201545123457e15"]
    events = ",".join(f'{{"ph": "X", "name": "a", "ts": {ts}, "dur": 0.001}}' for ts in written)
    trace = read(tmp_path, f"[{events}]")

    assert [ns - 1_694_128_201_545_123_000 for ns in in_file_order(trace.host)["start_ns"]] == [456, 500, 0, 457]
    assert in_file_order(trace.host)["duration_ns"].to_list() == [1, 1, 1, 1]


def test_one_thread_written_in_two_ways_is_one_thread(tmp_path):
    trace = read(
        tmp_path,
        [{**slice_of("a"), "tid": 25738}, {**slice_of("b"), "tid": "25738"}, {**slice_of("c"), "tid": "main"}],
    )

    assert in_file_order(trace.host)["thread"].to_list() == [0, 0, 1]
    assert trace.threads.select("pid", "tid").rows() == [("1", "25738"), ("1", "main")]


def test_threads_are_in_order_of_their_numbers_not_of_appearance(tmp_path):
    places = [(10, 2), (9, 1), (10, 1), ("Spans", "x"), (None, None), (9, "main")]
    trace = read(tmp_path, [{**slice_of("a"), "pid": pid, "tid": tid} for pid, tid in places])

    expected = [("9", "1"), ("9", "main"), ("10", "1"), ("10", "2"), ("Spans", "x"), (None, None)]
    assert trace.threads.select("pid", "tid").rows() == expected
    assert in_file_order(trace.host)["thread"].to_list() == [3, 0, 2, 4, 5, 1]


def test_a_process_is_named_once_for_all_its_threads(tmp_path):
    trace = read(
        tmp_path,
        [
            label("process_name", 1, 99, name="python"),
            slice_of("a"),
            {**slice_of("b"), "tid": 8},
            slice_of("c", pid=2),
        ],
    )

    assert trace.threads.select("pid", "tid", "process_name").rows() == [
        ("1", "7", "python"),
        ("1", "8", "python"),
        ("2", "7", None),
    ]


def test_an_event_without_a_duration_is_a_point(tmp_path):
    trace = read(tmp_path, '[{"ph": "X", "name": "a", "ts": 1}, {"ph": "X", "name": "b", "ts": 2, "dur": null}]')

    assert in_file_order(trace.host).select("start_ns", "duration_ns").rows() == [(1_000, 0), (2_000, 0)]
    assert trace.problems == ()


def test_null_arguments_are_no_arguments(tmp_path):
    trace = read(tmp_path, [slice_of("a", args={"Input Dims": None, "External id": None, "Call stack": ""})])

    assert in_file_order(trace.host).select("shapes", "external_id", "stack").rows() == [(None, None, None)]


def test_begins_and_ends_pair_up_on_their_own_thread(tmp_path):
    """GIVEN nested and interleaved pairs THEN an end closes the last begin of its thread, in order of time."""
    trace = read(
        tmp_path,
        [
            edge("E", "", 9),  # the end of "outer", written first
            edge("B", "outer", 1, category="python_function"),
            edge("B", "elsewhere", 2, tid=8, category="kernel"),
            edge("B", "inner", 3),
            edge("E", "inner", 5),
            edge("E", "elsewhere", 7.5, tid=8),
            edge("E", "nobody's", 0.5),
            edge("B", "never ends", 20),
            slice_of("whole", ts=4),
        ],
    )

    assert in_file_order(trace.host).select("event", "kind", "name", "start_ns", "duration_ns").rows() == [
        (1, "python", "outer", 1_000, 8_000),
        (2, "other", "elsewhere", 2_000, 5_500),
        (3, "op", "inner", 3_000, 2_000),
        (8, "op", "whole", 4_000, 5_000),
    ]
    assert trace.warnings == ("2 begin or end events have no counterpart and were skipped",)


@pytest.mark.parametrize(
    ("times", "what"),
    [
        ('"dur": 1', "with no usable start time"),
        ('"ts": null, "dur": 1', "with no usable start time"),
        ('"ts": [1, 2], "dur": 1', "with no usable start time"),
        ('"ts": "1,2", "dur": 1', "with no usable start time"),
        ('"ts": {"a": 1, "b": 2}, "dur": 1', "with no usable start time"),
        ('"ts": NaN, "dur": 1', "with no usable start time"),
        ('"ts": 9000000000000000, "dur": 1', "with a start time out of range"),
        ('"ts": -9000000000000000, "dur": 1', "with a start time out of range"),
        ('"ts": 18446744073709551615, "dur": 1', "with no usable start time"),
        ('"ts": 1, "dur": -0.001', "with a negative duration"),
        ('"ts": 1, "dur": Infinity', "with a duration that is not a number, or too large"),
        ('"ts": 1, "dur": [1, 2]', "with a duration that is not a number, or too large"),
        ('"ts": 1, "dur": "long"', "with a duration that is not a number, or too large"),
        ('"ts": 1, "dur": 18446744073709551.615', "with a duration that is not a number, or too large"),
        ('"ts": 1, "dur": 9007199254740.993', "with a duration of more than 104 days"),
    ],
)
def test_an_event_without_a_sound_time_is_counted_and_its_place_told(tmp_path, times, what):
    before, bad = '[{"ph": "X", "name": "a", "ts": 1}, ', f'{{"ph": "X", "name": "b", {times}}}'
    trace = read(tmp_path, f'{before}{bad}, {{"ph": "X", "name": "c", "ts": 2}}, {bad}]')

    assert in_file_order(trace.host)["name"].to_list() == ["a", "c"]
    assert [(p.what, p.offset, p.num) for p in trace.problems] == [(what, len(before), 2)]
    assert trace.num_events == 4
    assert_sound(trace)


def test_a_collective_without_a_sound_time_is_in_no_table(tmp_path):
    args = {"Collective name": "allreduce"}
    trace = read(tmp_path, [slice_of("bad", "kernel", dur=-1, args=args), slice_of("good", "kernel", args=args)])

    assert trace.collectives["event"].to_list() == trace.device["event"].to_list() == [1]


def test_ids_that_come_twice_are_kept_twice(tmp_path):
    trace = read(tmp_path, [slice_of("a", "kernel", args={"correlation": 1, "stream": 1, "device": 0})] * 3)

    assert trace.device["correlation"].to_list() == [1, 1, 1]


@pytest.mark.parametrize(
    "name",
    [
        "}, {",
        '"ph"',
        '},{"ph":"X"',
        '"}, {"ph": "X", "ts": 1}, {"',
        'back\\slash \\" and /',
        "tab\tnewline\nreturn\r",
        "NUL \0 inside",
        "Привет, 世界 🙂",
        "]",
        "]}",
        "[[[{{{",
        "\u2028\x7f",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<...>({lambda(int)#1})>(int)",
    ],
)
@pytest.mark.parametrize("ascii", [True, False])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (",\n", ":\t")])
def test_a_name_may_hold_anything(tmp_path, name, ascii, separators):
    events = [slice_of(name, args={"Call stack": name}), slice_of("after")]
    trace = read(tmp_path, text_of(events, ensure_ascii=ascii, separators=separators))

    assert in_file_order(trace.host)["name"].to_list() == [name, "after"]
    assert in_file_order(trace.host)["stack"].to_list() == [name, None]
    assert trace.problems == ()
