"""The answers of `torch.cuda` and `torch.accelerator` during a plan: those of the planned device.

A script first asks whether there is a GPU. In a plan for a CPU there is none, on any machine.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from stepscope.devices.limits import Device

_SILENT = (
    "synchronize", "empty_cache", "ipc_collect", "init", "_lazy_init", "set_device", "set_stream", "manual_seed",
    "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all", "reset_peak_memory_stats",
    "reset_max_memory_allocated", "reset_max_memory_cached", "reset_accumulated_memory_stats",
    "set_per_process_memory_fraction",
)  # fmt: skip
_NUMBERS = (
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_cached",
    "max_memory_cached", "current_device", "_exchange_device", "_maybe_exchange_device", "initial_seed",
)  # fmt: skip
_NVTX = ("range_push", "range_pop", "range_start", "range_end", "mark")


def patches(device: Device | None) -> Iterator[Any]:
    """Yield patches of `torch.cuda` for a device; without one, for a plan on a CPU."""
    for owner, answers in ((torch.cuda, _answers(device)), (torch.accelerator, _accelerator(device))):
        for name, answer in answers.items():
            if hasattr(owner, name):
                yield mock.patch.object(owner, name, answer)
    if device is not None:
        for name in _NVTX:
            yield mock.patch.object(torch.cuda.nvtx, name, _giving(0))
        yield mock.patch.object(torch.backends.cudnn, "is_acceptable", _giving(False))
        yield mock.patch.object(torch, "Generator", Generator)
        yield mock.patch.object(torch.utils.data._utils.pin_memory, "pin_memory", lambda data, *args, **kwargs: data)


def _answers(device: Device | None) -> dict[str, Any]:
    if device is None:
        return {"is_available": _giving(False), "device_count": _giving(0)}
    major, minor = capability = device.compute_capability or (9, 0)
    properties = SimpleNamespace(
        name=device.name,
        major=major,
        minor=minor,
        total_memory=device.visible_bytes or device.memory_bytes,
        multi_processor_count=device.num_processors,
        warp_size=32,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
    )
    return {
        **dict.fromkeys(_SILENT, _giving(None)),
        **dict.fromkeys(_NUMBERS, _giving(0)),
        "is_available": _giving(True),
        "is_initialized": _giving(False),
        "device_count": _giving(1),
        "get_device_capability": _giving(capability),
        "get_device_properties": _giving(properties),
        "get_device_name": _giving(device.name),
        "get_arch_list": _giving([f"sm_{major}{minor}"]),
        "is_bf16_supported": lambda including_emulation=True: bool(major >= 8 or including_emulation),
        "is_tf32_supported": _giving(major >= 8),
        "is_current_stream_capturing": _giving(False),
        "mem_get_info": _giving((properties.total_memory, properties.total_memory)),
        "memory_stats": lambda device=None: {},
        "memory_summary": _giving(""),
        "get_rng_state": lambda device=None: torch.ByteTensor(),
        "get_rng_state_all": lambda: [torch.ByteTensor()],
        "Stream": Stream,
        "Event": Event,
        "stream": nullcontext,
        "current_stream": lambda device=None: Stream(),
        "default_stream": lambda device=None: Stream(),
    }


def _accelerator(device: Device | None) -> dict[str, Any]:
    if device is None:
        return {"is_available": _giving(False), "device_count": _giving(0), "current_accelerator": _giving(None)}
    return {
        "is_available": _giving(True),
        "device_count": _giving(1),
        "current_accelerator": _giving(torch.device("cuda")),
        "current_stream": lambda device=None: Stream(),
        **dict.fromkeys(("current_device_index", "set_device_index", "synchronize", "set_stream"), _giving(0)),
    }


def _giving(answer: Any) -> Any:
    return lambda *args, **kwargs: answer


_Generator = torch.Generator


class _AnyGenerator(type):
    def __instancecheck__(cls, thing: Any) -> bool:
        return isinstance(thing, _Generator)


class Generator(metaclass=_AnyGenerator):
    """A generator for any device, which is the host's."""

    def __new__(cls, device: Any = None) -> Any:
        return _Generator()


class Stream:
    """A stream in a plan, where all work is in order. `number` identifies the owner of memory where it matters."""

    cuda_stream = 0
    wait_stream = wait_event = synchronize = __exit__ = _giving(None)
    query, is_capturing = _giving(True), _giving(False)

    def __init__(self, *args: Any, number: int = 0, **kwargs: Any) -> None:
        self.device, self.number = torch.device("cuda", 0), number

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def __enter__(self) -> "Stream":
        return self


class Event:
    """An event in a plan, where no time passes: any two are 1 ms apart."""

    record = wait = synchronize = _giving(None)
    query, elapsed_time = _giving(True), _giving(1.0)

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
