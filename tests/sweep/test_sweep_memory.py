"""What is known of memory: amounts, limits of control groups, errors of every kind."""

from __future__ import annotations

import sys

import pytest

from stepscope.errors import UsageError
from stepscope.sweep import memory, runner

GIB = 1 << 30


def lost(asked, free, total):
    return {"asked_bytes": asked, "free_bytes": free, "total_bytes": total}


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("40GiB", 40 * GIB), ("512m", 512 << 20), ("2 GB", 2 * 10**9), ("1000", 1000)]
)
def test_amounts(text, num_bytes):
    assert memory.bytes_of(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "4 parsecs", "-1GiB", "0", "0GiB", "0.1", "1.2.3GiB", "9" * 400])
def test_what_is_no_amount(text):
    with pytest.raises(UsageError, match="not an amount of memory"):
        memory.bytes_of(text)


def test_a_cuda_error_says_what_was_asked_for_and_what_was_there():
    class OutOfMemoryError(RuntimeError):
        pass

    text = (
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.72 GiB of which 1.50 GiB "
        "is free. Including non-PyTorch memory, this process has 138.22 GiB memory in use."
    )
    assert memory.read_error(OutOfMemoryError(text)) == lost(20 * GIB, int(1.5 * GIB), int(139.72 * GIB))
    assert memory.read_error(RuntimeError("CUDA error: out of memory")) == lost(None, None, None)


def test_a_host_error_says_what_was_asked_for():
    error = RuntimeError(
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12"
    )
    found = memory.read_error(error)
    assert found is not None and found["asked_bytes"] == 4096
    assert memory.read_error(MemoryError()) is not None


@pytest.mark.parametrize(("mapped", "free"), [(5, 3), (2, 6), (1, 6), (9, 0)])
def test_what_is_free_is_the_rest_of_what_the_point_may_use(monkeypatch, mapped, free):
    """GIVEN a process that held 2 GiB when it was given 6 more THEN memory of before is no part of either figure."""
    monkeypatch.setattr(memory, "_held_bytes", 2 * GIB)
    monkeypatch.setattr(memory, "data_bytes", lambda: mapped * GIB)
    monkeypatch.setattr(memory.resource, "getrlimit", lambda _which: (8 * GIB, 8 * GIB))

    found = memory.read_error(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 GiB"))

    assert found == lost(9 * GIB, free * GIB, 6 * GIB)


def test_more_free_memory_than_was_asked_for_is_not_told():
    """On the way from the failure to who reads it, what the step held has been freed."""
    small = memory.read_error(RuntimeError("DefaultCPUAllocator: you tried to allocate 1 bytes. Error code 12"))
    assert small == lost(1, None, small["total_bytes"])
    oom = {"asked_bytes": 1 << 28, "free_bytes": None, "total_bytes": 2 << 30}
    told = runner._oom_reason({"oom": oom, "stage": "first call"})
    assert told == "needed 256 MiB more within its limit of 2.00 GiB, in stage first call"


def test_another_error_is_not_about_memory():
    assert memory.read_error(RuntimeError("shape mismatch")) is None
    assert memory.read_error(ValueError("out of range")) is None


def machine(tmp_path, cgroup, files):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   16777216 kB\n")
    (tmp_path / "proc" / "vmstat").write_text("nr 1\noom_kill 2\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "proc", tmp_path / "cgroup"


def test_a_control_group_above_ours_can_be_the_limit(tmp_path):
    files = {
        "a/memory.max": f"{8 * GIB}\n",
        "a/memory.current": f"{5 * GIB}\n",
        "a/memory.stat": f"anon 1\ninactive_file {GIB}\n",
        "a/memory.events": "low 0\noom 4\noom_kill 3\n",
        "a/b/memory.max": "max\n",
        "a/b/memory.current": "1\n",
    }
    proc, cgroups = machine(tmp_path, "0::/a/b\n", files)

    assert memory.available_bytes(proc, cgroups) == 4 * GIB
    assert memory.num_oom_kills(proc, cgroups) == 5


def test_control_groups_of_the_first_kind_count_too(tmp_path):
    files = {"memory/x/memory.limit_in_bytes": f"{3 * GIB}\n", "memory/x/memory.usage_in_bytes": f"{GIB}\n"}
    proc, cgroups = machine(tmp_path, "4:memory:/x\n3:cpu:/\n", files)

    assert memory.available_bytes(proc, cgroups) == 2 * GIB


def test_without_a_limit_it_is_the_machines(tmp_path):
    files = {"memory/memory.limit_in_bytes": "9223372036854771712\n", "memory/memory.usage_in_bytes": "1\n"}
    proc, cgroups = machine(tmp_path, "4:memory:/\n", files)

    assert memory.available_bytes(proc, cgroups) == 16 * GIB
    assert memory.available_bytes(tmp_path / "nothing", cgroups) is None


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_this_machine_has_memory():
    assert memory.available_bytes() > 1 << 20 and memory.data_bytes() > 1 << 20
