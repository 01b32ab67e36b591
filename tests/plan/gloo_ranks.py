"""Ranks of a real process group (gloo) on this machine, and the most bytes of tensors that one has at once.

    python gloo_ranks.py RANK WORLD PORT REQUEST

Each rank is a process. Its peak comes from PyTorch's own events of allocations, in a step that is not the first.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path


def peak_bytes(parallel, workload, values):
    """Return the peaks of a job's ranks; `parallel` are fields of `Parallel`."""
    num_ranks = next(parallel[way] for way in ("fsdp", "ddp", "tp", "pp") if way in parallel)
    num_ranks *= parallel.get("replicas", 1)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    request = json.dumps({"parallel": parallel, "workload": workload, "values": values})
    words = [sys.executable, str(Path(__file__)), "{}", str(num_ranks), str(port), request]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([word.format(rank) if word == "{}" else word for word in words], env=environment,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(num_ranks)
    ]  # fmt: skip
    ends = [rank.communicate(timeout=600) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(end[1][-2000:] for end in ends)
    return [int(end[0].split()[-1]) for end in ends]


def main(rank, num_ranks, port, request):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module
    from torch.nn.parallel import DistributedDataParallel

    from stepscope.planner.emulation.fsdp import policy_of, units
    from stepscope.planner.emulation.pipeline import StagePass, loss_of, split, users_own
    from stepscope.planner.emulation.tensor_parallel import styles_of
    from stepscope.planner.parallel import Parallel
    from stepscope.sweep import measure, prepare
    from stepscope.sweep.grid import Grid
    from stepscope.workloads.registry import find

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    parallel, workload = (
        Parallel(**{**request["parallel"], "split": tuple(request["parallel"].get("split", ()))}),
        find(request["workload"]),
    )
    grid = Grid(workload, {"device": "cpu"})
    point = grid.points([grid.words([f"{name}={value}" for name, value in request["values"].items()])], False)[0]
    built = prepare.build(workload, workload.config(**point.config), 0, "cpu")
    module = built.module.to(prepare.weights_dtype(point.run))
    if parallel.fsdp:
        shape = (num_ranks,) if parallel.replicas == 1 else (parallel.replicas, parallel.fsdp)
        names = {} if parallel.replicas == 1 else {"mesh_dim_names": ("replicate", "shard")}
        for unit in units(module):
            fully_shard(unit, mesh=init_device_mesh("cpu", shape, **names), mp_policy=policy_of(parallel))
    elif parallel.ddp:
        module = DistributedDataParallel(module)
    elif parallel.tp:
        parallelize_module(module, init_device_mesh("cpu", (num_ranks,)), styles_of(module))
    batch = prepare.cast(prepare.make_batch(built, 0, "cpu"), prepare.weights_dtype(point.run))
    if parallel.pp:
        stage = split(users_own(module), parallel, batch).build_stage(rank, torch.device("cpu"))
        one_pass = StagePass(stage, loss_of(users_own(module)), parallel, batch, point.run)
    else:
        one_pass = prepare.Pass(module, batch, point.run)
    one_pass()
    one_pass()
    one_pass.drop_gradients()
    tensors = stage_tensors(one_pass) if parallel.pp else one_pass.tensors()
    before = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    if parallel.ddp:  # the reducer's buckets together have a place for every gradient
        before.append(torch.empty(sum(p.numel() * p.itemsize for p in module.parameters()), dtype=torch.uint8))
    print(measure.traced(one_pass, "cpu", before, None).peak_bytes)
    dist.barrier()
    dist.destroy_process_group()


def stage_tensors(one_pass):
    """Every tensor of a stage that exists before a pass."""
    module, states = one_pass._stage.submod, one_pass.optimizer.state.values() if one_pass.optimizer else []
    found = [*one_pass._received(), *module.parameters(), *module.buffers(), *one_pass._inputs.values()]
    found += [] if one_pass._targets is None else [one_pass._targets]
    return found + [value for state in states for value in state.values() if hasattr(value, "untyped_storage")]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
