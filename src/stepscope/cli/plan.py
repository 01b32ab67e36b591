"""Tell what a training step will need, with no GPU and no weights allocated: memory, whether it fits, the least time.

The program's own steps are run on tensors without data, and what they allocate is played to a model of CUDA's caching
allocator. The prediction is for the PyTorch that is installed here, eager or with --compile default, on a device
that nobody else uses.

WORKLOAD is a name (stepscope list workloads), hf:path/to/config.json, my.module:build or path/to/file.py:build.

examples:
  stepscope plan cs336 --preset 2.7B --set seq_len=512 --device "NVIDIA H100 80GB HBM3"
  stepscope plan hydra --preset 100m --dtype autocast_bf16 --device "NVIDIA H200,NVIDIA A100-SXM4-40GB"
  stepscope plan train.py:build --max-batch --device "NVIDIA L40S"
  stepscope plan cs336 --preset 10B --fsdp 8
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stepscope.cli.support.output import print_document
from stepscope.cli.support.points import add_point_arguments, find_workload, typed_axes
from stepscope.cli.support.users_code import users_code
from stepscope.devices.peaks import Device, find_device, known_devices, nearest_names
from stepscope.errors import MissingDependencyError, UsageError
from stepscope.formatting import safe

if TYPE_CHECKING:
    from stepscope.planner.prediction import Planner, Prediction
    from stepscope.sweep.grid import Point
    from stepscope.workloads.workload import Workload

DEFAULT_DEVICE = "NVIDIA H100 80GB HBM3"
CPU = "cpu"
FLAGS = ("mode", "dtype", "compile", "sdpa", "optimizer")
# The option → the knob that it searches, and the key of the answer.
SEARCHES = {"max_batch": ("batch", "max_batch"), "max_length": ("seq_len", "max_seq_len")}
MOST_RANKS = 16384


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's options."""
    add_point_arguments(parser, "what to plan", FLAGS)
    parser.add_argument("--device", metavar="A,B", default=DEFAULT_DEVICE, help=f"default: {DEFAULT_DEVICE}; or cpu")
    parser.add_argument("--fsdp", metavar="N", help="one rank of N that train it together with FSDP2 (fully_shard)")
    parser.add_argument("--max-batch", action="store_true", help="the largest batch that fits")
    parser.add_argument("--max-length", action="store_true", help="the longest sequence that fits")
    parser.add_argument("--json", action="store_true", help="the predictions as JSON on standard output")


def main(arguments: argparse.Namespace) -> int:
    """Print the predictions."""
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("PyTorch is not installed here: pip install torch (a CPU build is enough)")
    from stepscope.cli.support.progress import Doing
    from stepscope.planner.emulation.torch_support import this_torch

    with this_torch():
        from stepscope.planner.prediction import Planner
    from stepscope.document.plan import plan_document
    from stepscope.sweep.grid import Grid

    devices = [_device(name) for name in dict.fromkeys(name.strip() for name in arguments.device.split(","))]
    workload = find_workload(arguments)
    grid = Grid(workload, {"device": CPU})
    points = grid.points([typed_axes(grid, arguments, FLAGS)])
    if not points:
        raise UsageError("there is no point to plan: --set has a knob without values")
    with Doing() as doing:
        plans = _Plans(workload, Planner(workload, _num_ranks(arguments.fsdp)), doing)
        rows = [plans.row(point, device, arguments) for point in points for device in devices]
    print_document(lambda: plan_document(rows), lambda: _json(rows), arguments.json)
    return 0


def _json(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The first prediction's own keys, its point's verdict on every device, and all predictions."""
    first = {name: value for name, value in rows[0].items() if name not in ("device", "fits")}
    fits: dict[str, str | None] = {}
    for row in rows:
        fits.setdefault(row["device"], row["fits"])
    return {**first, "fits": fits, "predictions": rows}


def _num_ranks(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or not 2 <= int(text) <= MOST_RANKS:
        raise UsageError(
            f"--fsdp {text}: how many devices train it together, from 2 to {MOST_RANKS}; for one, leave --fsdp out"
        )
    return int(text)


def _device(name: str) -> Device | None:
    if name == CPU:
        return None
    device = find_device(name)
    if device is None:
        near = nearest_names(name, 8) or [known.name for known in known_devices()][:3]
        raise UsageError(f"--device {name}: not the whole name of a device in the table: {', '.join(near)}; or cpu")
    return device


class _Plans:
    """Rows of the answer."""

    def __init__(self, workload: Workload[Any], planner: Planner, doing: Callable[[str], None]) -> None:
        self._workload, self._planner, self._doing = workload, planner, doing

    def row(self, point: Point, device: Device | None, arguments: argparse.Namespace) -> dict[str, Any]:
        """The prediction of a point on a device, with what was asked besides."""
        row = self._predict(point, device).to_json()
        row |= {"workload": point.workload, "preset": point.preset, "config": dict(point.config)}
        row["run"] = {name: value for name, value in point.run.items() if name != "device"}
        row["bounded_by"] = {}
        for option, (knob, key) in SEARCHES.items():
            if getattr(arguments, option):
                row[key], why = self._largest(point, device, knob)
                row["bounded_by"] |= {} if why is None else {key: why}
        return row

    def _predict(self, point: Point, device: Device | None, **changes: int) -> Prediction:
        from stepscope.planner.emulation.torch_support import this_torch
        from stepscope.sweep.grid import changed

        said = " ".join((point.preset or "", *(f"{name}={value}" for name, value in changes.items())))
        name = CPU if device is None else device.name
        self._doing(safe(f"planning {point.workload} {said} on {name}"))
        with users_code(), this_torch():
            return self._planner.predict(changed(self._workload, point, **changes) if changes else point, device)

    def _largest(self, point: Point, device: Device | None, knob: str) -> tuple[int | None, str | None]:
        from stepscope.planner.largest import Search

        if knob not in point.config:
            raise UsageError(f"{point.workload} has no knob '{knob}': there is nothing to search")
        search = Search(knob, lambda value: self._predict(point, device, **{knob: value}))
        return search.run(int(point.config[knob]))
