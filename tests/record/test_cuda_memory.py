"""What is asked of CUDA's allocator, and when; a stand-in answers here, tests/gpu asks the real one."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import pickletools

import pytest
import torch
from torch import nn

from stepscope.recorder import files
from stepscope.recorder.ledger import memory_window as cuda_memory
from stepscope.recorder.ledger.memory_window import (
    AllocatorCounters,
    AllocatorHistory,
    MemoryProbe,
    is_out_of_memory,
    write_snapshot,
)

SNAPSHOT = {"segments": [{"address": 1, "blocks": []}], "device_traces": [[{"action": "alloc", "size": 512}]]}


class FakeCuda:
    """CUDA's memory functions, and what was asked of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.current, self.peak, self.reserved, self.retries = 100, 900, 2000, 3
        self.script_keeps_history = False
        self.queued: list = []
        memory = torch.cuda.memory
        monkeypatch.setattr(torch.cuda, "memory_stats", self.stats)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "_lazy_call", self.queued.append)
        monkeypatch.setattr(memory, "_record_memory_history", self.history)
        monkeypatch.setattr(memory, "_snapshot", lambda: SNAPSHOT)
        monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: self.script_keeps_history, raising=False)

    def stats(self, _device: int) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": self.current,
            "allocated_bytes.all.peak": self.peak,
            "reserved_bytes.all.peak": self.reserved,
            "num_alloc_retries": self.retries,
        }

    def reset(self, _device: int) -> None:
        self.asked.append("reset")
        self.peak = self.current

    def history(self, enabled: str | None, **options: object) -> None:
        self.asked.append(f"history {enabled}")
        assert options in ({}, {"context": "alloc", "stacks": "python", "max_entries": 200_000})


@pytest.fixture
def cuda(monkeypatch):
    return FakeCuda(monkeypatch)


@pytest.mark.parametrize(("peak", "lowers"), [(1000, False), (900, False), (700, True)])
def test_counters_are_the_windows_own_and_a_lower_peak_is_said(cuda, peak, lowers):
    counters = AllocatorCounters(0)
    cuda.peak, cuda.retries = peak, 5

    assert counters.read() == {
        "start_allocated_bytes": 100,
        "peak_allocated_bytes": peak,
        "peak_reserved_bytes": 2000,
        "num_retries": 2,
    }
    assert ("900 bytes" in (counters.lowered or "")) == lowers


def test_history_begins_with_cuda_and_ends_with_the_warm_up(cuda, monkeypatch):
    history = AllocatorHistory()
    history.start_with_cuda()
    assert cuda.asked == []  # CUDA is the script's to initialize
    cuda.queued[0]()
    history.stop()
    history.stop()
    assert cuda.asked == ["history all", "history None"]

    cuda.queued[0]()  # asked for no more: CUDA came after the warm-up
    history.start_with_cuda()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    cuda.queued[1]()  # in a forked child
    assert len(cuda.asked) == 2


def test_a_history_that_cannot_be_kept_is_not_the_scripts_failure_to_initialize_cuda(cuda, monkeypatch):
    def refuses(**_options):
        raise RuntimeError("not with this allocator")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", refuses)
    AllocatorHistory().start_with_cuda()
    cuda.queued[0]()


def test_a_history_that_the_script_keeps_is_left_alone(cuda):
    cuda.script_keeps_history = True
    history = AllocatorHistory()

    assert not history.start()
    history.stop()
    assert cuda.asked == []


def test_a_snapshot_is_written_whole_and_in_protocol_4(cuda, tmp_path):
    write_snapshot(tmp_path / "snapshot.pickle")
    content = (tmp_path / "snapshot.pickle").read_bytes()
    opcode, protocol, _ = next(pickletools.genops(content))

    assert pickle.loads(content) == SNAPSHOT
    assert (opcode.name, protocol) == ("PROTO", 4)
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot.pickle"]


def test_out_of_memory_is_found_behind_another_exception():
    def raised(cause: BaseException | None) -> BaseException:
        try:
            raise RuntimeError("the trainer gave up") from cause
        except RuntimeError as error:
            return error

    oom = torch.OutOfMemoryError("CUDA out of memory")
    circle = RuntimeError("a circle")
    circle.__context__ = ValueError()
    circle.__context__.__context__ = circle
    assert is_out_of_memory(oom) and is_out_of_memory(raised(oom))
    assert not any(map(is_out_of_memory, (None, circle, raised(ValueError()))))


class Notes(list):
    def __call__(self, about: str, text: str) -> None:
        self.append(text)

    def guard(self, _doing: str, action) -> None:
        action()


def window(folder, in_full: bool) -> tuple[Notes, dict]:
    notes = Notes()
    probe = MemoryProbe(folder, in_full, notes, notes.guard)
    probe.await_cuda()
    probe.warmup_ended(has_window=True)
    layer = nn.Linear(2, 2)
    probe.start([layer], [], 0, lambda: "forward")
    layer(torch.ones(1, 2))
    probe.stop()
    with gzip.open(folder / files.MEMORY_FILE) as stream:
        return notes, json.load(stream)


@pytest.mark.long
def test_a_window_in_full_writes_a_snapshot_and_one_without_does_not(cuda, tmp_path):
    folders = [tmp_path / "full", tmp_path / "plain"]
    for folder in folders:
        folder.mkdir()
    notes, memory = window(folders[0], in_full=True)
    assert cuda.asked == ["reset", "history all", "history None"]
    assert memory["allocator"]["start_allocated_bytes"] == 100
    # Another note may be of graphs that other tests left alive in this process.
    assert sum("peak counters were reset" in note for note in notes) == 1
    assert (folders[0] / files.SNAPSHOT_FILE).exists()

    cuda.asked.clear()
    _, memory = window(folders[1], in_full=False)
    assert cuda.asked == ["reset"] and memory["allocator"] is not None
    assert not (folders[1] / files.SNAPSHOT_FILE).exists()


def test_a_gradient_that_nobody_has_asked_for_was_there_before_the_window(cuda, tmp_path):
    """GIVEN an input with a gradient that no variable holds THEN the window knows both, and when they die."""
    probe = MemoryProbe(tmp_path, False, Notes(), Notes().guard)
    inputs = torch.ones(77, 3, requires_grad=True)
    inputs.sum().backward()
    model = nn.Linear(2, 2)
    probe.start([model], [], None, lambda: "forward")
    del inputs
    probe.stop()

    with gzip.open(tmp_path / files.MEMORY_FILE) as stream:
        before = [entry for entry in json.load(stream)["allocations"] if entry["shape"] == [77, 3]]
    assert [entry["born"] for entry in before] == [None, None]
    assert sorted(entry["died"] for entry in before) == [0, 1]


def test_running_out_of_memory_leaves_a_snapshot_and_says_so(cuda, tmp_path):
    notes = Notes()
    probe = MemoryProbe(tmp_path, False, notes, notes.guard)
    probe.script_failed(ValueError("something else"))
    assert notes == [] and not list(tmp_path.iterdir())

    probe.script_failed(torch.OutOfMemoryError("CUDA out of memory"))
    assert pickle.loads((tmp_path / files.OOM_SNAPSHOT_FILE).read_bytes()) == SNAPSHOT
    assert files.OOM_SNAPSHOT_FILE in notes[0]
    assert cuda_memory.SNAPSHOT_PROTOCOL == 4
