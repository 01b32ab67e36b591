"""Samples GPU counters during a run in a separate thread, one JSON line per sample.

    {"t_ns": 812345, "gpu_busy_share": 0.97, "memory_controller_busy_share": 0.4, "power_watts": 512.3,
     "energy_joules": 123.4, "sm_clock_mhz": 1980, "memory_clock_mhz": 3201, "throttle": ["sw_power_cap"],
     "driver_memory_bytes": 81604378624}

`t_ns` is `time.perf_counter_ns()`. Counters that the GPU does not offer are missing. `energy_joules` counts from the
driver's start. It is in the first and last line, in samples on request, and about once per second.
"""

import json
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from stepscope.recorder.files import OwnFile
from stepscope.recorder.machine.nvml import Nvml, NvmlGpu, NvmlUnavailable

FLUSH_NS = 1_000_000_000
JOIN_SECONDS = 2.0
# The interval doubles after this many samples, so that the file of a run of weeks stays small.
STRETCH_SAMPLES = 18_000
PROCESSES_EVERY = 100  # samples


class CounterSampler:
    """Samples one GPU until `stop`. An exception ends the sampling and is kept in `error`, never raised."""

    def __init__(self, nvml: Nvml, gpu: NvmlGpu, path: Path, interval_seconds: float) -> None:
        self.error: BaseException | None = None
        self._nvml, self._gpu = nvml, gpu
        self.limits = gpu.limits()
        self._interval_ns = round(interval_seconds * 1e9)
        self._pid = os.getpid()
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._is_stopped = False
        # Not a Python file object: a forked child would write its copy of the buffer again on exit.
        self._pending: list[str] = []
        self._copy: OwnFile | None = None
        self._sums = CounterSums()
        self._num_processes: int | None = None  # others on the GPU
        self._file = OwnFile(path)
        self._thread = threading.Thread(target=self._run, name="stepscope-counters", daemon=True)

    @classmethod
    def start(
        cls,
        path: str | os.PathLike[str],
        gpu_uuid: str,
        interval_seconds: float = 0.1,
        library_name: str | None = None,
    ) -> "CounterSampler":
        """Return a running sampler. Raises NvmlUnavailable if the GPU's counters cannot be read."""
        if interval_seconds <= 0:
            raise ValueError(f"interval_seconds must be above 0, not {interval_seconds}")
        nvml = Nvml(library_name)
        try:
            sampler = cls(nvml, nvml.gpu(gpu_uuid), Path(path), interval_seconds)
        except BaseException:
            nvml.close()
            raise
        sampler._thread.start()
        return sampler

    def stop(self) -> None:
        """Stop sampling within JOIN_SECONDS and write the rest. Does nothing in a forked child."""
        if self._is_stopped or os.getpid() != self._pid:
            return
        self._is_stopped = True
        self._stopping.set()
        self._wake.set()
        self._thread.join(JOIN_SECONDS)
        # A thread that hangs inside the driver still uses both: leave them open.
        if not self._thread.is_alive():
            self._file.close()
            self._nvml.close()

    def sample_energy(self) -> None:
        """Ask the thread for a sample with energy now. Returns immediately."""
        self._wake.set()

    def copy_to(self, path: Path | None) -> None:
        """Write the samples from now on to another file too, or no longer."""
        copy, self._copy = self._copy, None if path is None else OwnFile(path)
        if copy is not None:
            copy.close()

    def take_sums(self) -> dict[str, Any]:
        """Return means and extremes of the samples since the last call, for a block of the history."""
        sums, self._sums = self._sums, CounterSums(self._sums.last_energy)
        found = sums.values()
        if found and (num := self._num_processes) is not None:
            found["num_processes"] = num
        return found

    def other_processes(self) -> list[dict[str, Any]]:
        """Return the other processes that compute on this GPU (`pid`, `name`, `used_bytes`); empty after `stop`.

        In a container the driver's pids may belong to another namespace. Then this process is in the list too. If
        NVML fails, the list is empty and `error` is set.
        """
        # A child forked while the thread was inside NVML would wait for a lock that is never released.
        if self._is_stopped or os.getpid() != self._pid:
            return []
        try:
            processes = self._gpu.compute_processes() or []
        except NvmlUnavailable as error:
            self.error = self.error or error
            return []
        return [process for process in processes if process["pid"] != self._pid]

    def _run(self) -> None:
        try:
            self._sample_until_stopped()
        except BaseException as error:
            self.error = error
        try:
            self._flush()
        except BaseException as error:
            self.error = self.error or error

    def _sample_until_stopped(self) -> None:
        num_samples = 0
        due_ns = time.perf_counter_ns()
        flushed_ns = due_ns - FLUSH_NS
        while True:
            asked = self._wake.wait(max(0, due_ns - time.perf_counter_ns()) / 1e9)
            self._wake.clear()
            if self._stopping.is_set():
                break
            now_ns = time.perf_counter_ns()
            flushes = now_ns + self._interval_ns - flushed_ns >= FLUSH_NS
            self._append(now_ns, with_energy=flushes or asked)
            num_samples += 1
            if num_samples % STRETCH_SAMPLES == 0:
                self._interval_ns *= 2
            if num_samples % PROCESSES_EVERY == 1:
                self._num_processes = len(self.other_processes())
            if flushes:
                self._flush()
                flushed_ns = now_ns
            due_ns = max(due_ns + self._interval_ns, now_ns)
        self._append(time.perf_counter_ns(), with_energy=True)

    def _append(self, now_ns: int, with_energy: bool) -> None:
        found = sample(self._gpu, now_ns, with_energy)
        self._sums.add(found)
        self._pending.append(json.dumps(found, separators=(",", ":")))

    def _flush(self) -> None:
        data = "".join(f"{line}\n" for line in self._pending).encode()
        self._pending.clear()
        self._file.append(data)
        if (copy := self._copy) is not None:
            copy.append(data)


