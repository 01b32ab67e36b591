"""Recordings written by hand: round numbers, so that every figure on a card can be checked in the head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MS = 1_000_000
WINDOWS = {"warmup": 2, "clean": 4, "trace_warmup": 1, "trace": 2, "memory": 1}


def sample(step: int, window: str = "clean", **fields: Any) -> dict[str, Any]:
    """A line of samples.jsonl: a step of 10 ms that began at `step` × 10 ms."""
    host_ns = fields.pop("host_ns", {"data": MS, "forward": 3 * MS, "backward": 5 * MS, "optimizer": MS})
    return {
        "step": step,
        "window": window,
        "start_ns": step * 10 * MS,
        "wall_ns": sum(host_ns.values()),
        "host_ns": host_ns,
        "num_tokens": 512,
        "num_samples": 8,
        "num_micro_batches": 1,
        "num_skipped": 0,
        "num_compiles": 0,
        **fields,
    }


def free_sample(step: int) -> dict[str, Any]:
    """A line of free running: the step's time and nothing else."""
    return {"step": step, "window": "free", "start_ns": step * 10 * MS, "wall_ns": 10 * MS}


def steps_of(windows: dict[str, int]) -> list[str]:
    """The window of each step, in order, without the free ones."""
    return [name for name, count in windows.items() for _ in range(count)]


