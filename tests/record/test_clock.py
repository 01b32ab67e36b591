"""The clock on a time of our own: parts that sum to the step, events that are never taken back too early."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.recorder import clock as clock_module
from stepscope.recorder.clock import Clock, TimedStep, name_between, read_device_ns


class FakeTime:
    def __init__(self) -> None:
        self.ns = 1000

    def __call__(self) -> int:
        return self.ns


class FakeEvent:
    """A CUDA event: knows when it was recorded last, and refuses to be recorded while it is still needed."""

    gpu: FakeGpu

    def __init__(self) -> None:
        self.recorded_at: int | None = None

    def record(self, _stream: object) -> None:
        assert id(self) not in self.gpu.needed, "an event of a step that was not read yet is recorded again"
        self.gpu.enqueued += 1
        self.recorded_at = self.gpu.enqueued

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.recorded_at is not None and later.recorded_at is not None
        return (later.recorded_at - self.recorded_at) / 1e6


class FakeGpu:
    """Stands for torch.cuda: a queue of events, each one nanosecond after the one before."""

    def __init__(self) -> None:
        self.enqueued = 0
        self.capturing = False
        self.num_events = 0
        self.needed: set[int] = set()

    def torch(self) -> SimpleNamespace:
        def event(enable_timing: bool) -> FakeEvent:
            assert enable_timing
            self.num_events += 1
            made = FakeEvent()
            made.gpu = self
            return made

        cuda = SimpleNamespace(
            Event=event,
            current_stream=lambda device: f"stream of {device}",
            is_current_stream_capturing=lambda: self.capturing,
        )
        return SimpleNamespace(cuda=cuda)


@pytest.fixture
def time():
    return FakeTime()


@pytest.fixture
def gpu(monkeypatch):
    fake = FakeGpu()
    monkeypatch.setattr(clock_module, "torch", fake.torch())
    return fake


def run(clock: Clock, time: FakeTime, *cuts: tuple[int, str | None]) -> None:
    """Let so many nanoseconds pass, then switch, for each cut."""
    for ns, label in cuts:
        time.ns += ns
        clock.switch(label)


def test_a_training_step_has_every_nanosecond_under_one_name(time):
    clock = Clock(time)
    clock.begin_step()
    run(
        clock,
        time,
        (5, "data"),
        (10, None),
        (2, "forward"),
        (30, "backward"),
        (50, None),
        (1, "optimizer"),
        (7, None),
    )
    time.ns += 3
    step = clock.end_step(0)

    assert step.host_ns == {
        "other": 5 + 1 + 3,
        "data": 10,
        "before_forward": 2,
        "forward": 30,
        "backward": 50,
        "optimizer": 7,
    }
    assert (step.index, step.start_ns, step.wall_ns) == (0, 1000, 108)


@pytest.mark.parametrize(
    ("following", "name"),
    [
        ("forward", "before_forward"),
        ("backward", "before_backward"),
        ("data", "other"),
        ("optimizer", "other"),
        ("other", "other"),
        (None, "other"),
    ],
)
def test_what_lies_between_phases_is_named_by_what_follows(following, name):
    assert name_between(following) == name


def test_a_phase_that_comes_twice_is_added_up(time):
    clock = Clock(time)
    clock.begin_step()
    run(clock, time, (0, "forward"), (3, "backward"), (4, "forward"), (5, "backward"), (6, None))

    assert clock.end_step(0).host_ns == {"before_forward": 0, "forward": 8, "backward": 10, "other": 0}


def test_switching_to_the_running_phase_cuts_nothing(time):
    cuts = []
    clock = Clock(time)
    clock.begin_step()
    clock.on_range = cuts.append
    run(clock, time, (1, "forward"), (1, "forward"), (1, None), (1, None))

    assert cuts == ["forward", None]


def test_what_happens_between_two_steps_belongs_to_neither(time):
    clock = Clock(time)
    clock.begin_step()
    time.ns += 10
    first = clock.end_step(0)
    time.ns += 100  # writing the line, entering a window
    clock.begin_step()
    time.ns += 10
    second = clock.end_step(1)

    assert (first.wall_ns, second.wall_ns) == (10, 10)
    assert second.start_ns == first.start_ns + first.wall_ns + 100


def test_a_phase_that_crosses_the_boundary_is_cut_there(time):
    clock = Clock(time)
    clock.begin_step()
    run(clock, time, (1, "forward"))
    time.ns += 10
    first = clock.end_step(0)
    clock.begin_step()
    run(clock, time, (20, None))

    assert first.host_ns == {"before_forward": 1, "forward": 10}
    assert clock.end_step(1).host_ns == {"forward": 20, "other": 0}


LABELS = st.sampled_from(["data", "forward", "backward", "optimizer", "other", None])


@given(st.lists(st.lists(st.tuples(st.integers(0, 1000), LABELS)), min_size=1))
def test_the_parts_always_sum_to_the_step(steps):
    time = FakeTime()
    clock = Clock(time)
    for index, cuts in enumerate(steps):
        time.ns += 17
        clock.begin_step()
        run(clock, time, *cuts)
        step = clock.end_step(index)

        assert sum(step.host_ns.values()) == step.wall_ns
        assert step.start_ns + step.wall_ns == time.ns


def test_device_time_is_read_between_the_cuts(time, gpu):
    clock = Clock(time)
    clock.use_device(0)
    clock.begin_step()
    run(clock, time, (1, "forward"), (1, "backward"), (1, "forward"), (1, None))
    step = clock.end_step(0)

    # Each event is one nanosecond after the one before it.
    assert read_device_ns(step) == {"before_forward": 1, "forward": 2, "backward": 1, "other": 1}
    assert list(read_device_ns(step)) == list(step.host_ns)
    assert gpu.num_events == 6


def test_events_of_a_step_that_was_read_are_used_again(time, gpu):
    clock = Clock(time)
    clock.use_device(0)
    for index in range(10):
        clock.begin_step()
        run(clock, time, (1, "forward"), (1, None))
        step = clock.end_step(index)
        assert read_device_ns(step) == {"before_forward": 1, "forward": 1, "other": 1}
        clock.recycle(step)

    assert gpu.num_events == 4


def test_without_a_device_there_is_nothing_to_read(time):
    clock = Clock(time)
    clock.begin_step()
    step = clock.end_step(0)

    assert read_device_ns(step) is None
    clock.recycle(step)  # and nothing to take back


def test_a_step_that_ends_inside_a_graph_capture_has_no_device_time(time, gpu):
    clock = Clock(time)
    clock.use_device(0)
    clock.begin_step()
    run(clock, time, (1, "forward"))
    gpu.capturing = True
    run(clock, time, (1, None))
    captured = clock.end_step(0)
    gpu.capturing = False
    clock.begin_step()
    after = clock.end_step(1)

    assert read_device_ns(captured) is None and captured.wall_ns == 2
    assert read_device_ns(after) == {"other": 1}


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(0, 4)),
        st.tuples(st.just("captured step"), st.integers(0, 4)),
        st.tuples(st.just("read"), st.integers(1, 5)),
    ),
    max_size=60,
)


@given(ACTIONS)
def test_an_event_is_never_handed_out_while_an_unread_step_needs_it(actions):
    gpu, index = FakeGpu(), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock_module, "torch", gpu.torch())
        clock = Clock(FakeTime())
        clock.use_device(0)
        unread: list[tuple[TimedStep, int]] = []
        for action, amount in actions:
            if action == "read":
                for step, truth_ns in unread[:amount]:
                    assert sum(read_device_ns(step).values()) == truth_ns
                    clock.recycle(step)
                del unread[:amount]
                continue
            gpu.needed = {id(e) for s, _ in unread for e in (s.first_event, *(e for _, e in s.events))}
            clock.begin_step()
            for cut in range(amount):
                gpu.capturing = action == "captured step" and cut == 1
                clock.switch(("forward", "backward")[cut % 2])
            gpu.capturing = False
            step = clock.end_step(index)
            unread.append((step, step.events[-1][1].recorded_at - step.first_event.recorded_at))
            index += 1
