"""Synthetic histories of whole runs, with faults planted at known steps.

`history.jsonl` has the lines that `recorder/history/` writes (docs/recording.md), block by block, so that a week is
made in seconds.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEGAN = 1_790_000_000.0  # Unix time
START_NS = 5_000_000_000
MIB = 2**20


@dataclass
class Run:
    """One run to be written. All faults are off; times are in ns, and `at` and `every` are in steps."""

    num_steps: int = 2_000
    step_ns: int = 100_000_000
    noise: float = 0.01  # standard deviation of a block's step time, relative
    seed: int = 0
    slower: Callable[[int], float] = lambda step: 1.0  # factor on the passes at a step: a drift
    data_share: float = 0.05
    slower_data: Callable[[int], float] = lambda step: 1.0  # factor on the data wait
    leak_bytes: int = 0  # per step
    save_every: int = 0
    save_ns: int = 3_000_000_000
    evaluate_every: int = 0
    evaluate_ns: int = 5_000_000_000
    stall_at: tuple[int, ...] = ()
    stall_ns: int = 60_000_000_000
    compile_at: tuple[int, ...] = ()
    restart_at: tuple[int, ...] = ()  # a new process, 5 minutes later, whose steps count from 0
    suspend_at: tuple[int, ...] = ()
    suspend_ns: int = 3_600_000_000_000
    window_at: tuple[int, ...] = ()  # windows that were triggered
    loss: Callable[[int], float] = lambda step: 2.0 + 8.0 / (1 + step / 100)
    collections: Callable[[int], float] = lambda step: 0.1  # of garbage, per step
    clock_mhz: Callable[[int], float] | None = None  # of the SMs at a step; None: no GPU
    other_processes: Callable[[int], int] = lambda step: 0
    tokens_per_step: int | None = 8192
    total_bytes: int | None = None  # of the GPU
    startup_ns: int = 20_000_000_000
    host: str = "node1"
    ends: str | None = "finished"  # the status; None: killed


def a_week(**faults: Any) -> Run:
    """Return a run of 6 million steps at 10 steps per second, which saves every 10,000 steps."""
    return Run(num_steps=6_000_000, save_every=10_000, clock_mhz=lambda step: 1980.0, total_bytes=80 << 30, **faults)


def write_history(folder: Path, run: Run) -> Path:
    """Write the `recording.json` and `history.jsonl` of a run into `folder`, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    random_numbers = random.Random(run.seed)
    lines: list[dict[str, Any]] = []
    wall_ns = monotonic_ns = START_NS  # with and without the time the machine slept
    process_step = 0  # where the steps of this process begin
    began_ns = monotonic_ns

    def unix(ns: int) -> float:
        return round(BEGAN + (ns - START_NS) / 1e9, 3)

    def begin(pid: int) -> None:
        nonlocal wall_ns, monotonic_ns, began_ns
        lines.append({"began": unix(wall_ns), "start_ns": monotonic_ns, "pid": pid, "host": run.host})
        began_ns = monotonic_ns
        wall_ns, monotonic_ns = wall_ns + run.startup_ns, monotonic_ns + run.startup_ns

    def event(name: str, step: int, ns: int, **details: Any) -> None:
        start_ns = monotonic_ns - (0 if name == "suspended" else ns)  # that clock stands still meanwhile
        lines.append({"event": name, "step": step, "start_ns": start_ns, "t": unix(wall_ns), "ns": ns, **details})

    begin(4000)
    step = num_restarts = num_windows = 0
    stops = sorted({*run.stall_at, *run.compile_at, *run.restart_at, *run.suspend_at, *run.window_at, run.num_steps})
    while step < run.num_steps:
        if step in run.restart_at and num_restarts < len(run.restart_at) and step != process_step:
            num_restarts += 1
            wall_ns, monotonic_ns = wall_ns + 300_000_000_000, monotonic_ns + 300_000_000_000
            begin(4000 + num_restarts)
            process_step = step
        own = step - process_step
        if step in run.suspend_at:
            wall_ns += run.suspend_ns
            event("suspended", own, run.suspend_ns)
        # The length of a block, as the recorder has it.
        block_ns = min(max((monotonic_ns - began_ns) // 200, 250_000_000), 60_000_000_000)
        factor = max(0.5, random_numbers.gauss(1.0, run.noise))
        passes_ns = round(run.step_ns * (1 - run.data_share) * run.slower(step) * factor)
        data_ns = round(run.step_ns * run.data_share * run.slower_data(step) * factor)
        one_ns = passes_ns + data_ns
        is_window = step in run.window_at
        next_stop = next(stop for stop in stops if stop > step)
        num = 3 if is_window else max(1, min(block_ns // one_ns, next_stop - step))
        host_ns = {"data": data_ns * num, "unattributed": passes_ns * num}
        num_times: dict[str, int] = {}
        max_ns, max_step = round(one_ns * (1.03 if num > 1 else 1)), own + num // 2
        start_ns = monotonic_ns
        aside: list[tuple[str, int, str]] = []
        if run.save_every:
            num_saves = (step + num) // run.save_every - step // run.save_every
            aside += [("checkpoint", run.save_ns, "train.py:40 save")] * num_saves
        if run.evaluate_every:
            num_evaluations = (step + num) // run.evaluate_every - step // run.evaluate_every
            aside += [("evaluation", run.evaluate_ns, "train.py:31 evaluate")] * num_evaluations
        if step in run.stall_at:
            aside.append(("stall", run.stall_ns, ""))
        if step in run.compile_at:
            aside.append(("compile", 20_000_000_000, ""))
        for name, ns, _ in aside:
            known = name if name in ("checkpoint", "evaluation") else "unattributed"
            host_ns[known] = host_ns.get(known, 0) + ns
            if known == name:
                num_times[name] = num_times.get(name, 0) + 1
            if one_ns + ns > max_ns:
                max_ns, max_step = one_ns + ns, own if name in ("stall", "compile") else own + num - 1
        total_ns = sum(host_ns.values())
        wall_ns, monotonic_ns = wall_ns + total_ns, monotonic_ns + total_ns
        memory = 8 << 30 if run.total_bytes else 0
        allocated = memory + run.leak_bytes * (own + num)
        block: dict[str, Any] = {
            **{"step": own, "num_steps": num, "window": "trace" if is_window else "free", "start_ns": start_ns},
            **{"t": unix(wall_ns), "wall_ns": total_ns, "median_ns": one_ns, "max_ns": max_ns, "max_step": max_step},
            "host_ns": host_ns,
        }
        if num_times:
            block["num_times"] = num_times
        if run.tokens_per_step:
            block |= {"num_tokens": run.tokens_per_step * num, "num_samples": 8 * num}
        block |= {"num_compiles": 1} if step in run.compile_at else {}
        first, last = (sum_of(run.collections, at) for at in (step, step + num))
        block |= {"num_collections": last - first} if last > first else {}
        loss = run.loss(step + num - 1)
        block |= {"loss": round(loss, 4) if abs(loss) < float("inf") else str(loss), "loss_step": own + num - 1}
        sampled = [run.loss(each) for each in range(step, step + num, max(1, 1_000_000_000 // one_ns))] + [loss]
        largest = max(sampled, key=lambda each: (each != each, each))
        if largest in sampled[:-1] and largest is not loss:
            at = range(step, step + num, max(1, 1_000_000_000 // one_ns))[sampled.index(largest)] - process_step
            block |= {"max_loss": round(largest, 4) if abs(largest) < float("inf") else str(largest)}
            block["max_loss_step"] = at
        if run.total_bytes:
            block |= {"allocated_bytes": allocated, "reserved_bytes": allocated + 512 * MIB}
            block |= {"peak_bytes": allocated + 4096 * MIB, "total_bytes": run.total_bytes}
        block["resident_bytes"] = 2048 * MIB + (0 if run.total_bytes else run.leak_bytes * (own + num))
        if run.clock_mhz is not None:
            clock = run.clock_mhz(step)
            block["gpu"] = {
                **{"power_watts": round(clock * 0.3, 1), "sm_clock_mhz": clock, "min_sm_clock_mhz": clock - 15},
                **{"busy_share": 0.97, "memory_bytes": allocated + 1024 * MIB, "throttle": []},
                **{
                    "energy_joules": round(clock * 0.3 * total_ns / 1e9, 1),
                    "num_processes": run.other_processes(step),
                },
            }
        for name, ns, place in aside:
            event(name, max_step, ns, **({"place": place} if place else {}))
        if is_window:
            num_windows += 1
            event("window", own, total_ns, folder=f"window{num_windows}", num_steps=num, reason="trigger")
        lines.append(block)
        step += num
    if run.ends is not None:
        event("end", step - process_step, 0, status=run.ends)
    (folder / "history.jsonl").write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    recording = {
        **{"schema_version": 1, "status": run.ends or "interrupted", "pid": 4000 + num_restarts},
        **{"started_at": "2026-09-21T14:13:20Z", "command": {"argv": ["train.py"], "folder": str(folder)}},
        **{"steps": {"source": "optimizer", "num_steps": step - process_step}, "windows": {"warmup": 5, "clean": 20}},
    }
    (folder / "recording.json").write_text(json.dumps(recording))
    return folder


def sum_of(rate: Callable[[int], float], step: int) -> int:
    """Return how often something has happened by `step`, at its rate there."""
    return int(rate(step) * step)