def write_recording(
    folder: Path,
    facts: dict[str, Any],
    samples: list[dict[str, Any]],
    counters: list[dict[str, Any]] | None = None,
    compiler: dict[str, Any] | None = None,
) -> Path:
    """A recording's folder, as the record side leaves it behind."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recording.json").write_text(json.dumps({"schema_version": 1, "status": "finished", **facts}))
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
    if counters is not None:
        (folder / "counters.jsonl").write_text("".join(json.dumps(line) + "\n" for line in counters))
    if compiler is not None:
        (folder / "compile.json").write_text(json.dumps(compiler))
    return folder


def flops_facts(**fields: Any) -> dict[str, Any]:
    """A linear layer of 1000 weights on 512 tokens: 2·1000·512 forward, twice that backward."""
    return {
        "by_op": [
            {"op": "aten.mm", "phase": "backward", "dtype": "fp32", "recomputed": False, "flops": 2_048_000},
            {
                "op": "aten.addmm",
                "phase": "forward",
                "dtype": "fp32",
                "recomputed": False,
                "flops": 1_024_000,
            },
        ],
        "model_flops_by_dtype": {"fp32": 3_072_000},
        "uncounted": [{"op": "aten.sum", "num_calls": 1, "num_elements": 512}],
        "forward_activation_flops": 0,
        "compiled": False,
        "error": None,
        "weights": [{"num_elements": 1000, "forward_flops": 1_024_000, "looked_up": False, "used": True}],
        **fields,
    }


def op_flops(phase: str, flops: int, dtype: str = "bf16", recomputed: bool = False) -> dict[str, Any]:
    """One entry of `by_op`."""
    return {"op": "aten.mm", "phase": phase, "dtype": dtype, "recomputed": recomputed, "flops": flops}


def cpu_facts(**fields: Any) -> dict[str, Any]:
    return {
        "command": {"argv": ["train.py", "--lr", "0.1"]},
        "exit_code": 0,
        "environment": {
            "device": "cpu",
            "device_name": "Imaginary CPU 9000",
            "torch": "2.13.0",
            "rank": 0,
            "world_size": 1,
        },
        "steps": {"source": "optimizer", "num_sources": 1, "num_steps": 12, "num_lines_dropped": 0},
        "memory": {"peak_resident_bytes": 512 << 20},
        "parameters": {"num_total": 1000, "num_trainable": 1000, "bytes_by_dtype": {"float32": 4000}},
        "flops": flops_facts(),
        "trace": {
            "num_steps": 2,
            "num_ops": 40,
            "num_kernels": 0,
            "file": "trace/rank0.json.gz",
            "trimmed": None,
        },
        **fields,
    }


def cpu_recording(folder: Path, **facts: Any) -> Path:
    """12 steps of 10 ms on a CPU; probed steps take 20 ms and 100 ms."""
    lines = []
    for step, window in enumerate(steps_of(WINDOWS)):
        factor = {"trace": 2, "memory": 10}.get(window, 1)
        host_ns = {"data": MS, "forward": 3 * MS, "backward": 5 * MS, "optimizer": MS}
        lines.append(sample(step, window, host_ns={name: ns * factor for name, ns in host_ns.items()}))
    return write_recording(folder, cpu_facts(**facts), [*lines, free_sample(10), free_sample(11)])


def gpu_facts(**fields: Any) -> dict[str, Any]:
    """A step of 4.947 TFLOP in bf16 on a device of 989.4 TFLOP/s: half of its peak at 10 ms."""
    total = 4_947_000_000_000
    return cpu_facts(
        environment={
            "device": "cuda",
            "device_name": "NVIDIA H200",
            "torch": "2.11.0",
            "rank": 0,
            "world_size": 1,
        },
        memory={
            "peak_resident_bytes": 1 << 30,
            "peak_allocated_bytes": 10 << 30,
            "peak_reserved_bytes": 12 << 30,
            "driver_used_bytes": 14 << 30,
            "driver_total_bytes": 140 << 30,
            "num_allocator_retries": 0,
            "num_allocator_ooms": 0,
        },
        flops=flops_facts(
            by_op=[
                op_flops("forward", total // 3),
                op_flops("backward", total // 3 * 2),
                op_flops("backward", total // 10, recomputed=True),
            ],
            model_flops_by_dtype={"bf16": total},
            weights=[{"num_elements": 1_610_351_562, "forward_flops": total // 3, "looked_up": False, "used": True}],
        ),
        parameters={
            "num_total": 1_610_351_562,
            "num_trainable": 1_610_351_562,
            "bytes_by_dtype": {"float32": 6_441_406_248},
        },
        trace={
            "num_steps": 2,
            "num_ops": 400,
            "num_kernels": 200,
            "gpu_busy_ns": 16 * MS,
            "gpu_busy_ns_by_phase": {
                "forward": 5 * MS,
                "backward": 9 * MS,
                "optimizer": 2 * MS,
                "before_forward": 0,
                "unattributed": MS,
            },
            "num_graph_launches": 0,
            "num_template_kernels": 0,
            "file": "trace/rank0.json.gz",
            "trimmed": None,
        },
        counters={"other_processes": [{"pid": 77, "name": "jupyter", "used_bytes": 1 << 30}]},
        **fields,
    )


def gpu_recording(folder: Path, compiler: dict[str, Any] | None = None, **facts: Any) -> Path:
    """12 steps of 10 ms between CUDA events; a step's device side is a line of its own that comes later."""
    lines, late = [], []
    for step, window in enumerate(steps_of(WINDOWS)):
        lines.append(sample(step, window, host_ns={"before_forward": MS, "forward": 4 * MS, "backward": 5 * MS}))
        device_ns = {
            "before_forward": MS // 2,
            "forward": 3 * MS,
            "backward": 5 * MS,
            "optimizer": 3 * MS // 2,
        }
        late.append({"step": step, "device_ns": device_ns, "loss": 2.0 - step / 10})
    counters = [
        {
            "t_ns": (2 + i) * 10 * MS,
            "gpu_busy_share": 0.8 + i / 10,
            "memory_controller_busy_share": 0.5,
            "power_watts": 500.0,
            "sm_clock_mhz": 1980,
            "memory_clock_mhz": 3201,
            "throttle": ["sw_power_cap"] if i else ["gpu_idle"],
        }
        for i in range(2)
    ]
    lines += [*late, free_sample(10), free_sample(11)]
    return write_recording(folder, gpu_facts(**facts), lines, counters, compiler)
