"""How long a thread waits for a core, and the memory that is left, as the kernel says."""

import sys
import threading
import time

import pytest

from stepscope.recorder.history import core_wait

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's figures are those of Linux")


def test_a_thread_that_works_runs_and_one_that_sleeps_does_not():
    times = core_wait.CoreTimes()
    first = times.read(1)
    assert first is not None and times.read(2) is None  # too soon for another
    time.sleep(0.1)
    slept = times.read(core_wait.PERIOD_NS + 1)
    end = time.thread_time_ns() + 50_000_000
    while time.thread_time_ns() < end:
        pass
    worked = times.read(2 * core_wait.PERIOD_NS + 1)
    assert slept is not None and worked is not None
    assert slept[0] - first[0] < 50_000_000 <= worked[0] - slept[0]
    assert first[1] <= slept[1] <= worked[1]


def test_each_thread_reads_its_own_times():
    found = []
    thread = threading.Thread(target=lambda: found.append(core_wait.CoreTimes().read(1)))
    thread.start()
    thread.join()
    own = core_wait.CoreTimes().read(1)
    assert own is not None and found[0][0] < own[0]


def test_memory_that_is_left():
    found = core_wait.available_bytes()
    assert found is not None and found > 0


def test_other_processes_use_what_is_busy_without_our_own_time(tmp_path, monkeypatch):
    stat = tmp_path / "stat"
    monkeypatch.setattr(core_wait, "STAT", stat)
    seconds = iter([5.0, 7.0, 7.0])
    monkeypatch.setattr(time, "process_time", lambda: next(seconds))
    ticks = core_wait.os.sysconf("SC_CLK_TCK")
    others = core_wait.OtherProcesses()
    stat.write_text("cpu 1000 0 0 1000 1000 0 0 0 0 0\ncpu0 …\n")
    assert others.share() is None
    # Ten seconds on two cores: we ran for two, others for three, another machine for one.
    stat.write_text(f"cpu {1000 + 4 * ticks} 0 {ticks} {1000 + 13 * ticks} {1000 + ticks} 0 0 {ticks} 0 0\n")
    assert others.share() == pytest.approx(4 / 20)
    assert others.share() is None  # no time has passed
    stat.unlink()
    assert others.share() is None


def test_the_kernel_says_how_much_others_use():
    others = core_wait.OtherProcesses()
    others.share()
    time.sleep(0.1)
    found = others.share()
    assert found is not None and 0 <= found <= 1
