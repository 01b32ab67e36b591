"""One all-reduce: the sum of a message over processes on this machine, gloo on CPUs, NCCL on GPUs.

The measured process is rank 0. It starts the other ranks, which contribute ones repeatedly until their standard input
closes, so they end when rank 0 ends for any reason.
"""

import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepscope.errors import UsageError
from stepscope.workloads.workload import Built, Evidence, Proof, Workload, knob

HOST = "127.0.0.1"
TIMEOUT_S = 60.0
# A peer waits in its next all-reduce while rank 0 does something else, such as compiling.
PEER_TIMEOUT_S = 24 * 3600.0
NUM_TIMED_CALLS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduceConfig:
    world_size: int = knob(2, "processes; each has its own GPU, if on GPUs")
    elements: int = knob(6_553_600, "elements of the message; default: 25 MiB in fp32, a DDP bucket")


class Group:
    """Rank 0's side of the process group, and the processes of the other ranks."""

    def __init__(self, world_size: int, device: torch.device) -> None:
        self.world_size = world_size
        self._message: str | None = None
        self._times: deque[tuple[Any, Any]] = deque(maxlen=NUM_TIMED_CALLS)
        backend = "nccl" if device.type == "cuda" else "gloo"
        _check(world_size, backend)
        timeout = timedelta(seconds=TIMEOUT_S)
        self._store = store = dist.TCPStore(HOST, 0, None, True, timeout=timeout, wait_for_workers=False)
        words = [sys.executable, "-m", __name__, str(store.port), str(world_size), backend]
        # Without an interface, gloo resolves the host's name, which may fail.
        for name in {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}:
            os.environ["GLOO_SOCKET_IFNAME"] = name
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._peers = [
            subprocess.Popen([*words, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment)
            for rank in range(1, world_size)
        ]
        self.close = weakref.finalize(self, _close, self._peers)
        try:
            self._wait()
            dist.init_process_group(backend, store=store, rank=0, world_size=world_size, timeout=timeout)
        except BaseException:
            self.close()
            raise

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensor over all ranks as a new tensor."""
        self._announce(f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}")
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        begin = _mark(total)
        try:
            dist.all_reduce(total)
        except RuntimeError as error:
            self._raise_if_dead(error)
            raise
        self._times.append((begin, _mark(total)))
        return total

    def seconds(self) -> float | None:
        """Return the median seconds of the last collectives, without the copy before each; None before any call."""
        return median(_seconds_between(begin, end) for begin, end in self._times) if self._times else None

    def _announce(self, message: str) -> None:
        if self._message == message:
            return
        if self._message is not None:
            raise UsageError(f"all_reduce: one message size per run, but {message} follows {self._message}")
        self._message = message
        self._store.set("message", message)

    def _wait(self) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        for rank in range(1, self.world_size):
            while not self._store.check([f"ready{rank}"]):
                self._raise_if_dead(None)
                if time.monotonic() > deadline:
                    raise RuntimeError(f"all_reduce: rank {rank} did not start within {TIMEOUT_S:.0f} s")
                time.sleep(0.02)

    def _raise_if_dead(self, cause: BaseException | None) -> None:
        # A connection closes shortly before its process ends; peers of a dead process end too, with exit code 0.
        deadline = time.monotonic() + (0.0 if cause is None else 1.0)
        while True:
            ended = {rank: peer.poll() for rank, peer in enumerate(self._peers, 1) if peer.poll() is not None}
            if any(ended.values()) or time.monotonic() >= deadline:
                break
            time.sleep(0.02)
        for rank, code in sorted(ended.items(), key=lambda entry: entry[1] == 0):
            raise RuntimeError(f"all_reduce: rank {rank} ended with exit code {code}") from cause


def _mark(tensor: Tensor) -> Any:
    """Return the current time: on the host, or as an event in the GPU stream that waits for the collective."""
    if tensor.device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds_between(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end) / 1e3)


class AllReduce(nn.Module):
    """x → its sum over all ranks; the gradient is summed as well."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group
        self.last: tuple[Tensor, Tensor] | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # nothing to fuse
    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = _Sum.apply(x, self.group)
        self.last = x.detach(), total.detach()
        return total


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(gradient), None


def _check(world_size: int, backend: str) -> None:
    if world_size < 1:
        raise UsageError(f"world_size={world_size}: must be at least 1")
    if not dist.is_available():
        raise UsageError("all_reduce: this torch was built without torch.distributed")
    if backend == "nccl" and world_size > torch.cuda.device_count():
        raise UsageError(f"world_size={world_size}: NCCL needs one GPU per rank, found {torch.cuda.device_count()}")
    if dist.is_initialized():
        raise UsageError("all_reduce: this process already belongs to a process group")


def _close(peers: list[subprocess.Popen[bytes]]) -> None:
    for peer in peers:
        peer.kill()
        assert peer.stdin is not None
        with suppress(OSError):
            peer.stdin.close()
        peer.wait()
    if dist.is_initialized():
        dist.destroy_process_group()


def _peer(port: str, world_size: str, backend: str, rank: str) -> None:
    """Run ranks 1 and above until their standard input closes."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    if backend == "nccl":
        torch.cuda.set_device(int(rank))
    store = dist.TCPStore(HOST, int(port), None, False, timeout=timedelta(seconds=TIMEOUT_S))
    store.set(f"ready{rank}", "")
    timeout = timedelta(seconds=PEER_TIMEOUT_S)
    dist.init_process_group(backend, store=store, rank=int(rank), world_size=int(world_size), timeout=timeout)
    store.wait(["message"], timeout)
    num_elements, dtype = store.get("message").decode().split()
    device = "cuda" if backend == "nccl" else "cpu"
    ones = torch.ones(int(num_elements), dtype=getattr(torch, dtype), device=device)
    message = torch.empty_like(ones)
    while True:
        message.copy_(ones)
        try:
            dist.all_reduce(message)
            if backend == "nccl":
                torch.cuda.synchronize()
        except RuntimeError:
            os._exit(0)  # rank 0 has ended, or another peer has, which rank 0 reports


def _exit_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


def build(config: AllReduceConfig) -> Built:
    group = Group(config.world_size, torch.empty(0).device)
    module = AllReduce(group)

    def facts() -> Mapping[str, float]:
        if module.last is None:
            return {"world_size": float(config.world_size)}
        x, total = module.last
        num_bytes = x.numel() * x.element_size()
        # Bytes per link in a ring: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
        bus_bytes = 2 * (config.world_size - 1) / config.world_size * num_bytes
        seconds = group.seconds()
        return {
            "world_size": float(dist.get_world_size()),
            "message_bytes": float(num_bytes),
            "bus_bytes": bus_bytes,
            **({} if seconds is None else {"collective_seconds": seconds, "bus_bytes_per_s": bus_bytes / seconds}),
            "largest_error": float((total.double() - x.double() - (config.world_size - 1)).abs().max()),
        }

    def shows(evidence: Evidence) -> str | None:
        # One call has two labels, of torch.distributed and of the backend.
        calls = max((n for name, n in evidence.ops.items() if "all_reduce" in name or "allreduce" in name), default=0)
        ranks = int(evidence.facts.get("world_size", 0))
        return f"all_reduce ×{calls} of {ranks}" if calls and ranks == config.world_size else None

    return Built(
        module=module,
        batch=lambda: {"x": torch.randn(config.elements).requires_grad_()},
        num_tokens=config.elements,
        proofs=(Proof(claim=f"world_size={config.world_size}", shows=shows),),
        facts=facts,
    )


WORKLOAD = Workload(
    name="all_reduce",
    about="the sum of a message over processes: gloo on CPUs, NCCL on GPUs",
    config=AllReduceConfig,
    presets={"default": {}, "tiny": {"elements": 1024}},
    build=build,
    mode="forward",
)

if __name__ == "__main__":
    _peer(*sys.argv[1:])
