"""Predict a training step's memory use, whether it fits, and its minimum time, without a GPU or allocating weights.

Runs the program's own steps on tensors without data and replays their allocations in a model of PyTorch's CUDA
caching allocator. The "least time" is a lower bound. The prediction is for the installed PyTorch version, in eager
mode or with --compile default, on a device that no other process uses.

WORKLOAD is a name (stepscope list workloads), hf:path/to/config.json, my.module:build or path/to/file.py:build.

examples:
  stepscope plan cs336 --preset 2.7B --set seq_len=512 --device "NVIDIA H100 80GB HBM3"
  stepscope plan hydra --preset 100m --dtype autocast_bf16 --device "NVIDIA H200,NVIDIA A100-SXM4-40GB"
  stepscope plan train.py:build --max-batch --device "NVIDIA L40S"
  stepscope plan cs336 --preset 10B --fsdp 8 --mixed-precision bf16:fp32
  stepscope plan cs336 --preset small --set batch=8 --pp 4 --microbatches 8
  stepscope plan cs336 --preset 10B --fit 80GiB
"""

import argparse

from stepscope.api.sweeps import DEFAULT_DEVICE, plan
from stepscope.cli.support.options import add_point_arguments, chosen, typed_axes
from stepscope.cli.support.output import doing, print_answer
from stepscope.errors import need_torch

FLAGS = ("mode", "dtype", "compile", "sdpa", "optimizer")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_point_arguments(parser, "workload to plan", FLAGS)
    add, about = parser.add_argument, f"GPU names, or cpu (default: {DEFAULT_DEVICE})"
    add("--device", metavar="A,B", default=DEFAULT_DEVICE, help=about)
    add("--fsdp", metavar="N", help="plan one of N ranks with FSDP2; 2x8: hybrid sharding")
    add("--ddp", metavar="N", help="plan one of N ranks with DistributedDataParallel")
    add("--tp", metavar="N", help="plan one of N ranks with the model's tensor-parallel plan")
    add("--pp", metavar="N|NAMES", help="plan N pipeline stages, or stages that begin at these modules")
    add("--microbatches", metavar="N", help="micro-batches of a pipeline (default: one per stage)")
    add("--schedule", metavar="NAME", help="a pipeline's schedule: 1f1b (default) or gpipe")
    add("--mixed-precision", metavar="P:R", help="FSDP2's dtypes of parameters and reduction, e.g. bf16:fp32")
    add("--offload-activations", action="store_true", help="keep saved activations in host memory")
    add("--fit", metavar="MEMORY", help="find the largest batch and the fewest GPUs of this size")
    add("--max-batch", action="store_true", help="find the largest batch that fits")
    add("--max-length", action="store_true", help="find the longest sequence that fits")
    add("--json", action="store_true", help="print JSON instead of text (docs/plan.md)")


def main(arguments: argparse.Namespace) -> int:
    need_torch()
    with doing() as show:
        found = plan(
            arguments.workload,
            set=typed_axes(arguments, FLAGS),
            device=arguments.device.split(","),
            **chosen(arguments, "fsdp", "ddp", "tp", "pp", "microbatches", "schedule", "mixed_precision"),
            **chosen(arguments, "offload_activations", "fit", "max_batch", "max_length"),
            on_line=show,
        )
    print_answer(found, arguments.json)
    return 0
