"""What a traced pass of a built workload leaves behind: the ground on which the tests try proofs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from stepscope.sweep.checks.proofs import CompiledGraphs
from stepscope.workloads.workload import Built, Evidence


def evidence_of(built: Built, *, backward: bool = True) -> Evidence:
    """The ops, kernels and facts of one traced pass, after one that was not traced (it may have compiled)."""
    batch = built.batch()
    device = next((tensor.device.type for tensor in batch.values()), "cpu")
    graphs = CompiledGraphs()
    graphs.start()
    run_once(built, batch, backward)
    graphs.stop()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities, acc_events=True) as traced:
        run_once(built, batch, backward)
        if device == "cuda":
            torch.cuda.synchronize()
    ops = graphs.ops.copy()
    kernels: Counter[str] = Counter()
    for event in traced.events():
        (ops if event.device_type == DeviceType.CPU else kernels)[event.name] += 1
    return Evidence(device=device, ops=ops, kernels=kernels, facts={**dynamo_counters(), **built.facts()})


def run_once(built: Built, batch: Any, backward: bool) -> Any:
    """The outputs of one pass; with `backward` their gradients have been computed and thrown away."""
    with torch.set_grad_enabled(backward):
        outputs = built.module(**batch)
    if backward:
        tensors = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        torch.autograd.backward(wanted, [torch.ones_like(tensor) for tensor in wanted])
        for tensor in (*built.module.parameters(), *batch.values()):
            tensor.grad = None
    return outputs


def dynamo_counters() -> dict[str, float]:
    """`dynamo.<counter>` of the compiler, since the process began."""
    from torch._dynamo.utils import counters

    named = {
        (name if group == "stats" else f"{group}.{name}"): n for group, c in counters.items() for name, n in c.items()
    }
    return {f"dynamo.{name}": float(count) for name, count in named.items()}