def sample(gpu: NvmlGpu, t_ns: int, with_energy: bool) -> dict[str, Any]:
    """Return one line of the counters file: the counters of `gpu` now, without those it does not offer."""
    busy = gpu.busy_shares()
    memory = gpu.memory_bytes()
    values = {
        "t_ns": t_ns,
        "gpu_busy_share": busy[0] if busy else None,
        "memory_controller_busy_share": busy[1] if busy else None,
        "power_watts": gpu.power_watts(),
        # Takes milliseconds on an H200. Every other reading takes microseconds.
        "energy_joules": gpu.energy_joules() if with_energy else None,
        "sm_clock_mhz": gpu.sm_clock_mhz(),
        "memory_clock_mhz": gpu.memory_clock_mhz(),
        "throttle": gpu.throttle_reasons(),
        "driver_memory_bytes": memory[0] if memory else None,
    }
    return {name: value for name, value in values.items() if value is not None}


class CounterSums:
    """Samples, added up. `first_energy` is what the counter showed before."""

    def __init__(self, first_energy: float | None = None) -> None:
        self._first_energy = self.last_energy = first_energy
        self._num: Counter[str] = Counter()
        self._sums: dict[str, float] = {}
        self._min_clock: int | None = None
        self._max_memory: int | None = None
        self._throttle: dict[str, None] = {}

    def add(self, found: dict[str, Any]) -> None:
        for name, ours in _MEANS.items():
            if name in found:
                self._num[ours] += 1
                self._sums[ours] = self._sums.get(ours, 0) + found[name]
        if (clock := found.get("sm_clock_mhz")) is not None:
            self._min_clock = clock if self._min_clock is None else min(clock, self._min_clock)
        if (memory := found.get("driver_memory_bytes")) is not None:
            self._max_memory = max(memory, self._max_memory or 0)
        if (energy := found.get("energy_joules")) is not None:
            self._first_energy = energy if self._first_energy is None else self._first_energy
            self.last_energy = energy
        self._throttle.update(dict.fromkeys(found.get("throttle", ())))

    def values(self) -> dict[str, Any]:
        """Return the fields of a block's `gpu`."""
        found: dict[str, Any] = {name: round(self._sums[name] / num, 3) for name, num in self._num.items()}
        if self._min_clock is not None:
            found["min_sm_clock_mhz"] = self._min_clock
        if self._max_memory is not None:
            found["memory_bytes"] = self._max_memory
        if self.last_energy is not None and self._first_energy is not None and self.last_energy > self._first_energy:
            found["energy_joules"] = round(self.last_energy - self._first_energy, 1)
        if found and self._throttle:
            found["throttle"] = list(self._throttle)
        return found


_MEANS = {"power_watts": "power_watts", "sm_clock_mhz": "sm_clock_mhz", "gpu_busy_share": "busy_share"}
