"""Tell what a training step will need, with no GPU and no weights allocated: memory, whether it fits, the least time.

The program's own steps are run on tensors without data, and what they allocate is played to a model of CUDA's caching
allocator. The prediction is for the PyTorch that is installed here, eager, on a device that nobody else uses.

WORKLOAD is a name (stepscope list workloads), hf:path/to/config.json, my.module:build or path/to/file.py:build.

examples:
  stepscope plan cs336 --preset 2.7B --set seq_len=512 --device "NVIDIA H100 80GB HBM3"
  stepscope plan hydra --preset 100m --dtype autocast_bf16 --device "NVIDIA H200,NVIDIA A100-SXM4-40GB"
  stepscope plan train.py:build --max-batch --device "NVIDIA L40S"
"""

from __future__ import annotations

import argparse
import importlib.util
from typing import TYPE_CHECKING, Any

from stepscope.cli.output import print_result
from stepscope.cli.users_code import users_code
from stepscope.devices.peaks import Device, find_device, known_devices, nearest_names
from stepscope.errors import MissingDependencyError, UsageError

if TYPE_CHECKING:
    from stepscope.plan.prediction import Planner
    from stepscope.sweep.grid import Point

DEFAULT_DEVICE = "NVIDIA H100 80GB HBM3"
CPU = "cpu"

_RUN_FLAGS = {
    "mode": "inference, forward, forward+backward, step",
    "dtype": "fp32, tf32, bf16, autocast_bf16, autocast_fp16",
    "sdpa": "attention back end: free, flash, efficient, math, cudnn",
    "optimizer": "adamw, fused, handwritten, sgd",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's options."""
    parser.add_argument("workload", metavar="WORKLOAD", help="what to plan")
    parser.add_argument("--preset", metavar="A,B", help="presets of the workload")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=V1,V2", help="values of a knob")
    for name, text in _RUN_FLAGS.items():
        parser.add_argument(f"--{name}", metavar="V1,V2", help=text)
    parser.add_argument("--device", metavar="A,B", default=DEFAULT_DEVICE, help=f"default: {DEFAULT_DEVICE}; or cpu")
    parser.add_argument("--max-batch", action="store_true", help="the largest batch that fits")
    parser.add_argument("--max-length", action="store_true", help="the longest sequence that fits")
    parser.add_argument("--json", action="store_true", help="the predictions as JSON on standard output")


def main(arguments: argparse.Namespace) -> int:
    """Print the predictions."""
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("PyTorch is not installed here: pip install torch (a CPU build is enough)")
    from stepscope.plan.prediction import Planner
    from stepscope.report.plans import plans_text
    from stepscope.sweep.grid import Grid
    from stepscope.workloads.registry import find

    devices = [_device(name.strip()) for name in arguments.device.split(",")]
    with users_code():
        workload = find(arguments.workload)
    words = [*arguments.set, *(f"{n}={v}" for n in _RUN_FLAGS if (v := getattr(arguments, n)) is not None)]
    if arguments.preset is not None:
        words.insert(0, f"preset={arguments.preset}")
    grid = Grid(workload, {"device": CPU})
    points = grid.points([grid.words(words)], False)
    planner = Planner(workload)
    rows = []
    for point in points:
        for device in devices:
            row = planner.predict(point, device).to_json()
            row |= {"workload": point.workload, "preset": point.preset, "config": dict(point.config)}
            row["run"] = {name: value for name, value in point.run.items() if name != "device"}
            if arguments.max_batch:
                row["max_batch"] = _largest(planner, workload, point, device, "batch")
            if arguments.max_length:
                row["max_seq_len"] = _largest(planner, workload, point, device, "seq_len")
            rows.append(row)
    print_result(lambda: _json(rows), lambda _colour, width: plans_text(rows, width), arguments.json)
    return 0


def _json(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The first prediction's own keys, the verdict of every device, and all predictions."""
    first = {name: value for name, value in rows[0].items() if name not in ("device", "fits")}
    return {**first, "fits": {row["device"]: row["fits"] for row in rows}, "predictions": rows}


def _device(name: str) -> Device | None:
    if name == CPU:
        return None
    device = find_device(name)
    if device is None:
        near = nearest_names(name) or [known.name for known in known_devices()][:3]
        raise UsageError(f"--device {name}: not in the table of devices; nearest: {', '.join(near)}; or cpu")
    return device


def _largest(planner: Planner, workload: Any, point: Point, device: Device | None, knob: str) -> int | None:
    from stepscope.plan.prediction import FITS, largest
    from stepscope.sweep.grid import changed

    if device is None:
        return None
    if knob not in point.config:
        raise UsageError(f"{point.workload} has no knob '{knob}': there is nothing to search")

    def fits(value: int) -> bool:
        return planner.predict(changed(workload, point, **{knob: value}), device).fits == FITS

    return largest(fits, int(point.config[knob]))
