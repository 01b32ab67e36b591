"""How long a thread waits for a core, and the memory that is left, as the kernel says."""

import sys
import threading
import time

import pytest

from stepscope.recorder.history import core_wait

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's figures are those of Linux")


def test_a_thread_that_sleeps_waits_for_no_core_and_one_of_many_does():
    wait = core_wait.CoreWait()
    assert wait.share() is None
    wait.of_this_thread()
    assert wait.share() is None  # the first reading
    time.sleep(0.11)
    share = wait.share()
    assert share is not None and 0.0 <= share <= 1.0
    assert wait.share() == share  # too soon for another


def test_the_thread_that_is_followed_may_end():
    wait = core_wait.CoreWait()
    thread = threading.Thread(target=wait.of_this_thread)
    thread.start()
    thread.join()
    assert wait.share() is None


def test_memory_that_is_left():
    found = core_wait.available_bytes()
    assert found is not None and found > 0
