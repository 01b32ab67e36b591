"""What `stepscope plan --fsdp N` predicts for one rank beside what happens to one, alone on a real device.

    python benchmarks/fsdp_accuracy.py --markdown fsdp.md --jsonl fsdp.jsonl       # on a GPU
    python benchmarks/fsdp_accuracy.py --device cpu                                # the same machinery without a GPU

The rank that is measured trains with FSDP2 in a process group of N in which nobody else is: its collectives do
nothing, and every allocation is real. Measured in a process of its own, after the second step, as plan_accuracy.py
does. NCCL's own buffers are in neither.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from plan_accuracy import in_child, points_of, row_of, table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from stepscope.devices.limits import find_device
from stepscope.planner.emulation.fsdp import units
from stepscope.planner.parallel import Parallel
from stepscope.planner.prediction import Planner
from stepscope.sweep import measure, prepare
from stepscope.sweep.grid import Point
from stepscope.workloads.registry import find
from stepscope.workloads.workload import Built

STEP, AUTOCAST = "mode=step", "dtype=autocast_bf16"
POINTS = [
    (2, "cs336", "small", "seq_len=512", STEP),
    (8, "cs336", "small", "seq_len=512", "optimizer=fused", STEP),
    (4, "cs336", "medium", "seq_len=1024", "attention=sdpa", AUTOCAST, STEP),
    (8, "cs336", "large", "seq_len=512", "checkpoint=1", STEP),
    (8, "cs336", "2.7B", "seq_len=256", STEP),
    (4, "hydra", "100m", AUTOCAST, STEP),
    (8, "nano", "decoder_medium", "seq_len=2048", "dtype=bf16", STEP),
    (4, "hf:llama", None, "seq_len=1024", "batch=4", AUTOCAST, STEP),
    (3, "hf:gpt2", None, "seq_len=512", "batch=8", STEP),
]
ON_CPU = [
    *((ranks, "cs336", "tiny", STEP) for ranks in (2, 3, 8)),
    *((ranks, "hydra", "tiny", STEP) for ranks in (2, 4, 8)),
    *((ranks, "nano", "tiny", STEP) for ranks in (2, 4, 8)),
    (4, "cs336", "tiny", "checkpoint=1", STEP),
    (4, "cs336", "tiny", "attention=sdpa", AUTOCAST, STEP),
    (4, "nano", "tiny", "dtype=bf16", STEP),
    (4, "megalodon", "tiny", STEP),
    (4, "tsmoe", "tiny", STEP),
    *((ranks, "cs336", "small", "seq_len=64", "batch=1", STEP) for ranks in (2, 4, 8)),
]


def predicted(point: Point, num_ranks: int, device: str) -> dict[str, Any]:
    """The plan of a rank, and how long it took."""
    begin = time.perf_counter()
    planner = Planner(find(point.workload), Parallel(fsdp=num_ranks))
    found = planner.predict(point, None if device == "cpu" else find_device(device))
    return {**found.to_json(), "seconds": time.perf_counter() - begin}


def measured(point: Point, num_ranks: int, device: str) -> dict[str, Any]:
    """The peaks of the third and fourth step of a rank."""
    run = {**point.run, "device": device}
    prepare.apply_settings(run)
    workload = find(point.workload)
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    if device == "cuda":
        torch.cuda.set_device(0)
    mesh = init_device_mesh(device, (num_ranks,))
    # Its memory does not mind what weights are, and drawing billions of them takes a while.
    is_plain = point.workload == "cs336"
    with mock.patch.object(nn.init, "normal_", _constant) if is_plain else nullcontext():
        built = prepare.build(workload, workload.config(**point.config), int(run["seed"]), "cpu")
    assert isinstance(built, Built)
    dtype = prepare.weights_dtype(run)
    built.module.to(dtype)
    for unit in units(built.module):
        fully_shard(unit, mesh=mesh)
    batch = prepare.cast(prepare.make_batch(built, 0, device), dtype)
    one_pass = prepare.Pass(built.module, batch, run)
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    one_pass()
    one_pass()
    if device == "cpu":
        one_pass.drop_gradients()
        before = [getattr(tensor, "_local_tensor", tensor) for tensor in one_pass.tensors()]
        return {"peak_allocated_bytes": measure.traced(one_pass, "cpu", before, None).peak_bytes}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    one_pass()
    one_pass()
    torch.cuda.synchronize()
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _constant(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return tensor.fill_(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="NVIDIA H200", help="a name of the table of devices, or cpu")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="that predict")
    parser.add_argument("--seconds", type=float, default=540, help="stop measuring after so long")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--jsonl", type=Path)
    arguments = parser.parse_args()
    begin = time.monotonic()
    entries = ON_CPU if arguments.device == "cpu" else POINTS
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        points = points_of([tuple(rest) for _, *rest in entries], Path(folder))
        ranks = [num_ranks for num_ranks, *_ in entries]
        with ThreadPoolExecutor(arguments.processes) as pool:
            plans = list(
                pool.map(lambda pair: in_child(predicted, *pair, arguments.device), zip(points, ranks, strict=True))
            )
        print(f"{len(points)} points predicted in {time.monotonic() - begin:.0f} s", flush=True)
        for point, num_ranks, plan in zip(points, ranks, plans):
            if time.monotonic() - begin > arguments.seconds:
                print("out of time", flush=True)
                break
            real = in_child(measured, point, num_ranks, "cpu" if arguments.device == "cpu" else "cuda")
            row = row_of(point, plan, real)
            row["point"] = f"1 of {num_ranks}: {row['point']}"
            rows.append(row)
            errors = ["" if row[name] is None else f"{row[name]:+.3%}" for name in ("allocated", "reserved")]
            print(f"{row['point']:<78} {errors[0]:>9} {errors[1]:>9} {row['verdict']}", flush=True)
            if arguments.jsonl:
                with arguments.jsonl.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    lines = table(rows)
    print("\n".join(lines))
    print(f"{time.monotonic() - begin:.0f} s in all")
    if arguments.markdown:
        text = "\n".join([f"torch {torch.__version__}, {sys.platform}", "", *lines, ""])
        arguments.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
