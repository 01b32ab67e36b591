"""Reading a recording that is whole, cut off, or nonsense: typed data, warnings, or one RecordingError."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handmade import cpu_facts, cpu_recording, gpu_recording, sample, write_recording
from stepscope.errors import RecordingError
from stepscope.trace.recording import StepSample, read_recording


def lines(*entries: object) -> bytes:
    return b"".join(entry if isinstance(entry, bytes) else json.dumps(entry).encode() + b"\n" for entry in entries)


def read(folder, samples: bytes = b"", facts: bytes | None = None, **files: bytes):
    folder.mkdir(exist_ok=True)
    (folder / "recording.json").write_bytes(facts or json.dumps({"schema_version": 1, "status": "finished"}).encode())
    (folder / "samples.jsonl").write_bytes(samples)
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_bytes(content)
    return read_recording(folder)


def test_a_whole_recording_is_typed_data(tmp_path):
    recording = read_recording(cpu_recording(tmp_path / "run"))

    assert (recording.status, len(recording.samples), recording.warnings) == ("finished", 12, ())
    assert recording.compiler is None and recording.counters == ()
    assert recording.window("clean")[0] == StepSample(
        step=2,
        window="clean",
        start_ns=20_000_000,
        wall_ns=10_000_000,
        host_ns={"data": 1_000_000, "forward": 3_000_000, "backward": 5_000_000, "optimizer": 1_000_000},
        device_ns=None,
        num_tokens=512,
        num_samples=8,
        num_micro_batches=1,
        num_skipped=0,
        num_compiles=0,
        loss=None,
    )
    assert [len(recording.window(name)) for name in ("warmup", "trace", "memory", "free", "no such")] == [
        2,
        2,
        1,
        2,
        0,
    ]


def test_the_device_side_comes_later_and_is_merged(tmp_path):
    recording = read_recording(gpu_recording(tmp_path / "run"))

    assert all(s.device_ns is not None and s.wall_ns == 10_000_000 for s in recording.samples[:10])
    assert recording.samples[3].loss == 1.7
    assert [counter.t_ns for counter in recording.counters] == [20_000_000, 30_000_000]
    assert recording.counters[1].throttle == ("sw_power_cap",)


def test_late_lines_may_come_in_any_order_and_for_some_steps_only(tmp_path):
    recording = read(
        tmp_path / "run",
        lines(sample(0), sample(1), {"step": 1, "loss": 0.5}, sample(2), {"step": 0, "device_ns": {"forward": 7}}),
    )

    assert [(s.step, s.device_ns, s.loss) for s in recording.samples] == [
        (0, {"forward": 7}, None),
        (1, None, 0.5),
        (2, None, None),
    ]


def test_a_restart_voids_what_came_before(tmp_path):
    recording = read(
        tmp_path / "run", lines(sample(0), sample(1), {"restart": "steps are now ..."}, sample(0, "warmup"))
    )

    assert [(s.step, s.window) for s in recording.samples] == [(0, "warmup")]
    assert recording.warnings == ()


@pytest.mark.parametrize("cut", [1, 20, 100, 200])
def test_a_line_that_a_kill_cut_off_is_left_out_and_said(tmp_path, cut):
    whole = lines(sample(0), sample(1))
    recording = read(tmp_path / "run", whole + json.dumps(sample(2)).encode()[:cut])

    assert [s.step for s in recording.samples] == [0, 1]
    assert recording.warnings == ("samples.jsonl: 1 line(s) could not be read and were skipped",)


def test_garbage_between_good_lines_is_counted(tmp_path):
    garbage = [
        b"\xff\xfe\x00\n",
        b"not json\n",
        b"[1, 2]\n",
        b"null\n",
        b"[" * 100_000 + b"\n",
        b"9" * 10_000 + b"\n",
    ]
    recording = read(tmp_path / "run", lines(sample(0), *garbage, sample(1)))

    assert [s.step for s in recording.samples] == [0, 1]
    assert recording.warnings == ("samples.jsonl: 6 line(s) could not be read and were skipped",)


@pytest.mark.parametrize("field", ["window", "start_ns", "wall_ns", "host_ns"])
def test_a_step_that_lacks_a_field_is_left_out_and_said(tmp_path, field):
    broken = sample(1)
    del broken[field]
    recording = read(tmp_path / "run", lines(sample(0), broken, sample(2)))

    assert [s.step for s in recording.samples] == [0, 2]
    assert recording.warnings == ("samples.jsonl: 1 step(s) have a missing or invalid field and were skipped",)


def test_fields_that_older_writers_did_not_have_get_their_defaults(tmp_path):
    bare = {key: sample(0)[key] for key in ("step", "window", "start_ns", "wall_ns", "host_ns")}
    (only,) = read(tmp_path / "run", lines(bare)).samples

    assert (only.num_tokens, only.num_micro_batches, only.num_compiles, only.loss) == (None, 0, 0, None)


def test_fields_that_newer_writers_add_are_passed_over(tmp_path):
    recording = read(
        tmp_path / "run",
        lines({**sample(0), "color": "blue"}, {"event": "something new"}),
        counters_jsonl=lines({"t_ns": 1, "temperature": 60, "power_watts": 3.5}, {"no time": 1}),
    )

    assert len(recording.samples) == 1
    assert [counter.power_watts for counter in recording.counters] == [3.5]


@pytest.mark.parametrize("loss", ["nan", "inf", "-inf", "NaN"])
def test_a_loss_that_json_cannot_say_is_written_as_text(tmp_path, loss):
    (only,) = read(tmp_path / "run", lines(sample(0, loss=loss))).samples

    assert str(only.loss) == loss.lower()


WRONG = ["Infinity", "-Infinity", "NaN", "1e999", '"fast"', "[]", "{}", "null", '[{"forward": 1}]', "true", "1.5"]
FIELDS = ["start_ns", "wall_ns", "host_ns", "device_ns", "num_tokens", "num_samples", "loss", "window", "step"]


@pytest.mark.parametrize("field", FIELDS)
def test_a_value_of_the_wrong_kind_costs_at_most_its_step(tmp_path, field):
    for value in WRONG:
        broken = json.dumps({**sample(1), field: "HERE"}).replace('"HERE"', value).encode() + b"\n"
        recording = read(tmp_path / "run", lines(sample(0), broken, sample(2)))

        assert {0, 2} <= {s.step for s in recording.samples}, value
        for step in recording.samples:
            assert isinstance(step.window, str) and isinstance(step.wall_ns, int) and isinstance(step.step, int), (
                value
            )
            assert step.device_ns is None or all(isinstance(ns, int) for ns in step.device_ns.values()), value
            assert step.num_tokens is None or isinstance(step.num_tokens, int), value
            assert step.num_samples is None or isinstance(step.num_samples, int), value


@pytest.mark.parametrize(("where", "kind"), [("train.py:7 main", "rollout"), ("train.py:9 test", "evaluation")])
def test_what_one_line_does_has_one_name(tmp_path, where, kind):
    """GIVEN a step whose forward was called an evaluation before each step turned out to have it THEN it is one of
    those; not if it was on another line."""
    between = {"forward_without_gradients": {where: 1}, "rollout": {"train.py:7 main": 2}}
    facts = {"schema_version": 1, "status": "finished", "between": between}
    names = ("evaluation", "rollout", "rollout")
    steps = [
        sample(step, "clean") | {"host_ns": {"forward": 9, name: 1}, "wall_ns": 10} for step, name in enumerate(names)
    ]

    recording = read(tmp_path, lines(*steps), json.dumps(facts).encode())

    assert [list(step.host_ns)[-1] for step in recording.samples] == [kind, "rollout", "rollout"]


def test_a_free_step_has_its_time_and_nothing_else(tmp_path):
    (only,) = read(tmp_path / "run", lines({"step": 40, "window": "free", "start_ns": 5, "wall_ns": 7})).samples

    assert (only.step, only.window, only.start_ns, only.wall_ns) == (40, "free", 5, 7)
    assert sum(only.host_ns.values()) == 7 and only.num_tokens is None


def test_absurd_numbers_are_left_out_and_said(tmp_path):
    recording = read(tmp_path / "run", lines(sample(0), sample(1, start_ns=-1), sample(2, wall_ns=10**30)))

    assert [s.step for s in recording.samples] == [0]
    assert recording.warnings == ("samples.jsonl: 2 step(s) have a missing or invalid field and were skipped",)


def test_no_folder_no_recording_and_a_newer_one_are_told_apart(tmp_path):
    with pytest.raises(RecordingError, match="not found"):
        read_recording(tmp_path / "nowhere")
    with pytest.raises(RecordingError, match=r"is not a recording: it has no recording.json"):
        read_recording(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(RecordingError):
        read_recording(tmp_path / "file")
    folder = write_recording(tmp_path / "run", cpu_facts(schema_version=2), [])
    with pytest.raises(
        RecordingError, match=r"schema version 2, but this Stepscope reads up to 1\. Run `pip install --upgrade"
    ):
        read_recording(folder)


NO_RECORDINGS = [
    b" ",
    b"{",
    b"[]",
    b"null",
    b"3",
    b'"text"',
    b"{}",
    b'{"schema_version": 1}',
    b'{"schema_version": "1", "status": "x"}',
    b'{"schema_version": null, "status": "x"}',
    b'{"schema_version": 1.5, "status": 1}',
    b"[" * 100_000,
    b"\xff\xff",
]


@pytest.mark.parametrize("facts", NO_RECORDINGS, ids=lambda facts: facts[:40].decode(errors="replace"))
def test_a_recording_json_that_is_not_one_is_one_line(tmp_path, facts):
    with pytest.raises(RecordingError) as caught:
        read(tmp_path / "run", facts=facts)

    assert "\n" not in str(caught.value) and "recording.json" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff", b"[" * 100_000], ids=range(6))
def test_a_compile_json_that_is_not_one_is_left_out_or_one_line(tmp_path, content):
    try:
        recording = read(tmp_path / "run", compile_json=content)
    except RecordingError as error:
        assert "compile.json" in str(error)
    else:
        assert recording.compiler is None and any("compile.json" in warning for warning in recording.warnings)


WRONG_COUNTERS = [
    {"t_ns": "soon"},
    {"t_ns": None},
    {"t_ns": 1, "throttle": 3},
    {"t_ns": 1, "throttle": None},
    {"t_ns": 1, "throttle": [7]},
    {"t_ns": 1, "power_watts": "x"},
]


@pytest.mark.parametrize("counter", WRONG_COUNTERS, ids=json.dumps)
def test_a_counter_of_the_wrong_kind_costs_at_most_its_line(tmp_path, counter):
    recording = read(tmp_path / "run", counters_jsonl=lines({"t_ns": 5, "power_watts": 2.0}, counter))

    assert recording.counters[0].t_ns == 5
    for one in recording.counters:
        assert isinstance(one.t_ns, int) and all(isinstance(reason, str) for reason in one.throttle)
        assert one.power_watts is None or isinstance(one.power_watts, float)


@settings(max_examples=5 * settings().max_examples)
@given(st.binary(max_size=200), st.binary(max_size=200))
def test_random_bytes_never_make_more_than_a_recording_error(tmp_path_factory, facts, samples):
    folder = tmp_path_factory.getbasetemp() / "random-bytes"
    for given_facts in (None, facts):
        try:
            recording = read(folder, samples, given_facts)
        except RecordingError:
            assert given_facts
        else:
            assert recording.samples == ()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
CHANGE = st.tuples(st.integers(0, 3), st.sampled_from([*sample(0), "device_ns", "loss", "restart"]), JSON)


@settings(max_examples=5 * settings().max_examples)
@given(st.lists(CHANGE, max_size=5))
def test_lines_of_the_right_shape_with_wrong_values_never_raise(tmp_path_factory, changes):
    entries = [sample(step) for step in range(4)]
    for position, field, value in changes:
        entries[position][field] = value
    recording = read(tmp_path_factory.getbasetemp() / "wrong-values", lines(*entries))

    assert len(recording.samples) <= 4
